"""The unit table: modules, layout and bytes of each unit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from fullshard.core.engine.step.unit import Unit
from fullshard.sizes import format_bytes

_WIDEST = 120
"""Characters of a line; wider lines wrap in most terminals and pages."""

_LEAST = 12
"""Fewest characters of a class name that are kept."""


@dataclass(frozen=True)
class UnitRow:
    """A row of the table.

    Attributes:
        unit: Qualified name of the module.
        kind: Class of the module.
        parameters: Elements of its full parameters.
        trainable: Elements that require gradients.
        tensors: Number of parameters.
        lanes: Number of buffers; each sharded one costs one collective a gather.
        padding: Share of the lanes that is padding.
        shard_bytes: Bytes of parameters that each rank keeps.
        gathered_bytes: Bytes while the unit is gathered.
    """

    unit: str
    kind: str
    parameters: int
    trainable: int
    tensors: int
    lanes: int
    padding: float
    shard_bytes: int
    gathered_bytes: int


@dataclass(frozen=True)
class UnitTable:
    """The units of a sharded model, root first; ``str()`` draws them.

    Attributes:
        rows: One for each unit.
        world_size: Ranks that share each unit.
        blocks: Ranks among which tensor parallelism divides parameters; 1 if there is none. Bytes are a rank's.
    """

    rows: tuple[UnitRow, ...]
    world_size: int
    blocks: int = 1

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"world_size": self.world_size, "blocks": self.blocks, "units": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        """Return the table as text, at most 120 characters wide; runs of similar units take one line."""
        title = f"{_count(len(self.rows), 'unit')} over {_count(self.world_size, 'rank')}"
        title += f", times {self.blocks} that divide parameters (tensor parallel)" if self.blocks > 1 else ""
        frozen = any(row.trainable < row.parameters for row in self.rows)
        counts = ("parameters", "trainable") if frozen else ("parameters",)
        head = ("unit", "class", *counts, "tensors", "lanes", "padding", "bytes/rank", "gathered")
        lines = [head, *(self._line(label, rows, counts) for label, rows in _runs(self.rows))]
        label, _, *numbers = self._line("total", self.rows, counts)
        lines.append((label, "", *numbers))
        shared = _shared_parent(self.rows)
        inside = f"{title}; all but the root are inside {shared}"
        if shared and sum(_widths(lines)) - 2 > _WIDEST >= len(inside):
            title = inside
            lines = [(line[0].removeprefix(f"{shared}."), *line[1:]) for line in lines]
        lines = _shortened(lines)
        widths = _widths(lines)
        rule = "  ".join("-" * (width - 2) for width in widths)
        drawn = [_draw(line, widths) for line in lines]
        return "\n".join([title, drawn[0], rule, *drawn[1:-1], rule, drawn[-1]])

    def _line(self, label: str, rows: tuple[UnitRow, ...], counts: tuple[str, ...]) -> tuple[str, ...]:
        parameters = sum(r.parameters for r in rows)
        padding = sum(r.padding * r.parameters for r in rows) / (parameters or 1)
        return (
            label,
            rows[0].kind,
            *(f"{sum(getattr(r, count) for r in rows):,}" for count in counts),
            str(sum(r.tensors for r in rows)),
            str(sum(r.lanes for r in rows)),
            f"{padding:.2%}",
            format_bytes(sum(r.shard_bytes for r in rows)),
            format_bytes((sum if label == "total" else max)(r.gathered_bytes for r in rows)),
        )


def _draw(line: tuple[str, ...], widths: list[int]) -> str:
    sized = enumerate(zip(line, widths, strict=True))
    return "  ".join(cell.ljust(w - 2) if i < 2 else cell.rjust(w - 2) for i, (cell, w) in sized).rstrip()


def _widths(lines: Sequence[tuple[str, ...]]) -> list[int]:
    """Return the width of each column, with two blanks of separation."""
    return [2 + max(map(len, column)) for column in zip(*lines, strict=True)]


def _shared_parent(rows: tuple[UnitRow, ...]) -> str:
    """Return the module that contains all units but the root, such as peft's wrapper; empty if there is none."""
    paths = [row.unit.split(".")[:-2] for row in rows[1:]]
    shared = paths[0] if paths else []
    for path in paths:
        same = [one == other for one, other in zip(shared, path, strict=False)]
        shared = shared[: [*same, False].index(False)]
    return ".".join(shared)


def _shortened(lines: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Shorten lines that are too wide: first class names, then unit names, whose ends are kept."""
    widths = _widths(lines)
    over = sum(widths) - 2 - _WIDEST
    if over <= 0:
        return lines
    kind = max(min(widths[1] - 2, _LEAST), widths[1] - 2 - over)
    over -= widths[1] - 2 - kind
    unit = widths[0] - 2 - max(0, over)
    return [
        (
            name if len(name) <= unit else f"…{name[len(name) - unit + 1 :]}",
            what if len(what) <= kind else f"{what[: kind - 1]}…",
            *rest,
        )
        for name, what, *rest in lines
    ]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _runs(rows: tuple[UnitRow, ...]) -> Iterable[tuple[str, tuple[UnitRow, ...]]]:
    """Join neighbours that differ only in the number at the end of their name into one line."""
    start = 0
    for stop in range(1, len(rows) + 1):
        if stop < len(rows) and _same_kind(rows[stop - 1], rows[stop]):
            continue
        run = rows[start:stop]
        label = run[0].unit if len(run) == 1 else f"{run[0].unit} .. {run[-1].unit.rpartition('.')[2]} (x{len(run)})"
        yield label, run
        start = stop


def _same_kind(one: UnitRow, two: UnitRow) -> bool:
    same_parent = one.unit.rpartition(".")[0] == two.unit.rpartition(".")[0]
    return same_parent and one.parameters == two.parameters and one.kind == two.kind and one.lanes == two.lanes


def unit_table(units: Sequence[Unit], world_size: int) -> UnitTable:
    """Return the table of ``units``, root first, each shared by ``world_size`` ranks."""
    divided = (param.meta.block for unit in units for param in unit.params)
    blocks = max((block.count for block in divided if block is not None), default=1)
    return UnitTable(tuple(make_row(unit) for unit in units), world_size, blocks)


def make_row(unit: Unit) -> UnitRow:
    """Return the row of one unit."""
    numels = [(prod(p.meta.global_shape), p.trainable) for p in unit.params]
    total = sum(p.numel for p in unit.params)  # in the lanes: of divided parameters this rank's blocks
    held = sum(lane.layout.world_size * lane.layout.shard_numel for lane in unit.lanes)
    return UnitRow(
        unit=unit.name,
        kind=" + ".join(dict.fromkeys(type(module).__name__ for module in unit.modules)),
        parameters=sum(n for n, _ in numels),
        trainable=sum(n for n, trainable in numels if trainable),
        tensors=len(numels),
        lanes=len(unit.lanes),
        padding=held / total - 1 if total else 0.0,
        shard_bytes=sum(lane.shard.nbytes for lane in unit.lanes),
        gathered_bytes=sum(lane.full.nbytes for lane in unit.lanes),
    )
