"""The user's cache directory, for what can be made again; importable without torch."""

from __future__ import annotations

import os
from pathlib import Path


def default_directory() -> Path:
    """Return ``fullshard/`` in the user's cache directory: ``$XDG_CACHE_HOME``, or ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "fullshard")
