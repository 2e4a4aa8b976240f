"""What ``fullshard inspect`` says of directories and files, drawn as tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fullshard.sizes import format_bytes

_LARGEST = 10


def draw(found: Any) -> None:
    """Print what a path holds.

    Args:
        found: The ``Contents`` or ``Listing`` of ``fullshard.storage.contents``.
    """
    console = Console(highlight=False, soft_wrap=False)
    console.print(Text(f"{found.path}: {found.kind.value}"), soft_wrap=True)
    if hasattr(found, "entries"):
        _draw_listing(console, found)
    else:
        _draw_contents(console, found)


def _draw_contents(console: Console, found: Any) -> None:
    for name, value in _short(found.facts).items():
        console.print(Text(f"  {name}: {value}"), soft_wrap=True)
    console.print(_table("tensors by group", ("group", "tensors", "elements", "dtypes", "size"), _group_rows(found)))
    largest = sorted(found.tensors, key=lambda tensor: (-tensor.nbytes, tensor.name))[:_LARGEST]
    rows = [(t.name, " x ".join(map(str, t.shape)) or "one number", t.dtype, format_bytes(t.nbytes)) for t in largest]
    console.print(_table(f"the largest of {len(found.tensors):,} tensors", ("tensor", "shape", "dtype", "size"), rows))
    files = [(name, format_bytes(nbytes)) for name, nbytes in found.files.items()]
    console.print(_table("files", ("file", "size"), files))


def _draw_listing(console: Console, found: Any) -> None:
    rows = [
        (
            "." if entry.path == found.path else str(Path(entry.path).relative_to(found.path)),
            "" if entry.step is None else f"{entry.step:,}",
            "" if entry.metric is None else f"{entry.metric:.4g}",
            format_bytes(entry.nbytes),
            ("whole, the best" if entry.is_best else "whole") if entry.problem is None else "TORN",
        )
        for entry in found.entries
    ]
    if rows:
        console.print(_table("by markers and sizes", ("directory", "step", "metric", "size", "state"), rows))
    else:
        console.print("  nothing yet")
    if found.greater_is_better is not None:
        console.print(Text(f"best: by the metric, {_direction(found)}"), soft_wrap=True)
    for entry in found.entries:
        if entry.problem is not None:
            console.print(Text(f"torn: {entry.problem}"), soft_wrap=True)
    for path in found.unfinished:
        console.print(
            Text(f"note: {path} is being written or deleted, or was left by a killed process"), soft_wrap=True
        )


def _direction(listing: Any) -> str:
    way = _WAYS[listing.greater_is_better]
    if listing.recorded:
        return way
    return f"{way}: assumed, an earlier version that saved these did not record it, and of a loss it is the other way"


_WAYS = {True: "the greater the better", False: "the smaller the better", None: "which way is better was not recorded"}


def _short(facts: Mapping[str, Any]) -> dict[str, str]:
    """The facts that fit on a line."""
    shown = {
        "step": lambda value: f"{value:,}",
        "world_size": str,
        "metric": lambda value: "none" if value is None else f"{value:.6g}",
        "versions": lambda value: ", ".join(f"{name} {version}" for name, version in value.items()),
        "values": lambda value: ", ".join(value) or "none",
        "model_type": str,
        "architectures": lambda value: ", ".join(value or ()),
        "dtype": str,
    }
    short = {name.replace("_", " "): shown[name](facts[name]) for name in shown if name in facts}
    if facts.get("metric") is not None:
        short["metric"] += f", {_WAYS[facts['greater_is_better']]}"
    return short


def _group_rows(found: Any) -> list[tuple[str, ...]]:
    groups = found.groups
    rows = [(g.name, f"{g.tensors:,}", f"{g.elements:,}", ", ".join(g.dtypes), format_bytes(g.nbytes)) for g in groups]
    sums = [f"{sum(getattr(group, name) for group in groups):,}" for name in ("tensors", "elements")]
    return [*rows, ("all", *sums, "", format_bytes(sum(group.nbytes for group in groups)))]


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    """A table; the first column takes the room that is left and goes on in the next line."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for number, column in enumerate(columns):
        right = column in ("tensors", "elements", "size", "step", "metric")
        table.add_column(column, justify="right" if right else "left", overflow="fold", no_wrap=number > 0)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
