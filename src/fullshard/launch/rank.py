"""The program that every rank runs: ``python -m fullshard.launch.rank CONFIG [key=value ...]``.

Our launcher starts it (:mod:`fullshard.launch.local`), and under torchrun ``fullshard train`` runs it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from transformers.utils import logging

from fullshard.comm import init_from_env, shutdown
from fullshard.config import load_run
from fullshard.errors import RunStopped
from fullshard.launch.failure import FAILURE_FILE_VARIABLE, Failure
from fullshard.launch.local import INTERRUPTED_EXIT_CODE, end_with_launcher
from fullshard.launch.signals import StopSignals
from fullshard.train import ConsoleSink, FileSink, Sink, train


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this process as one rank of a training run.

    Args:
        arguments: Command line; None: this process's.

    Returns:
        Exit code 0, or ``STOPPED_EXIT_CODE`` when the run was told to stop and has saved. A failure ends the process
        here, with the exit code of its kind: leaving the process group in order would wait for ranks that will never
        come.
    """
    options = _parse(arguments)
    end_with_launcher()
    rank = int(os.environ["RANK"])
    try:
        _train(options, is_first=rank == 0)
    except RunStopped as stopped:
        return _say_stopped(Failure.of(stopped, rank), as_json=options.json)
    except KeyboardInterrupt:
        os._exit(INTERRUPTED_EXIT_CODE)
    except BaseException as error:
        _report(Failure.of(error, rank))
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fullshard.launch.rank")
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def _train(options: argparse.Namespace, *, is_first: bool) -> None:
    """Join the other ranks, train, leave. Rank 0 speaks to the user; with ``--json`` stdout is the summary's."""
    if not is_first:
        # What transformers says is the same on every rank.
        logging.disable_progress_bar()
        logging.set_verbosity_error()
    config = load_run(options.config, options.overrides)
    comm = init_from_env()
    sinks: list[Sink] = []
    if is_first:
        sinks = [
            FileSink(config.output_dir, logging_steps=config.training.logging_steps),
            ConsoleSink(Console(stderr=options.json), samples=config.evaluation.num_samples_shown),
        ]
    try:
        summary = train(config, comm, sinks, StopSignals())
    except RunStopped:
        shutdown()
        raise
    if is_first and options.json:
        print(json.dumps(summary.as_dict()), flush=True)
    shutdown()


def _say_stopped(stop: Failure, *, as_json: bool) -> int:
    """Tell the launcher, or the user when somebody else launched us, that the run has saved and left."""
    path = os.environ.get(FAILURE_FILE_VARIABLE)
    if path is not None:
        stop.write(Path(path))
    elif stop.rank == 0:
        print(stop.text(), file=sys.stderr, flush=True)
        if as_json:
            print(json.dumps(stop.as_dict()), flush=True)
    return stop.exit_code


def _report(failure: Failure) -> None:
    """Tell the launcher, or the user when somebody else launched us, why this rank fails; and end."""
    sys.stdout.flush()
    path = os.environ.get(FAILURE_FILE_VARIABLE)
    if path is not None:
        failure.write(Path(path))
    else:
        print(f"[rank {failure.rank}] {failure.text()}", file=sys.stderr, flush=True)
    os._exit(failure.exit_code)


if __name__ == "__main__":
    sys.exit(main())
