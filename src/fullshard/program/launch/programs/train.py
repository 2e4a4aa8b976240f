"""What each rank of ``fullshard train`` runs: ``python -m fullshard.program.launch.programs.train CONFIG``.

Fullshard's launcher starts it (:mod:`fullshard.program.launch.local`); under torchrun, ``fullshard train`` calls it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from fullshard.core.comm import init_from_env, shutdown
from fullshard.errors import RunStopped
from fullshard.program.config import RunConfig, load_run, require_base, require_output_dir
from fullshard.program.launch.attempts import note_plan
from fullshard.program.launch.local import gpu_count
from fullshard.program.launch.messages import say
from fullshard.program.launch.programs.again import ReachedSink, resume_again
from fullshard.program.launch.programs.rank import run_as_rank
from fullshard.program.launch.programs.signals import StopSignals
from fullshard.program.launch.progress import WorkProgress
from fullshard.program.sharing import PushSink, push_finished
from fullshard.program.train import ConsoleSink, FileSink, Sink, train
from fullshard.program.train.auto import choices_without_plan, chosen_precision, chosen_settings, chosen_ways
from fullshard.program.train.memory_check import check_memory
from fullshard.program.train.reporting.card import CardSink
from fullshard.program.train.reporting.trackers import tracker_sinks
from fullshard.program.train.setup.devices import Devices
from fullshard.program.train.setup.float8 import require_float8
from fullshard.program.train.setup.prepare import prepare


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this process as one rank of a training run; see ``run_as_rank``."""
    return run_as_rank(make_parser(), arguments, _train, outlives_output=True)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of a rank's command line."""
    parser = argparse.ArgumentParser(prog="python -m fullshard.program.launch.programs.train")
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--no-plan", action="store_true")
    parser.add_argument("--stop-when-file", type=Path)
    return parser


def _train(options: argparse.Namespace, *, is_first: bool) -> None:
    """Join the other ranks and train. Rank 0 reports to the user; with ``--json`` only the summary goes to stdout."""
    reached = ReachedSink(time.time())

    def load(more: Sequence[str]) -> RunConfig:
        return load_run(options.config, [*options.overrides, *more])

    config = load(())
    asked = config.resume
    require_base(config.model)
    require_output_dir(config)
    require_float8(config, Devices.of_machine(gpu_count()))
    tell = say if is_first else lambda line: None
    tell("reading the data")
    # Tokenizing may take long, so it comes before the process group: no rank waits in a collective.
    with WorkProgress("tokenizing", shown=is_first) as progress:
        prepared = prepare(config, say=tell, progress=lambda what, done, total: progress(done, total))
    comm = init_from_env()
    # The record is on the machine that rank 0 was on; that may be another one now, or lost.
    noted = comm.all_gather_object(resume_again(asked))
    options.overrides = [*options.overrides, *next(filter(None, noted), [])]
    config = load(())
    precision, choice = chosen_precision(load, comm, tell)
    ways, taken = chosen_ways(lambda more: load([*precision, *more]), prepared, comm, tell)
    settled = [*precision, *ways]
    chosen = (*settled, *chosen_settings(lambda more: load([*settled, *more]), prepared, comm, tell))
    planned = None
    if not options.no_plan:
        with WorkProgress("planning", shown=is_first) as progress:
            tells = _told_and_noted if is_first else tell
            planned = check_memory(lambda more: load([*chosen, *more]), prepared, comm, tells, progress)
    by_plan = choices_without_plan(load(chosen), comm) if planned is None else planned.chosen
    config = load([*chosen, *(one.override for one in by_plan)])
    push = _uploads(config) if is_first else None
    sinks = _sinks(config, reached, push, to_stderr=options.json) if is_first else []
    try:
        choices = [choice, *taken, *by_plan]
        summary = train(config, comm, sinks, StopSignals(options.stop_when_file), prepared, planned, choices)
    except RunStopped as stopped:
        shutdown()
        if config.resume == asked:
            raise
        text = str(stopped).replace("same command resumes", "same command with resume=auto resumes")
        raise RunStopped(text, step=stopped.step, checkpoint=stopped.checkpoint) from None
    if is_first and options.json:
        reached.tell(json.dumps(summary.as_dict()))
    shutdown()  # the other ranks do not wait for the upload
    if is_first:
        if push is not None:
            push.join()
        push_finished(config, say)


def _told_and_noted(line: str) -> None:
    """Tell the user about the plan, and record it for the message of a rank that is killed for memory."""
    say(line)
    note_plan(line)


def _uploads(config: RunConfig) -> PushSink | None:
    """Return the sink that uploads checkpoints on the way, if the run asks for that."""
    wanted = config.training.push_to_hub
    return PushSink(config, say) if wanted and wanted.checkpoints else None


def _sinks(config: RunConfig, reached: ReachedSink, push: PushSink | None, *, to_stderr: bool) -> list[Sink]:
    """Return rank 0's sinks. The summary, which marks the run as complete, comes after the card."""
    return [
        reached,
        CardSink(config.output_dir, say),
        FileSink(config.output_dir, logging_steps=config.training.logging_steps, say=say),
        ConsoleSink(Console(stderr=to_stderr), samples=config.evaluation.num_samples_shown),
        *tracker_sinks(config, say),
        *([] if push is None else [push]),
    ]


if __name__ == "__main__":
    sys.exit(main())
