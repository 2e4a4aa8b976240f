"""First values of parameters and buffers, before they are cut: one unit at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from fullshard.comm import Mesh, together
from fullshard.engine.setup.wrap import ParamSpec, UnitSpec
from fullshard.errors import MismatchError, WrapError


@dataclass(frozen=True)
class FirstValues:
    """Where parameters and buffers take their first values from, unit by unit.

    Attributes:
        initialize: Called, on every rank, with each module of a unit of which a part is on the meta device, outer
            modules first. It gives what the module itself owns memory and values (``module.to_empty(device=…,
            recurse=False)`` and what follows). The random state is the same on every rank, and restored. None: a
            module's ``reset_parameters()``, or ``_reset_parameters()`` of
            ``nn.MultiheadAttention``, or the ``_init_weights`` of a Hugging Face model.
        from_rank0: Every rank takes rank 0's values of the sharded parameters and of all buffers. Other ranks may hold
            other values, or none: on the meta device nothing but memory is made for them there.
    """

    initialize: Callable[[nn.Module], object] | None = None
    from_rank0: bool = False


class Initializer:
    """Gives the parts of one model their first values; every rank has one and asks it for the same, in one order."""

    def __init__(self, model: nn.Module, mesh: Mesh, device: torch.device, first: FirstValues) -> None:
        """Values are made on ``device``."""
        self.model = model
        self.mesh = mesh
        self.device = device
        self.first = first
        self._seed: int | None = torch.initial_seed() if first.from_rank0 else None
        self._given = first.from_rank0 and mesh.rank > 0  # what this rank has will be overwritten
        self._called: set[nn.Module] = set()

    def prepare_unit(self, index: int, spec: UnitSpec, others: frozenset[nn.Module]) -> None:
        """Have values in the unit's parameters, on every rank.

        Args:
            index: The unit's place among those of the model.
            spec: The unit.
            others: The modules of all units.

        Raises:
            WrapError: It is on the meta device, and its modules cannot initialise themselves.
        """
        if not self.first.from_rank0:
            self._make_values(index, spec, others)
            return
        together(self.mesh, lambda: self._make_values(index, spec, others))
        self.mesh.announce(f"first values of unit {spec.name} from rank 0")
        for member in spec.params:
            value = self._from_rank0(member.param.detach())
            if member.param.is_meta:
                _replace(member, value)
            elif self._given:
                member.param.data.copy_(value)

    def prepare_rest(self) -> None:
        """Have values in the buffers of modules that own buffers only (rotary embeddings), after all units.

        Raises:
            WrapError: Nothing gives a buffer its values.
        """
        if self.first.from_rank0:
            together(self.mesh, self._make_rest)
        else:
            self._make_rest()

    def share_buffers(self, modules: Sequence[nn.Module]) -> None:
        """Have rank 0's values in the buffers of ``modules``, if that is wanted; all ranks, alike.

        Raises:
            MismatchError: Ranks have different buffers.
        """
        if not self.first.from_rank0:
            return
        named = [(module, key, buffer) for module in modules for key, buffer in module._buffers.items()]
        held = [(module, key, buffer) for module, key, buffer in named if buffer is not None]
        described = [f"{type(m).__name__}.{key} {tuple(b.shape)} {b.dtype}" for m, key, b in held]
        everyone = self.mesh.all_gather_object(described)
        if any(theirs != everyone[0] for theirs in everyone):
            raise MismatchError(
                f"Ranks hold different buffers, and all are to take rank 0's values: {dict(enumerate(everyone))}. "
                "Build the same model with the same arguments on every rank."
            )
        self.mesh.announce("first values of buffers from rank 0")
        for module, key, buffer in held:
            module._buffers[key] = self._from_rank0(buffer)

    # One unit

    def _make_values(self, index: int, spec: UnitSpec, others: frozenset[nn.Module]) -> None:
        """Give what is on the meta device memory and values, the same on every rank, whatever its random state."""
        inside = list(_modules_of(spec, others - set(spec.modules)))
        initialize = self.first.initialize
        parts = [*(m.param for m in spec.params), *(b for m in inside if initialize for b in m._buffers.values())]
        if not any(part is not None and part.is_meta for part in parts):
            return
        if initialize is None and self._given:
            return
        if self._seed is None:
            self._seed = int(self.mesh.all_gather_object(torch.initial_seed())[0])
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            # A seed a unit, so that the values do not depend on how the model is cut up before this unit.
            torch.manual_seed((self._seed + 7919 * index) % (1 << 63))
            if initialize is None:
                self._run_own_initializers(spec)
            else:
                self._call(initialize, spec, inside)

    def _call(self, initialize: Callable[[nn.Module], object], spec: UnitSpec, inside: list[nn.Module]) -> None:
        """Have the caller's function fill the modules of the unit, and those its tied parameters are registered at."""
        owners = (module for member in spec.params for module, _ in member.slots)
        for module in dict.fromkeys([*inside, *owners]):
            if module not in self._called:
                self._called.add(module)
                initialize(module)
        for member in spec.params:
            module, key = member.slots[0]
            made = module._parameters[key]
            if not member.param.is_meta and made is member.param:
                continue
            if made is None or made.is_meta or (made.shape, made.dtype) != (member.param.shape, member.param.dtype):
                found = "None" if made is None else f"{tuple(made.shape)} {made.dtype} on {made.device}"
                raise WrapError(
                    f"The function that initialises modules left {member.names[0]} as {found}; it must be "
                    f"{tuple(member.param.shape)} {member.param.dtype}, with memory. Have it call "
                    "module.to_empty(device=…, recurse=False) first."
                )
            _replace(member, made.data)

    def _run_own_initializers(self, spec: UnitSpec) -> None:
        owners: dict[int, nn.Module] = {}
        for member in spec.params:
            if member.param.is_meta:
                _replace(member, torch.empty_like(member.param, device=self.device))
                owners.update((id(module), module) for module, _ in member.slots)
        bare = {id(module) for module in owners.values() if self._own_initializer(module) is None}
        lacking = [(m.names[0], type(m.slots[0][0]).__name__) for m in spec.params if id(m.slots[0][0]) in bare]
        if lacking:
            classes = ", ".join(sorted({name for _, name in lacking}))
            raise WrapError(
                f"Unit {spec.name} is on the meta device, and nothing gives {', '.join(name for name, _ in lacking)} "
                f"first values: {classes} has no reset_parameters(), which a module on the "
                "meta device is initialised by. Add that method to the class, or build the model on CPU."
            )
        everything = [module for member in spec.modules for module in member.modules()]
        for module in reversed(everything):  # children first, as Module.apply does
            wanted = set(owners) if hasattr(self.model, "_init_weights") else {id(module)} & set(owners)
            if any(id(child) in wanted for child in module.modules()):
                self._initialize_module(module)

    def _own_initializer(self, module: nn.Module) -> Callable[[], object] | None:
        """What gives the module its first values: Hugging Face's way, or torch's."""
        of_model = getattr(self.model, "_init_weights", None)
        if of_model is not None:
            return partial(of_model, module)
        # Elsewhere a method of this name often fills all that is below the module, in whichever unit it is.
        of_attention = module._reset_parameters if isinstance(module, nn.MultiheadAttention) else None
        return getattr(module, "reset_parameters", of_attention)

    def _initialize_module(self, module: nn.Module) -> None:
        """Give the module's meta buffers memory, and all it holds its first values.

        Raises:
            WrapError: A buffer is still unwritten then.
        """
        fresh: dict[str, torch.Tensor] = {}
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = fresh[key] = _marked_like(buffer, self.device)
        initializer = self._own_initializer(module)
        if initializer is not None:
            initializer()
        if self.device.type == "meta":
            return  # only laid out: there are no values
        for key, marked in fresh.items():
            if torch.equal(module._buffers[key].nan_to_num(7.0), _marked_like(marked, self.device).nan_to_num(7.0)):  # type: ignore[union-attr]
                raise WrapError(
                    f"Buffer {key} of {type(module).__name__} is on the meta device, and nothing gives it its values: "
                    "set it in reset_parameters(), or build the model on CPU."
                )

    # What is no unit's

    def _make_rest(self) -> None:
        if self._given:
            return  # memory comes with rank 0's values
        with torch.no_grad():
            for module in self.model.modules():
                if any(buffer is not None and buffer.is_meta for buffer in module._buffers.values()):
                    self._initialize_module(module)

    def _from_rank0(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's values of ``tensor``, of the same shape and dtype, on the device of collectives."""
        device = self.mesh.device
        here = torch.empty(tensor.shape, dtype=tensor.dtype, device=device) if self._given else tensor.to(device)
        here = here.contiguous()
        if here.numel():
            self.mesh.broadcast(here.reshape(-1).view(torch.uint8))
        return here


def _modules_of(spec: UnitSpec, others: frozenset[nn.Module]) -> Iterator[nn.Module]:
    """The unit's modules and those in them, without the other units', level by level."""
    level, seen = list(spec.modules), set(spec.modules)
    while level:
        yield from level
        inner = dict.fromkeys(child for module in level for child in module.children())
        level = [child for child in inner if child not in seen and child not in others]
        seen.update(level)


def _replace(member: ParamSpec, value: torch.Tensor) -> None:
    """Register ``value`` as the parameter, at all its places."""
    member.param = nn.Parameter(value, member.param.requires_grad)
    for module, key in member.slots:
        module._parameters[key] = member.param


def _marked_like(buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory for a buffer, filled with what no initialiser writes: NaN, or the lowest integer (False for booleans)."""
    if buffer.is_floating_point() or buffer.is_complex():
        return torch.full_like(buffer, float("nan"), device=device)
    return torch.full_like(
        buffer, False if buffer.dtype == torch.bool else torch.iinfo(buffer.dtype).min, device=device
    )
