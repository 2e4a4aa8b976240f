"""The encoding of a text file: UTF-8, or windows-1252 if every line that is not ASCII is valid only in that."""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from pathlib import Path

from fullshard.errors import DataError
from fullshard.program.data.examples import SourceSpec
from fullshard.program.data.reading.tables import encoding_problem, is_parquet, open_lines

_SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class Encoding:
    """The encoding of a file."""

    name: str  # a value of ``data.encoding``
    example: str | None = None  # a line that needs it; None for UTF-8
    # how many lines are in neither of the two encodings, and the first of them; None: there is none
    problem: str | None = None


def find_encoding(path: Path, remedy: str) -> Encoding:
    """Return UTF-8, or windows-1252 if no line with other than ASCII characters is UTF-8 and all are valid in it.

    Args:
        path: The file; any process, alone.
        remedy: What a user can do with a file in UTF-16 instead of converting it.

    Raises:
        DataError: The file is UTF-16, whose zero bytes are valid in both.
    """
    broken, other, first, example = 0, 0, "", None
    total = 0
    with open_lines(path, "utf-8") as lines:
        for total, line in enumerate(lines, start=1):
            if total == 1 and "\0" in line:
                raise DataError(
                    f"{path}: its first line has zero bytes, as text in UTF-16 has. Save the file as UTF-8 (in a "
                    f"shell: iconv -f utf-16 -t utf-8), or {remedy}."
                )
            problem = encoding_problem(line, "utf-8")
            if problem is None:
                other += not line.isascii()
                continue
            broken += 1
            first = first or f"line {total}: {problem.partition(':')[0]}"
            try:
                text = line.encode("utf-8", "surrogateescape").decode("windows-1252")
            except UnicodeDecodeError:
                other += 1
            else:
                example = example or text.strip()
    if not broken:
        return Encoding("utf-8")
    if example is not None and not other and not _has_mark(path):
        return Encoding("windows-1252", example)
    return Encoding("utf-8", problem=f"{broken:,} of {total:,} lines cannot be read, the first of them {first}")


def encoding_of_rows(path: Path, spec: SourceSpec, given: str | None) -> tuple[str, tuple[str, ...]]:
    """Return the encoding of a file of rows for a trained model, and notes that say which; any process, alone.

    It is the one given by the user, else the run's, if that is not UTF-8, else the one found by :func:`find_encoding`.
    Lines that are not in it are unusable rows.

    Raises:
        DataError: See :func:`find_encoding`.
    """
    if given is not None:
        return given, ()
    if path.suffix.lower() == ".parquet" or spec.format == "parquet" or is_parquet(path):
        return spec.encoding, ()
    if codecs.lookup(spec.encoding).name != "utf-8":
        return spec.encoding, (f"the rows are read as {spec.encoding}, the run's data.encoding (--encoding)",)
    found = find_encoding(path, "give --encoding utf-16")
    if found.example is None:
        return found.name, ()
    example = found.example[:_SHOWN_CHARACTERS]
    return found.name, (f"not UTF-8: read as {found.name} (--encoding), with lines such as {example!r}",)


def _has_mark(path: Path) -> bool:
    """Return True if the file begins with the byte-order mark of UTF-8."""
    with open_lines(path, "windows-1252") as lines:
        return lines.read(3).encode("windows-1252", "surrogateescape") == codecs.BOM_UTF8
