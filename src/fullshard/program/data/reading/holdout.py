"""Holding out rows by a hash: the same rows in every run and on every machine, independent of the other rows."""

from __future__ import annotations

from hashlib import blake2b

from fullshard.errors import DataError
from fullshard.program.data.examples import Example, Split
from fullshard.program.data.reading.conversations import opening


def is_held_out(key: str, fraction: float) -> bool:
    """Return True for a ``fraction`` of keys; rows with the same key are on the same side."""
    digest = blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


class Sides:
    """Assigns rows to splits by their sources; conversations by their openings.

    All turns of a conversation are on one side, and conversations that begin with the same turns share a side.

    Attributes:
        counts: Rows of each split so far.
    """

    def __init__(self, fraction: float, where: str) -> None:
        """Start with no rows; ``where`` names the table in messages."""
        self.counts: dict[Split, int] = {"train": 0, "validation": 0}
        self._fraction, self._where = fraction, where
        self._of_turns: bool | None = None

    def side(self, example: Example) -> Split:
        """Return the split of a row, and count it."""
        talk = example.conversation
        if self._of_turns is None:
            self._of_turns = talk is not None
        key = example.source if talk is None else opening(talk)
        split: Split = "validation" if is_held_out(key, self._fraction) else "train"
        self.counts[split] += 1
        return split

    def note(self) -> str:
        """Return the message about how many rows are held out; called after all rows were seen.

        Raises:
            DataError: One of the splits is empty.
        """
        num_train, num_held_out = self.counts["train"], self.counts["validation"]
        require_both_sides(num_train, num_held_out, self._fraction, self._where)
        rows = num_train + num_held_out
        what = "the turns before the first answer" if self._of_turns else "a row's source"
        return (
            f"{self._where}: {num_held_out} of {rows} rows are held out, {num_held_out / rows:.1%}, by "
            f"data.validation_fraction {self._fraction:g}: the hash of {what} decides."
        )


def require_both_sides(num_train: int, num_held_out: int, fraction: float, where: str) -> None:
    """Raise DataError if a fraction leaves no rows for training or none for evaluation."""
    if not num_train or not num_held_out:
        raise DataError(
            f"{where}: data.validation_fraction {fraction} leaves {num_train} rows for training and {num_held_out} "
            "held out; both need at least one. Choose another fraction, or give data.validation_file."
        )
