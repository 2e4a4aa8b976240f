"""``sharding: auto``: settings chosen at the start of a run, alike on every rank."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fullshard.core.comm import Comm, free_memory, together
from fullshard.errors import ConfigError, MemoryLimitError, UserError
from fullshard.planner import Hardware, hardware, names
from fullshard.program.config import RunConfig
from fullshard.program.train.reporting.sinks import RUN_NAME
from fullshard.program.train.search import Load, Telling, Tried, search
from fullshard.program.train.setup.devices import KEPT, Choice, Devices, precision_choice
from fullshard.program.train.setup.float8 import require_float8
from fullshard.program.train.setup.prepare import Prepared
from fullshard.program.train.setup.resume import checkpoints_directory
from fullshard.program.train.setup.ways import WAYS_SETTING, ways_choice
from fullshard.sizes import format_bytes, format_duration
from fullshard.state.saving.scratch import ScratchDirectory
from fullshard.state.storage import as_place, find_checkpoints, read_index

_CPU = Hardware(
    name="CPU rank",
    memory_bytes=0,
    outside_bytes=0,
    workspace_bytes=0,
    flops_per_s={torch.float32: 5e10, torch.bfloat16: 5e10, torch.float16: 5e10},
    bytes_per_s=1e10,
    kernel_s=0.0,
    host_s=5e-6,
    link_bytes_per_s=3e9,
    network_bytes_per_s=1e9,
    latency_s=1e-4,
    has_host=False,
)
"""Rough rates of a server's core; good enough to rank settings by what they compute and send."""


def chosen_settings(
    load: Load, data: Prepared, comm: Comm, tell: Callable[[str], None] = lambda line: None
) -> tuple[str, ...]:
    """Return the overrides that ``sharding: auto`` chooses; empty if it is not set. Every rank calls it.

    Rank 0 searches with the smallest memory of all ranks. A resumed run keeps the choice of its start. The last of the
    overrides records the others in the run's settings. ``tell`` receives a line for the user.

    Raises:
        ConfigError: A GPU has no data sheet, or the run cannot be planned; on every rank.
        MemoryLimitError: Nothing that was tried fits; on every rank.
    """
    config = load(())
    if config.sharding.auto is not True:
        return ()
    free = comm.all_gather_object(free_memory(comm.device))
    shares = [size // sum(pool in of_rank for of_rank in free) for one in free for pool, size in one.items()]

    begun = has_begun(config, comm)

    def choose() -> tuple[str, ...] | None:
        if comm.rank:
            return None
        before = recorded(config, "sharding.auto", begun=begun)
        if isinstance(before, list):
            before = tuple(before)
            tell(f"sharding: auto keeps the choice of this run's start: {_text(before)}")
            return before
        device = _device(comm.device, min(shares, default=None))
        return _best(search(load, comm.size, device, data, Telling(tell, timed=device.name != _CPU.name)), device, tell)

    found = comm.all_gather_object(together(comm, choose))[0]
    return _with_record(found)


def chosen_ways(
    load: Load, data: Prepared, comm: Comm, tell: Callable[[str], None] = lambda line: None
) -> tuple[tuple[str, ...], tuple[Choice, ...]]:
    """Return the override that ``speed.ways: auto`` stands for and the choice; both empty if ways are set.

    Every rank calls it, with its precision chosen. A resumed run keeps the ways of its start. ``tell`` receives a line
    for the user.

    Raises:
        UserError: The model cannot be built, or the settings do not match it; on every rank.
    """
    config = load(())
    if config.speed.ways != "auto":
        return (), ()
    devices, begun = Devices.of_ranks(comm), has_begun(config, comm)

    def choose() -> Choice:
        before = recorded(config, WAYS_SETTING, before=[], begun=begun) if comm.rank == 0 else None
        if isinstance(before, list):
            return Choice(WAYS_SETTING, f"[{', '.join(before)}]", KEPT)
        return ways_choice(config, data, comm.size, devices, comm.device)[1][0]

    found = comm.all_gather_object(together(comm, choose))
    choice = next((one for one in found if one.why == KEPT), found[0])
    if devices.gpu:
        tell(str(choice))
    return (choice.override,), (choice,)


def simulated_settings(
    load: Load, data: Prepared, world_size: int, device: Hardware | None, tell: Callable[[str], None]
) -> tuple[str, ...]:
    """Return what :func:`chosen_settings` returns on such GPUs, None: on this machine's CPU; one process.

    Raises:
        ConfigError: The run cannot be planned.
        MemoryLimitError: Nothing that was tried fits.
    """
    if load(()).sharding.auto is not True:
        return ()
    if device is None:
        free = min(free_memory(torch.device("cpu")).values(), default=None)
        device = _device(torch.device("cpu"), None if free is None else free // world_size)
    return _with_record(
        _best(search(load, world_size, device, data, Telling(tell, timed=device.name != _CPU.name)), device, tell)
    )


def _with_record(found: tuple[str, ...]) -> tuple[str, ...]:
    return (*found, f"sharding.auto={json.dumps(found)}")


def chosen_precision(
    load: Load, comm: Comm, tell: Callable[[str], None] = lambda line: None
) -> tuple[tuple[str, ...], Choice]:
    """Return the override that ``training.precision: auto`` stands for, empty if a precision is set, and the choice.

    Every rank calls it. A run that continues keeps the precision of its start. ``tell`` receives a line for the user.

    Raises:
        UserError: The place of the checkpoints cannot be used, or the devices have no fp8; on every rank.
    """
    config = load(())
    devices = Devices.of_ranks(comm)
    asks = config.training.precision == "auto"
    before = None
    if asks:
        before = comm.all_gather_object(together(comm, lambda: None if comm.rank else precision_before(config)))[0]
    require_float8(config, devices)
    found = precision_choice(config, devices, before)
    tell(f"precision: {found.value} ({found.why})")
    return ((f"training.precision={found.value}",) if asks else ()), found


def choices_without_plan(config: RunConfig, comm: Comm) -> tuple[Choice, ...]:
    """Return what settings that a plan decides are without one: as at the run's start, or what needs no memory.

    Every rank calls it.
    """
    found, least = [], "no plan shows what fits"
    training = config.training
    asked = {
        "training.gradient_checkpointing": (training.gradient_checkpointing, False),
        "training.accumulate": (training.accumulate if training.gradient_accumulation_steps > 1 else "", "sharded"),
    }
    for setting, (value, otherwise) in asked.items():
        if value == "auto":
            before = recorded_on_rank_0(config, comm, setting, otherwise)
            taken, why = (otherwise, least) if before in (None, "auto") else (before, KEPT)
            found.append(Choice(setting, str(taken).lower(), why))
    return tuple(found)


def precision_before(config: RunConfig) -> str | None:
    """Return the precision of the checkpoint that the run continues from, as far as it has one."""
    return _values_before(config).get("settings", {}).get("training.precision")


def _values_before(config: RunConfig) -> Mapping[str, Any]:
    """Return the values of the checkpoint that the run continues from, empty if there is none."""
    if config.resume == "never":
        return {}
    place = checkpoints_directory(config) if config.resume in ("auto", "previous") else as_place(config.resume)
    complete = find_checkpoints(place)[::-1] or [place]
    for path in complete if config.resume == "previous" else complete[:1]:
        with contextlib.suppress(UserError, OSError, LookupError, TypeError):  # resuming reports it later
            return read_index(path).values
    return {}


def gpu_sheet(device: torch.device) -> Hardware | None:
    """Return the data sheet of a GPU by its name; None on the CPU or if there is none."""
    if device.type != "cuda":
        return None
    called = torch.cuda.get_device_name(device).lower()
    known = [name for name in names() if name in called]
    return hardware(max(known, key=len)) if known else None


def _device(device: torch.device, free: int | None) -> Hardware:
    sheet = gpu_sheet(device) if device.type == "cuda" else _CPU
    if sheet is None:
        raise ConfigError(
            f"sharding: auto needs a data sheet, and there is none for {torch.cuda.get_device_name(device)}. Set what "
            "`fullshard plan RUN --gpu NAME --fit` prints for a GPU like it."
        )
    if device.type == "cuda":  # not run on a GPU yet; memory outside of tensors is allocated before free memory is read
        return replace(sheet, memory_bytes=min(sheet.memory_bytes, (free or sheet.memory_bytes) + sheet.outside_bytes))
    if free is None:
        raise ConfigError(
            "sharding: auto needs the free memory, which this system does not report. Set sharding.strategy."
        )
    return replace(sheet, memory_bytes=free)


def _best(tried: list[Tried], device: Hardware, tell: Callable[[str], None]) -> tuple[str, ...]:
    best, plan = tried[0], tried[0].plan
    if best.why or plan is None:
        raise MemoryLimitError(
            f"sharding: auto found nothing that fits in {format_bytes(device.memory_bytes)} a rank, of {len(tried)} "
            f"settings; the first: {tried[0].why}. Use more ranks, or a smaller model or batch."
        )
    guess = "" if device.name == _CPU.name else f", about {format_duration(best.step_s)} a step"
    tell(
        f"sharding: auto chose {_text(best.overrides)}, of {len(tried)} settings: {format_bytes(plan.needed_bytes)} a "
        f"rank, {format_bytes(device.memory_bytes)} are free{guess}"
    )
    return best.overrides


def has_begun(config: RunConfig, comm: Comm) -> bool:
    """Return whether an earlier attempt of the same launcher has passed its start; every rank calls it."""
    scratch = ScratchDirectory.of(checkpoints_directory(config))
    return any(comm.all_gather_object(scratch is not None and scratch.begun() > 0))


def recorded_on_rank_0(config: RunConfig, comm: Comm, setting: str, before: Any = None) -> Any:
    """Return what :func:`recorded` finds on rank 0; every rank calls it, and raises what rank 0 raises."""
    begun = has_begun(config, comm)
    mine = together(comm, lambda: None if comm.rank else recorded(config, setting, before, begun=begun))
    return comm.all_gather_object(mine)[0]


def recorded(config: RunConfig, setting: str, before: Any = None, *, begun: bool) -> Any:
    """Return the recorded setting of the run that continues; None if it starts from scratch. On rank 0.

    Its checkpoint has it, wherever that lies, and ``run.json`` in ``output_dir`` before the first one. An attempt after
    one that has ``begun`` never starts from scratch: with other settings the snapshots would not fit. ``before`` is
    what runs of earlier versions did, which have not recorded it.
    """
    decided = {} if begun else _values_before(config).get("decided", {})
    if isinstance(decided, Mapping) and setting in decided:
        return decided[setting]
    path = Path(config.output_dir, RUN_NAME)
    if (config.resume == "never" and not begun) or not path.exists():
        return None
    section, name = setting.split(".")
    try:
        return json.loads(path.read_text(encoding="utf-8"))["config"][section].get(name, before)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # resuming reports later whether its checkpoints can be used


def _text(overrides: tuple[str, ...]) -> str:
    return " ".join(overrides) or "the run file's own settings"
