"""The program that every rank of ``fullshard predict`` runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fullshard.core.comm import init_from_env, shutdown
from fullshard.errors import ConfigError, DataError
from fullshard.program.config import PROMPT_NAME, SUMMARY_NAME, RunConfig
from fullshard.program.config.recorded import recorded_run, recorded_turns, run_of
from fullshard.program.data import InputRow, describe_separator, encoding_of_rows, read_inputs, uses_chat_template
from fullshard.program.launch.messages import say
from fullshard.program.launch.programs.rank import rank_parser, run_as_rank
from fullshard.program.launch.programs.row_file import RecordColumns, RowWriter
from fullshard.program.launch.progress import WorkProgress
from fullshard.program.launch.streams import UnreadOutputError
from fullshard.program.models import is_causal, resolve_model
from fullshard.program.train.evaluation.predict import plain_rows, predict
from fullshard.program.train.evaluation.trained import find_trained, load_trained
from fullshard.program.train.setup.prepare import chat_notes, separator_of, source_spec, tokenize_spec


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this process as one rank that predicts; see :func:`~fullshard.program.launch.programs.rank.run_as_rank`."""
    return run_as_rank(make_parser(), arguments, _predict)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of a rank's command line."""
    texts = dict.fromkeys(("prefix", "separator", "source_column", "encoding", "system", "set"), str)
    numbers = dict.fromkeys(("num_beams", "max_new_tokens", "batch_size"), int)
    return rank_parser("predict", {"model": str, "file": Path}, {**texts, **numbers, "output": Path, "base": Path})


def _predict(options: argparse.Namespace, *, is_first: bool) -> None:
    """Read the rows, join the other ranks, load the model and predict; rank 0 writes the predictions."""
    directory = resolve_model(options.model)
    trained = find_trained(options.model, recorded_run(directory), options.base)
    config = changed(trained.config.of_set(options.set), options)
    source = source_spec(config.data, config.training.objective)
    encoding, encoding_notes = encoding_of_rows(options.file, source, options.encoding)
    run = run_of(directory)
    asks_turns = run is not None and recorded_turns(run, options.set) is not None
    table = read_inputs(options.file, replace(source, encoding=encoding), asks_turns=asks_turns)
    _require_plain(table.rows, options)
    comm = init_from_env()
    model, tokenizer, notes = load_trained(trained, comm)
    rows, about_text = _as_read(table.rows, config, model, tokenizer, run, options)
    same_format = options.output is not None and options.output.suffix.lower() == options.file.suffix.lower()
    columns = RecordColumns.of(table, same_format=same_format)
    about = (*settings_notes(directory), *encoding_notes, *table.notes, *notes, *about_text, *columns.notes)
    for note in about if is_first else ():
        say(note)
    unusable = [row for row in rows if row.problem is not None]
    if is_first and unusable:
        say(
            f"{len(unusable):,} of {len(rows):,} rows cannot be used: their prediction is null, and problem says "
            f"why. The first is line {unusable[0].line}: {unusable[0].problem}"
        )
    done = cut = 0
    output = options.output if is_first else None
    with _opened(output, columns) as out, WorkProgress("predicting", shown=is_first) as progress:
        for written in predict(model, tokenizer, rows, config, comm):
            if is_first:
                with _writing():
                    out.write(list(map(columns.record, rows[done:], written)))
            done, cut = done + len(written), cut + sum(one.cut for one in written)
            progress(done, len(rows))
        if is_first:
            with _writing():
                out.end()
    if is_first and cut:
        limit = config.data.max_source_length
        say(f"{cut:,} of {done:,} sources were truncated to {limit} tokens (data.max_source_length)")
    if is_first and options.output is not None:
        if options.json:
            print(json.dumps({"rows": done, "unusable": len(unusable), "output": str(options.output)}), flush=True)
        else:
            say(f"{done:,} predictions written to {options.output}")
    shutdown()


def _require_plain(rows: Sequence[InputRow], options: argparse.Namespace) -> None:
    """Raise ConfigError if a system turn is given for rows that have their own turns."""
    if options.system is not None and not any(row.is_plain for row in rows):
        raise ConfigError(
            f"--system gives plain text a system turn, but the rows of {options.file} are conversations with their own "
            "turns. Leave --system out."
        )


def _as_read(
    rows: Sequence[InputRow],
    config: RunConfig,
    model: Any,
    tokenizer: Any,
    run: Path | None,
    options: argparse.Namespace,
) -> tuple[Sequence[InputRow], tuple[str, ...]]:
    """Return the rows as the model reads them, and notes on the text around them; prepares the tokenizer; every rank.

    Raises:
        ConfigError: See :func:`~fullshard.program.train.evaluation.predict.plain_rows`.
    """
    causal, notes = is_causal(model), ()
    if any(row.is_plain for row in rows):
        chats = uses_chat_template(tokenizer, tokenize_spec(config, tokenizer, causal=causal))
        plain = plain_rows(run, options.set, options.system, chats=chats)
        notes = plain.notes
        if plain.system_turns is not None:
            rows = [row.after(plain.system_turns) for row in rows]
    turns = chat_notes(config, tokenizer) if causal and any(row.conversation is not None for row in rows) else ()
    separator = separator_of(tokenizer, tokenize_spec(config, tokenizer, causal=causal))
    return rows, (*turns, *(() if separator is None else (describe_separator(separator, tokenizer),)), *notes)


def settings_notes(directory: Path) -> tuple[str, ...]:
    """Return a note where a model's settings come from, unless it is a run's; any process."""
    run = run_of(directory)
    if run == directory and not (directory / SUMMARY_NAME).exists():
        return (f"prefix, lengths and other settings are those of {directory / PROMPT_NAME}",)
    if run is None or run == directory:
        return ()
    return (f"prefix, lengths and other settings are those of the run in {run}",)


def changed(config: RunConfig, options: argparse.Namespace) -> RunConfig:
    """Return a run's settings with the command line's overrides."""
    evaluation = {"num_beams": options.num_beams, "max_new_tokens": options.max_new_tokens}
    if options.num_beams == 1:
        evaluation["length_penalty"] = 1.0  # it applies to beam search only
    data = {"source_prefix": options.prefix, "separator": options.separator, "source_column": options.source_column}
    data = _given(data)
    if options.source_column is not None:
        data["template"] = None
    training = {"per_device_eval_batch_size": options.batch_size}
    given = {
        "evaluation": config.evaluation.model_copy(update=_given(evaluation)),
        "data": config.data.model_copy(update=data),
        "training": config.training.model_copy(update=_given(training)),
    }
    return config.model_copy(update=given)


def _given(values: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in values.items() if value is not None}


@contextmanager
def _opened(path: Path | None, columns: RecordColumns) -> Iterator[RowWriter]:
    """Open the file to write, in the format of its suffix, or yield JSON Lines on standard output."""
    if path is None:
        yield RowWriter(sys.stdout, ".jsonl", columns)
        return
    try:
        file = path.open("w", encoding="utf-8", newline="\n")
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error}.") from error
    with file:
        yield RowWriter(file, path.suffix, columns)


@contextmanager
def _writing() -> Iterator[None]:
    """Convert errors of writing predictions inside the context.

    Raises:
        UnreadOutputError: The pipe has no reader any more.
        DataError: The file cannot be written.
    """
    try:
        yield
    except BrokenPipeError as error:
        raise UnreadOutputError from error
    except OSError as error:
        raise DataError(f"The predictions could not be written: {error}.") from error


if __name__ == "__main__":
    sys.exit(main())
