"""Checks before sharding that all ranks hold the same model."""

from __future__ import annotations

import warnings
import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fullshard.core.comm import Mesh, group_behind
from fullshard.core.engine.setup.wrap import UnitSpec
from fullshard.errors import MismatchError

_SAMPLES = 4096

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


def _sample_checksum(param: torch.Tensor) -> int:
    """Return a checksum of up to 4096 evenly spread elements; 0 on the meta device."""
    if param.is_meta:
        return 0
    flat = param.detach().reshape(-1)
    stride = max(1, flat.numel() // _SAMPLES)
    sample = flat[::stride][:_SAMPLES].to("cpu", copy=True).contiguous()
    return zlib.crc32(sample.view(torch.uint8).numpy().tobytes())


def _describe(unit: UnitSpec) -> str:
    """Describe everything about a unit that ranks must agree on, except values."""
    params = ", ".join(
        f"{'='.join(s.names)} {tuple(s.param.shape)} {s.param.dtype}{'' if s.param.requires_grad else ' frozen'}"
        for s in unit.params
    )
    return f"{unit.name}: {params}"


def check_same_model(
    mesh: Mesh, units: Sequence[UnitSpec], policy: object, version: str, *, compare_values: bool
) -> frozenset[int]:
    """Compare the model, its units, the policy and the values of parameters over ranks; every rank calls it once.

    Values are compared by a checksum of up to 4096 elements of each parameter: with different seeds, or weights loaded
    on one rank only, the model would be assembled from several. Values to be overwritten are not compared.

    Returns:
        The positions of the units in which values differ.

    Raises:
        MismatchError: On every rank, with the first difference that is not one of values.
    """
    described = [f"fullshard {version}, torch {torch.__version__}", repr(policy), *map(_describe, units)]
    compared = units if compare_values else ()
    values = [zlib.crc32(repr(_checksums(unit)).encode()) for unit in compared]
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
    return [_sample_checksum(spec.param) for spec in unit.params]


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
        "load the same weights, or take rank 0's: fully_shard(…, first_values=fullshard.engine.FirstValues("
        "from_rank0=True))."
    )


def different_values(
    mesh: Mesh, units: Sequence[UnitSpec], differing: frozenset[int], buffers: Mapping[str, torch.Tensor]
) -> Differing:
    """Return where ranks hold different values, including ``buffers``. Every rank calls it.

    Rank 0 warns once for each group of ranks. Buffers that are not the same in name, shape and dtype on every rank are
    not compared: modules that are left out of sharding may differ between ranks.
    """
    mine = {name: (tuple(b.shape), b.dtype, _sample_checksum(b)) for name, b in buffers.items()}
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
