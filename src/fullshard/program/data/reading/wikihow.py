"""WikiHow's ``wikihowAll.csv`` or ``wikihowSep.csv``, cleaned like the authors' process.py."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from fullshard.errors import DataError
from fullshard.program.data.examples import Example, SourceSpec, Split, Table
from fullshard.program.data.reading.csv_file import csv_records
from fullshard.program.data.reading.row import BadRows
from fullshard.program.data.reading.sample import is_held_out, require_both_sides
from fullshard.program.data.reading.text_file import empty, encoding_problem, open_lines

COLUMNS = ("headline", "text", "title")
LISTS: dict[Split, str] = {"train": "all_train.txt", "validation": "all_val.txt"}
TEST_LIST = "all_test.txt"
DEFAULT_FRACTION = 0.05
"""Share of titles held out if there are neither title lists nor data.validation_fraction."""

_COMMAS_AFTER_LINES = re.compile(r"[.]+[\n]+[,]")
_LONGEST_SUMMARY = 0.75
"""Summaries of at least this share of their article's characters are left out."""


def read_wikihow(path: Path, spec: SourceSpec, split: Split | None) -> Table:
    """Read the articles of one split and their summaries. Any process can call it.

    The summary is the headline, the article the text. The same rows are left out as by the authors' program, and
    counted in the notes. Titles are split by the authors' lists if those are next to the file, else by a hash.

    Args:
        path: wikihowAll.csv or wikihowSep.csv.
        spec: Encoding, share to hold out, allowed unusable rows.
        split: The split; None: all rows.

    Raises:
        DataError: The file has other columns, too many undecodable rows, or no rows for this split.
    """
    side_of, how = (lambda _: "used"), "all rows are used"
    if split is not None:
        side_of, how = title_split(path, spec)
    kept: list[Example] = []
    sides: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    bad = BadRows(str(path))
    total = 0
    for total, (line, cells) in enumerate(_records(path, spec.encoding), start=1):  # noqa: B007
        problem = encoding_problem("".join(cells or ()), spec.encoding)
        if problem is not None:
            bad.add(line, problem)
            continue
        example = _example(line, cells)
        if isinstance(example, str):
            dropped[example] += 1
            continue
        assert cells is not None, "_example refuses a row without cells"
        side = side_of(title_key(cells[2]))
        sides[side] += 1
        if split is None or side == split:
            kept.append(example)
    notes = bad.settle(total, spec.max_bad_rows)
    if split is not None and _title_lists(path) is None:
        fraction = spec.validation_fraction or DEFAULT_FRACTION
        require_both_sides(sides["train"], sides["validation"], fraction, str(path))
    counts = [f"{sides[side]} {side}" for side in sides] + [f"{count} left out {why}" for why, count in dropped.items()]
    notes += (f"{path}: {how}. Of {total} rows: {', '.join(counts)}.",)
    if not kept:
        raise DataError(f"{notes[-1]} At least one row is needed.")
    return Table(kept, notes, bad.beyond_shown)


def title_key(title: str) -> str:
    """Return a title in the form of the authors' lists: its letters and digits."""
    return "".join(character for character in title if character.isalnum())


def cleaned_article(text: str) -> str:
    """Remove the commas that the authors' file has at the beginnings of lines."""
    return _COMMAS_AFTER_LINES.sub(".\n", text)


def list_files(path: Path) -> list[Path]:
    """Return the authors' title lists that are next to a file."""
    candidates = (path.parent / name for name in (*LISTS.values(), TEST_LIST))
    return [candidate for candidate in candidates if candidate.is_file()]


def title_split(path: Path, spec: SourceSpec) -> tuple[Callable[[str], str], str]:
    """Return a function from a title's key to its split, and a description of it.

    Raises:
        DataError: Only one of the lists for training and validation exists, or one cannot be read.
    """
    lists = _title_lists(path)
    if lists is None:
        fraction = spec.validation_fraction or DEFAULT_FRACTION
        how = (
            f"no {LISTS['train']} and {LISTS['validation']} next to it: {fraction:g} of the titles are held out by hash"
        )
        return lambda key: "validation" if is_held_out(key, fraction) else "train", how
    idle = ", data.validation_fraction is not used" if spec.validation_fraction else ""
    return lambda key: lists.get(key, "in none of the lists"), f"split by the authors' title lists{idle}"


def _title_lists(path: Path) -> dict[str, str] | None:
    """Return the split of each listed title; None if there are no lists."""
    found = {file.name: file for file in list_files(path)}
    missing = [name for name in LISTS.values() if name not in found]
    if len(missing) == len(LISTS):
        return None
    if missing:
        raise DataError(
            f"{path.parent} has {' and '.join(found)}, but no {missing[0]}: put all of the authors' title lists next "
            "to the file, or none, to split by a hash of the titles."
        )
    sides = {TEST_LIST: "test", **{name: str(side) for side, name in LISTS.items()}}
    lists: dict[str, str] = {}
    for name, side in sides.items():
        if name in found:
            with open_lines(found[name], "utf-8") as lines:
                lists.update(dict.fromkeys(map(title_key, lines), side))
    return lists


def _records(path: Path, encoding: str) -> Iterator[tuple[int, list[str] | None]]:
    """Yield line and (headline, text, title) of each row; None for a row of the wrong length."""
    with open_lines(path, encoding) as lines:
        # The authors' file has rows that a strict reader refuses.
        records = csv_records(lines, ",", strict=False)
        header = next((record for _, record in records), None)
        if header is None:
            raise empty(path)
        names = [] if isinstance(header, csv.Error) else [name.strip() for name in header]
        if any(names.count(name) != 1 for name in COLUMNS):
            listed = ", ".join(repr(name) for name in names)
            raise DataError(
                f"{path} is not the authors' WikiHow file: it needs the columns headline, title and text (in "
                f"wikihowAll.csv) or overview, headline, text, sectionLabel and title (wikihowSep.csv); got {listed}. "
                "Set data.format: csv and name the columns."
            )
        places = [names.index(name) for name in COLUMNS]
        for line, record in records:
            complete = not isinstance(record, csv.Error) and len(record) == len(names)
            yield line, [record[place] for place in places] if complete else None  # type: ignore[reportIndexIssue]


def _example(line: int, cells: list[str] | None) -> Example | str:
    """Return a row's example, or the reason why it is left out."""
    if cells is None:
        return "with a wrong number of cells"
    headline, text, title = cells
    if not (headline.strip() and text.strip() and title.strip()):
        return "without headline, text or title"
    if not len(headline) < _LONGEST_SUMMARY * len(text):
        return "whose summary is not shorter than 3/4 of the article"
    return Example(cleaned_article(text), (headline.replace(".,", "."),), line)
