"""Refuses a run that has too little memory, by the first numbers of its plan and then by all of it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fullshard.core.comm import Comm, free_memory, lacking
from fullshard.errors import MemoryLimitError, UserError
from fullshard.planner import TooMuchWorkError, work_limit
from fullshard.planner.plan import LABELS, PHASE_LABELS
from fullshard.program.config import RunConfig, option_of
from fullshard.program.train.auto import gpu_sheet, recorded_on_rank_0
from fullshard.program.train.first_numbers import FirstNumbers, first_numbers
from fullshard.program.train.run.record import Planned
from fullshard.program.train.run_plan import (
    ACCUMULATE,
    AUTO_SHARE,
    RunPlan,
    needed_bytes,
    plan_prepared,
    planned_by_masks,
)
from fullshard.program.train.search import (
    Chooser,
    Load,
    Need,
    RankPlan,
    find_remedies,
    limit_of,
    settings_that_need_less,
)
from fullshard.program.train.setup.devices import Choice
from fullshard.program.train.setup.prepare import Prepared
from fullshard.program.train.setup.quantization import require_kernels
from fullshard.program.train.setup.resume import checkpoints_directory
from fullshard.program.train.setup.steps import learning_rate_schedule, make_plan
from fullshard.sizes import format_bytes
from fullshard.state.saving.scratch import ScratchDirectory


def require_first_numbers(load: Load, data: Prepared, comm: Comm, free: Mapping[str, int]) -> None:
    """Refuse a run whose ranks have too little memory by the first numbers of their plans; every rank calls it.

    ``free`` are the bytes of each pool that this rank may take, see :func:`~fullshard.core.comm.free_memory`.

    Raises:
        MemoryLimitError: It cannot fit; on every rank, with the same text.
    """
    mine = _first_numbers(load, data, comm)
    everyone = comm.all_gather_object((None if mine is None else mine.least, free))
    needs = [0 if least is None else sum(least.values()) for least, _ in everyone]
    short = lacking([(needed, pools) for needed, (_, pools) in zip(needs, everyone, strict=True)])
    if short is None:
        return
    fullest = max(range(comm.size), key=needs.__getitem__)
    text = _first_refusal(short, fullest, everyone[fullest][0], load, data, comm) if comm.rank == 0 else None
    raise MemoryLimitError(comm.all_gather_object(text)[0])


def _first_numbers(load: Load, data: Prepared, comm: Comm, overrides: Sequence[str] = ()) -> FirstNumbers | None:
    """Return this rank's first numbers; None if its model cannot be laid out without weights."""
    try:
        gpu = comm.device.type != "cpu"
        return first_numbers(load(overrides), data.tokenizer, comm.size, comm.rank, gpu=gpu)
    except Exception:
        return None


def _first_refusal(
    short: tuple[str, int, int], fullest: int, least: Mapping[str, int], load: Load, data: Prepared, comm: Comm
) -> str:
    pool, needed, there = short
    kinds = sorted(least.items(), key=lambda part: -part[1])
    lines = [f"  {LABELS[name]:<28}{format_bytes(size):>12}" for name, size in kinds if size]
    before, remedies = _first_numbers(load, data, comm), []
    for overrides in _settings_of_kept(load(())):
        other = _first_numbers(load, data, comm, overrides)
        if other is not None and before is not None and other.nbytes < before.nbytes:
            remedies.append(f"  {' '.join(overrides)}: {format_bytes(before.nbytes - other.nbytes)} less")
    return "\n".join([
        f"The run cannot fit, so it was not started: its ranks need at least {format_bytes(needed)} for tensors, even "
        f"without activations, and their {pool.partition(':')[0]} has {format_bytes(there)} left.",
        f"Rank {fullest} of {comm.size} needs at least {format_bytes(sum(least.values()))}. At one moment of a step it "
        "holds:",
        *lines,
        *(["Settings that need less, to type after the run file:", *remedies] if remedies else []),
        "Use a smaller model, an adapter (model.adapter), or more memory: ranks on further GPUs or machines.",
        "--no-plan starts it anyway.",
    ])  # fmt: skip


def _settings_of_kept(config: RunConfig) -> list[tuple[str, ...]]:
    """Return those settings that need less whatever the batch is, alone and all together."""
    kept = ("sharding.strategy", ACCUMULATE, "training.optimizer")
    every = dict.fromkeys(one for some in settings_that_need_less(config) for one in some)
    alone = [(one,) for one in every if one.partition("=")[0] in kept]
    return list(dict.fromkeys((*alone, tuple(one for (one,) in alone)))) if alone else []


LEAST_OPERATORS = 500_000
"""Operators that a plan may take for any run: some twenty seconds of processor time. Llamas of 6.5 and 65 billion
parameters take 73,000 and 250,000."""

OPERATORS_A_BATCH = 500
"""Operators that a plan may take for each micro-batch of the run: at most a fourth of the run's own."""


@dataclass(frozen=True)
class _Checked:
    """The result of a plan for the run and later attempts of it, as JSON holds it."""

    values: dict[str, Any]  # see :class:`Planned`
    table: str
    rank: int  # the rank that needs most
    before: int  # bytes that it needs
    limit: int  # bytes that it may take
    chosen: Sequence[Choice] = ()  # what the plans decide

    def planned(self, load: Load, data: Prepared, comm: Comm) -> Planned:
        # If memory ran out once although the plan fits, a later plan that fits means little.
        need = _need(self, _with(load, self.chosen), data, comm)
        return Planned(self.values, self.table, lambda: _remedy_lines(need, verdicts=False), tuple(self.chosen))


def _with(load: Load, chosen: Sequence[Choice]) -> Load:
    return lambda more: load([*(one.override for one in chosen), *more])


def check_memory(
    load: Load,
    data: Prepared,
    comm: Comm,
    tell: Callable[[str], None],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Planned | None:
    """Plan the run, each rank itself, and refuse it if ranks need more than there is; every rank calls it.

    What cannot fit by the first numbers of a plan is refused before anything is simulated. Only the peaks of tensors
    are compared with the free memory, including a machine's swap and caches; what the processes already hold is not
    free. A plan that takes too many operators for the run's length is abandoned. An attempt after the loss of a rank
    takes the previous one's result.

    ``training.gradient_checkpointing: auto`` and ``training.accumulate: auto`` are decided here for all ranks, by the
    plans of all of them; a run that continues keeps the choices of its start while they fit.

    ``tell`` receives a line for the user; ``progress`` is called with the steps planned and those to plan. Returns None
    if there is no plan.

    Raises:
        MemoryLimitError: It does not fit; on every rank, with the same text.
    """
    config = load(())
    scratch = ScratchDirectory.of(checkpoints_directory(config))
    file = None if scratch is None else scratch.directory / f"plan-{comm.rank}-{_key(config, comm.size)}.json"
    if scratch is not None and scratch.attempt:
        found = _read(file)
        if all(comm.all_gather_object(found is not None)):
            if not found:
                return None
            checked = _Checked(**{**found, "chosen": [Choice(**one) for one in found["chosen"]]})
            return checked.planned(load, data, comm)
    checked = _check(load, data, comm, tell, progress)
    if file is not None:
        _write(file, checked)
    return None if checked is None else checked.planned(load, data, comm)


def _key(config: RunConfig, world_size: int) -> str:
    """Return a digest of everything that a plan depends on."""
    settings = {key: str(value) for key, value in config.as_flat().items() if option_of(key).planned}
    return hashlib.sha256(json.dumps([settings, world_size], sort_keys=True).encode()).hexdigest()[:16]


def _read(file: Path | None) -> dict[str, Any] | None:
    """Return what an earlier attempt of this rank found, empty if there was no plan; None if it is not there."""
    try:
        return None if file is None else json.loads(file.read_text())
    except FileNotFoundError:
        return None


def _write(file: Path, checked: _Checked | None) -> None:
    with contextlib.suppress(OSError):  # without it a later attempt plans again
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = file.with_suffix(".tmp")
        temporary.write_text(json.dumps({} if checked is None else asdict(checked)))
        temporary.replace(file)


def _check(
    load: Load, data: Prepared, comm: Comm, tell: Callable[[str], None], progress: Callable[[int, int], None]
) -> _Checked | None:
    """Plan the run and refuse it if it does not fit; see :func:`check_memory`."""
    with contextlib.suppress(UserError):  # which the plan tells
        require_kernels(load(()))  # half a second of imports, which the run itself needs
    free = free_memory(comm.device)
    comm.barrier()  # all have looked before one plans, which takes some memory
    require_first_numbers(load, data, comm, free)
    kind = comm.device.type
    chooser = _chooser(load, data, comm, free, progress)
    chosen = chooser.choose()
    everyone = chooser.of(chosen)
    short = chooser.shortage(everyone)
    without = next((rank.plan for rank in everyone if isinstance(rank.plan, str)), None)
    if without is not None:
        tell(f"starting without a plan: {without}")
        return None
    for one in chosen:
        if one.value != "false":  # nothing is recomputed: what one expects
            tell(str(one))
    load = _with(load, chosen)
    if short is None:
        everyone = chooser.gathering_once(everyone)
    fullest = max(range(comm.size), key=lambda rank: chooser.needs_of(everyone[rank]))
    checked = _Checked(
        _values(everyone, fullest),
        str(everyone[comm.rank].plan),
        fullest,
        chooser.needs_of(everyone[fullest]),
        limit_of(everyone, fullest),
        chosen,
    )
    compiled, by_masks = "compile" in load(()).ways, planned_by_masks(load(()), gpu=kind == "cuda")
    if short is not None and not compiled and by_masks is None:  # an upper bound does not show that a run cannot fit
        need = _need(checked, load, data, comm)
        text = _refusal(short, everyone[fullest].plan, need) if comm.rank == 0 else None  # type: ignore[arg-type]
        raise MemoryLimitError(comm.all_gather_object(text)[0])
    least = min((size for rank in everyone for size in rank.free.values()), default=None)
    left = "" if least is None else f"; {format_bytes(least)} are free"
    later = sorted({phase for rank in everyone if isinstance(rank.plan, RunPlan) for phase in rank.plan.unplanned})
    left += f"; too much work to plan: {', '.join(later)}" if later else ""
    keeps = chooser.snapshots
    also = f" and {format_bytes(max(rank.snapshots() for rank in everyone))} for snapshots" if keeps else ""
    plainly = "attention is planned with masks and scores" if by_masks else "blocks are planned uncompiled"
    bound = f", an upper bound because {plainly}" if compiled or by_masks else ""
    tell(f"planned: a rank needs at most {format_bytes(checked.before)} for tensors{also}{left}{bound}")
    if short is not None:
        pool, needed, there = short
        tell(
            f"by that bound ranks need {format_bytes(needed)}, and their {pool.partition(':')[0]} has "
            f"{format_bytes(there)}: unless {by_masks or 'compiled blocks'} need less, memory runs out"
        )
    if keeps:
        _tell_of_snapshots(chooser, everyone, tell)
    return checked


def _keeps_snapshots(config: RunConfig) -> bool:
    """Return whether this attempt takes snapshots for a later one."""
    scratch = ScratchDirectory.of(checkpoints_directory(config))
    return scratch is not None and not scratch.last


def _tell_of_snapshots(chooser: Chooser, everyone: Sequence[RankPlan], tell: Callable[[str], None]) -> None:
    """Report if the run fits, but not together with its snapshots; it is not refused for that."""
    short = chooser.shortage(everyone, snapshots=True)
    if short is not None:
        pool, needed, there = short
        most = max(rank.snapshots() for rank in everyone)
        tell(
            f"with snapshots for restarts, {format_bytes(most)} for a rank, {format_bytes(needed)} are needed and the "
            f"{pool.partition(':')[0]} has {format_bytes(there)}: memory may run out. --max-restarts 0 takes none"
        )


def _chooser(
    load: Load, data: Prepared, comm: Comm, free: dict[str, int], progress: Callable[[int, int], None]
) -> Chooser:
    """Return what chooses by the plans of all ranks, each of which plans itself."""
    config, kind = load(()), comm.device.type
    training = config.training
    lists = training.packing or training.per_device_train_batch_tokens is not None or config.data.weights

    def planned(chosen: Sequence[Choice], *, listed: bool = False) -> list[RankPlan]:
        return comm.all_gather_object(RankPlan(_tried(_with(load, chosen), data, comm, progress, listed=listed), free))

    def make(chosen: Sequence[Choice]) -> list[RankPlan]:
        everyone = planned(chosen)
        if chooser.shortage(everyone) is None or lists:
            return everyone
        # Those batches are at least as large as the run's. Only batches that come count against it.
        come = planned(chosen, listed=True)
        if [rank.unplanned for rank in come] != [rank.unplanned for rank in everyone]:
            return everyone
        return [min(pair, key=chooser.needs_of) for pair in zip(everyone, come, strict=True)]

    def before(setting: str) -> Any:
        old = "sharded" if setting == ACCUMULATE else None  # runs of earlier versions reduced every micro-batch
        found = recorded_on_rank_0(config, comm, setting, old)
        return None if found == "auto" else found

    chooser = Chooser(
        config,
        comm.size,
        make,
        needs=lambda plan: needed_bytes(plan, kind),
        share=1.0 if kind == "cpu" else AUTO_SHARE,
        before=before,
        snapshots=kind == "cpu" and _keeps_snapshots(config),
    )
    return chooser


def _tried(
    load: Load, data: Prepared, comm: Comm, progress: Callable[[int, int], None], *, listed: bool = False
) -> RunPlan | str:
    """Return the plan of this rank, or why there is none."""
    most = LEAST_OPERATORS
    try:
        config, device = load(()), gpu_sheet(comm.device)
        epoch = make_plan(config, data.train_set, comm.size, causal=data.causal)
        total = learning_rate_schedule(config, epoch.num_steps).total_steps
        most = max(most, OPERATORS_A_BATCH * total * config.training.gradient_accumulation_steps)
        how = {"roughly": comm.rank, "listed": listed, "progress": progress}
        with work_limit(most):
            # What was chosen is in the settings by now, and recorded with the run's start.
            return replace(plan_prepared(config, data, comm.size, device, **how), chosen=())
    except TooMuchWorkError:
        return f"it needs more than {most:,} operators, much for a run of this length; `fullshard plan` has no limit"
    except UserError as error:
        return str(error)
    except Exception as error:  # a failing plan must not prevent a run that may work
        return f"{type(error).__name__} in the plan: {(str(error).splitlines() or [''])[0]}"
    finally:
        # Returns the memory of planning to the system: a plan of t5-small left 220 MiB in the C library's heap.
        gc.collect()
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)


def _need(checked: _Checked, load: Load, data: Prepared, comm: Comm) -> Need:
    return Need(
        load=load,
        data=data,
        world_size=comm.size,
        rank=checked.rank,
        bytes_of=lambda plan: needed_bytes(plan, comm.device.type),
        before=checked.before,
        limit=checked.limit,
        device=gpu_sheet(comm.device),
    )


def _refusal(short: tuple[str, int, int], plan: RunPlan, need: Need) -> str:
    pool, needed, there = short
    parts = sorted(plan.parts.items(), key=lambda part: -part[1])
    lines = [f"  {LABELS[name]:<28}{format_bytes(size):>12}" for name, size in parts if size]
    fullest = max(plan.phase_peaks, key=lambda phase: plan.bytes_in(phase, snapshots=False))
    lines += [f"Its fullest phase: {PHASE_LABELS[fullest]}, {format_bytes(plan.phase_peaks[fullest])}."]
    copies = plan.host.get("checkpoint_copies", 0)
    lines += [f"In addition, copies of a checkpoint being saved take: {format_bytes(copies)}."] if copies else []
    return "\n".join([
        f"The run cannot fit, so it was not started: its ranks need {format_bytes(needed)} for tensors, and their "
        f"{pool.partition(':')[0]} has {format_bytes(there)} left.",
        f"Rank {plan.rank} of {plan.world_size} needs {format_bytes(need.before)}. At the peak of a step, "
        f"{format_bytes(plan.peak_bytes)}, it holds:",
        *lines,
        _remedy_lines(need, verdicts=True) or "No setting that was tried needs less: use more ranks.",
        "--no-plan starts it anyway.",
    ])  # fmt: skip


def _remedy_lines(need: Need, *, verdicts: bool) -> str:
    fits = {True: ", then it fits", False: ", not enough alone"} if verdicts else {True: "", False: ""}
    lines = [f"{remedy}{fits[remedy.fits]}" for remedy in find_remedies(need)]
    return "\n".join(["Settings that need less, to type after the run file:", *lines]) if lines else ""


def _values(everyone: Sequence[RankPlan], fullest: int) -> dict[str, Any]:
    """Return the fullest rank's plan, and each rank's memory for the run's summary."""
    plans = [rank.plan for rank in everyone if not isinstance(rank.plan, str)]
    ranks = [
        {
            "rank": plan.rank,
            "parameters": plan.parts["shards"],
            "optimizer": plan.parts["optimizer_state"],
            "gathered_peak": plan.account["gathered"],
            "gradient_buffer_peak": plan.account["gradients"],
            "peak": plan.peak_bytes,
            # Tensors measured on the CPU include the copies of a save; those of snapshots are left out.
            "copies": plan.host.get("checkpoint_copies", 0) if plan.device is None else 0,
        }
        for plan in plans
    ]
    return {**plans[fullest].as_dict(), "memory": ranks}
