"""The program that every rank of ``fullshard tune`` runs."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fullshard.core.comm import init_from_env, shutdown, together
from fullshard.errors import ConfigError
from fullshard.program.config import RunConfig, require_base
from fullshard.program.config.load import check_run, read_values
from fullshard.program.launch.local import gpu_count
from fullshard.program.launch.messages import say
from fullshard.program.launch.programs.rank import rank_parser, run_as_rank
from fullshard.program.launch.progress import WorkProgress
from fullshard.program.train.auto import chosen_precision
from fullshard.program.train.setup.devices import Devices
from fullshard.program.train.setup.float8 import require_float8
from fullshard.program.train.setup.prepare import prepare
from fullshard.program.train.setup.tuned import set_by_hand
from fullshard.program.tune.run_file import as_yaml, changes, write_choice
from fullshard.program.tune.table import as_json, as_text
from fullshard.program.tune.tune import Tuning, tune


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this process as one rank of a tuning; see ``run_as_rank``."""
    return run_as_rank(make_parser(), arguments, _tune)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of a rank's command line."""
    return rank_parser("tune", {"config": Path, "overrides": str}, {"minutes": float, "journal": Path})


def _tune(options: argparse.Namespace, *, is_first: bool) -> None:
    """Tokenize, join the other ranks and measure; rank 0 prints the table and writes the choice."""
    tell = say if is_first else lambda line: None

    values = read_values(options.config)  # once: the user may edit the file while ranks measure

    def load(more: Sequence[str]) -> RunConfig:
        return check_run(values, options.config, [*options.overrides, *more, "resume=never"])

    config = load(())
    require_base(config.model)
    require_float8(config, Devices.of_machine(gpu_count()))
    # A list of unusable rows is written by the run itself.
    with tempfile.TemporaryDirectory() as place, WorkProgress("tokenizing", shown=is_first) as progress:
        elsewhere = config.model_copy(update={"output_dir": Path(place)})
        data = prepare(elsewhere, tell, lambda what, done, total: progress(done, total))
    comm = init_from_env()
    precision, _ = chosen_precision(load, comm, tell)
    with WorkProgress("measuring candidates", shown=is_first) as progress:
        found = tune(lambda more: load([*precision, *more]), data, comm, options.minutes, options.journal, progress)
    if is_first:
        text = (as_json if options.json else as_text)(found.outcome, found.misfits, found.chosen)
        print(text, flush=True)
    if not options.json:
        together(comm, lambda: _write(options, values, found) if is_first else None)
    shutdown()


def _write(options: argparse.Namespace, before: Mapping[str, Any], found: Tuning) -> None:
    """Write the choice into the run file, as far as that leaves it open; on rank 0. ``before``: what it had."""
    config = check_run(before, options.config, options.overrides)
    values = changes(found.chosen, config)
    if config.training.speed == "auto":
        print(f"\n{options.config} stays as it is: with training.speed: auto its next run takes this choice.")
    elif not values:
        print(f"\n{options.config} stays as it is: it already says the fastest.")
    elif read_values(options.config) != before:
        raise ConfigError(
            f"{options.config} has changed since it was read, and the choice is for what it had; it is not written. "
            f"Add it by hand if it still applies:\n{as_yaml(values)}"
        )
    else:
        write_choice(options.config, values, options.overrides)
        print(f"\nwrote into {options.config}:\n{as_yaml(values)}")
    if fixed := set_by_hand(config):
        print(f"not varied, as the run file sets it: {', '.join(fixed)}. Remove it to have others measured")
    print(f"kept for training.speed: auto and `fullshard plan --fit`: {found.kept}")


if __name__ == "__main__":
    sys.exit(main())
