"""What a sharded model knows beside its units: the schedule, the collectives' order, the end of backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from fullshard.comm import Mesh
from fullshard.engine.agreement import Agreement
from fullshard.engine.buffers import Account
from fullshard.engine.param import ShardedParam
from fullshard.engine.schedule import Action, Call, Schedule, Verb
from fullshard.engine.torch_private import call_after_backward
from fullshard.engine.unit import State, Unit
from fullshard.errors import ShardingError
from fullshard.policy import BackwardPrefetch, MixedPrecision, ShardingStrategy


@dataclass(frozen=True)
class Policy:
    """The policies of one sharded model.

    Attributes:
        strategy: What is sharded.
        precision: Compute and reduce dtypes.
        prefetch: When backward gathers ahead.
    """

    strategy: ShardingStrategy
    precision: MixedPrecision
    prefetch: BackwardPrefetch


class Runtime:
    """The executor of one sharded model's schedule on one rank.

    Attributes:
        mesh: The ranks that share the model.
        units: Root first.
        policy: What was given to ``fully_shard``.
        account: Bytes of the engine's buffers.
        syncing: False inside ``no_sync``: gradients stay unsharded and are added up.
    """

    def __init__(
        self, units: list[Unit], mesh: Mesh, policy: Policy, account: Account, ignored: frozenset[int]
    ) -> None:
        """Start with every unit sharded; ``ignored`` are the ids of the parameters left out."""
        self.units = units
        self.mesh = mesh
        self.policy = policy
        self.account = account
        self.syncing = True
        self.ignored = ignored
        self.schedule = Schedule(
            [unit.trainable for unit in units],
            root=0,
            keeps_after_forward=policy.strategy.keeps_after_forward,
            prefetch=policy.prefetch,
        )
        self.agreement = Agreement(mesh, [unit.name for unit in units])
        self.open_calls: list[Call] = []
        self._reducing: Unit | None = None
        self._in_backward = False
        for unit in units:
            unit.watch_gradients(self.on_arrival)

    @property
    def root(self) -> Unit:
        """The unit of the model itself."""
        return self.units[0]

    def perform(self, actions: Iterable[Action]) -> None:
        """Do what the schedule says, in order."""
        for verb, index in actions:
            unit = self.units[index]
            if verb is Verb.GATHER:
                self.gather(unit)
            elif verb is Verb.PREFETCH:
                self._issue(unit)
            elif verb is Verb.HIDE:
                if not unit.held:
                    unit.hide()
            elif verb is Verb.RESHARD:
                self.release(unit)
            elif verb is Verb.REDUCE or unit.holds_gradient:
                self._reduce(unit)

    def release(self, unit: Unit) -> None:
        """Free the unit's full parameters, unless something wants them kept."""
        if unit.held:
            return
        if unit.pinned:
            unit.hide()
        else:
            unit.reshard()

    def gather(self, unit: Unit) -> None:
        """Have the unit's full parameters in place."""
        self._issue(unit)
        unit.finish_gather()

    def need(self, unit: Unit) -> None:
        """Backward computes with the unit's parameters now; normally they are there."""
        if not unit.shown:
            self.backward_event()
            self.gather(unit)

    def _issue(self, unit: Unit) -> None:
        if unit.state is State.SHARDED:
            self.agreement.before("all-gather", unit.index)
            unit.issue_gather()

    def _reduce(self, unit: Unit) -> None:
        if not self.syncing:
            return
        self._finish_reducing()
        self.agreement.before("reduce-scatter", unit.index)
        unit.issue_reduce()
        self._reducing = unit

    def _finish_reducing(self) -> None:
        if self._reducing is not None:
            self._reducing.finish_reduce()
            self._reducing = None

    # Events

    def begin_pass(self) -> None:
        """The root's forward starts, outside backward."""
        self.open_calls.clear()
        for unit in self.units:
            unit.open_calls = 0
            # A wrong guess of the schedule, an exception, or a forward that saw no backward: what was gathered then may
            # be older than the shards by now.
            self.release(unit)
        self.check_parameters()
        self.schedule.pass_begins()

    def forward_event(self) -> None:
        """Any forward outside backward: a backward that did not come to its end was given up."""
        if self._in_backward:
            self.reset()

    def end_pass(self, *, training: bool) -> None:
        """The root's forward is over."""
        self.schedule.pass_ends()
        if not training:
            self.agreement.pass_is_over()

    def backward_event(self) -> None:
        """Any sign of backward: make sure that its end will be noticed."""
        if not self._in_backward:
            self._in_backward = True
            for unit in self.units:
                unit.begin_backward()
            call_after_backward(self.end_backward)

    def on_arrival(self, unit: Unit, param: ShardedParam) -> None:
        """Autograd has accumulated the gradient of ``param``."""
        if param.full.grad is not None:
            self.receive(unit, param, lambda: unit.add_gradient(param), fused=False)

    def receive(self, unit: Unit, param: ShardedParam, write: Callable[[], None], *, fused: bool = True) -> None:
        """Have ``write`` put a gradient of ``param`` into its lane, and reduce the unit if that completes it."""
        self.backward_event()
        # At most one unit's unsharded gradients exist: the one before must be out before this one is allocated.
        if param.state.gradient is None or unit.reducing:
            self._finish_reducing()
        write()
        if unit.note_arrival(param, fused=fused):
            self.perform(self.schedule.all_arrived(unit.index))

    def end_backward(self) -> None:
        """Autograd is done: issue what is still due, wait for it, and leave every unit sharded."""
        self.perform(self.schedule.sweep())
        for unit in reversed(self.units):
            if unit.holds_gradient:  # outside the plan, or late
                self._reduce(unit)
        self._finish_reducing()
        if self.syncing:
            self._clear_unused()
        for unit in self.units:
            unit.end_backward(synced=self.syncing)
            unit.pinned = False
            self.release(unit)
        self.schedule.reset()
        self._in_backward = False

    def _clear_unused(self) -> None:
        """Take back the zero gradients of parameters that no rank used, as an unsharded run would leave them None."""
        arrived = [flag for unit in self.units for flag in unit.arrivals()]
        used = self.agreement.after_backward(arrived, self.schedule.trace)
        trainable = ((unit, p) for unit in self.units for p in unit.params if p.trainable)
        if used is not None:
            for (_, param), is_used in zip(trainable, used, strict=True):
                if not is_used and not param.had_gradient:
                    param.shard.grad = None

    def reset(self) -> None:
        """Drop everything a failed step left behind; shards and reduced gradients stay."""
        for unit in self.units:
            unit.drop_gradients()
            unit.pinned = False
            self.release(unit)
        self._reducing = None
        self.schedule.reset()
        self._in_backward = False

    def check_parameters(self) -> None:
        """Notice parameters that were moved, cast, replaced, added, frozen or unfrozen behind the engine's back.

        Raises:
            ShardingError: That happened; the message names the parameter and the remedy.
        """
        for unit in self.units:
            if not unit.shown:
                for param in unit.params:
                    _check_parameter(param)
        if self.agreement.first_pass:
            self._check_nothing_was_added()

    def _check_nothing_was_added(self) -> None:
        known = {id(one) for _, param in self.all_params() for one in (param.shard, param.full)} | self.ignored
        for name, param in self.root.module.named_parameters():
            if id(param) not in known:
                raise ShardingError(
                    f"{name} was added to the model after fully_shard, so nothing would keep it equal on all ranks. "
                    "Add it before sharding, or name it in ignored_params."
                )

    # What other code asks

    def all_params(self) -> Iterable[tuple[Unit, ShardedParam]]:
        """Every sharded parameter with its unit, root first."""
        return ((unit, param) for unit in self.units for param in unit.params)

    def __deepcopy__(self, memo: dict[int, Any]) -> Runtime:
        """Refuse, as :meth:`Unit.__deepcopy__` does."""
        self.root.__deepcopy__(memo)
        return self


def _check_parameter(param: ShardedParam) -> None:
    for module, key in param.slots:
        if module._parameters.get(key) is not param.shard:
            raise ShardingError(
                f"{param.meta.name} was replaced by another Parameter after fully_shard (load_state_dict(assign=True), "
                f"or an assignment to {type(module).__name__}.{key}). Change values in place, or replace it "
                "before sharding."
            )
    if param.shard.data_ptr() != param.address:
        _adopt(param)
    if param.shard._backward_hooks:
        raise ShardingError(
            f"{param.meta.name} has a gradient hook (register_hook), which would never be called: gradients arrive in "
            "the unsharded parameter. Change .grad after backward instead."
        )
    # Under no_grad nothing asks; peft freezes adapters for the length of a reference forward.
    if torch.is_grad_enabled() and param.shard.requires_grad != param.trainable:
        raise ShardingError(
            f"requires_grad of {param.meta.name} changed from {param.trainable} to {param.shard.requires_grad} "
            "after fully_shard. Freeze or unfreeze parameters before sharding: frozen ones live in lanes of their own."
        )


def _adopt(param: ShardedParam) -> None:
    """Take over the values of a shard that ``.to()`` or ``.data`` gave new memory."""
    expected = param.local_view(param.state.shard)
    if (param.shard.dtype, param.shard.device, param.shard.shape) != (expected.dtype, expected.device, expected.shape):
        raise ShardingError(
            f"{param.meta.name} is {tuple(param.shard.shape)} {param.shard.dtype} on {param.shard.device} but was "
            f"sharded as {tuple(expected.shape)} {expected.dtype} on {expected.device}: cast or move the model before "
            "fully_shard, or use mp_policy for a compute dtype."
        )
    with torch.no_grad():
        expected.copy_(param.shard)
        param.shard.data = expected
