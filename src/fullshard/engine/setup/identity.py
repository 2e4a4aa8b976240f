"""Checks before sharding that all ranks hold the same model."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from fullshard.comm import Mesh
from fullshard.engine.setup.wrap import UnitSpec
from fullshard.errors import MismatchError

_SAMPLES = 4096


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
) -> None:
    """Compare the model, its units, the policy and the values of parameters over ranks; every rank calls it once.

    Values are compared by a checksum of up to 4096 elements of each parameter: with different seeds, or weights loaded
    on one rank only, the model would be assembled from several. Values to be overwritten are not compared.

    Raises:
        MismatchError: On every rank, with the first difference.
    """
    described = [f"fullshard {version}, torch {torch.__version__}", repr(policy), *map(_describe, units)]
    compared = units if compare_values else ()
    values = [zlib.crc32(repr([_sample_checksum(s.param) for s in unit.params]).encode()) for unit in compared]
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
    for index, marks in enumerate(zip(*(v for _, v in everyone), strict=True)):
        if len(set(marks)) > 1:
            raise MismatchError(
                f"Ranks hold different values in unit {units[index].name} (checksums {dict(enumerate(marks))}). Use "
                "the same seed on every rank before building the model (torch.manual_seed), or load the same weights."
            )
