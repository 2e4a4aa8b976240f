"""Formatting of numbers in tiles, tables and on the axes of charts, readable at any magnitude."""

from __future__ import annotations

from collections.abc import Iterable

WHOLE = ",~f"
"""Plotly's format for an axis of counts: no needless digits, but enough to distinguish two ticks."""

PERCENT = ",~%"
"""Plotly's format for an axis of shares."""

FEW_STEPS = 12
"""An axis of at most this many steps has a tick for each; otherwise plotly adds ticks between steps."""


def shown(value: float) -> float:
    """Round to seven significant digits; more are not visible, and a curve near 1 needs as many."""
    return float(f"{value:.7g}")


def number(value: float, decimals: int = 1) -> str:
    """Format a number with this many decimals, or with three significant digits if it is small."""
    small = abs(value) < 10 ** (2 - decimals) / 2
    return f"{value:.3g}" if small else f"{value:,.{decimals}f}"


def share(value: float) -> str:
    """Format a share as a percentage."""
    return "<0.1%" if 0 < value < 5e-4 else f"{value:.1%}"


def memory_unit(nbytes: Iterable[int]) -> tuple[str, int]:
    """Return name and bytes of the unit (KiB, MiB or GiB) that suits the largest of these sizes."""
    largest = max(nbytes, default=0)
    if largest < 1 << 20:
        return "KiB", 1 << 10
    return ("MiB", 1 << 20) if largest < 10 << 30 else ("GiB", 1 << 30)
