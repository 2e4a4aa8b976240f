"""``fullshard inspect``: the unit table of a run file's model, or the contents of a directory or file of weights."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fullshard.errors import ConfigError
from fullshard.program.cli.common import add_json, add_overrides, describe_base, load_program, path_or_url, positive
from fullshard.program.config import load_run
from fullshard.program.launch import choose_nproc
from fullshard.sizes import format_bytes

UNITS_PROGRAM = "fullshard.program.train.dry_run"
CONTENTS_PROGRAM = "fullshard.state.storage.contents"

SUMMARY = "show how a run's model would be sharded, or the contents of a checkpoint"

DESCRIPTION = """\
For a run file: show how its model would be sharded (units, parameters, lanes, padding, bytes on each rank). Needs no
GPU, no ranks and no memory for the weights, which are not read.

For the output_dir of a run or a directory of checkpoints: list the checkpoints and show which are complete. For one
checkpoint (step-…), a model's directory or a file of weights: show its contents. URLs of checkpoints (s3://bucket/run)
are listed and shown too. Tensors are not read; fullshard verify compares them with their checksums.
"""

EPILOG = """\
examples:
  fullshard inspect examples/banking77_tiny.yaml
  fullshard inspect run.yaml --world-size 64 --json
  fullshard inspect runs/mine
  fullshard inspect runs/mine/checkpoints/step-00000100
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("path", metavar="PATH", type=path_or_url, help="run file (YAML), directory or file of weights")
    add_overrides(parser, "with a run file: override a setting of the run file, such as training.learning_rate=1e-4")
    add_json(parser)
    parser.add_argument(
        "--world-size",
        metavar="N",
        type=positive,
        help="with a run file: ranks to shard over (default: as many as train would start)",
    )


def run(options: argparse.Namespace) -> None:
    """Print the table; one process."""
    url = isinstance(options.path, str)
    weights = load_program("fullshard.state.storage").WEIGHT_SUFFIXES
    if url or options.path.is_dir() or options.path.name.endswith(weights):
        _print_contents(options)
        return
    if not options.path.exists():
        raise ConfigError(
            f"There is no {options.path}. Name a run file, a run's directory, a checkpoint, or a model's directory."
        )
    config = load_run(options.path, options.overrides)
    world_size = options.world_size or choose_nproc(config.nproc)
    table = load_program(UNITS_PROGRAM).inspect_units(config, world_size)
    print(json.dumps(table.as_dict()) if options.json else table)


def _print_contents(options: argparse.Namespace) -> None:
    given = ["--world-size"] if options.world_size else []
    given += options.overrides
    if given:
        raise ConfigError(f"{options.path} is not a run file; {given[0]} applies to a run file only. Leave it out.")
    found = load_program(CONTENTS_PROGRAM).inspect_path(options.path)
    if options.json:
        print(json.dumps(found.as_dict()))
    else:
        draw(found)


_LARGEST = 10


def draw(found: Any) -> None:
    """Print the contents of a path.

    Args:
        found: The ``Contents`` or ``Listing`` of ``fullshard.state.storage.contents``.
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
    groups = found.groups
    rows = [(g.name, f"{g.tensors:,}", f"{g.elements:,}", ", ".join(g.dtypes), format_bytes(g.nbytes)) for g in groups]
    sums = [f"{sum(getattr(group, name) for group in groups):,}" for name in ("tensors", "elements")]
    rows.append(("all", sums[0], sums[1], "", format_bytes(sum(group.nbytes for group in groups))))
    console.print(_table("tensors by group", ("group", "tensors", "elements", "dtypes", "size"), rows))
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
        assumed = " (assumed: the earlier version that saved these did not record it; for a loss, lower is better)"
        direction = _DIRECTIONS[found.greater_is_better] + ("" if found.recorded else assumed)
        console.print(Text(f"best: by the metric, {direction}"), soft_wrap=True)
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


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    """Return a table whose first column takes the remaining width and wraps."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for number, column in enumerate(columns):
        right = column in ("tensors", "elements", "size", "step", "metric")
        table.add_column(column, justify="right" if right else "left", overflow="fold", no_wrap=number > 0)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
