"""The unit table: what was wrapped, how it is laid out, what it costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fullshard.engine.unit import Unit


@dataclass(frozen=True)
class UnitRow:
    """One unit.

    Attributes:
        unit: Qualified name of the module.
        kind: Class of the module.
        parameters: Elements of all its parameters, unsharded.
        trainable: Those that require gradients.
        tensors: Number of parameters.
        lanes: Number of buffers; of those that are sharded each costs one collective a gather.
        padding: Share of the lanes that holds nothing.
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
        rows: One a unit.
        world_size: Ranks that share each unit.
    """

    rows: tuple[UnitRow, ...]
    world_size: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"world_size": self.world_size, "units": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        """The table as text; runs of alike units take one line."""
        head = ("unit", "class", "parameters", "tensors", "lanes", "padding", "bytes/rank", "gathered")
        lines = [self._line(label, rows) for label, rows in _runs(self.rows)]
        label, _, *numbers = self._line("total", self.rows)
        lines.append((label, "", *numbers))
        widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
        drawn = [_draw(head, widths), "  ".join("-" * w for w in widths)]
        drawn += [_draw(line, widths) for line in lines[:-1]]
        drawn += ["  ".join("-" * w for w in widths), _draw(lines[-1], widths)]
        return "\n".join([f"{_count(len(self.rows), 'unit')} over {_count(self.world_size, 'rank')}", *drawn])

    def _line(self, label: str, rows: tuple[UnitRow, ...]) -> tuple[str, ...]:
        parameters = sum(r.parameters for r in rows)
        frozen = parameters - sum(r.trainable for r in rows)
        padding = sum(r.padding * r.parameters for r in rows) / (parameters or 1)
        return (
            label,
            rows[0].kind,
            f"{parameters:,}" + (f" ({frozen:,} frozen)" if frozen else ""),
            str(sum(r.tensors for r in rows)),
            str(sum(r.lanes for r in rows)),
            f"{padding:.2%}",
            _bytes(sum(r.shard_bytes for r in rows)),
            _bytes(max(r.gathered_bytes for r in rows))
            if label != "total"
            else _bytes(sum(r.gathered_bytes for r in rows)),
        )


def _draw(line: tuple[str, ...], widths: list[int]) -> str:
    cells = [cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))]
    return "  ".join(cells).rstrip()


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _bytes(count: int) -> str:
    if count < 1 << 20:
        return f"{count / (1 << 10):.1f} KiB"
    if count < 1 << 30:
        return f"{count / (1 << 20):.1f} MiB"
    return f"{count / (1 << 30):.2f} GiB"


def _runs(rows: tuple[UnitRow, ...]) -> Iterable[tuple[str, tuple[UnitRow, ...]]]:
    """Neighbours that differ only in the number at the end of their name, as one line."""
    start = 0
    for stop in range(1, len(rows) + 1):
        if stop < len(rows) and _alike(rows[stop - 1], rows[stop]):
            continue
        run = rows[start:stop]
        label = run[0].unit if len(run) == 1 else f"{run[0].unit} .. {run[-1].unit.rpartition('.')[2]} (x{len(run)})"
        yield label, run
        start = stop


def _alike(one: UnitRow, two: UnitRow) -> bool:
    same_parent = one.unit.rpartition(".")[0] == two.unit.rpartition(".")[0]
    return same_parent and one.parameters == two.parameters and one.kind == two.kind and one.lanes == two.lanes


def unit_table(units: Sequence[Unit], world_size: int) -> UnitTable:
    """The table of ``units``, root first, each shared by ``world_size`` ranks."""
    return UnitTable(tuple(make_row(unit) for unit in units), world_size)


def make_row(unit: Unit) -> UnitRow:
    """The row of one unit."""
    numels = [(p.numel, p.trainable) for p in unit.params]
    total = sum(n for n, _ in numels)
    held = sum(lane.lane.world_size * lane.lane.shard_numel for lane in unit.lanes)
    return UnitRow(
        unit=unit.name,
        kind=" + ".join(dict.fromkeys(type(module).__name__ for module in unit.modules)),
        parameters=total,
        trainable=sum(n for n, trainable in numels if trainable),
        tensors=len(numels),
        lanes=len(unit.lanes),
        padding=held / total - 1 if total else 0.0,
        shard_bytes=sum(lane.shard.nbytes for lane in unit.lanes),
        gathered_bytes=sum(lane.full.nbytes for lane in unit.lanes),
    )
