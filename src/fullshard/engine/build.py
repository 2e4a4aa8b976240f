"""From unsharded parameters, on CPU or without memory, to units: one unit at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import nn

from fullshard.comm import Device, Mesh, SoloComm
from fullshard.engine.buffers import Account
from fullshard.engine.lane import CutLane, LaneState, Origin
from fullshard.engine.param import ShardedParam
from fullshard.engine.precision import Dtypes, dtypes_of, torch_dtype
from fullshard.engine.unit import Unit
from fullshard.engine.wrap import ParamSpec, UnitSpec, is_table
from fullshard.errors import WrapError
from fullshard.layout import Lane, plan_unit
from fullshard.layout.sharded import ShardMeta
from fullshard.policy import ShardingStrategy, UnitPolicy


class UnitBuilder:
    """Builds the units of one model; every rank builds the same ones in the same order."""

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        policy: UnitPolicy,
        account: Account,
        device: Device,
        kept: frozenset[int],
    ) -> None:
        """Units compute on ``device``; ``kept`` are the ids of the modules that compute in float32."""
        self.model = model
        self.mesh = mesh
        self.policy = policy
        self.account = account
        self.runtime_device = device
        self.device = device.device
        self.kept = kept
        self.seed: int | None = None

    def build(self, index: int, spec: UnitSpec, *, values: bool) -> Unit:
        """Make the unit: never more than its own parameters are in memory beside the shards made so far.

        Args:
            index: Its place among the model's units.
            spec: Its modules and parameters.
            values: Whether the shards get the parameters' values, or their initial ones; else they hold zeros, nothing
                is initialised, and somebody fills them.

        Raises:
            WrapError: The unit is on the meta device and its modules cannot initialise themselves.
        """
        if values and any(param.param.is_meta for param in spec.params):
            self._initialize(index, spec)
        cut = [piece for group in self._groups(spec) for piece in self._cut(group, values=values)]
        # From here on the unsharded values are not needed; their memory goes before the gathered buffer comes.
        for member in spec.params:
            if not member.param.is_meta:
                member.param.data = member.param.data.new_empty(0)
        lanes: list[LaneState] = []
        params: list[ShardedParam] = []
        for piece in cut:
            state = LaneState(piece, self.runtime_device, self.account)
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
        if self.policy.offload is None:
            return piece
        return self.runtime_device.pin(piece.cpu()) if self._pinned else piece.cpu()

    def _cut(self, group: list[ParamSpec], *, values: bool) -> Iterable[CutLane]:
        """Plan the lanes of one group and copy this rank's part of them, if ``values`` are wanted."""
        first, dtypes = group[0].param, self._dtypes(group[0])
        replicated = self.policy.frozen == "replicate" and not first.requires_grad
        mesh = Mesh(SoloComm(self.mesh.device), self.mesh.everyone) if replicated else self.mesh
        layout = plan_unit(tuple(tuple(member.param.shape) for member in group), mesh.shard.size)
        for lane in layout.lanes:
            shard = torch.zeros(lane.shard_numel, dtype=dtypes.shard, device=self.device)
            if values:
                _copy_values(group, lane, mesh.shard.rank, shard)
            members = [group[placement.index] for placement in lane.placements]
            yield CutLane(
                lane=lane,
                mesh=mesh,
                shard=self._host(shard),
                shapes=[tuple(member.param.shape) for member in members],
                origins=[Origin(m.param, tuple(m.names), m.slots, is_table(m)) for m in members],
                dtypes=dtypes,
                trainable=first.requires_grad,
                pinned=self._pinned,
                whole=replicated or self.policy.strategy is ShardingStrategy.NO_SHARD,
            )

    def _sharded_params(self, state: LaneState, piece: CutLane) -> Iterable[ShardedParam]:
        for placement, shape, origin in zip(piece.lane.placements, piece.shapes, piece.origins, strict=True):
            meta = ShardMeta(origin.names[0], origin.names[1:], shape, piece.lane, placement, piece.mesh.shard.rank)
            yield ShardedParam(meta, state, origin, trainable=piece.trainable)

    # Initialisation without memory

    def _initialize(self, index: int, spec: UnitSpec) -> None:
        """Give the unit's meta parameters and buffers memory and their initial values, the same on every rank."""
        if self.seed is None:
            self.seed = int(self.mesh.all_gather_object(torch.initial_seed())[0])
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
        owned = {id(m) for m in owners}
        lacking = sorted({type(m).__name__ for m in owners if self._initializer(m) is None})
        if lacking:
            raise WrapError(
                f"Unit {spec.name} is on the meta device, and {', '.join(lacking)} has no reset_parameters() to give "
                "its parameters their first values. Add that method, or build the model on CPU."
            )
        everything = [module for member in spec.modules for module in member.modules()]
        for module in reversed(everything):  # children first, as Module.apply does
            wanted = owned if hasattr(self.model, "_init_weights") else {id(module)} & owned
            if any(id(child) in wanted for child in module.modules()):
                self._initialize_module(module)

    def _initializer(self, module: nn.Module) -> Callable[[], object] | None:
        """What gives the module its first values: Hugging Face's way, or torch's."""
        of_model = getattr(self.model, "_init_weights", None)
        if of_model is not None:
            return partial(of_model, module)
        return getattr(module, "reset_parameters", None)

    def _initialize_module(self, module: nn.Module) -> None:
        """Give the module's meta buffers memory, and all it holds its first values.

        Raises:
            WrapError: A buffer is still unwritten then.
        """
        fresh: dict[str, torch.Tensor] = {}
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = fresh[key] = _marked_like(buffer, self.device)
        initializer = self._initializer(module)
        if initializer is not None:
            initializer()
        for key, marked in fresh.items():
            if torch.equal(module._buffers[key].nan_to_num(7.0), _marked_like(marked, self.device).nan_to_num(7.0)):  # type: ignore[union-attr]
                raise WrapError(
                    f"Buffer {key} of {type(module).__name__} is on the meta device, and nothing gives it its values: "
                    "set it in reset_parameters(), or build the model on CPU."
                )

    def initialize_rest(self) -> None:
        """Give modules that own buffers only (rotary embeddings) their values, after all units are built.

        Raises:
            WrapError: Nothing gives a buffer its values.
        """
        with torch.no_grad():
            for module in self.model.modules():
                if any(buffer is not None and buffer.is_meta for buffer in module._buffers.values()):
                    self._initialize_module(module)


def _copy_values(group: list[ParamSpec], lane: Lane, rank: int, shard: torch.Tensor) -> None:
    """Copy a rank's part of a lane's parameters into ``shard``, (shard_numel,)."""
    low, _ = lane.shard_bounds(rank)
    for placement in lane.placements:
        start, stop = lane.local_range(placement, rank)
        source = group[placement.index].param.detach().reshape(-1)[start:stop]
        offset = placement.start + start - low
        if stop > start:
            shard[offset : offset + stop - start].copy_(source)


def _marked_like(buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory for a buffer, filled with what no initialiser writes: NaN, or the lowest integer (False for booleans)."""
    if buffer.is_floating_point() or buffer.is_complex():
        return torch.full_like(buffer, float("nan"), device=device)
    return torch.full_like(
        buffer, False if buffer.dtype == torch.bool else torch.iinfo(buffer.dtype).min, device=device
    )


def move_buffers(modules: Iterable[nn.Module], device: torch.device, dtype: str | None) -> None:
    """Move buffers to the device, and floating ones to the named dtype; meta ones are left as they are."""
    for module in modules:
        for key, buffer in module._buffers.items():
            if buffer is None or buffer.is_meta:
                continue
            wanted = torch_dtype(dtype) if buffer.is_floating_point() else None
            module._buffers[key] = buffer.to(device=device, dtype=wanted)
