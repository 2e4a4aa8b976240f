"""Reading of untrusted JSON files: size limits before parsing, and a checksum inside the file.

A sealed file ends with ``"own_sha256"``, the SHA-256 of every byte before that entry, so that a flipped bit is found
without other files. It is a checksum, not a signature: anyone who can write the file can seal it again.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from annotated_types import Ge

from fullshard.errors import CheckpointError
from fullshard.state.storage import rules
from fullshard.state.storage.backend import backend_of
from fullshard.state.storage.object_path import Place

T = TypeVar("T")

SEAL = "own_sha256"
"""Name of the last entry of a sealed file."""

_SEALED = re.compile(rb',\s*"own_sha256":\s*"([^"]*)"\s*\}\s*\Z')
_SEAL_BYTES = 200
"""The seal lies within this many bytes of the end of a file."""
_HASH_BYTES = 16 << 20


@dataclass(frozen=True)
class Bounds:
    """Limits of a file, checked before parsing, because parsing takes twenty times the memory of the text."""

    nbytes: int
    names: int  # keys of its objects
    values: int  # values in its objects and lists


SMALL = Bounds(256 << 20, 4_000_000, 16_000_000)
"""Limits of configurations, tokenizers and the index of a model in several files."""


def read_bounded(path: Place, nbytes: int) -> bytes:
    """Read a file of at most ``nbytes``; any rank.

    Raises:
        OSError: It cannot be read, or is not a regular file.
        ValueError: It is larger.
    """
    with backend_of(path).opened(path, None) as file:
        if file.size > nbytes:
            raise ValueError(f"it has {file.size:,} bytes; at most {nbytes:,} are read")
        return file.content()


def require_bounded(content: bytes, bounds: Bounds) -> None:
    """Check a JSON text against limits without parsing it.

    Raises:
        ValueError: It has more than ``bounds``.
    """
    if len(content) > bounds.nbytes:
        raise ValueError(f"it has {len(content):,} bytes; at most {bounds.nbytes:,} are read")
    # Both counts are upper bounds, because strings may contain the characters too.
    names, values = content.count(b":"), content.count(b",") + content.count(b"[") + content.count(b"{")
    for found, limit, what in ((names, bounds.names, "names"), (values, bounds.values, "values")):
        if found > limit:
            raise ValueError(f"it has up to {found:,} {what}; at most {limit:,} are read")


def parse_bounded(content: bytes, bounds: Bounds) -> Any:
    """Parse JSON in UTF-8, after counting what is in it.

    Raises:
        ValueError: It has more than ``bounds``, is nested too deeply, or is not JSON.
    """
    require_bounded(content, bounds)
    try:
        return json.loads(content.decode("utf-8-sig"))
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error


def parse(kind: type[T], content: bytes, bounds: Bounds) -> T:
    """Parse a JSON object as a dataclass, by the types of its fields.

    Raises:
        ValueError: It has more than ``bounds``, or as for :func:`fullshard.state.storage.rules.parse`.
    """
    require_bounded(content, bounds)
    return rules.parse(kind, content)


def read_json(path: Place, bounds: Bounds = SMALL) -> Any:
    """Read and parse a JSON file; any rank.

    Raises:
        OSError: It cannot be read.
        ValueError: As for :func:`read_bounded` and :func:`parse_bounded`.
    """
    return parse_bounded(read_bounded(path, bounds.nbytes), bounds)


def seal(text: str) -> str:
    """Add the checksum of the file to the text of a JSON object with at least one entry."""
    body = text.rstrip()[:-1].rstrip()
    digest = hashlib.sha256(body.encode()).hexdigest()
    return f'{body},\n"{SEAL}":"{digest}"}}\n'


def require_sealed(content: bytes, *, needed: bool = False) -> None:
    """Check a file's own checksum, if it has one.

    Args:
        content: All bytes of the file.
        needed: Raise if there is none.

    Raises:
        ValueError: It has another checksum, or none although it is needed.
    """
    tail = max(0, len(content) - _SEAL_BYTES)
    found = _SEALED.search(content, tail)
    if found is None:
        if needed:
            raise ValueError(f"its last entry is not {SEAL}, the checksum of the file")
        return
    digest = hashlib.sha256(memoryview(content)[: found.start()]).hexdigest()
    if found[1] != digest.encode():
        written = found[1].decode(errors="replace")
        raise ValueError(f"it was changed after it was written: it has SHA-256 {digest}, expected {written}")


@dataclass(frozen=True)
class _Header:
    """What a sealed file says before its fields are looked at."""

    version: Annotated[int, Ge(1)] = 1


def parse_sealed(kind: type[T], content: bytes, bounds: Bounds, newest: int) -> T:
    """Parse a sealed file as a dataclass; files of format version 1 may lack the seal.

    Raises:
        ValueError: It has more than ``bounds``, a version above ``newest``, another checksum, or fields that break
            their rules.
    """
    version = parse(_Header, content, bounds).version
    if version > newest:
        raise ValueError(f"it has format version {version}; this fullshard reads up to {newest}. Update it")
    require_sealed(content, needed=version > 1)
    return rules.parse(kind, content)


def sha256_of(path: Place) -> str:
    """Return the SHA-256 of a regular file.

    Raises:
        OSError: It cannot be read.
    """
    digest, at = hashlib.sha256(), 0
    with backend_of(path).opened(path, None) as file:
        block = memoryview(bytearray(min(file.size, _HASH_BYTES)))
        while at < file.size and (count := file.read_into(block, at)):
            digest.update(block[:count])
            at += count
    return digest.hexdigest()


def as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as they will be read back from JSON; any rank.

    Raises:
        CheckpointError: They would change.
    """
    try:
        plain = json.loads(json.dumps(dict(values)))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"values must be representable in JSON: {error}.") from error
    _require_text_keys("values", values)
    return plain


def _require_text_keys(where: str, value: Any) -> None:
    """Refuse keys that JSON would turn into strings, with which MultiStepLR would silently never decay."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise CheckpointError(
                    f"{where} has the key {key!r}, but JSON keys are strings. Save list(d.items()) instead, and "
                    "convert it back after loading."
                )
            _require_text_keys(f"{where}[{key!r}]", inner)
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            _require_text_keys(f"{where}[{number}]", inner)
