"""The work of ``fullshard chat``: one process answers lines of a terminal or of a pipe."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from fullshard.core.comm import Comm, join_alone, shutdown
from fullshard.errors import DataError
from fullshard.program.config import RunConfig, recorded_run, run_of
from fullshard.program.data import uses_chat_template
from fullshard.program.launch.messages import say
from fullshard.program.launch.programs.predict import changed, settings_notes
from fullshard.program.launch.programs.row_file import RowWriter
from fullshard.program.models import base_of, is_causal, resolve_model
from fullshard.program.train.evaluation.chat import Talk
from fullshard.program.train.evaluation.predict import RowPrediction, plain_rows
from fullshard.program.train.evaluation.trained import find_trained, load_trained
from fullshard.program.train.setup.devices import Devices, usable, with_precision
from fullshard.program.train.setup.prepare import chat_notes, tokenize_spec

RESET, QUIT = "/reset", "/quit"


def chat(options: argparse.Namespace) -> None:
    """Load the model and answer until the input ends; one process, which is no rank.

    Raises:
        UserError: The model cannot be loaded, or the settings do not match it.
        UnreadOutputError: The answers have no reader any more.
    """
    directory = resolve_model(options.model)
    run = run_of(directory)
    trained = find_trained(options.model, recorded_run(directory), options.base)
    config = changed(trained.config.of_set(options.set), options)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    comm = join_alone(device)
    try:
        model, tokenizer, notes = load_trained(trained, comm)
        causal = is_causal(model)
        chats = uses_chat_template(tokenizer, tokenize_spec(config, tokenizer, causal=causal))
        plain = plain_rows(run, options.set, options.system, chats=chats)
        added = chat_notes(config, tokenizer) if causal and plain.system_turns is not None else ()
        temperature, system_turns = options.temperature, plain.system_turns
        talk = Talk(model, tokenizer, config, comm, temperature=temperature, system_turns=system_turns)
        about = about_model(options.model, model, config, comm)
        for note in (*settings_notes(directory), *notes, *added, *plain.notes, about):
            say(note)
        if sys.stdin.isatty() and sys.stdout.isatty() and not options.json:
            _converse(talk, config, shows_prompt=options.show_prompt)
        else:
            _answer_lines(talk, config, RowWriter(sys.stdout, ".jsonl" if options.json else ".txt"), options)
    finally:
        shutdown()


def about_model(name: str, model: Any, config: RunConfig, comm: Comm) -> str:
    """Return a line with the model that answers, what it computes in, and its device."""
    device = comm.device
    count = sum(parameter.numel() for parameter in model.parameters())
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    devices = Devices.of_ranks(comm)
    precision = usable(with_precision(config, devices), devices)[0].training.precision
    computed = "" if precision == "fp32" else f", computed in {precision}"
    place = "the CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
    return f"{name}: {type(base_of(model)).__name__}, {count:,} parameters in {dtype}{computed}, on {place}"


def _converse(talk: Talk, config: RunConfig, *, shows_prompt: bool) -> None:
    """Ask for lines in the terminal and write the answers as they come."""
    with contextlib.suppress(ImportError):  # Python can be built without it
        import readline  # noqa: F401, PLC0415 (gives input() the arrow keys and a history)
    kind = "the model reads the conversation so far" if talk.remembers else "each line is answered on its own"
    say(f"{kind}; {RESET} starts anew, {QUIT} or Ctrl-D ends, Ctrl-C stops an answer")
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:  # discards the line, as shells do
            print()
            continue
        if text == QUIT:
            return
        if text == RESET:
            talk.reset()
        elif text:
            with _stoppable() as stopped:
                try:
                    answer = talk.answer(text, lambda part: print(part, end="", flush=True), stopped)
                except DataError as error:
                    say(str(error))
                    continue
            print(" (stopped)" if stopped() else "")
            _explain(answer.prompt, config, cut=answer.cut, shows_prompt=shows_prompt)


def _explain(prompt: str, config: RunConfig, *, cut: bool, shows_prompt: bool) -> None:
    """Print what the model read, if requested or if it was cut."""
    if cut:
        limit = config.data.max_source_length
        say(f"what the model read was cut to {limit} tokens (data.max_source_length), the oldest turns first")
    if shows_prompt:
        say(f"the model read {prompt!r}")


@contextmanager
def _stoppable() -> Iterator[Callable[[], bool]]:
    """Make Ctrl-C stop an answer inside the context, which yields whether it was pressed; a second one interrupts."""
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        if stopped:
            signal.default_int_handler(number, frame)
        stopped = True

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield lambda: stopped
    finally:
        signal.signal(signal.SIGINT, before)


def _answer_lines(talk: Talk, config: RunConfig, out: RowWriter, options: argparse.Namespace) -> None:
    """Write one answer for each line of standard input, also for lines that cannot be used."""
    for raw in sys.stdin.buffer:
        line = raw.rstrip(b"\r\n").decode(config.data.encoding, errors="replace")
        if line.strip() == QUIT:
            return
        if line.strip() == RESET:
            talk.reset()
            continue
        problem = _problem(raw, line, config.data.encoding)
        if problem is None:
            answer = talk.answer(line)
            _explain(answer.prompt, config, cut=False, shows_prompt=options.show_prompt)
            record = RowPrediction(line, answer.text, cut=answer.cut)
        else:
            record = RowPrediction(line, None, problem=problem)
        out.write([record.as_dict()])


def _problem(raw: bytes, line: str, encoding: str) -> str | None:
    """Return why a line cannot be answered, or None."""
    try:
        raw.decode(encoding)
    except UnicodeError as error:
        return f"it is not {encoding.upper()}: {error}"
    return None if line.strip() else "it is empty"
