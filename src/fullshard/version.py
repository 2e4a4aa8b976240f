"""The version, and the tested versions of other libraries, in a module of its own so that every room can import it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

__version__ = "0.1.0"

TESTED: dict[str, tuple[str, str]] = {
    "torch": ("2.11", "2.14"),
    "transformers": ("5.17", "5.24"),
    "accelerate": ("1.14", "1.15"),
    "peft": ("0.21", "0.21"),
}
"""The oldest and the newest release of each library that tests ran with: docs/reference/versions.md says which ones."""


def untested(*names: str) -> str | None:
    """Return a line about those of the libraries that are installed in versions outside of :data:`TESTED`, or None."""
    found = [(name, _installed(name), *TESTED[name]) for name in names]
    outside = [
        f"{name} {installed} ({oldest} to {newest})"
        for name, installed, oldest, newest in found
        if installed is not None and not _release(oldest) <= _release(installed) <= _release(newest)
    ]
    if not outside:
        return None
    return f"fullshard was not tested with these versions (tested ones in brackets): {', '.join(outside)}."


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _release(text: str) -> tuple[int, ...]:
    """Return major and minor number."""
    return tuple(int(part) for part in text.split(".")[:2])
