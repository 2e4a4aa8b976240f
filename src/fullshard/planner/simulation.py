"""Runs a sharded model's steps without memory, and notes what is alive at the fullest moment, and who made it."""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from fullshard.core.comm import Comm, Work as CommWork
from fullshard.core.comm.device import Device
from fullshard.core.engine.registry import runtime_of
from fullshard.core.engine.step.lane import PermanentBuffer
from fullshard.core.engine.step.recorder import Kind, StepRecorder, Transfer
from fullshard.core.quantized import QuantizedLinear
from fullshard.core.torch_private import in_backward, tree_leaves
from fullshard.errors import ConfigError
from fullshard.planner.fake_tensors import FakeMode, planning
from fullshard.planner.memory_tracker import PHASES, MemoryTracker, TooMuchWorkError
from fullshard.planner.ranks import Ledger
from fullshard.planner.work import Work

OUTSIDE = "other_forward"
"""What forward makes outside of the model's modules, such as the loss, or in the model's own code."""

REST = "backward_and_temporaries"
"""What backward makes, recomputed activations too, and what operators hold until they return."""

_PEFTS = "base_model.model."
"""What peft's models put before every name."""


class Blocks:
    """Tells which block's forward runs: a module whose name ends with a number, or one that is not inside of such.

    Blocks that differ in numbers are one: ``encoder.block.0`` and ``encoder.block.1`` are ``encoder.block.*``.
    """

    def __init__(self, model: nn.Module, is_forward: Callable[[], bool]) -> None:
        """Watch ``model``; ``is_forward`` returns whether a step is in forward."""
        self._is_forward = is_forward
        self._running: list[str] = []
        names = {module: name for name, module in reversed([*_outer(model, "")])}  # a shared one has its first name
        for module, name in names.items():
            label = re.sub(r"(?<![^.])\d+(?![^.])", "*", name.removeprefix(_PEFTS))
            module.register_forward_pre_hook(partial(self._begin, label))
            module.register_forward_hook(self._end, always_call=True)

    def _begin(self, label: str, _module: nn.Module, _args: Any) -> None:
        self._running.append(label)

    def _end(self, *_args: Any) -> None:
        self._running.pop()

    def owner(self) -> str | None:
        """Return the block that makes a storage now; None: backward or the optimizer does."""
        if not self._is_forward():
            return None
        return self._running[-1] if self._running else OUTSIDE


def _outer(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield blocks and the modules around them, with their names."""
    for name, child in module.named_children():
        yield prefix + name, child
        if not name.isdigit():
            yield from _outer(child, f"{prefix}{name}.")


@dataclass(frozen=True)
class Span:
    """An interval of a step, in operators from its start; a gather or reduce lasts until it is waited for."""

    unit: str  # empty: the optimizer
    kind: Kind
    start: int
    end: int


@dataclass(frozen=True)
class MemoryTimeline:
    """One step of a plan; places are numbers of operators that were called before."""

    operators: int  # number of operators in the step
    places: tuple[int, ...]  # ascending: where something was allocated or freed; a place has at most two moments
    parts: Mapping[str, tuple[int, ...]]  # bytes by kind at the fullest and the last moment of each place
    spans: tuple[Span, ...]  # sorted by their start
    units: tuple[str, ...]  # names, root first


class TimelineRecorder(StepRecorder):
    """Notes the memory timeline of one step at a time."""

    def __init__(self, operators: Callable[[], int]) -> None:
        """Start empty; ``operators`` returns the number of calls so far."""
        super().__init__()
        self._operators = operators
        self.clear()

    def clear(self) -> None:
        """Forget everything, because a step begins."""
        self._start = self._operators()
        self._samples: list[tuple[int, Mapping[str, int]]] = []
        self._open: dict[tuple[str, Kind], int] = {}
        self._spans: list[Span] = []

    def _place(self) -> int:
        return self._operators() - self._start

    def sample_parts(self, parts: Mapping[str, int]) -> None:
        """Record the live memory; for each place the fullest moment and the last are kept."""
        place = self._place()
        here = [one for one in self._samples[-2:] if one[0] == place]
        if len(here) == 2:
            highest = max(here, key=lambda one: sum(one[1].values()))
            self._samples[-2:] = [highest]
        self._samples.append((place, parts))

    def begin(self, unit: str, kind: Kind) -> None:
        """Start an interval, unless it has started already."""
        self._open.setdefault((unit, kind), self._place())

    def end(self, unit: str, kind: Kind) -> None:
        """End an interval; do nothing if it has not started."""
        begun = self._open.pop((unit, kind), None)
        if begun is not None:
            self._spans.append(Span(unit, kind, begun, self._place()))

    def issued(self, unit: str, kind: Transfer, works: Sequence[CommWork]) -> None:
        """Forget an interval that has no collectives."""
        if not works:
            self._open.pop((unit, kind), None)

    def timeline(self, units: Sequence[str]) -> MemoryTimeline:
        """Return the timeline of the step that ends here; everything after the units belongs to the optimizer."""
        operators = self._place()
        updates = max((span.end for span in self._spans), default=operators)
        spans = [*self._spans, Span("", "optimizer", updates, operators)]
        names = self._samples[0][1] if self._samples else {}
        return MemoryTimeline(
            operators=operators,
            places=tuple(place for place, _ in self._samples),
            parts={name: tuple(parts[name] for _, parts in self._samples) for name in names},
            spans=tuple(sorted(spans, key=lambda span: (span.start, span.end))),
            units=tuple(units),
        )


class _Apart(Device):
    """The device of a rank with separate host memory: lanes see that their shards are not on it."""

    def __init__(self, tracker: MemoryTracker, reduces_behind: int) -> None:
        super().__init__(torch.device("cpu"))
        self.reduces_behind = reduces_behind
        self.device = torch.device("meta")  # no tensor is on it, so shards always count as elsewhere
        self._tracker = tracker

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype)

    def empty_host(self, numel: int, dtype: torch.dtype, *, pinned: bool) -> torch.Tensor:
        made = torch.empty(numel, dtype=dtype)
        self._tracker.to_host(made)
        return made


def host_of_gpu() -> Device | None:
    """Return a device that has host memory apart, in the simulation of a rank on a GPU; None elsewhere."""
    mode = planning()
    return _Apart(mode.tracker, 0) if mode is not None and mode.has_host else None


def set_apart(model: torch.nn.Module, mode: FakeMode, phase: Callable[[], str]) -> None:
    """Count the shards of ``model`` as the host's from now on, and everything made only from them.

    Args:
        model: Sharded with ``offload_policy``.
        mode: The mode it runs in.
        phase: Returns the phase of a step: what the optimizer makes of nothing is the host's too.

    Raises:
        ConfigError: Weights are replicated.
    """
    tracker, runtime = mode.tracker, runtime_of(model)
    lanes = [lane for unit in runtime.units for lane in unit.lanes]
    if any(isinstance(lane.full, PermanentBuffer) for lane in lanes):
        raise ConfigError(
            "A plan for GPUs does not support sharding.cpu_offload with replicated weights yet (no_shard, or sharding."
            "frozen: replicate). Plan sharding.strategy=full_shard and sharding.frozen=shard."
        )
    apart = _Apart(tracker, runtime.device.reduces_behind)
    for lane in lanes:
        tracker.to_host(lane.shard)
        lane.device = apart

    def on_host(given: list[torch.Tensor]) -> bool:
        return all(map(tracker.is_on_host, given)) if given else phase() == "optimizer"

    mode.on_host = on_host


STEPS = 3
"""Steps of a simulation: the first makes the optimizer's state and learns the order of units."""

PARTS = (
    "shards",
    "optimizer_state",
    "gathered_units",
    "gradient_buffers",
    "gradient_shards",
    "buffers_and_batch",
    "activations_and_temporaries",
)
"""The parts of the fullest moment of a step. Gradient buffers are unsharded gradients that wait to be reduced."""


@dataclass(frozen=True)
class PlannedStep:
    """The program to simulate."""

    model: nn.Module  # sharded
    optimizer: torch.optim.Optimizer  # over its shards
    step: Callable[[], object]  # clears gradients, then forward, backward and the optimizer's step
    steps: int = STEPS  # number of steps
    after: Mapping[str, Callable[[MemoryTracker], None]] = field(
        default_factory=dict
    )  # phases between steps, in their order
    host: Mapping[str, Callable[[], int]] = field(default_factory=dict)  # bytes that it keeps in host memory, by kind
    # the assumed value of an unknown number that is read outside of the model's forward; None: reading one is an error
    assumed: Callable[[], float] | None = None
    # True: one more step follows for its work alone, of a usual size; False: the last step is also the one timed
    usual: bool = False
    times: float = 1  # how often that step has the micro-batches that are simulated


@dataclass(frozen=True)
class Simulation:
    """What one rank holds and sends in a step; bytes."""

    peaks: dict[str, int]  # highest live bytes, by phase
    parts: dict[str, int]  # live bytes by kind at the highest moment of a step
    activations: dict[str, int]  # ``activations_and_temporaries`` of these by block, see :class:`Blocks`
    account: dict[str, int]  # peaks of the engine's own buffers since the model was sharded
    sent: dict[str, tuple[int, int]]  # collectives of a step and the bytes they send, by kind
    elements: int  # elements of parameters that this rank holds, without padding
    work: Work  # of the timed step; empty if not requested
    timeline: MemoryTimeline | None = None  # of the step with the highest moment; None: not asked for
    host: Mapping[str, int] = field(default_factory=dict)  # further bytes in host memory, by kind
    unplanned: tuple[str, ...] = ()  # phases after the steps that were too much work
    times: float = 1  # how often the timed step has the work's micro-batches


def simulate(
    build: Callable[[Comm], PlannedStep],
    rank: int,
    size: int,
    *,
    reduces_behind: int = 0,
    draws: bool = False,
    has_host: bool = False,
    timed: bool = True,
) -> Simulation:
    """Run ``build``, its steps and the phases after them as ``rank`` of ``size`` ranks; needs no memory, no other rank.

    Args:
        build: Makes the model, shards it over the given communicator and makes the optimizer.
        rank: The rank to simulate.
        size: Number of ranks.
        reduces_behind: See :class:`fullshard.core.comm.Device`: 0 as on the CPU, 1 as on CUDA.
        draws: Whether to note the memory timeline of the fullest step too, which takes longer.
        timed: Whether to record the work of a step, for its time; takes a third of that step's planning.
        has_host: True if host memory is separate from the device's, as with a GPU: offloaded shards are counted apart,
            and no memory is kept for large quantised weights.

    Raises:
        ModelError: A step depends on values.
        UserError: Those of ``build``.
    """
    tracker, ledger = MemoryTracker(), Ledger(rank, size)
    with warnings.catch_warnings(), _only_new_garbage(), FakeMode(tracker) as mode:
        warnings.simplefilter("ignore")  # about a run that does not take place
        mode.has_host = has_host
        made = build(ledger.world)
        runtime = runtime_of(made.model)
        runtime.device.reduces_behind = reduces_behind
        workspaces = {one.workspace for one in made.model.modules() if isinstance(one, QuantizedLinear)}
        for workspace in workspaces:
            workspace.keeps = not has_host
            workspace.most_parts = None if draws else 2
        before = tracker.peaks.get("before_first_step", 0)
        gc.collect()  # what building left in cycles
        watch = _Watch(made, tracker, mode, draws=draws)
        if has_host and runtime.root.policy.offload is not None:
            set_apart(made.model, mode, watch.phase)
            before -= tracker.host_live  # lanes go to the host one after the other
        work = Work(watch.phase)

        def take_step(*, noted: bool) -> None:
            ledger.clear()
            watch.begin_step()
            if noted:
                mode.on_operator, ledger.note = work.compute, work.issue
                for workspace in workspaces:
                    workspace.most_parts = None
            made.step()
            watch.end_step()
            mode.on_operator, ledger.note = mode.ignore, ledger.ignore

        for step in range(made.steps):
            take_step(noted=timed and not made.usual and step == made.steps - 1)
        peaks = {"before_first_step": before, **{phase: tracker.peaks.get(phase, 0) for phase in PHASES[1:]}}
        account, sent = {**watch.tracker.peak, "total": watch.tracker.peak_total}, ledger.sent()
        if timed and made.usual:
            tracker.restart(watch.phase, lambda: None)  # the parts stay those of the largest batches
            take_step(noted=True)
        host, left = _after_steps(made, tracker, peaks)
    return Simulation(
        peaks=peaks,
        parts=watch.parts,
        activations=watch.activations(),
        account=account,
        sent=sent,
        elements=sum(stop - start for start, stop in watch.ranges()),
        work=work,
        timeline=watch.timeline,
        host=host,
        unplanned=tuple(left),
        times=made.times,
    )


def _after_steps(made: PlannedStep, tracker: MemoryTracker, peaks: dict[str, int]) -> tuple[dict[str, int], list[str]]:
    """Run the phases after the steps, and add their peaks; return the host's memory, and the phases without a plan."""
    tracker.on_change = lambda: None
    tracker.restart(lambda: "host", lambda: None)  # these are neither in a step nor between steps
    host = {kind: size() for kind, size in made.host.items()}
    host |= {"offloaded": tracker.host_peak} if tracker.host_peak else {}
    left = list(made.after)
    with suppress(TooMuchWorkError):  # the steps' needs are known, and usually the largest
        for name, run in made.after.items():
            tracker.restart(partial(str, name), lambda: None)
            run(tracker)
            peaks[name] = tracker.peaks[name]
            left.remove(name)
    return host, left


_caller_freezes = False


@contextmanager
def _only_new_garbage() -> Iterator[None]:
    """Context in which collections look only at objects made in it: all others of a process take up to a second."""
    global _caller_freezes
    _caller_freezes = _caller_freezes or gc.get_freeze_count() > 0  # counting them takes 0.2 s, so it is done once
    if _caller_freezes:  # ending that is not up to a plan
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _Watch(StepRecorder):
    """Tracks the phase of a step, and the parts of its bytes at each new maximum."""

    def __init__(self, made: PlannedStep, tracker: MemoryTracker, mode: FakeMode, *, draws: bool) -> None:
        super().__init__()
        self.timeline: MemoryTimeline | None = None
        self._drawn = TimelineRecorder(lambda: mode.operators)
        self._draws = draws
        self.parts: dict[str, int] = dict.fromkeys(PARTS, 0)
        self._owned: dict[str, int] = {}
        self._runtime = runtime_of(made.model)
        self.tracker = self._runtime.tracker
        self._optimizer = made.optimizer
        self._tracker = tracker
        self._mode, self._assumed = mode, made.assumed
        mode.assumed = made.assumed
        self._gradients: dict[str, int] = {}
        self._phase = "forward"
        self._state = self._held = 0
        self._is_fullest = self._knows_gradients = False
        self._runtime.watch(self)
        made.model.register_forward_pre_hook(self._forward_begins, prepend=True)
        made.model.register_forward_hook(self._forward_ends)
        tracker.owner = Blocks(made.model, lambda: self.phase() == "forward").owner
        tracker.restart(self.phase, self._note)

    def _forward_begins(self, _model: object, _args: object) -> None:
        if not in_backward():
            self._phase = "forward"
        self._mode.assumed = None

    def _forward_ends(self, *_args: object) -> None:
        self._mode.assumed = self._assumed

    def phase(self) -> str:
        """Return the phase: everything after a backward is the optimizer's, until the next forward."""
        if in_backward():
            self._phase = "backward"
        elif self._phase == "backward":
            self._phase = "optimizer"
        return self._phase

    def begin_step(self) -> None:
        """Record what is held between steps."""
        self._phase = "forward"
        self._gradients = self._gradients_now()
        self._state = _state_bytes(self._optimizer, self._tracker)
        self._held = self._tracker.live - sum(self._known().values())
        self._is_fullest = self._knows_gradients = False
        self._drawn.clear()
        if self._draws:
            self._tracker.on_change = lambda: self._drawn.sample_parts(self._parts_now())

    def end_step(self) -> None:
        """Keep the memory timeline of a step that was fuller than all before."""
        self._tracker.on_change = lambda: None
        if self._draws and self._is_fullest:
            self.timeline = self._drawn.timeline([unit.name for unit in self._runtime.units])

    def begin(self, unit: str, kind: Kind) -> None:
        """See :meth:`StepRecorder.begin`."""
        if kind == "forward" and not self._knows_gradients and not in_backward():
            # Clearing them gives no notice; their memory is freed when the engine's forward begins.
            self._gradients = self._gradients_now()
            self._knows_gradients = True
        elif kind == "backward":
            self._knows_gradients = False
        self._drawn.begin(unit, kind)

    def end(self, unit: str, kind: Kind) -> None:
        """See :meth:`StepRecorder.end`."""
        self._drawn.end(unit, kind)

    def issued(self, unit: str, kind: Transfer, works: Sequence[CommWork]) -> None:
        """See :meth:`StepRecorder.issued`."""
        self._drawn.issued(unit, kind, works)

    def wait(self, unit: str, kind: Transfer, works: Sequence[CommWork], how: Callable[[CommWork], None]) -> None:
        """See :meth:`StepRecorder.wait`."""
        super().wait(unit, kind, works, how)
        self._drawn.end(unit, kind)

    def gradients_take(self, unit: str, nbytes: Callable[[], int]) -> None:
        """See :meth:`StepRecorder.gradients_take`."""
        self._gradients[unit] = nbytes()

    def ranges(self) -> Iterable[tuple[int, int]]:
        """Yield the elements that this rank holds of each parameter, as bounds."""
        return (param.meta.element_range for _, param in self._runtime.all_params())

    def activations(self) -> dict[str, int]:
        """Return what the activations and temporaries of the fullest moment consist of."""
        made = {name: nbytes for name, nbytes in self._owned.items() if nbytes}
        return {**made, REST: self.parts["activations_and_temporaries"] - sum(made.values())}

    def _gradients_now(self) -> dict[str, int]:
        return {unit.name: unit.gradient_bytes() for unit in self._runtime.units}

    def _known(self) -> dict[str, int]:
        live = self.tracker.live
        return {
            "shards": live["shards"] - self._offloaded(),
            "optimizer_state": self._state,
            "gathered_units": live["gathered"],
            "gradient_buffers": live["gradients"],
            "gradient_shards": sum(self._gradients.values()),
        }

    def _offloaded(self) -> int:
        """Return the bytes of shards in separate host memory."""
        lanes = (lane for unit in self._runtime.units for lane in unit.lanes)
        return sum(lane.shard.nbytes for lane in lanes if lane.offloaded) if self._mode.on_host is not None else 0

    def _parts_now(self) -> dict[str, int]:
        known = self._known()
        rest = self._tracker.live - sum(known.values()) - self._held
        return {**known, "buffers_and_batch": self._held, "activations_and_temporaries": rest}

    def _note(self) -> None:
        self.parts = self._parts_now()
        self._owned = self._tracker.owned.copy()
        self._is_fullest = True


def _state_bytes(optimizer: torch.optim.Optimizer, tracker: MemoryTracker) -> int:
    """Return the bytes of an optimizer's state on the device; a storage that several parameters share counts once."""
    tensors = [leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, torch.Tensor)]
    own = (tensor.untyped_storage() for tensor in tensors if not tracker.is_on_host(tensor))
    storages = {storage._cdata: storage.nbytes() for storage in own}
    return sum(storages.values())
