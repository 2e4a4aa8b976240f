"""Steps that were planned, measured on ranks: of a model with the library, and of run files with the program."""

import sys
import time
from itertools import cycle
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import fullshard
from fullshard.comm import GlooComm, MemoryMeter, RecordingComm
from fullshard.config import load_run
from fullshard.engine.registry import runtime_of
from fullshard.train.plan import largest_steps
from fullshard.train.run.assemble import assemble
from fullshard.train.run.step import StepSpec, issue_step
from fullshard.train.setup.prepare import prepare
from support.planned import OPTIONS, RUNS, build
from support.rank_script import parse, print_result

STEPS = 3


def measured(comm, build):
    """Peak of the steps above what was there before ``build(comm)``, and what the last one sent."""
    ledger = RecordingComm(comm)
    with MemoryMeter(comm.device) as meter:
        model, step, count = build(ledger)
        built = time.perf_counter()
        for _ in range(count):
            ledger.entries.clear()
            step()
    account, names = runtime_of(model).account, sorted(set(ledger.names))
    return {
        "peak_bytes": max(count for at, count in meter.timeline if at >= built) - meter.start_bytes,
        "collectives": {name: ledger.names.count(name) for name in names},
        "sent_bytes": {n: sum(e.sent_bytes for e in ledger.entries if e.collective == n) for n in names},
        "account": {**account.peak, "total": account.peak_total},
    }


def library(comm, options):
    def take(ranks):
        made = build(ranks, **options)
        return made.model, made.step, STEPS

    return measured(comm, take)


def program(comm, path):
    config = load_run(path, [])
    data = prepare(config)
    given = largest_steps(config, data, comm.size)

    def build(ranks):
        parts = assemble(config, ranks, data)
        parts.model.train()
        spec = StepSpec(1, 0.0, 1e-3, config.training.max_grad_norm, parts.collate.causal)
        turns = cycle(given)

        def step():
            issue_step(parts.model, parts.optimizer, next(turns), ranks, spec).report()

        return parts.model, step, STEPS - 1 + len(given)

    return measured(comm, build)


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
