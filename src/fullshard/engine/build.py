"""From unsharded parameters, on CPU or without memory, to units: one unit at a time."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from fullshard.comm import Comm
from fullshard.engine.buffers import Account, ReusableBuffer
from fullshard.engine.lane import LaneState
from fullshard.engine.param import ShardedParam
from fullshard.engine.precision import compute_dtype, reduce_dtype, shard_dtype
from fullshard.engine.unit import Unit
from fullshard.engine.wrap import ParamSpec, UnitSpec
from fullshard.errors import WrapError
from fullshard.layout import Lane, plan_unit
from fullshard.layout.sharded import ShardMeta
from fullshard.policy import MixedPrecision


class UnitBuilder:
    """Builds the units of one model; every rank builds the same ones in the same order."""

    def __init__(
        self, model: nn.Module, comm: Comm, policy: MixedPrecision, account: Account, device: torch.device
    ) -> None:
        """Shards live on ``device``."""
        self.model = model
        self.comm = comm
        self.policy = policy
        self.account = account
        self.device = device
        self.seed: int | None = None

    def build(self, index: int, spec: UnitSpec) -> Unit:
        """Make the unit: never more than its own parameters are in memory beside the shards made so far.

        Raises:
            WrapError: The unit is on the meta device and its modules cannot initialise themselves.
        """
        if any(param.param.is_meta for param in spec.params):
            self._initialize(index, spec)
        groups: dict[tuple[object, ...], list[ParamSpec]] = {}
        for param in spec.params:
            p = param.param
            dtypes = (shard_dtype(self.policy, p), compute_dtype(self.policy, p), reduce_dtype(self.policy, p))
            groups.setdefault((*dtypes, p.requires_grad), []).append(param)
        lanes: list[LaneState] = []
        params: list[ShardedParam] = []
        for members in groups.values():
            layout = plan_unit(tuple(tuple(m.param.shape) for m in members), self.comm.size)
            for lane in layout.lanes:
                lanes.append(self._fill_lane(lane, members))
                params += self._sharded_params(lane, lanes[-1], members)
        for member in spec.params:
            del member.param  # the last reference to the unsharded memory, but for the caller's own
        return Unit(index, spec.name, spec.module, params, lanes, self.comm)

    def _fill_lane(self, lane: Lane, members: list[ParamSpec]) -> LaneState:
        first = members[lane.placements[0].index].param
        full = ReusableBuffer(
            lane.world_size * lane.shard_numel, compute_dtype(self.policy, first), self.device, self.account
        )
        shard = torch.zeros(lane.shard_numel, dtype=shard_dtype(self.policy, first), device=self.device)
        state = LaneState(lane, full, shard, reduce_dtype(self.policy, first), self.account)
        state.trainable = first.requires_grad
        state.shapes = [tuple(members[placement.index].param.shape) for placement in lane.placements]
        low, _ = lane.shard_bounds(self.comm.rank)
        for placement in lane.placements:
            start, stop = lane.local_range(placement, self.comm.rank)
            source = members[placement.index].param.detach().reshape(-1)[start:stop]
            offset = placement.start + start - low
            if stop > start:
                shard[offset : offset + stop - start].copy_(source)
        return state

    def _sharded_params(self, lane: Lane, state: LaneState, members: list[ParamSpec]) -> Iterable[ShardedParam]:
        for placement in lane.placements:
            member = members[placement.index]
            shape = tuple(member.param.shape)
            meta = ShardMeta(member.names[0], tuple(member.names[1:]), shape, lane, placement, self.comm.rank)
            yield ShardedParam(meta, state, member.slots, trainable=state.trainable)

    # Initialisation without memory

    def _initialize(self, index: int, spec: UnitSpec) -> None:
        """Give the unit's meta parameters and buffers memory and their initial values, the same on every rank."""
        if self.seed is None:
            self.seed = int(self.comm.all_gather_object(torch.initial_seed())[0])
        owners: dict[int, nn.Module] = {}
        for member in spec.params:
            if not member.param.is_meta:
                continue
            member.param = nn.Parameter(torch.empty_like(member.param, device=self.device), member.param.requires_grad)
            for module, key in member.slots:
                module._parameters[key] = member.param
                owners[id(module)] = module
        devices = [self.device] if self.device.type == "cuda" else []
        seed = self.seed
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            # A seed a unit, so that the values do not depend on how the model is cut up before this unit.
            torch.manual_seed((seed + 7919 * index) % (1 << 63))
            self._run_initializers(spec, list(owners.values()))

    def _run_initializers(self, spec: UnitSpec, owners: list[nn.Module]) -> None:
        initialize = getattr(self.model, "_init_weights", None)  # Hugging Face models
        if initialize is not None:
            owned = {id(m) for m in owners}
            for module in reversed(list(spec.module.modules())):  # children first, as Module.apply does
                if any(id(child) in owned for child in module.modules()):
                    _materialize_buffers(module, self.device)
                    initialize(module)
            return
        lacking = sorted({type(m).__name__ for m in owners if not hasattr(m, "reset_parameters")})
        if lacking:
            raise WrapError(
                f"Unit {spec.name} is on the meta device, and {', '.join(lacking)} has no reset_parameters() to give "
                "its parameters their first values. Add that method, or build the model on CPU."
            )
        for module in owners:
            _materialize_buffers(module, self.device)
            module.reset_parameters()  # type: ignore[operator]


def _materialize_buffers(module: nn.Module, device: torch.device) -> None:
    for key, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[key] = torch.empty_like(buffer, device=device)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move buffers to the device of the shards; the meta ones are left for the units' initialisers."""
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta and buffer.device != device:
                module._buffers[key] = buffer.to(device)
