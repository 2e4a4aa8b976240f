"""Steps that were planned, measured on ranks: of a model with the library, and of run files with the program."""

import gc
import os
import sys
import time
from itertools import cycle
from math import prod
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import fullshard
from fullshard.core.comm import GlooComm, MemoryMeter, RecordingComm
from fullshard.core.comm.mesh import _split
from fullshard.core.engine import saved_tensors
from fullshard.core.engine.registry import runtime_of
from fullshard.program.config import load_run
from fullshard.program.train.evaluation.evaluate import evaluate
from fullshard.program.train.run.assemble import assemble
from fullshard.program.train.run.step import StepSpec, issue_step
from fullshard.program.train.run_plan import largest_steps
from fullshard.program.train.setup.prepare import prepare
from fullshard.state.saving import Checkpoints, load_checkpoint, save
from fullshard.state.storage import dtype_of, find_checkpoints, read_index
from fullshard.state.storage.shard_file import BLOCK_BYTES
from fullshard.variables import RESTARTS_VARIABLE, SCRATCH_VARIABLE
from support.planned import OPTIONS, RUNS, build
from support.rank_script import parse, print_result

STEPS = 3


class SplitLedger(RecordingComm):
    """Also records what is sent within groups of its ranks."""

    def split(self, groups):
        group = RecordingComm(_split(self.inner, groups))
        group.entries = self.entries
        return group


def measured(comm, build, after=lambda meter: {}):
    """Peak of the steps above what was there before ``build(comm)``, what the last one sent, and ``after(meter)``."""
    ledger = SplitLedger(comm)
    with MemoryMeter(comm.device) as meter:
        begun = time.perf_counter()
        model, step, count = build(ledger)
        built = time.perf_counter()
        for _ in range(count):
            ledger.entries.clear()
            step()
        stepped, entries = time.perf_counter(), list(ledger.entries)
        account = {**runtime_of(model).tracker.peak, "total": runtime_of(model).tracker.peak_total}
        around = after(meter)
    sent = {name: [e.sent_bytes for e in entries if e.collective == name] for name in sorted(set(ledger.names))}
    return {
        "built_bytes": above(meter, begun, built),
        "peak_bytes": above(meter, built, stepped),
        "around": {phase: measure() for phase, measure in around.items()},
        "collectives": {name: len(each) for name, each in sent.items() if each},
        "sent_bytes": {name: sum(each) for name, each in sent.items() if each},
        "account": account,
    }


def above(meter, begin, end):
    """The most bytes between two moments, above those at the start."""
    return max(count for at, count in meter.timeline if begin <= at < end) - meter.start_bytes


def held(meter, moment):
    """The bytes at a moment."""
    return [count for at, count in meter.timeline if at < moment][-1]


def around(meter, parts, config, directory):
    """What a run does beside its steps: functions that say what it held, once the meter has stopped."""
    ranks, marks = parts.comm, [time.perf_counter()]
    for at_once in (False, True):
        if parts.evaluation is not None:
            evaluate(parts.model, parts.tokenizer, parts.evaluation, ranks, step=1, epoch=1.0, at_once=at_once)
        marks.append(time.perf_counter())
    os.environ |= {SCRATCH_VARIABLE: str(directory), RESTARTS_VARIABLE: "3"}
    with Checkpoints(directory / "checkpoints", ranks=ranks, in_memory=1) as checkpoints:
        path = checkpoints.save(parts.model, parts.optimizer, step=1, base=parts.base)
        save(parts.model, directory / "model")
        marks.append(time.perf_counter())
        checkpoints.save(parts.model, parts.optimizer, step=2, base=parts.base, background=True)
        checkpoints.wait()
        marks.append(time.perf_counter())
        checkpoints.in_memory.note_made(parts.model)
        checkpoints.in_memory.leave_out_made(parts.model)
        for step in (3, 4):
            checkpoints.snapshot(parts.model, parts.optimizer, step=step)
            checkpoints.in_memory.wait()
        kept = [read_index(path) for path in find_checkpoints(*directory.glob(f"*/rank-{ranks.rank:05d}"))]
        runs = [(entry, piece) for index in kept for entry in index.tensors.values() for piece in entry.pieces]
        snapshots = sum((piece.stop - piece.start) * dtype_of(entry).itemsize for entry, piece in runs)
    gc.collect()  # what is freed after this mark would be missing from what a resumed run holds
    marks.append(time.perf_counter())
    again = assemble(config, ranks)
    again.model.train()
    gc.collect()
    marks.append(time.perf_counter())
    load_checkpoint(again.model, again.optimizer, path)
    marks.append(time.perf_counter())
    largest = max(prod(one.shape) * one.dtype.itemsize for one in saved_tensors(again.model))
    found = {
        "saving": lambda: above(meter, *marks[2:4]),
        "checkpoint_copies": lambda: held(meter, marks[4]) - held(meter, marks[3]),
        "snapshots": lambda: snapshots,
        "resuming": lambda: above(meter, *marks[6:8]) - held(meter, marks[5]) + meter.start_bytes,
        "block": lambda: min(BLOCK_BYTES, largest),
    }
    if parts.evaluation is None:
        return found
    return found | {"evaluation": lambda: above(meter, *marks[:2]), "at_once": lambda: above(meter, *marks[1:3])}


def library(comm, options):
    def take(ranks):
        made = build(ranks, **options)
        return made.model, made.step, STEPS

    return measured(comm, take)


def program(comm, path):
    config = load_run(path, [])
    data = prepare(config)
    given = largest_steps(config, data, comm.size)

    made = []

    def build(ranks):
        parts = assemble(config, ranks, data)
        made.append(parts)
        parts.model.train()
        unsharded = config.training.accumulate == "unsharded"
        spec = StepSpec(1, 0.0, 1e-3, config.training.max_grad_norm, parts.collate.causal, unsharded=unsharded)
        turns = cycle(given)

        def step():
            issue_step(parts.model, parts.optimizer, next(turns), ranks, spec).report()

        return parts.model, step, STEPS - 1 + len(given)

    kept = path.parent / "kept"
    return measured(comm, build, lambda meter: around(meter, made[0], config, kept))


def main():
    options = parse([*OPTIONS, *RUNS], __doc__)
    torch.set_num_threads(1)
    comm = fullshard.init()
    results = {name: library(comm, OPTIONS[name]) for name in options.only if name in OPTIONS}
    results["sockets"] = library(GlooComm(comm.group, direct=False), {})
    for name in options.only:
        if name in RUNS:
            results[name] = program(comm, options.directory / name / "run.yaml")
    print_result(comm.all_gather_object(results))
    fullshard.shutdown()


if __name__ == "__main__":
    main()
