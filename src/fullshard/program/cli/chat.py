"""``fullshard chat``: try a trained model in a terminal, or line by line in a pipe."""

from __future__ import annotations

import argparse

from fullshard.errors import ConfigError
from fullshard.program.cli.common import add_base, add_json, add_prompt, add_system, amount, load_program, require_model
from fullshard.program.launch import launched_elsewhere

PROGRAM = "fullshard.program.launch.programs.chat"

SUMMARY = "try a trained model in a terminal"

DESCRIPTION = """\
Try a trained model in a terminal: type a line, and the answer comes as it is written. Runs in one process, on a GPU if
there is one.

A causal model whose tokenizer has a chat template reads the conversation so far; so does an encoder-decoder that was
trained on conversations. A conversation begins with the system turn of the training rows. Any other model gets each
line on its own, as a row of `fullshard predict`. /reset starts anew, /quit or Ctrl-D ends, Ctrl-C stops an answer.

MODEL is the output_dir of a run, the best model of an unfinished one (RUN/best), or any other model: a directory, a
directory of a peft adapter, or a Hub id. Prefix, separator, lengths and beams are the run's.

In a pipe one line is written for each line read, with --json an object with input and prediction; /reset writes none.
"""

EPILOG = """\
examples:
  fullshard chat runs/mine
  fullshard chat runs/mine --temperature 0.7 --max-new-tokens 200
  fullshard chat runs/mine --json < questions.txt > answers.jsonl
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("model", metavar="MODEL", help="output_dir of a run, directory or Hub id of a model")
    add_prompt(parser, "answer")
    parser.add_argument(
        "--temperature",
        metavar="T",
        type=amount,
        default=0.0,
        help="draw tokens with this temperature (default: 0, the most likely ones, as predict)",
    )
    add_system(parser)
    parser.add_argument("--set", metavar="NAME", help="of a mixture: the set whose prefix the lines get")
    parser.add_argument("--show-prompt", action="store_true", help="print what the model read, with special tokens")
    add_base(parser)
    add_json(parser, help="print one JSON object per line; print errors as JSON")
    # Defaults for the settings of predict that this verb does not have.
    parser.set_defaults(batch_size=1, source_column=None)


def run(options: argparse.Namespace) -> None:
    """Chat with the model in this process."""
    if launched_elsewhere():
        raise ConfigError("fullshard chat runs in one process: start it without torchrun.")
    require_model(options.model)
    load_program(PROGRAM).chat(options)
