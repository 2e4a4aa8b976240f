"""``fullshard plan``: what each rank of a run will hold and send, before there is a GPU for it."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

from fullshard.cli.common import add_run_arguments, add_verb, load_program, positive
from fullshard.config import load_run
from fullshard.launch import choose_nproc
from fullshard.launch.messages import say
from fullshard.sizes import format_bytes

PROGRAM = "fullshard.train.plan"

DOES_NOT_FIT = 1
"""Exit code if the run needs more than --memory."""

DESCRIPTION = """\
Show how many bytes of tensors the fullest rank of a run holds at its fullest moment, what they are, and how many bytes
it sends in a step. The run's own model, schedule and optimizer take three steps on tensors without memory: this needs
no GPU, no ranks, no weights and no network. The batch is the longest that the data can give.

With --memory, also say whether it fits; the exit code is 1 if it does not. Not counted are evaluation, saving, and what
a process holds besides tensors (on a GPU the CUDA context, NCCL's buffers and the allocator's slack): pass the memory
that is left for tensors.
"""

EPILOG = """\
examples:
  fullshard plan examples/banking77_tiny.yaml --world 2
  fullshard plan run.yaml --world 8 --memory 78GB training.per_device_train_batch_size=16
  fullshard plan run.yaml --world 8 --json
"""

_UNITS = {"": 1, "B": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}B": size for unit, size in _UNITS.items() if len(unit) == 1 and unit != "B"}
_UNITS |= {f"{unit}IB": 1 << (10 * power) for power, unit in enumerate("KMGT", 1)}


def add_parser(verbs: Any) -> None:
    """Add the verb's parser to those of ``fullshard``."""
    parser = add_verb(
        verbs, "plan", run, "show the memory and the traffic of a run, before it starts", DESCRIPTION, EPILOG
    )
    add_run_arguments(parser)
    parser.add_argument(
        "--world", metavar="N", type=positive, help="ranks to plan for (default: as many as train would start)"
    )
    parser.add_argument(
        "--memory", metavar="SIZE", type=memory, help="memory of each rank for tensors, such as 80GB or 24GiB"
    )


def memory(text: str) -> int:
    """Parse a size: a number, and B, kB, MB, GB, TB (powers of 1,000) or KiB, MiB, GiB, TiB (of 1,024).

    Raises:
        argparse.ArgumentTypeError: The text is not one.
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([a-zA-Z]*)", text.strip())
    size = _UNITS.get(found[2].upper()) if found else None
    if found is None or size is None or float(found[1]) * size < 1:
        raise argparse.ArgumentTypeError(f"must be a size above zero, such as 80GB or 24GiB; got {text!r}")
    return int(float(found[1]) * size)


def run(options: argparse.Namespace) -> int:
    """Print the plan; one process.

    Returns:
        0, or 1 if the run does not fit into ``--memory``.

    Raises:
        UserError: The settings are wrong, cannot be planned, or data or model cannot be used.
    """
    config = load_run(options.config, options.overrides)
    world_size = options.world or choose_nproc(config.nproc)
    say(f"planning {world_size} rank{'s' if world_size > 1 else ''}: three steps without memory")
    plan = load_program(PROGRAM).plan_run(config, world_size)
    fits = options.memory is None or plan.fits(options.memory)
    if options.json:
        verdict = {} if options.memory is None else {"memory_bytes": options.memory, "fits": fits}
        print(json.dumps({**plan.as_dict(), **verdict}))
    else:
        print(plan)
        if options.memory is not None:
            print(f"\n{_verdict(plan, options.memory)}")
    return 0 if fits else DOES_NOT_FIT


def _verdict(plan: Any, memory_bytes: int) -> str:
    """Return whether a plan fits, and by how much."""
    need = f"{format_bytes(plan.highest_bytes)} and 1 % more of {format_bytes(memory_bytes)}"
    apart = format_bytes(abs(memory_bytes - plan.needed_bytes))
    if plan.fits(memory_bytes):
        return f"fits: it needs {need}; {apart} are left"
    return (
        f"does not fit: it needs {need}; {apart} are missing. Plan more ranks (--world), or override "
        "training.gradient_checkpointing=true, training.per_device_train_batch_size, training.optimizer or "
        "training.precision."
    )
