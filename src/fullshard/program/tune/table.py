"""What a tuning prints: a table of all that was measured, and what was left out and why."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fullshard.program.train.setup.tuned import Setting
from fullshard.program.tune.candidates import Candidate, named
from fullshard.program.tune.halving import NO_TIME, Measured, Outcome
from fullshard.sizes import format_bytes, format_duration

SHOWN = 20
"""Rows of the table at most."""

_TITLES = ("ways", "recompute", "rows", "step", "tokens/s", "of peak", "reserved", "compile")


def as_text(outcome: Outcome, misfits: Mapping[str, str], chosen: Setting) -> str:
    """Return the table, with a mark at the choice, and a line for each reason why something was left out."""
    shown = list(outcome.measured.values())[:SHOWN]
    rows = [_TITLES, *map(_cells, shown)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_TITLES))]
    lines = []
    for row, found in zip(rows, [None, *shown], strict=True):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append(f"{'*' if found is not None and found.setting == chosen else ' '} {'  '.join(cells)}".rstrip())
    further = len(outcome.measured) - len(shown)
    lines += [f"  and {further} more; --json prints all of them"] if further else []
    return "\n".join([*lines, *_left_out(outcome.left_out, misfits)])


def _cells(found: Measured) -> tuple[str, ...]:
    setting = found.setting
    return (
        named(setting.ways),
        {"true": "all", "false": "none"}.get(setting.recompute, setting.recompute),
        "-" if setting.rows is None else f"{setting.rows} x {setting.times}",
        f"{1e3 * found.step_s:,.0f} ms",
        f"{found.tokens / found.step_s:,.0f}",
        "-" if found.share_of_peak is None else f"{found.share_of_peak:.1%}",
        format_bytes(found.reserved_bytes) if found.reserved_bytes else "-",
        format_duration(found.compile_s) if "compile" in setting.ways else "-",
    )


def _left_out(left_out: Mapping[Candidate, str], misfits: Mapping[str, str]) -> list[str]:
    by_reason: dict[str, list[Candidate]] = {}
    for one, why in left_out.items():
        by_reason.setdefault(why, []).append(one)
    lines = [f"  {name}: does not apply: {why}" for name, why in misfits.items()]
    for why, some in by_reason.items():
        ways = dict.fromkeys(named(one.ways) for one in some)
        if why == NO_TIME:
            lines.append(f"  {len(some)} candidate{'s' if len(some) > 1 else ''}: {why} (--minutes)")
        elif len(some) == 1:
            lines.append(f"  {some[0]}: {why}")
        else:
            lines.append(f"  {', '.join(ways)} ({len(some)} candidates): {why}")
    return ["left out:", *lines] if lines else []


def as_json(outcome: Outcome, misfits: Mapping[str, str], chosen: Setting) -> str:
    """Return everything as JSON."""
    measured = [
        {**found.setting.values, **{name: value for name, value in asdict(found).items() if name != "setting"}}
        | {"step_s": found.step_s, "tokens_per_s": found.tokens / found.step_s, "chosen": found.setting == chosen}
        for found in outcome.measured.values()
    ]
    left_out: list[dict[str, Any]] = [{"ways": [name], "candidate": name, "why": why} for name, why in misfits.items()]
    left_out += [{"ways": list(one.ways), "candidate": str(one), "why": why} for one, why in outcome.left_out.items()]
    return json.dumps({"choice": chosen.values, "measured": measured, "left_out": left_out})
