"""Rows held out by a hash, which are the same in every run and on every machine, whatever other rows there are."""

from __future__ import annotations

from hashlib import blake2b

from fullshard.data.examples import Example, Split, Table
from fullshard.data.reading.conversations import opening
from fullshard.errors import DataError


def is_held_out(key: str, fraction: float) -> bool:
    """Return whether rows with this key are held out, a ``fraction`` of keys; rows with the same key stay together."""
    digest = blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def hold_out(table: Table, fraction: float, split: Split, where: str) -> Table:
    """Return one split of a table, chosen by the sources of its rows; of conversations by their openings.

    A conversation is on one side with all its turns, and so are those that begin with the same turns.

    Raises:
        DataError: One of the splits would be empty.
    """
    sides: dict[Split, list[Example]] = {"train": [], "validation": []}
    for example in table.examples:
        key = example.source if example.conversation is None else opening(example.conversation)
        sides["validation" if is_held_out(key, fraction) else "train"].append(example)
    require_both_sides(len(sides["train"]), len(sides["validation"]), fraction, where)
    share = len(sides["validation"]) / len(table.examples)
    what = "a row's source" if table.examples[0].conversation is None else "the turns before the first answer"
    note = (
        f"{where}: {len(sides['validation'])} of {len(table.examples)} rows are held out, {share:.1%}, by "
        f"data.validation_fraction {fraction:g}: the hash of {what} decides, whatever other rows there are."
    )
    # The unusable rows are those of one file, whichever side is read: listed with the training rows, once.
    return Table(sides[split], (*table.notes, note), table.skipped if split == "train" else ())


def require_both_sides(num_train: int, num_held_out: int, fraction: float, where: str) -> None:
    """Raise DataError if a fraction leaves no rows for training or none for evaluation."""
    if not num_train or not num_held_out:
        raise DataError(
            f"{where}: data.validation_fraction {fraction} leaves {num_train} rows for training and {num_held_out} "
            "held out; both need at least one. Choose another fraction, or give data.validation_file."
        )
