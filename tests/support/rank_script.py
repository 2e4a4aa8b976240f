"""The command line, the checks and the results of scripts that run named cases on each rank.

``run_processes`` or torchrun starts such a script once a rank. Called without them it starts its ranks itself:

    python tests/dist/engine/rank_main.py --help            # lists the cases
    python tests/dist/engine/rank_main.py --only memory     # runs one and prints its result
"""

import argparse
import json
import os
import sys
import tempfile
import textwrap
import traceback
from pathlib import Path

import torch.distributed as dist

from support.processes import run_processes


def parse(cases, description, ranks=2, gpus=""):
    """The options of this rank: ``only``, the names of the cases to run, and ``directory``, where they write.

    Without torchrun's environment it starts ``ranks`` ranks of the script, which see ``gpus``, prints their result and
    ends the program.
    """
    names = textwrap.fill(", ".join(cases), 100, initial_indent="  ", subsequent_indent="  ")
    parser = argparse.ArgumentParser(
        description=description, epilog=f"cases:\n{names}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="NAME[,NAME...]", help="run these cases (default: all)")
    parser.add_argument("--directory", type=Path, help="where cases read and write (default: a new directory)")
    options = parser.parse_args()
    options.only = options.only.split(",") if options.only else list(cases)
    unknown = [name for name in options.only if name not in cases]
    if unknown:
        parser.error(f"unknown case {', '.join(unknown)}; cases are {', '.join(cases)}")
    if "RANK" not in os.environ:
        with tempfile.TemporaryDirectory() as scratch:
            directory = str(options.directory or scratch)
            show(
                run_processes(ranks, sys.argv[0], "--only", ",".join(options.only), "--directory", directory, gpus=gpus)
            )
        sys.exit()
    return options


def show(result):
    """Print a result for people: texts as they are, other values as JSON."""
    for key, value in result.items() if isinstance(result, dict) else enumerate(result):
        print(f"{key}:", value if isinstance(value, str) else json.dumps(value, indent=1))


def run_checks(cases, names, *arguments):
    """Call the named cases on every rank; from name to the tracebacks of the ranks where it failed, empty if none."""
    outcomes = {}
    for name in names:
        texts = [None] * dist.get_world_size()
        dist.all_gather_object(texts, traceback_of(cases[name], *arguments))
        outcomes[name] = "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
    return outcomes


def traceback_of(case, *arguments):
    """The traceback of a case that fails on this rank, else an empty text."""
    try:
        case(*arguments)
    except BaseException:
        text = traceback.format_exc()
        print(text, file=sys.stderr, flush=True)
        return text
    return ""


def found(case, *arguments, **options):
    """What a case returns, or its traceback, so that the others still run; ``processes.Cases`` reads it.

    One that fails on some ranks only leaves the others waiting, and is ended by the launcher.
    """
    try:
        return case(*arguments, **options)
    except Exception:
        text = traceback.format_exc()
        print(text, file=sys.stderr, flush=True)
        return {"failed": text}


def print_result(result, rank=None):
    """Print ``result`` on rank 0, where ``run_processes`` finds it."""
    if int(os.environ["RANK"] if rank is None else rank) == 0:
        print("RESULT " + json.dumps(result), flush=True)
