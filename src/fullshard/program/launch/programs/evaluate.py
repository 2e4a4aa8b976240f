"""The program that every rank of ``fullshard evaluate`` runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from fullshard.core.comm import init_from_env, shutdown, together
from fullshard.errors import ConfigError
from fullshard.program.config import SUMMARY_NAME, RunConfig, read_evaluated, read_prompt
from fullshard.program.config.load import is_hub_id
from fullshard.program.data import encoding_of_rows
from fullshard.program.launch.messages import say
from fullshard.program.launch.programs.rank import rank_parser, run_as_rank
from fullshard.program.launch.progress import WorkProgress
from fullshard.program.models import resolve_model
from fullshard.program.train.evaluation.evaluate import evaluate
from fullshard.program.train.evaluation.generation import fits_at_once
from fullshard.program.train.evaluation.reference import with_held_out_reference
from fullshard.program.train.evaluation.results import (
    draw_evaluation,
    evaluation_values,
    require_no_run,
    write_evaluation,
)
from fullshard.program.train.evaluation.trained import find_trained, load_trained
from fullshard.program.train.run.assemble import make_evaluation, require_same_rows
from fullshard.program.train.setup.prepare import Prepared, prepare, source_spec


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this process as one rank of an evaluation; see ``run_as_rank``."""
    return run_as_rank(make_parser(), arguments, _evaluate)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of a rank's command line."""
    options = {"model": str, "data": Path, "encoding": str, "output": Path, "set": str, "base": Path}
    return rank_parser("evaluate", {"run": Path, "overrides": str}, options)


def _evaluate(options: argparse.Namespace, *, is_first: bool) -> None:
    """Tokenize, join the other ranks, load the model and evaluate; rank 0 writes and prints the result."""
    at_hub = is_hub_id(str(options.run))
    path = resolve_model(str(options.run)) if at_hub else options.run
    run = read_evaluated(path, options.data, options.overrides)
    refers = run.training.preference_has_reference
    if refers and not (path / SUMMARY_NAME).exists() and read_prompt(path) is not None:
        raise ConfigError(
            f"The model was trained with training.objective: {run.training.objective}, whose metrics compare with the "
            f"model at the start of its run, and {path} has no run. Evaluate the run's output_dir, or a model with "
            "--model and the run. For texts: fullshard predict."
        )
    if options.set is not None or options.data is not None:
        run = run.of_set(options.set)
    if at_hub and options.output is None:
        raise ConfigError(f"{options.run} is a model on the Hub: give the directory for the result with --output DIR.")
    output = options.output or run.output_dir / "evaluation"
    require_no_run(output)
    file = None if options.data is None else options.data.absolute()
    name = options.model or str(run.output_dir)
    started = with_rows(run, file, options.overrides)
    trained = find_trained(name, started, options.base)
    source = source_spec(trained.config.data, run.training.objective)
    encoding, encoding_notes = (None, ()) if file is None else encoding_of_rows(file, source, options.encoding)
    shown = say if is_first else lambda line: None
    prepared = _with_labels(prepare(trained.config, shown, rows_file=file, rows_encoding=encoding), path)
    comm = init_from_env()
    require_same_rows(comm, prepared)
    if refers:
        shown("reading the model at the start of the run, and computing its log-probabilities of the rows")
        prepared = with_held_out_reference(started, prepared, comm)
    spec = together(comm, lambda: make_evaluation(trained.config, prepared))
    assert spec is not None, "with_rows saw that there are held-out rows"
    model, tokenizer, notes = load_trained(trained, comm)
    with WorkProgress("evaluating", shown=is_first) as progress:
        at_once = fits_at_once(model, comm)
        report = evaluate(model, tokenizer, spec, comm, step=0, epoch=0.0, progress=progress, at_once=at_once)
    data = trained.config.data
    origin = file or data.validation_file or data.train_file or data.dataset_name or " and ".join(data.parts)
    values = evaluation_values(
        report, model=str(trained.directory), data=str(origin), rows=spec.rows.tokenized.examples, world_size=comm.size
    )
    together(comm, lambda: write_evaluation(report, values, output) if is_first else None)
    if is_first:
        for note in (*encoding_notes, *prepared.notes, *notes):
            say(note)
        if options.json:
            print(json.dumps(values), flush=True)
        else:
            draw_evaluation(Console(), report, values, output)
    shutdown()


def _with_labels(prepared: Prepared, model: Path) -> Prepared:
    """Return the rows with the label set that travels with a model, if it has one and its training rows are not there.

    The label set of ``accuracy``, and the label of its baseline, are those of the training rows.
    """
    values = None if (model / SUMMARY_NAME).exists() else read_prompt(model)
    labels = None if values is None else values.get("labels")
    if not labels:
        return prepared
    majority = max(labels, key=lambda label: labels[label])
    return replace(prepared, labels=labels, sets=tuple(replace(one, majority=majority) for one in prepared.sets))


def with_rows(run: RunConfig, file: Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Return a run's settings for an evaluation on its own held-out rows, or on all rows of a file.

    Raises:
        ConfigError: There is no file, and the run has no held-out rows.
    """
    data = run.data
    # The run's limit on held-out rows does not apply to a file.
    if file is not None and not any(override.startswith("data.max_eval_samples") for override in overrides):
        data = data.model_copy(update={"max_eval_samples": None})
    if file is None and not data.holds_out:
        raise ConfigError("The run has no held-out rows: name some with --data FILE.")
    training = run.training.model_copy(update={"eval_strategy": "epoch"})
    return run.model_copy(update={"data": data, "training": training})


if __name__ == "__main__":
    sys.exit(main())
