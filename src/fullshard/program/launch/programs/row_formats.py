"""Formats that predictions are written in; apart, because the command line checks them before torch is imported."""

from __future__ import annotations

from pathlib import Path

from fullshard.errors import ConfigError

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".txt")
"""Suffixes whose format is written; without a suffix it is JSON Lines."""


def require_suffix(path: Path) -> None:
    """Check that the file's suffix names a format that can be written; any process.

    Raises:
        ConfigError: It does not.
    """
    if path.suffix and path.suffix.lower() not in SUFFIXES:
        raise ConfigError(
            f"-o {path}: predictions are written as {', '.join(SUFFIXES)}, by the file's suffix; got {path.suffix}."
        )
