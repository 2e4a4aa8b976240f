"""A whole tuning: candidates, measurements, choice, and the record of it for later runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from fullshard.core.comm import Comm, free_memory, together
from fullshard.errors import ConfigError, MemoryLimitError, ModelError
from fullshard.program.speed import WAYS
from fullshard.program.train.auto import gpu_sheet
from fullshard.program.train.fit import Load
from fullshard.program.train.run.assemble import require_same_rows, require_same_settings
from fullshard.program.train.setup.prepare import Prepared
from fullshard.program.train.setup.tuned import Setting, card_of, key_of, place_of, with_others, write_tuned
from fullshard.program.tune.candidates import Memory, candidates
from fullshard.program.tune.halving import Halving, Outcome
from fullshard.program.tune.journal import Journal
from fullshard.program.tune.measure import Bench


@dataclass(frozen=True)
class Tuning:
    """What a tuning found; the same on every rank."""

    outcome: Outcome
    misfits: Mapping[str, str]  # names of ways that do not apply, and why
    chosen: Setting
    kept: Path  # where later runs find it


def tune(
    load: Load,
    data: Prepared,
    comm: Comm,
    minutes: float,
    journal: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Tuning:
    """Measure candidates and keep the result in the user's cache; every rank calls it.

    Args:
        load: Reads the run file with further overrides; its precision is chosen.
        data: The run's data.
        comm: The ranks of the run.
        minutes: About how long it may take. The first candidate is measured in any case.
        journal: File for the results so far, on each machine; None: in the user's cache.
        progress: Called with candidates done and in total.

    Raises:
        ConfigError: The run file leaves the strategy to ``sharding: auto``, or ranks share rows; on every rank.
        ModelError: A way that it names does not apply; on every rank.
        UserError: As for training; on every rank.
        MemoryLimitError: Nothing fits, on every rank; or this rank is out of memory, see :class:`Bench`.
    """
    started = time.monotonic()
    config = load(())
    if config.sharding.auto is True:
        raise ConfigError(
            "fullshard tune measures what sharding: auto predicts. Set sharding.strategy instead; `fullshard plan RUN "
            "--gpu NAME --fit` prints one."
        )
    if config.sharding.sequence_parallel > 1:
        raise ConfigError(
            f"fullshard tune measures ways for full rows, and sharding.sequence_parallel: "
            f"{config.sharding.sequence_parallel} lets ranks share rows. Tune without it, or train without tuning."
        )
    require_same_settings(comm, config)
    require_same_rows(comm, data)
    if comm.device.type == "cuda":
        torch.set_float32_matmul_precision("high" if config.training.tf32 else "highest")
    sheet = gpu_sheet(comm.device)
    key = key_of(config, data, comm.size, card_of(comm, None if sheet is None else sheet.name))
    kept = place_of(config, key)
    free = comm.all_gather_object(free_memory(comm.device))
    shares = [size // sum(pool in of_rank for of_rank in free) for one in free for pool, size in one.items()]
    # Of another attempt's journal nothing holds if the run file was changed meanwhile.
    journal = None if journal is None else journal.with_name(f"{journal.name}.{key}")
    notes = Journal(journal or kept.with_name(f"tuning-{key}.json"), comm)
    bench = Bench(load, data, comm, Memory(load, data, comm.size, sheet, min(shares, default=None)), notes)
    for name in config.ways:
        if name in bench.misfits:
            raise ModelError(f"speed.ways: {name} does not apply: {bench.misfits[name]}. Remove it from the run file.")
    fitting = [name for name in WAYS if name not in bench.misfits]

    def clock() -> float:
        return comm.all_gather_object(time.monotonic() - started)[0]

    outcome = Halving(bench, clock, 60 * minutes, progress, notes.has).run(candidates(config, fitting))
    if not outcome.measured:
        reasons = "; ".join(dict.fromkeys(outcome.left_out.values()))
        raise MemoryLimitError(f"Nothing could be measured: {reasons}. Use more ranks, or a smaller model or batch.")
    measured = [(found.setting, found.step_s) for found in outcome.measured.values()]
    together(comm, lambda: write_tuned(kept, with_others(measured, kept, config)) if comm.rank == 0 else None)
    notes.remove()
    return Tuning(outcome, bench.misfits, measured[0][0], kept)
