"""Numbers as text that reads right at any size, in tiles, tables and on the axes of charts."""

from __future__ import annotations

from collections.abc import Iterable

WHOLE = ",~f"
"""Plotly's format of an axis of counts: no digits that say nothing, but those that tell two ticks apart."""

PERCENT = ",~%"
"""The same of an axis of shares."""

FEW_STEPS = 12
"""An axis of at most this many steps has a tick for each of them; else plotly puts some between two steps."""


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
    """Return name and bytes of the unit in which the largest of these sizes reads well: KiB, MiB or GiB."""
    largest = max(nbytes, default=0)
    if largest < 1 << 20:
        return "KiB", 1 << 10
    return ("MiB", 1 << 20) if largest < 10 << 30 else ("GiB", 1 << 30)
