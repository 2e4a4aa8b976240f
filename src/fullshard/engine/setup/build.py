"""From unsharded parameters, on CPU or without memory, to units: one unit at a time."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from fullshard.comm import Device, Mesh, SoloComm
from fullshard.engine.setup.wrap import ParamSpec, UnitSpec, is_table
from fullshard.engine.step.buffers import Account
from fullshard.engine.step.lane import CutLane, Lane, Origin
from fullshard.engine.step.param import ShardedParam
from fullshard.engine.step.precision import Dtypes, dtypes_of, torch_dtype
from fullshard.engine.step.unit import Unit
from fullshard.layout import LaneLayout, plan_unit
from fullshard.layout.sharded import ShardMeta
from fullshard.policy import ShardingStrategy, UnitPolicy


class UnitBuilder:
    """Builds the units of one model; every rank builds the same ones in the same order."""

    def __init__(
        self,
        mesh: Mesh,
        policy: UnitPolicy,
        account: Account,
        device: Device,
        kept: frozenset[int],
    ) -> None:
        """Units compute on ``device``; ``kept`` are the ids of the modules that compute in float32."""
        self.mesh = mesh
        self.policy = policy
        self.account = account
        self.runtime_device = device
        self.device = device.device
        self.kept = kept

    def build(self, spec: UnitSpec, *, values: bool) -> Unit:
        """Make the unit: never more than its own parameters are in memory beside the shards made so far.

        Args:
            spec: Its modules and parameters.
            values: Whether the shards get the parameters' values; else they hold zeros, and somebody fills them.
        """
        cut = [piece for group in self._groups(spec) for piece in self._cut(group, values=values)]
        # From here on the unsharded values are not needed; their memory goes before the gathered buffer comes.
        for member in spec.params:
            if not member.param.is_meta:
                member.param.data = member.param.data.new_empty(0)
        lanes: list[Lane] = []
        params: list[ShardedParam] = []
        for piece in cut:
            state = Lane(piece, self.runtime_device, self.account)
            lanes.append(state)
            params += self._sharded_params(state, piece)
        return Unit(spec.name, spec.modules, params, lanes, self.policy)

    def _dtypes(self, member: ParamSpec) -> Dtypes:
        kept = any(id(module) in self.kept for module, _ in member.slots)
        return dtypes_of(self.policy.precision, member.param, kept=kept)

    def _groups(self, spec: UnitSpec) -> Iterable[list[ParamSpec]]:
        """Parameters that may share a lane: the same dtypes, all trainable or all frozen, and each table alone."""
        groups: dict[tuple[object, ...], list[ParamSpec]] = {}
        for member in spec.params:
            alone = id(member) if is_table(member) else None
            groups.setdefault((self._dtypes(member), member.param.requires_grad, alone), []).append(member)
        return groups.values()

    @property
    def _pinned(self) -> bool:
        offload = self.policy.offload
        return offload is not None and offload.pin_memory and self.device.type != "cpu"

    def _host(self, piece: torch.Tensor) -> torch.Tensor:
        """A shard in host memory, if that is the policy."""
        if self.policy.offload is None or piece.is_meta:
            return piece
        return self.runtime_device.pin(piece.cpu()) if self._pinned else piece.cpu()

    def _cut(self, group: list[ParamSpec], *, values: bool) -> Iterable[CutLane]:
        """Plan the lanes of one group and copy this rank's part of them, if ``values`` are wanted."""
        first, dtypes = group[0].param, self._dtypes(group[0])
        replicated = self.policy.frozen == "replicate" and not first.requires_grad
        mesh = Mesh(SoloComm(self.mesh.device), self.mesh.everyone) if replicated else self.mesh
        layout = plan_unit(tuple(tuple(member.param.shape) for member in group), mesh.shard_group.size)
        for lane in layout.lanes:
            shard = torch.zeros(lane.shard_numel, dtype=dtypes.shard, device=self.device)
            if values:
                _copy_values(group, lane, mesh.shard_group.rank, shard)
            members = [group[placement.index] for placement in lane.placements]
            yield CutLane(
                layout=lane,
                mesh=mesh,
                shard=self._host(shard),
                shapes=[tuple(member.param.shape) for member in members],
                origins=[Origin(m.param, tuple(m.names), m.slots, is_table(m)) for m in members],
                dtypes=dtypes,
                trainable=first.requires_grad,
                pinned=self._pinned,
                whole=replicated or self.policy.strategy is ShardingStrategy.NO_SHARD,
            )

    def _sharded_params(self, lane: Lane, piece: CutLane) -> Iterable[ShardedParam]:
        for placement, shape, origin in zip(piece.layout.placements, piece.shapes, piece.origins, strict=True):
            meta = ShardMeta(
                origin.names[0], origin.names[1:], shape, piece.layout, placement, piece.mesh.shard_group.rank
            )
            yield ShardedParam(meta, lane, origin, trainable=piece.trainable)


def _copy_values(group: list[ParamSpec], lane: LaneLayout, rank: int, shard: torch.Tensor) -> None:
    """Copy a rank's part of a lane's parameters into ``shard``, (shard_numel,)."""
    low, _ = lane.shard_bounds(rank)
    for placement in lane.placements:
        start, stop = lane.local_range(placement, rank)
        source = group[placement.index].param.detach().reshape(-1)[start:stop]
        offset = placement.start + start - low
        if stop > start:
            shard[offset : offset + stop - start].copy_(source)


def move_buffers(modules: Iterable[nn.Module], device: torch.device, dtype: str | None) -> None:
    """Move buffers to the device, and floating ones to the named dtype; meta ones are left as they are."""
    for module in modules:
        for key, buffer in module._buffers.items():
            if buffer is None or buffer.is_meta:
                continue
            wanted = torch_dtype(dtype) if buffer.is_floating_point() else None
            module._buffers[key] = buffer.to(device=device, dtype=wanted)
