"""The one rule for names of files that come from outside: listings of a bucket, indices, records, tokenizers."""

from __future__ import annotations


def stays_inside(name: str) -> bool:
    """Return whether ``name``, relative, is of a file below the directory it is joined to; no file is read."""
    return "\0" not in name and not any(part in ("", ".", "..") for part in name.split("/"))
