"""The model is the same on all ranks: comparing it before it is sharded, and its first values."""

from __future__ import annotations

import sys
import time
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

import torch
from torch import nn

from fullshard.core.comm import Comm, Mesh, group_behind, together
from fullshard.core.engine.extension.checksum import checksums
from fullshard.core.engine.setup.loaded import KeepLoaded
from fullshard.core.engine.setup.wrap import ParamSpec, UnitSpec
from fullshard.core.engine.step.unit import plain_type
from fullshard.core.shards import rows_of
from fullshard.core.transformers_private import initializer
from fullshard.errors import MismatchError, WrapError
from fullshard.sizes import format_bytes

_SAID_AFTER_S = 2.0

_WARNED: weakref.WeakSet[object] = weakref.WeakSet()
"""Groups whose rank 0 has warned that ranks held different values."""


@dataclass(frozen=True)
class Differing:
    """Units and buffers in which ranks hold different values and take rank 0's; the same on every rank.

    Attributes:
        units: Positions of units.
        buffers: Names of buffers.
    """

    units: frozenset[int] = frozenset()
    buffers: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        """Return True if there are any."""
        return bool(self.units or self.buffers)


def _describe(unit: UnitSpec) -> str:
    """Describe everything about a unit that ranks must agree on, except values."""
    params = ", ".join(
        f"{'='.join(s.names)} {tuple(s.param.shape)} {s.param.dtype}{'' if s.param.requires_grad else ' frozen'}"
        f"{'' if s.parallel is None else f' of {s.parallel.shape}, {s.parallel.placements}'}"
        for s in unit.params
    )
    return f"{unit.name}: {params}"


def check_same_model(
    mesh: Mesh, units: Sequence[UnitSpec], about: Sequence[str], *, compare_values: bool
) -> frozenset[int]:
    """Compare the model, its units, what is said ``about`` it and the values of parameters; every rank calls it once.

    Values are compared by a checksum of all bits: with different seeds, or weights loaded on one rank only, the model
    would be assembled from several. Values to be overwritten are not compared.

    Returns:
        The positions of the units in which values differ.

    Raises:
        MismatchError: On every rank, with the first difference that is not one of values.
    """
    described = [*about, *map(_describe, units)]
    compared = units if compare_values else ()
    values = _unit_checksums(mesh, compared)
    everyone = mesh.all_gather_object(([zlib.crc32(text.encode()) for text in described], values))
    structures = [structure for structure, _ in everyone]
    if any(structure != structures[0] for structure in structures):
        place = next(
            (i for i, marks in enumerate(zip(*structures, strict=False)) if len(set(marks)) > 1),
            min(len(structure) for structure in structures),
        )
        mine = described[place] if place < len(described) else "no more units"
        texts = mesh.all_gather_object(mine if len(mine) < 400 else mine[:400] + " …")
        raise MismatchError(
            "Ranks hold different models or policies. First difference: "
            + "; ".join(f"rank {rank} has {text}" for rank, text in enumerate(texts))
            + ". Build the same model with the same arguments on every rank."
        )
    by_unit = zip(*(values for _, values in everyone), strict=True)
    return frozenset(index for index, marks in enumerate(by_unit) if len(set(marks)) > 1)


def _checksums(unit: UnitSpec) -> list[int]:
    return checksums([spec.param for spec in unit.params])


def _unit_checksums(mesh: Mesh, units: Sequence[UnitSpec]) -> list[bytes]:
    """Return a digest of the values of each unit; rank 0 says it if that took long."""
    params, started = [spec.param for unit in units for spec in unit.params], time.monotonic()
    sums = iter(checksums(params))
    digests = [blake2b(repr([next(sums) for _ in unit.params]).encode(), digest_size=8).digest() for unit in units]
    seconds = time.monotonic() - started
    if seconds > _SAID_AFTER_S and mesh.rank == 0:
        size = sum(param.numel() * param.itemsize for param in params if not param.is_meta)
        print(
            f"fullshard: compared all {format_bytes(size)} of the model with other ranks' in {seconds:.1f} s. "
            "fully_shard(…, weights=…) and FirstValues(from_rank0=True) have nothing to compare.",
            file=sys.stderr,
            flush=True,
        )
    return digests


def refuse_different_values(mesh: Mesh, units: Sequence[UnitSpec], differing: frozenset[int]) -> None:
    """Raise if there are units in which ranks hold different values; every rank calls it.

    Raises:
        MismatchError: On every rank, with the first parameter that differs.
    """
    if not differing:
        return
    first = min(differing)
    name, marks = _first_parameter(mesh, units[first])
    raise MismatchError(
        f"Ranks hold different values in unit {units[first].name}, first in {name} (checksums "
        f"{dict(enumerate(marks))}). Use the same seed on every rank before building the model (torch.manual_seed), "
        "load the same weights, or take rank 0's: fully_shard(…, first_values=fullshard.FirstValues("
        "from_rank0=True))."
    )


def refuse_different_copies(
    mesh: Mesh, everyone: Mesh, blocks: Comm, units: Sequence[UnitSpec], model: nn.Module
) -> None:
    """Raise if ranks that divide a model hold different values of what they do not divide; every rank calls it.

    Args:
        mesh: The ranks that share rows; of these the first is asked, whose values the others have or take.
        everyone: All ranks.
        blocks: The ranks that divide the model.
        units: Its units.
        model: The model, of whose parameters that were sharded before each rank compares its rows.

    Raises:
        MismatchError: On every rank, with the first parameter that differs.
    """
    copies = [s for unit in units for s in unit.params if s.parallel is None or s.parallel.block is None]
    held = {spec.names[0]: spec.param for spec in copies if mesh.rank == 0}
    sharded = ((name, p) for name, p in model.named_parameters() if hasattr(p, "shard_meta"))
    held |= {name: rows_of(p) for name, p in sharded if vars(p)["shard_meta"].block is None}
    mine = dict(zip(held, checksums(list(held.values())), strict=True))
    by_block = blocks.all_gather_object(mine)

    def check() -> None:
        for name in mine:
            marks = [of_block[name] for of_block in by_block]
            if len(set(marks)) > 1:
                raise MismatchError(
                    f"The {blocks.size} ranks of tensor parallelism hold different values of {name}, which they do not "
                    f"divide (checksums {marks}). Use the same seed on every rank before building the model "
                    "(torch.manual_seed), or load the same weights."
                )

    together(everyone, check)


def different_values(
    mesh: Mesh, units: Sequence[UnitSpec], differing: frozenset[int], buffers: Mapping[str, torch.Tensor]
) -> Differing:
    """Return where ranks hold different values, including ``buffers``. Every rank calls it.

    Rank 0 warns once for each group of ranks. Buffers that are not the same in name, shape and dtype on every rank are
    not compared: modules that are left out of sharding may differ between ranks.
    """
    sums = checksums(list(buffers.values()))
    mine = {name: (tuple(b.shape), b.dtype, of_b) for (name, b), of_b in zip(buffers.items(), sums, strict=True)}
    everyone = mesh.all_gather_object(mine)
    common = [name for name in everyone[0] if all(_same_kind(name, theirs, everyone[0]) for theirs in everyone)]
    found = Differing(differing, frozenset(n for n in common if len({theirs[n] for theirs in everyone}) > 1))
    if found:
        first = _first_parameter(mesh, units[min(differing)])[0] if differing else next(iter(sorted(found.buffers)))
        _warn_of_different_values(mesh, first)
    return found


def _same_kind(name: str, theirs: Mapping[str, tuple[object, ...]], ours: Mapping[str, tuple[object, ...]]) -> bool:
    return name in theirs and theirs[name][:2] == ours[name][:2]


def _first_parameter(mesh: Mesh, unit: UnitSpec) -> tuple[str, Sequence[int]]:
    """Return the first parameter of ``unit`` whose values differ, and its checksums by rank; every rank calls it."""
    by_param = zip(*mesh.all_gather_object(_checksums(unit)), strict=True)
    return next(
        (spec.names[0], marks) for spec, marks in zip(unit.params, by_param, strict=True) if len(set(marks)) > 1
    )


def _warn_of_different_values(mesh: Mesh, name: str) -> None:
    group = group_behind(mesh)
    if mesh.rank > 0 or group in _WARNED:
        return
    _WARNED.add(group)
    warnings.warn(
        f"Ranks hold different values, first in {name}: each drew its own, or loaded other weights. All {mesh.size} "
        "ranks take rank 0's. Use the same seed on every rank before building the model (torch.manual_seed) to avoid "
        "sending them. Further differences on these ranks are not reported.",
        stacklevel=5,
    )


@dataclass(frozen=True)
class FirstValues:
    """The source of first values of parameters and buffers, unit by unit.

    Attributes:
        initialize: Called on every rank with each module of a unit that is partly on the meta device, outer modules
            first. It must allocate and fill what the module itself owns (``module.to_empty(device=…,
            recurse=False)``, then the values); what has memory keeps its values. The random state is the same on every
            rank, and restored afterwards. None: ``reset_parameters()`` of a module, ``_reset_parameters()`` of
            ``nn.MultiheadAttention``, or ``_init_weights`` of a Hugging Face model.
        from_rank0: Whether every rank takes rank 0's values of sharded parameters and all buffers. Other ranks may
            hold other values or be on the meta device, where only memory is allocated for them.
        from_rank0_if_different: Whether ranks that hold different values take rank 0's, in the units and buffers that
            differ, and rank 0 warns once; otherwise that is an error.
        rest_later: Whether the caller fills what nothing initializes on the meta device, after sharding: such buffers
            stay there, and such parameters are NaN with a warning; otherwise that is an error.
    """

    initialize: Callable[[nn.Module], object] | None = None
    from_rank0: bool = False
    from_rank0_if_different: bool = False
    rest_later: bool = False


class Initializer:
    """Gives the units of a model their first values; every rank makes the same calls in the same order."""

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        everyone: Mesh,
        device: torch.device,
        first: FirstValues,
        differing: Differing,
    ) -> None:
        """Make values on ``device``, alike for ``everyone``; units and buffers that are ``differing`` take rank 0's."""
        self.model = model
        self.mesh = mesh
        self.device = device
        self.first = first
        self.differing = differing
        self._seed: int | None = torch.initial_seed() if first.from_rank0 else None
        if differing or everyone is not mesh:  # created now: perhaps only some ranks make values
            self._seed = int(everyone.all_gather_object(torch.initial_seed())[0])
        self._called: set[nn.Module] = set()

    def prepare_unit(self, index: int, spec: UnitSpec, others: frozenset[nn.Module]) -> None:
        """Fill the unit's parameters; every rank calls it.

        Args:
            index: The unit's position in the model.
            spec: The unit.
            others: The modules of all units.

        Raises:
            WrapError: It is on the meta device, and its modules cannot initialize themselves.
        """
        if not (self.first.from_rank0 or index in self.differing.units):
            self._make_values(index, spec, others)
            return
        overwritten = self.mesh.rank > 0
        together(self.mesh, lambda: self._make_values(index, spec, others, overwritten=overwritten))
        self.mesh.announce(f"first values of unit {spec.name} from rank 0")
        for member in spec.params:
            value = self._from_rank0(member.param.detach())
            if member.param.is_meta:
                _replace(member, value)
            elif overwritten:
                member.param.data.copy_(value)

    def prepare_rest(self) -> None:
        """Fill the buffers of modules without parameters (rotary embeddings), after all units.

        Raises:
            WrapError: Nothing fills a buffer.
        """
        if self.first.from_rank0 or self.differing:
            together(self.mesh, self._make_rest)
        else:
            self._make_rest()

    def share_buffers(self, modules: Sequence[nn.Module]) -> None:
        """Copy rank 0's values into the buffers of ``modules``: all if ``from_rank0``, else those that differ.

        Every rank calls it.

        Raises:
            MismatchError: Ranks have different buffers, with ``from_rank0``.
        """
        if not self.first.from_rank0:
            self._share_differing_buffers()
            return
        named = [(module, key, buffer) for module in modules for key, buffer in module._buffers.items()]
        held = [(module, key, buffer) for module, key, buffer in named if buffer is not None]
        described = [f"{type(m).__name__}.{key} {tuple(b.shape)} {b.dtype}" for m, key, b in held]
        everyone = self.mesh.all_gather_object(described)
        if any(theirs != everyone[0] for theirs in everyone):
            raise MismatchError(
                f"All ranks take rank 0's values, but they hold different buffers: {dict(enumerate(everyone))}. "
                "Build the same model with the same arguments on every rank."
            )
        self.mesh.announce("first values of buffers from rank 0")
        for module, key, buffer in held:
            module._buffers[key] = self._from_rank0(buffer)

    def _share_differing_buffers(self) -> None:
        held = {
            f"{path}.{key}" if path else key: (module, key)
            for path, module in self.model.named_modules()
            for key in module._buffers
        }
        for name in sorted(self.differing.buffers):
            module, key = held[name]
            self.mesh.announce(f"values of buffer {name} from rank 0")
            module._buffers[key] = self._from_rank0(module._buffers[key])  # type: ignore[arg-type]

    # One unit

    def _make_values(
        self, index: int, spec: UnitSpec, others: frozenset[nn.Module], *, overwritten: bool = False
    ) -> None:
        """Allocate and fill what is on the meta device, identically on every rank whatever its random state.

        Nothing else changes: values that were loaded are kept.
        """
        inside = list(_modules_of(spec, others - set(spec.modules)))
        initialize = self.first.initialize
        lacking = [module for module in inside if initialize or module._parameters]
        parts = [*(m.param for m in spec.params), *(b for module in lacking for b in module._buffers.values())]
        if not any(part is not None and part.is_meta for part in parts):
            return
        if initialize is None and overwritten:
            return
        if self._seed is None:
            self._seed = int(self.mesh.all_gather_object(torch.initial_seed())[0])
        divided = [(member, one) for member in spec.params if (one := member.parallel) and member.param.is_meta]
        for member, one in divided:  # as of the unsharded model: draws and fans are those of the full shape
            _replace(member, torch.empty(one.shape, dtype=member.param.dtype, device="meta"))
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.no_grad(), KeepLoaded(self.model):
            # One seed a unit, so that its values do not depend on the units before it.
            torch.manual_seed((self._seed + 7919 * index) % (1 << 63))
            if initialize is None:
                self._run_own_initializers(spec, lacking)
            else:
                self._call(initialize, spec, inside)
        for member, one in divided:
            member.param = nn.Parameter(one.cut(member.param.detach()).contiguous(), member.param.requires_grad)

    def _call(self, initialize: Callable[[nn.Module], object], spec: UnitSpec, inside: list[nn.Module]) -> None:
        """Call the user's function with the modules of the unit and the owners of its tied parameters."""
        owners = (module for member in spec.params for module, _ in member.slots)
        for module in dict.fromkeys([*inside, *owners]):
            if module not in self._called:
                self._called.add(module)
                initialize(module)
        for member in spec.params:
            if not member.param.is_meta:
                continue
            module, key = member.slots[0]
            made = module._parameters[key]
            if member.extension is not None and made is not None and made is not member.param:
                made = nn.Parameter(member.extension.values_of(made), made.requires_grad)
            if made is None or made.is_meta or (made.shape, made.dtype) != (member.param.shape, member.param.dtype):
                found = "None" if made is None else f"{tuple(made.shape)} {made.dtype} on {made.device}"
                raise WrapError(
                    f"The function that initializes modules left {member.names[0]} as {found}; it must be "
                    f"{tuple(member.param.shape)} {member.param.dtype}, with memory. Have it call "
                    "module.to_empty(device=…, recurse=False) first."
                )
            _replace(member, made.data)

    def _run_own_initializers(self, spec: UnitSpec, inside: Sequence[nn.Module]) -> None:
        """Fill the unit's parameters, and the buffers of the modules ``inside`` while their parameters are full."""
        owners = {
            id(module): module
            for module in inside
            if any(b is not None and b.is_meta for b in module._buffers.values())
        }
        for member in spec.params:
            if member.param.is_meta:
                _replace(member, torch.empty_like(member.param, device=self.device))
                owners.update((id(module), module) for module, _ in member.slots)
        bare = {id(module) for module in owners.values() if self._own_initializer(module) is None}
        lacking = [member for member in spec.params if id(member.slots[0][0]) in bare]
        if lacking:
            self._tell_of_lacking(spec, lacking)
            for member in lacking:
                member.param.copy_(marked_like(member.param, self.device))
        everything = [module for member in spec.modules for module in member.modules()]
        for module in reversed(everything):  # children first, as Module.apply does
            wanted = set(owners) if initializer(self.model) else {id(module)} & set(owners)
            if any(id(child) in wanted for child in module.modules()):
                self._initialize_module(module)

    def _tell_of_lacking(self, spec: UnitSpec, lacking: Sequence[ParamSpec]) -> None:
        """Raise because nothing initializes parameters of a unit, or warn on rank 0 if the caller does so later.

        Raises:
            WrapError: The caller does not.
        """
        classes = ", ".join(sorted({plain_type(member.slots[0][0]).__name__ for member in lacking}))
        fact = (
            f"Unit {spec.name} is on the meta device, and nothing initializes "
            f"{', '.join(member.names[0] for member in lacking)}: {classes} has no reset_parameters()"
        )
        if not self.first.rest_later:
            raise WrapError(
                f"{fact}, which modules on the meta device need. Add that method to the class, or build the model on "
                "CPU."
            )
        if self.mesh.rank == 0:
            warnings.warn(f"{fact}. They are NaN until you initialize them or load their values.", stacklevel=2)

    def _own_initializer(self, module: nn.Module) -> Callable[[], object] | None:
        """Return the function that initializes the module, Hugging Face's or torch's; None if there is none."""
        of_model = initializer(self.model)
        if of_model is not None:
            return partial(of_model, module)
        # In other classes, a method of this name often fills everything below the module, in other units too.
        of_attention = module._reset_parameters if isinstance(module, nn.MultiheadAttention) else None
        return getattr(module, "reset_parameters", of_attention)

    def _initialize_module(self, module: nn.Module) -> None:
        """Allocate the module's meta buffers and initialize everything it holds.

        Raises:
            WrapError: A buffer is still unwritten afterwards, and the caller does not fill it later.
        """
        meta = {key: buffer for key, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
        for key, buffer in meta.items():
            module._buffers[key] = marked_like(buffer, self.device)
        if self.device.type == "meta":
            return  # only the layout is wanted: there are no values, and drawing none takes milliseconds each
        initializer = self._own_initializer(module)
        if initializer is not None:
            initializer()
        for key, buffer in meta.items():
            if torch.equal(module._buffers[key].nan_to_num(7.0), marked_like(buffer, self.device).nan_to_num(7.0)):  # type: ignore[union-attr]
                if self.first.rest_later:
                    module._buffers[key] = buffer
                    continue
                raise WrapError(
                    f"Buffer {key} of {type(module).__name__} is on the meta device, and nothing fills it: "
                    "set it in reset_parameters(), or build the model on CPU."
                )

    # Outside units

    def _make_rest(self) -> None:
        if self.first.from_rank0 and self.mesh.rank > 0:
            return  # allocated already, with rank 0's values
        given = self.differing.buffers if self.mesh.rank > 0 else ()
        with torch.no_grad(), KeepLoaded(self.model):
            for path, module in self.model.named_modules():
                here = ((f"{path}.{key}" if path else key, buffer) for key, buffer in module._buffers.items())
                if any(buffer is not None and buffer.is_meta and name not in given for name, buffer in here):
                    if self.first.rest_later and any(hasattr(p, "shard_meta") for p in module._parameters.values()):
                        continue  # its initializer ran with its unit, and would draw other values on each rank now
                    self._initialize_module(module)

    def _from_rank0(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return rank 0's values of ``tensor``, same shape and dtype, on the device of collectives."""
        device = self.mesh.device
        overwritten = self.mesh.rank > 0
        here = torch.empty(tensor.shape, dtype=tensor.dtype, device=device) if overwritten else tensor.to(device)
        here = here.contiguous()
        if here.numel():
            self.mesh.broadcast(here.reshape(-1).view(torch.uint8))
        return here


def _modules_of(spec: UnitSpec, others: frozenset[nn.Module]) -> Iterator[nn.Module]:
    """Yield the unit's modules and their submodules, without other units', level by level."""
    level, seen = list(spec.modules), set(spec.modules)
    while level:
        yield from level
        inner = dict.fromkeys(child for module in level for child in module.children())
        level = [child for child in inner if child not in seen and child not in others]
        seen.update(level)


def _replace(member: ParamSpec, value: torch.Tensor) -> None:
    """Register ``value`` as the parameter in all its slots."""
    member.param = nn.Parameter(value, member.param.requires_grad)
    for module, key in member.slots:
        module._parameters[key] = member.param


def marked_like(buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a buffer filled with a value no initializer writes: NaN, or the lowest integer (False for booleans)."""
    if buffer.is_floating_point() or buffer.is_complex():
        return torch.full_like(buffer, float("nan"), device=device)
    return torch.full_like(
        buffer, False if buffer.dtype == torch.bool else torch.iinfo(buffer.dtype).min, device=device
    )
