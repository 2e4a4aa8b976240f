"""The encoding of a text file by its bytes: UTF-8, as a byte-order mark says, or the one that its letters speak for."""

from __future__ import annotations

import codecs
import gzip
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from charset_normalizer import from_bytes

from fullshard.errors import DataError
from fullshard.program.data.examples import SourceSpec
from fullshard.program.data.reading.letters import unexplained
from fullshard.program.data.reading.text_file import is_gzip, is_parquet, require_no_other_kind, unreadable

USUAL = "windows-1252"
"""The encoding that is taken, and said, where few characters beyond ASCII fit it as well as others."""

_OF_TWO_BYTES = ("gb18030", "big5", "cp950", "big5hkscs", "cp949", "cp932", "euc-jp")
_OF_ONE_BYTE = (
    *(USUAL, "iso-8859-15", "mac-roman", "cp850", "cp437"),
    *("windows-1250", "iso-8859-2", "cp852", "mac-latin2"),
    *("windows-1251", "koi8-r", "koi8-u", "cp866", "iso-8859-5", "mac-cyrillic"),
    *("windows-1253", "iso-8859-7", "windows-1254", "iso-8859-9", "windows-1255", "windows-1256", "iso-8859-6"),
    *("windows-1257", "iso-8859-4", "iso-8859-13", "windows-1258", "cp874"),
)
"""Encodings of files that people have; of those that give the same text, the first is named."""

_MARKED = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_WIDE = ("utf-32-le", "utf-32-be", "utf-16-le", "utf-16-be")
_HEAD = 1 << 16
_SAMPLE, _LINE = 1 << 16, 1 << 12
"""Bytes of lines that are looked at, spread over the file, and of one of them."""

_CLEAR = 0.1
"""By how much another encoding must be worse for the best one to be clear."""

_BY_CHANCE, _MOST_BY_CHANCE = 0.05, 1000
"""Lines of another encoding that may also be UTF-8: for each that is not, and at most."""

_DAMAGED = 0.05
"""Share of lines with a broken character, and of characters that no language explains, in a file's own encoding."""

_SHOWN, _MOST = 4, 60
"""Encodings to choose from, and characters of a line that are shown."""


@dataclass(frozen=True)
class Encoding:
    """The encoding of a file."""

    name: str  # a value of ``data.encoding``
    example: str | None = None  # a line that needs it; None for UTF-8
    # how many lines are not in it, and the first of them; None: there is none
    problem: str | None = None
    others: tuple[tuple[str, str], ...] = ()  # encodings that fit as well, each with the line as they read it

    def note(self, option: str) -> str:
        """Return how the file is read, with a line, also as another encoding that fits; ``option`` sets another."""
        assert self.example is not None, "UTF-8 needs no note"
        told = f"read as {self.name}" if self.name.startswith("utf") else f"not UTF-8: read as {self.name}"
        others = "".join(f"; {name} would be {line[:_MOST]!r}" for name, line in self.others[:1])
        return f"{told} ({option}), with lines such as {self.example[:_MOST]!r}{others}"


@dataclass
class _Lines:
    """What a pass over a file's lines finds."""

    total: int = 0
    broken: int = 0  # lines that are not UTF-8
    first: str = ""  # the first of them, and its byte
    by_chance: list[bytes] = field(default_factory=list)  # UTF-8 of two-byte characters, as some of others may be
    surely: int = 0  # lines that are UTF-8 of longer ones
    escaped: int = 0  # lines of ASCII with the escapes of ISO-2022-JP
    sample: list[bytes] = field(default_factory=list)
    _every: int = 1
    _size: int = 0

    def add(self, line: bytes) -> None:
        """Take the next line."""
        self.total += 1
        if line.isascii():
            if b"\x1b$" in line:
                self.escaped += 1
                self._keep(line)
            return
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            if not self.broken:
                self.first = f"line {self.total:,}: byte 0x{line[error.start]:02x} is not UTF-8"
            self.broken += 1
            self._keep(line)
        else:
            if max(text) >= "\u0800" or len(self.by_chance) > _MOST_BY_CHANCE:
                self.surely += 1
            else:
                self.by_chance.append(line)

    def _keep(self, line: bytes) -> None:
        """Keep lines evenly spread over those that there were, of a bounded size together."""
        if (self.broken + self.escaped - 1) % self._every:
            return
        start = next((place for place, byte in enumerate(line) if byte > 127), 0)  # a character begins here
        self.sample.append(line[max(0, start - 100) :][:_LINE].strip(b"\r\n"))
        self._size += len(self.sample[-1])
        while self._size > _SAMPLE and len(self.sample) > 1:
            self.sample, self._every = self.sample[::2], 2 * self._every
            self._size = sum(map(len, self.sample))


@dataclass(frozen=True)
class _Reading:
    """A sample as an encoding reads it."""

    name: str
    text: str
    odd: Counter[str]  # characters that no language explains
    odd_share: float  # of the characters beyond ASCII
    misfit: float  # twice that, and charset-normalizer's measures of disorder and of a language's letters


def find_encoding(path: Path) -> Encoding:
    """Return the encoding of a file, gzipped or not. Any process, alone.

    UTF-8 if its lines are, or what its byte-order mark or zero bytes say. Else the one of some 35 in which the lines
    beyond ASCII fit a language best by its letters, and by charset-normalizer's measures of order; another one must be
    clearly worse, or give the same text. Where few characters fit windows-1252 as well as others, it is that one.

    Raises:
        DataError: It cannot be read, or no encoding is clear; the likeliest are shown with a line.
    """
    with open_bytes(path) as file:
        head = file.read(_HEAD)
    marked = next((name for mark, name in _MARKED if head.startswith(mark)), None)
    if marked is not None or b"\0" in head:
        return _wide(path, head, marked)
    found = _Lines()
    with open_bytes(path) as file:
        for line in file:
            found.add(line)
    if not found.broken:
        if found.escaped and (read := _readings(found.sample, ("iso2022_jp",))):
            return _checked(path, "iso2022_jp", read[0].text, ())
        return Encoding("utf-8")
    damaged = Encoding(
        "utf-8", problem=f"{_of(found.broken, found.total)} cannot be read, the first of them {found.first}"
    )
    is_utf8 = found.surely or len(found.by_chance) > _BY_CHANCE * found.broken
    if head.startswith(codecs.BOM_UTF8) or is_utf8:
        return damaged
    readings = _readings(found.sample, (*_OF_TWO_BYTES, *_OF_ONE_BYTE))
    if not readings or not _reads(readings[0].name, found.by_chance):
        return damaged
    best, *rest = readings
    likely = [one for one in rest if not _is_worse(one, best)]
    if best.odd_share > _DAMAGED:
        raise _unclear(path, readings)
    if not likely:
        return _checked(path, best.name, best.text, ())
    readable = (one for one in readings if one is best or (one in likely and _has_marks_only(one)))
    usual = next((one for one in readable if one.name == USUAL), None)
    if usual is None:
        raise _unclear(path, (best, *likely))
    others = tuple((one.name, _differing(usual, one)[1]) for one in (best, *likely) if one is not usual)
    return _checked(path, USUAL, usual.text, others, _differing(usual, best if best is not usual else likely[0])[0])


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
    found = find_encoding(path)
    return found.name, () if found.example is None else (found.note("--encoding"),)


@contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """Open a text file as bytes, unpacked if it is gzipped.

    Raises:
        DataError: It cannot be read, or is no text by its first bytes.
    """
    try:
        require_no_other_kind(path)
        with gzip.open(path) if is_gzip(path) else path.open("rb") as file:
            yield file  # type: ignore[reportReturnType]
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(path, error) from error


def _readings(sample: Sequence[bytes], names: Sequence[str]) -> list[_Reading]:
    """Return the sample as each encoding reads it that can, the best fitting first; of equal texts only the first."""
    texts: dict[str, str] = {}
    for name in names:
        lines, broken = [], 0
        for line in sample:
            try:
                # A line that was cut may end within a character.
                lines.append(codecs.getincrementaldecoder(name)().decode(line, final=len(line) < _LINE))
            except UnicodeDecodeError:
                lines.append(line.decode(name, "replace"))
                broken += 1
        text = "\n".join(lines)
        if broken <= _DAMAGED * len(sample) and not any(map(_is_no_text, set(text))):
            texts.setdefault(text, name)
    return sorted((_reading(name, text) for text, name in texts.items()), key=lambda one: one.misfit)


def _reads(name: str, lines: Sequence[bytes]) -> bool:
    """Return whether lines that are UTF-8 may be of an encoding: of one byte, none has the odd letters of "Ã©"."""
    return name in _OF_TWO_BYTES or not any(unexplained(line.decode(name, "replace")) for line in lines)


def _reading(name: str, text: str) -> _Reading:
    odd = unexplained(text)
    share = odd.total() / max(1, sum(not one.isascii() for one in text))
    # Each alone, because the package leaves out those that it thinks cannot win.
    asked = {"cp_isolation": [name], "preemptive_behaviour": False, "enable_fallback": False, "threshold": 0.9}
    found = from_bytes(text.encode(name, "ignore"), **asked).best()
    disorder = 1.0 if found is None else found.chaos - found.coherence / 4
    return _Reading(name, text, odd, share, 2 * share + disorder)


def _is_no_text(one: str) -> bool:
    return unicodedata.category(one) in ("Cc", "Cn", "Co", "Cs") and one not in "\t\r\n\x1b"


def _has_marks_only(one: _Reading) -> bool:
    """Return True for a text of ASCII letters, such as an English one with curly quotes."""
    return not one.odd and not any(letter.isalpha() and not letter.isascii() for letter in one.text)


def _is_worse(one: _Reading, best: _Reading) -> bool:
    """Return True if a reading is clearly worse: altogether, or where it differs from the best one."""
    if one.misfit - best.misfit >= _CLEAR:
        return True
    if len(one.text) != len(best.text):
        return False
    differing = sum(a != b for a, b in zip(one.text, best.text, strict=True))
    return one.misfit > best.misfit and 2 * (one.odd.total() - best.odd.total()) >= differing


def _differing(one: _Reading, other: _Reading) -> tuple[str, str]:
    """Return the first line that two readings read differently, as each reads it."""
    pairs = zip(one.text.split("\n"), other.text.split("\n"), strict=False)
    first, second = next(pair for pair in pairs if pair[0] != pair[1])
    return first.strip(), second.strip()


def _checked(
    path: Path, name: str, text: str, others: tuple[tuple[str, str], ...], example: str | None = None
) -> Encoding:
    """Return the encoding with what is not in it: the sample does not stand for the whole file."""
    total, broken, first = 0, 0, ""
    with open_bytes(path) as file:
        for total, line in enumerate(file, start=1):
            try:
                line.decode(name)
            except UnicodeDecodeError as error:
                bytes_ = line[error.start : error.start + 4].hex(" ")
                first = first or f"line {total:,}: its bytes {bytes_} are not {name.upper()}"
                broken += 1
    problem = f"it is {name} by most of its lines, but {_of(broken, total)} are not, the first of them {first}"
    example = example or text.split("\n", 1)[0].strip()
    return Encoding(name, example, problem if broken else None, others)


def _of(count: int, total: int) -> str:
    return f"{count:,} of {total:,} lines"


def _unclear(path: Path, likely: Sequence[_Reading]) -> DataError:
    best, *others = likely[:_SHOWN]
    lines = [(one.name, _differing(best, one)[1]) for one in others]
    lines = [(best.name, _differing(best, others[0])[0] if others else best.text.split("\n", 1)[0].strip()), *lines]
    shown = "\n".join(f"  {name}: {line[:_MOST]!r}" for name, line in lines)
    return DataError(
        f"{path} is not UTF-8, and its bytes fit several encodings. Which of these lines is right?\n{shown}\nName the "
        "encoding: --encoding NAME (data.encoding in a run file). Or save the file as UTF-8."
    )


def _wide(path: Path, head: bytes, marked: str | None) -> Encoding:
    """Return UTF-16 or UTF-32, by the mark or by which of them makes lines of the first bytes.

    Raises:
        DataError: None does.
    """
    for name in _WIDE if marked is None else (marked,):
        size = 4 if "32" in name else 2
        try:
            text = codecs.getincrementaldecoder(name)().decode(head[: len(head) // size * size])
        except UnicodeDecodeError:
            continue
        if marked is not None or ("\n" in text and not any(map(_is_no_text, set(text)))):
            example = next((line for line in text.splitlines() if line.strip()), "")
            return Encoding(name, example.strip())
    raise DataError(
        f"{path} has zero bytes, as text in UTF-16 has, but is neither UTF-16 nor UTF-32. Save the file as UTF-8 "
        "text, or name its encoding: --encoding NAME (data.encoding in a run file)."
    )
