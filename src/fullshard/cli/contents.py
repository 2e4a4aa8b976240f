"""Tables of ``fullshard inspect`` for directories and files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fullshard.cli.common import describe_base
from fullshard.sizes import format_bytes

_LARGEST = 10


def draw(found: Any) -> None:
    """Print the contents of a path.

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
    rows = [(t.name, " x ".join(map(str, t.shape)) or "scalar", t.dtype, format_bytes(t.nbytes)) for t in largest]
    console.print(_table(f"the largest of {len(found.tensors):,} tensors", ("tensor", "shape", "dtype", "size"), rows))
    files = [(name, format_bytes(nbytes)) for name, nbytes in found.files.items()]
    console.print(_table("files", ("file", "size"), files))


def _draw_listing(console: Console, found: Any) -> None:
    rows = [
        (
            "." if entry.path == found.path else str(entry.path)[len(str(found.path)) + 1 :],
            "" if entry.step is None else f"{entry.step:,}",
            "" if entry.metric is None else f"{entry.metric:.4g}",
            format_bytes(entry.nbytes),
            ("complete, best" if entry.is_best else "complete") if entry.problem is None else "INCOMPLETE",
        )
        for entry in found.entries
    ]
    if rows:
        console.print(_table("files and sizes were checked", ("directory", "step", "metric", "size", "state"), rows))
    else:
        console.print("  no checkpoints yet")
    if found.greater_is_better is not None:
        console.print(Text(f"best: by the metric, {_direction(found)}"), soft_wrap=True)
    for entry in found.entries:
        if entry.problem is not None:
            console.print(Text(f"incomplete: {entry.problem}"), soft_wrap=True)
    for path in found.unfinished:
        console.print(
            Text(f"note: {path} is being written or deleted, or is left over from a killed process"), soft_wrap=True
        )
    for path in found.set_aside:
        text = f"note: {path} was damaged and set aside by resume=previous; delete it if you do not need it"
        console.print(Text(text), soft_wrap=True)


def _direction(listing: Any) -> str:
    direction = _DIRECTIONS[listing.greater_is_better]
    if listing.recorded:
        return direction
    return f"{direction} (assumed: the earlier version that saved these did not record it; for a loss, lower is better)"


_DIRECTIONS = {True: "higher is better", False: "lower is better", None: "whether higher is better was not recorded"}


def _short(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the facts that fit on a line."""
    shown = {
        "step": lambda value: f"{value:,}",
        "world_size": str,
        "metric": lambda value: "none" if value is None else f"{value:.6g}",
        "base": lambda value: "" if value is None else describe_base(value),
        "versions": lambda value: ", ".join(f"{name} {version}" for name, version in value.items()),
        "values": lambda value: ", ".join(value) or "none",
        "model_type": str,
        "architectures": lambda value: ", ".join(value or ()),
        "dtype": str,
    }
    short = {name.replace("_", " "): shown[name](facts[name]) for name in shown if name in facts}
    if facts.get("base") is None:
        short.pop("base", None)
    if facts.get("metric") is not None:
        short["metric"] += f", {_DIRECTIONS[facts['greater_is_better']]}"
    return short


def _group_rows(found: Any) -> list[tuple[str, ...]]:
    groups = found.groups
    rows = [(g.name, f"{g.tensors:,}", f"{g.elements:,}", ", ".join(g.dtypes), format_bytes(g.nbytes)) for g in groups]
    sums = [f"{sum(getattr(group, name) for group in groups):,}" for name in ("tensors", "elements")]
    return [*rows, ("all", *sums, "", format_bytes(sum(group.nbytes for group in groups)))]


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    """Return a table whose first column takes the remaining width and wraps."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for number, column in enumerate(columns):
        right = column in ("tensors", "elements", "size", "step", "metric")
        table.add_column(column, justify="right" if right else "left", overflow="fold", no_wrap=number > 0)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
