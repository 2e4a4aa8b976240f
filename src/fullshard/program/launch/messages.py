"""Messages of the program to its user, on standard error."""

from __future__ import annotations

import sys


def say(line: str) -> None:
    """Print a message under the program's name."""
    print(f"fullshard: {line}", file=sys.stderr, flush=True)
