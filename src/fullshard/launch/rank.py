"""The program that every rank runs: ``python -m fullshard.launch.rank CONFIG [key=value ...]``.

Our launcher starts it (:mod:`fullshard.launch.local`), and under torchrun ``fullshard train`` runs it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from fullshard.comm import init_from_env, shutdown
from fullshard.config import load_run, require_output_dir
from fullshard.errors import RunStopped
from fullshard.launch.program import run_as_rank
from fullshard.launch.progress import WorkProgress
from fullshard.launch.signals import StopSignals
from fullshard.train import ConsoleSink, FileSink, Sink, train
from fullshard.train.reporting.trackers import tracker_sinks
from fullshard.train.setup.prepare import prepare


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this process as one rank of a training run.

    Args:
        arguments: Command line; None: this process's.

    Returns:
        The exit code; see :func:`~fullshard.launch.program.run_as_rank`.
    """
    options = _parse(arguments)
    return run_as_rank(lambda is_first: _train(options, is_first=is_first), as_json=options.json)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fullshard.launch.rank")
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def _train(options: argparse.Namespace, *, is_first: bool) -> None:
    """Join the other ranks, train, leave. Rank 0 speaks to the user; with ``--json`` stdout is the summary's."""
    config = load_run(options.config, options.overrides)
    require_output_dir(config.output_dir)
    # Tokenizing may take long, so it comes before the ranks know each other: nobody waits in a collective.
    with WorkProgress("tokenizing", shown=is_first) as progress:
        prepared = prepare(
            config,
            say=_say if is_first else lambda line: None,
            progress=lambda what, done, total: progress(done, total),
        )
    comm = init_from_env()
    sinks: list[Sink] = []
    if is_first:
        sinks = [
            FileSink(config.output_dir, logging_steps=config.training.logging_steps),
            ConsoleSink(Console(stderr=options.json), samples=config.evaluation.num_samples_shown),
            *tracker_sinks(config, _say),
        ]
    try:
        summary = train(config, comm, sinks, StopSignals(), prepared)
    except RunStopped:
        shutdown()
        raise
    if is_first and options.json:
        print(json.dumps(summary.as_dict()), flush=True)
    shutdown()


def _say(line: str) -> None:
    print(f"fullshard: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
