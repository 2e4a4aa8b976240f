"""Refuses a run that has too little memory: by arithmetic at once, then by its plan, before the model is built."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch import nn

from fullshard.core.comm import Comm, demands, free_memory, lacking
from fullshard.core.engine import UnitTable, units
from fullshard.core.engine.registry import runtime_of
from fullshard.core.engine.setup.wrap import ROOT_NAME
from fullshard.core.policy import ShardingStrategy
from fullshard.errors import MemoryLimitError, UserError
from fullshard.planner import TooMuchWorkError, work_limit
from fullshard.planner.plan import LABELS, PHASE_LABELS
from fullshard.program.config import RunConfig, option_of
from fullshard.program.models import base_of
from fullshard.program.train.auto import gpu_sheet, has_begun, recorded
from fullshard.program.train.dry_run import lay_out
from fullshard.program.train.fit import Load, Need, blocks_choice, fewest_blocks, find_remedies
from fullshard.program.train.run.record import Planned
from fullshard.program.train.run_plan import (
    ACCUMULATE,
    AUTO_SHARE,
    BLOCKS,
    RunPlan,
    needed_bytes,
    plan_prepared,
    planned_by_masks,
    uncompiled,
)
from fullshard.program.train.setup.devices import KEPT, Choice, may_accumulate_unsharded
from fullshard.program.train.setup.optimizers import expected_state_bytes
from fullshard.program.train.setup.prepare import Prepared
from fullshard.program.train.setup.quantization import require_kernels
from fullshard.program.train.setup.resume import checkpoints_directory
from fullshard.program.train.setup.steps import learning_rate_schedule, make_plan
from fullshard.sizes import format_bytes
from fullshard.state.saving.scratch import ScratchDirectory

_TABLES = {"Embedding", "Linear"}
"""Classes of units outside the blocks, which tokens may travel to: then they are not gathered."""


@dataclass(frozen=True)
class Least:
    """The tensors of a rank at one moment of a step, without activations, buffers and batch; a step needs more."""

    parts: Mapping[str, int]  # bytes by kind, as a plan names them
    unit: str  # the gathered unit

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


def least_memory(config: RunConfig, data: Prepared, world_size: int, rank: int, kind: str) -> Least:
    """Return what a rank holds at least at the fullest moment of a step; any process, alone.

    That is the larger of two moments: in the optimizer's step, with all gradients; and in the backward of the last of
    the largest units to have one, which is gathered beside the gradients of the others. ``kind`` is the type of the
    device that the rank computes on.

    Raises:
        UserError: The model cannot be built, or the settings do not match it.
    """
    frozen = "shard" if config.sharding.frozen == "auto" else config.sharding.frozen  # whichever needs less
    sharding = config.sharding.model_copy(update={"frozen": frozen})
    config = uncompiled(config.model_copy(update={"sharding": sharding}))  # the compiler's imports take seconds
    model = lay_out(config, data.tokenizer, world_size, rank)
    table = units(model)
    at_home = kind == "cpu" and config.sharding.tables != "gather"
    training = config.training
    full = training.accumulate == "unsharded" and training.gradient_accumulation_steps > 1 and not at_home
    gradients = _gradients(model, table, full=full)
    state = expected_state_bytes(model, config)
    if getattr(base_of(model).config, "sub_configs", None):  # parts for images and sound, which texts may not reach
        gradients, state = dict.fromkeys(gradients, 0), 0
    gathered, beside, unit = max(_moments(table, gradients, at_home=at_home), default=(0, 0, ""))
    if config.sharding.cpu_offload and kind != "cpu":  # the rest is in the host's memory
        return Least({"gathered_units": max((row.gathered_bytes for row in table.rows), default=0)}, unit)
    kept = {"shards": sum(row.shard_bytes for row in table.rows), "optimizer_state": state}
    every, made = sum(gradients.values()), "gradient_buffers" if full else "gradient_shards"
    if every >= gathered + beside:
        return Least({**kept, made: every}, "")
    return Least({**kept, made: beside, "gathered_units": gathered}, unit)


def _gradients(model: nn.Module, table: UnitTable, *, full: bool) -> dict[str, int]:
    """Return the bytes of this rank's gradients by unit: of its rows, or ``full`` ones, which accumulate unsharded."""
    made = dict.fromkeys((row.unit for row in table.rows), 0)
    for unit in runtime_of(model).units:
        for param in unit.params:
            start, stop = (0, param.numel) if full else param.meta.element_range
            made[unit.name] += 4 * (stop - start) * param.trainable
    return made


def _moments(table: UnitTable, gradients: Mapping[str, int], *, at_home: bool) -> Iterator[tuple[int, int, str]]:
    """Yield bytes of a gathered unit, of the gradients that are there with it, and its name, for the largest units.

    Of the n largest units, the last one in backward is at least as large as the n-th, and the others have gradients.
    """
    rows = [row for row in table.rows if not at_home or not (row.unit == ROOT_NAME or row.kind in _TABLES)]
    rows = sorted(rows, key=lambda row: -row.gathered_bytes)
    sums = accumulate(gradients[row.unit] for row in rows)
    most = accumulate((gradients[row.unit] for row in rows), max)
    for row, total, own in zip(rows, sums, most, strict=True):
        yield row.gathered_bytes, total - own, row.unit


def require_least(load: Load, data: Prepared, comm: Comm, free: Mapping[str, int]) -> None:
    """Refuse a run whose ranks have too little memory even without activations; every rank calls it.

    ``free`` are the bytes of each pool that this rank may take, see :func:`~fullshard.core.comm.free_memory`.

    Raises:
        MemoryLimitError: It cannot fit; on every rank, with the same text.
    """
    everyone: list[tuple[Least | None, Mapping[str, int]]] = comm.all_gather_object(
        (_least_of_rank(load, data, comm), free)
    )
    short = lacking([(0 if least is None else least.nbytes, pools) for least, pools in everyone])
    if short is None:
        return
    fullest = max(range(comm.size), key=lambda rank: 0 if (one := everyone[rank][0]) is None else one.nbytes)
    text = _least_refusal(short, fullest, everyone, load, data, comm) if comm.rank == 0 else None
    raise MemoryLimitError(comm.all_gather_object(text)[0])


def _least_of_rank(load: Load, data: Prepared, comm: Comm, overrides: Sequence[str] = ()) -> Least | None:
    """Return what this rank needs at least; None if its model cannot be laid out without weights."""
    try:
        return least_memory(load(overrides), data, comm.size, comm.rank, comm.device.type)
    except Exception:
        return None


def _least_refusal(
    short: tuple[str, int, int],
    fullest: int,
    everyone: Sequence[tuple[Least | None, Mapping[str, int]]],
    load: Load,
    data: Prepared,
    comm: Comm,
) -> str:
    pool, needed, there = short
    least = everyone[fullest][0]
    assert least is not None, "it needs more than there is"
    kinds = sorted(least.parts.items(), key=lambda part: -part[1])
    lines = [f"  {LABELS[name]:<28}{format_bytes(size):>12}" for name, size in kinds if size]
    before, remedies = everyone[comm.rank][0], []
    for overrides in _settings(load(())):
        other = _least_of_rank(load, data, comm, overrides)
        if other is not None and before is not None and other.nbytes < before.nbytes:
            remedies.append(f"  {' '.join(overrides)}: {format_bytes(before.nbytes - other.nbytes)} less")
    return "\n".join([
        f"The run cannot fit, so it was not started: its ranks need at least {format_bytes(needed)} for tensors, even "
        f"without activations, and their {pool.partition(':')[0]} has {format_bytes(there)} left.",
        f"Rank {fullest} of {comm.size} needs at least {format_bytes(least.nbytes)}. At one moment of a step it holds:",
        *lines,
        *(["Settings that need less, to type after the run file:", *remedies] if remedies else []),
        "Use a smaller model, an adapter (model.adapter), or more memory: ranks on further GPUs or machines.",
        "--no-plan starts it anyway.",
    ])  # fmt: skip


def _settings(config: RunConfig) -> Iterator[tuple[str, ...]]:
    shards = ShardingStrategy(config.sharding.strategy).shards
    wide = config.training.optimizer == "adamw"
    own = ["training.accumulate=sharded"] if config.training.accumulate == "unsharded" else []
    own += (["sharding.strategy=full_shard"] if not shards else []) + (
        ["training.optimizer=adamw_8bit"] if wide else []
    )
    yield from dict.fromkeys((*((one,) for one in own), tuple(own))) if own else ()


LEAST_OPERATORS = 500_000
"""Operators that a plan may take for any run: some twenty seconds of processor time. Llamas of 6.5 and 65 billion
parameters take 73,000 and 250,000."""

OPERATORS_A_BATCH = 500
"""Operators that a plan may take for each micro-batch of the run: at most a fourth of the run's own."""


@dataclass(frozen=True)
class _Rank:
    """The values that a rank sends to the others."""

    plan: RunPlan | str  # or why there is none
    free: dict[str, int]  # see :func:`~fullshard.core.comm.free_memory`

    def needs(self, kind: str) -> int:
        return 0 if isinstance(self.plan, str) else needed_bytes(self.plan, kind)

    def snapshots(self) -> int:
        return 0 if isinstance(self.plan, str) else self.plan.host.get("snapshots", 0)


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


def _unplanned(rank: _Rank) -> tuple[str, ...] | None:
    return None if isinstance(rank.plan, str) else tuple(rank.plan.unplanned)


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

    What cannot fit by arithmetic alone is refused before anything is planned. Only the peaks of tensors are compared
    with the free memory, including a machine's swap and caches; what the processes already hold is not free. A plan
    that takes too many operators for the run's length is abandoned. An attempt after the loss of a rank takes the
    previous one's result.

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
    require_least(load, data, comm, free)
    kind = comm.device.type
    plans = _Plans(load, data, comm, free, progress)
    chosen = plans.choose()
    everyone = plans.of(chosen)
    short = shortage(everyone, kind)
    without = next((rank.plan for rank in everyone if isinstance(rank.plan, str)), None)
    if without is not None:
        tell(f"starting without a plan: {without}")
        return None
    for one in chosen:
        if one.value != "false":  # nothing is recomputed: what one expects
            tell(str(one))
    load = _with(load, chosen)
    if short is None:
        everyone = _gathering_once(everyone, kind, snapshots=kind == "cpu" and _keeps_snapshots(load(())))
    fullest = max(range(comm.size), key=lambda rank: everyone[rank].needs(kind))
    checked = _Checked(
        _values(everyone, fullest),
        str(everyone[comm.rank].plan),
        fullest,
        everyone[fullest].needs(kind),
        _limit(everyone, fullest),
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
    keeps = kind == "cpu" and _keeps_snapshots(load(()))
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
        _tell_of_snapshots(everyone, tell)
    return checked


def _gathering_once(everyone: list[_Rank], kind: str, *, snapshots: bool) -> list[_Rank]:
    """Return plans whose evaluations gather all units once, if that fits or no rank needs more; else ``everyone``."""
    plans = [rank.plan.gathering_once() for rank in everyone if isinstance(rank.plan, RunPlan)]
    once = [_Rank(plan, rank.free) for plan, rank in zip(plans, everyone, strict=True)]
    fits = shortage(once, kind, snapshots=snapshots, share=AUTO_SHARE) is None and all(rank.free for rank in once)
    needs_no_more = all(one.needs(kind) <= rank.needs(kind) for one, rank in zip(once, everyone, strict=True))
    return once if (fits or needs_no_more) and all(plan.gathers_once for plan in plans) else everyone


def _keeps_snapshots(config: RunConfig) -> bool:
    """Return whether this attempt takes snapshots for a later one."""
    scratch = ScratchDirectory.of(checkpoints_directory(config))
    return scratch is not None and not scratch.last


def _tell_of_snapshots(everyone: Sequence[_Rank], tell: Callable[[str], None]) -> None:
    """Report if the run fits, but not together with its snapshots; it is not refused for that."""
    short = shortage(everyone, "cpu", snapshots=True)
    if short is not None:
        pool, needed, there = short
        most = max(rank.snapshots() for rank in everyone)
        tell(
            f"with snapshots for restarts, {format_bytes(most)} for a rank, {format_bytes(needed)} are needed and the "
            f"{pool.partition(':')[0]} has {format_bytes(there)}: memory may run out. --max-restarts 0 takes none"
        )


class _Plans:
    """The plans of all ranks, by what they choose; every rank calls each method alike."""

    def __init__(
        self, load: Load, data: Prepared, comm: Comm, free: dict[str, int], progress: Callable[[int, int], None]
    ) -> None:
        self._load, self._data, self._comm, self._free, self._progress = load, data, comm, free, progress
        self._kind = comm.device.type
        self._config = load(())
        training = self._config.training
        self._lists = (
            training.packing or training.per_device_train_batch_tokens is not None or self._config.data.weights
        )
        self._found: dict[tuple[str, ...], list[_Rank]] = {}

    def of(self, chosen: Sequence[Choice]) -> list[_Rank]:
        """Return every rank's plan with these choices."""
        key = tuple(one.override for one in chosen if one.value not in ("false", "sharded"))  # auto's in a plan
        if key not in self._found:
            everyone = self._planned(chosen)
            if shortage(everyone, self._kind) is not None and not self._lists:
                # Those batches are at least as large as the run's. Only batches that come count against it.
                come = self._planned(chosen, listed=True)
                if [_unplanned(rank) for rank in come] == [_unplanned(rank) for rank in everyone]:
                    pairs = zip(everyone, come, strict=True)
                    everyone = [min(pair, key=lambda rank: rank.needs(self._kind)) for pair in pairs]
            self._found[key] = everyone
        return self._found[key]

    def choose(self) -> list[Choice]:
        """Return what the run chooses by its memory: how many blocks are recomputed, and how gradients add up."""
        blocks = self._blocks() if self._config.training.gradient_checkpointing == "auto" else None
        chosen = [] if blocks is None else [blocks]
        # Without a plan nothing is chosen.
        several = self._config.training.accumulate == "auto" and self._config.training.gradient_accumulation_steps > 1
        return [*chosen, self._accumulation(chosen)] if several and self._is_planned(chosen) else chosen

    def _blocks(self) -> Choice | None:
        """Choose the fewest blocks to recompute with which all ranks fit; None without a plan."""
        if not self._is_planned(()):
            return None
        first: RunPlan = self.of(())[0].plan  # type: ignore[assignment]
        share = 1.0 if self._kind == "cpu" else AUTO_SHARE

        def choice(number: int, why: str = "") -> Choice:
            return blocks_choice(number, first.blocks, why)

        def missing(number: int) -> float:
            tried = (choice(number),) if number else ()
            if not self._is_planned(tried):
                return math.inf
            pools = demands([(rank.needs(self._kind), rank.free) for rank in self.of(tried)])
            return max((needed - share * there for _, needed, there in pools), default=0)

        before = self._before(BLOCKS)
        kept = before * first.blocks if isinstance(before, bool) else min(before or 0, first.blocks)
        if kept and missing(kept) <= 0:
            return choice(kept, KEPT)
        number = fewest_blocks(missing, first.blocks)
        if not number:
            return choice(0, "the run fits without" if missing(0) <= 0 else "recomputing more does not need less")
        without, needs = (max(rank.needs(self._kind) for rank in self.of(one)) for one in ((), (choice(number),)))
        there = int(share * min(_limit(self.of(()), rank) for rank in range(self._comm.size)))
        sizes = f"{format_bytes(without)} without, {format_bytes(needs)} with it, and may take {format_bytes(there)}"
        return choice(number, f"a rank needs {sizes}")

    def _accumulation(self, chosen: Sequence[Choice]) -> Choice:
        """Choose full gradients where they send less and fit; in a run that continues, if they fit at all."""
        if not may_accumulate_unsharded(self._config, self._comm.size):
            return Choice(ACCUMULATE, "sharded", "unsharded sends no less")
        before = self._before(ACCUMULATE, "sharded")  # runs of earlier versions reduced every micro-batch
        if before == "sharded":
            return Choice(ACCUMULATE, before, KEPT)
        unsharded = Choice(ACCUMULATE, "unsharded", "")
        everyone = self.of([*chosen, unsharded])
        if not self._is_planned([*chosen, unsharded]):
            return Choice(ACCUMULATE, "sharded", "unsharded could not be planned")
        if not all(rank.free for rank in everyone):
            return Choice(ACCUMULATE, "sharded", "the system does not report its free memory")
        share = 1.0 if before == "unsharded" else AUTO_SHARE
        snapshots = self._kind == "cpu" and _keeps_snapshots(self._config)
        short = shortage(everyone, self._kind, snapshots=snapshots, share=share)
        if short is None:
            why = KEPT if share == 1.0 else f"it sends less, and its plan fits in {share:.0%} of the free memory"
            return replace(unsharded, why=why)
        pool, needed, there = short
        limit = f"{share:.0%} of the {format_bytes(there)} that are free in its {pool.partition(':')[0]}"
        return Choice(ACCUMULATE, "sharded", f"unsharded needs {format_bytes(needed)}, more than {limit}")

    def _planned(self, chosen: Sequence[Choice], *, listed: bool = False) -> list[_Rank]:
        plan = _tried(_with(self._load, chosen), self._data, self._comm, self._progress, listed=listed)
        return self._comm.all_gather_object(_Rank(plan, self._free))

    def _is_planned(self, chosen: Sequence[Choice]) -> bool:
        """Return whether all ranks have a plan, of the same phases as without choices: others cannot be compared."""
        phases = [_unplanned(rank) for rank in self.of(chosen)]
        return None not in phases and phases == [_unplanned(rank) for rank in self.of(())]

    def _before(self, setting: str, old: Any = None) -> Any:
        """Return what the run that continues chose at its start; None if there is none."""
        begun = has_begun(self._config, self._comm)
        mine = recorded(self._config, setting, old, begun=begun) if self._comm.rank == 0 else None
        found = self._comm.all_gather_object(mine)[0]
        return None if found == "auto" else found


def shortage(
    ranks: Sequence[_Rank], kind: str, *, snapshots: bool = False, share: float = 1.0
) -> tuple[str, int, int] | None:
    """Return a pool too small for its ranks, what they need and what it has; None if there is enough in a ``share``."""
    return lacking([(rank.needs(kind) + snapshots * rank.snapshots(), rank.free) for rank in ranks], share)


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


def _limit(everyone: Sequence[_Rank], fullest: int) -> int:
    """Return the bytes that the fullest rank may take: an equal share of its pool."""
    shares = [size // sum(pool in rank.free for rank in everyone) for pool, size in everyone[fullest].free.items()]
    return min(shares, default=sys.maxsize)


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


def _values(everyone: Sequence[_Rank], fullest: int) -> dict[str, Any]:
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
            # Tensors measured on the CPU include the copies in the host's memory.
            "copies": sum(plan.host.values()) if plan.device is None else 0,
        }
        for plan in plans
    ]
    return {**plans[fullest].as_dict(), "memory": ranks}
