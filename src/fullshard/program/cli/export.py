"""``fullshard export``: writes a checkpoint's model as a Hugging Face directory, or its LoRA adapter for peft."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import ModuleType
from typing import Any

from fullshard.program.cli.common import ByteProgress, add_base, add_json, load_program, path_or_url
from fullshard.program.launch.messages import say
from fullshard.sizes import format_bytes

PROGRAM = "fullshard.state.saving.export"
MERGE = "fullshard.program.launch.programs.merge"

SUMMARY = "write a checkpoint's model for from_pretrained"

DESCRIPTION = """\
Write a checkpoint's model to a directory that from_pretrained loads.

PATH is the output_dir of a run, a directory of checkpoints, one checkpoint (step-…), or a URL of one of the last two.
Of a finished run that was evaluated it is the best step's model, the one in its output_dir; otherwise the latest
checkpoint's. Needs no GPU and no ranks: the weights are streamed through about 64 MB of memory, and each block is
compared with its checksum. Of weights that have a moving average in the checkpoint (training.ema_decay), the average is
written, as the run publishes it. DIR must be new or empty; it appears only once it is complete.
"""

EPILOG = """\
A run's best/ directory, and its output_dir once it has finished, already contain the best model in this form.
--merge also takes an adapter without checkpoints: a finished run, best/, or what peft saved. Its base is loaded then.

examples:
  fullshard export runs/mine -o exported
  fullshard export runs/mine --checkpoint 1200 --dtype bf16 --max-shard-size 5GB -o exported
  fullshard export runs/lora --adapter -o adapter      # for PeftModel.from_pretrained(base, "adapter")
  fullshard export runs/lora --merge -o merged         # the base model with the adapter merged into it
  fullshard export runs/qlora --merge --base /new/t5 -o merged   # a quantised base that was moved
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "path", metavar="PATH", type=path_or_url, help="a run, its checkpoints, or one of them; or a URL"
    )
    parser.add_argument("-o", "--output", metavar="DIR", type=Path, required=True, help="directory to write")
    parser.add_argument(
        "--checkpoint",
        metavar="WHICH",
        help="among complete checkpoints: latest, best (by its metric) or a step (default: of a finished run that was "
        "evaluated the best, which is its own model; else latest)",
    )
    parser.add_argument(
        "--dtype",
        choices=("bf16", "fp16", "fp32"),
        help="dtype of floating-point weights (default: unchanged; "
        "merged into a quantised base, which is read from its own files: bf16)",
    )
    parser.add_argument(
        "--max-shard-size", metavar="SIZE", default="50GB", help="maximum size of a file, such as 5GB (default: 50GB)"
    )
    lora = parser.add_mutually_exclusive_group()
    lora.add_argument(
        "--merge",
        dest="lora",
        action="store_const",
        const="merge",
        help="LoRA: the base model with the adapter merged into it",
    )
    lora.add_argument(
        "--adapter",
        dest="lora",
        action="store_const",
        const="adapter",
        help="LoRA: the adapter alone, in peft's format",
    )
    add_base(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> None:
    """Export; one process."""
    program = load_program(PROGRAM)
    how = program.ExportOptions(options.dtype, options.max_shard_size, options.lora, options.base)
    if options.lora == "merge" and options.checkpoint is None and _is_adapter_alone(options.path):
        _merge(options, program, how)
        return
    checkpoint = program.choose_checkpoint(options.path, options.checkpoint)
    with ByteProgress("exporting") as progress:
        report = program.export(checkpoint, options.output, how, progress)
    assumed = program.assumed_of(checkpoint) if options.checkpoint == "best" else []
    for note in [*report.notes, *assumed]:
        say(note)
    if options.json:
        print(json.dumps({**report.as_dict(), "choice": program.describe_choice(checkpoint)}))
    else:
        size = f"{report.tensors:,} tensors, {format_bytes(report.nbytes)}"
        print(f"{report.directory} written: {size}, of {program.describe_choice(checkpoint)}, from {report.checkpoint}")


def _is_adapter_alone(path: Any) -> bool:
    """Return whether a directory has an adapter, and no checkpoint that has its base too."""
    place = Path(path)
    return (place / "adapter_config.json").is_file() and not any((place / "checkpoints").glob("step-*"))


def _merge(options: argparse.Namespace, program: ModuleType, how: Any) -> None:
    """Merge the adapter that lies in a directory into its base."""
    near = options.output.absolute().parent
    near.mkdir(parents=True, exist_ok=True)
    adapter = load_program(MERGE)
    with (
        adapter.checkpoint_of_adapter(Path(options.path), options.base, near) as checkpoint,
        ByteProgress("exporting") as progress,
    ):
        report = program.export(checkpoint, options.output, how, progress)
    for note in report.notes:
        say(note)
    if options.json:
        print(
            json.dumps(
                {**report.as_dict(), "checkpoint": None, "step": None, "choice": f"the adapter in {options.path}"}
            )
        )
    else:
        size = f"{report.tensors:,} tensors, {format_bytes(report.nbytes)}"
        print(f"{report.directory} written: {size}, of the adapter in {options.path}, merged into its base")
