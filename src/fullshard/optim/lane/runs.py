"""Runs of neighboring parameters: shards that are adjacent in a lane's memory, as one flat tensor."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import nn

from fullshard.layout import ShardMeta
from fullshard.shards import on_rows, rows_of


@dataclass(frozen=True, eq=False)
class ParamRun:
    """Parameters that are adjacent on this rank, with nothing but padding between them. Counts are of elements."""

    params: tuple[nn.Parameter, ...]  # the parameters by ascending address, none of them empty
    starts: tuple[int, ...]  # first element of each, counted from the first one's
    numel: int  # from the first element of the first parameter to the last one of the last, padding included

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the run as one tensor: flat, or the parameter's if it has only one."""
        first = local(self.params[0])
        return (self.numel,) if len(self.params) > 1 else tuple(first.shape)

    def flat(self) -> torch.Tensor:
        """Return the parameters' memory as one tensor."""
        first = local(self.params[0])
        return first if len(self.params) == 1 else first.as_strided((self.numel,), (1,))

    def part(self, joined: torch.Tensor, index: int) -> torch.Tensor:
        """Return parameter ``index``'s part of ``joined``, of the run's shape: a view in the parameter's shape."""
        if len(self.params) == 1:
            return joined
        param, start = local(self.params[index]), self.starts[index]
        return joined[start : start + param.numel()].view(param.shape)

    def split(self, keys: Sequence[Hashable]) -> list[tuple[ParamRun, int]]:
        """Split the run into pieces of neighbors with equal keys; also return the first element of each piece.

        Args:
            keys: One key for each parameter.
        """
        pieces: list[tuple[ParamRun, int]] = []
        for _, numbers in groupby(range(len(self.params)), key=lambda number: keys[number]):
            members = list(numbers)
            base, last = self.starts[members[0]], members[-1]
            starts = tuple(self.starts[number] - base for number in members)
            numel = starts[-1] + local(self.params[last]).numel()
            pieces.append((ParamRun(tuple(self.params[number] for number in members), starts, numel), base))
        return pieces

    @on_rows
    def as_one(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return ``tensors``, one for each parameter, as one of the run's shape; None if not in one piece of memory."""
        first = rows_of(tensors[0])
        if len(tensors) == 1:
            return first
        address, size, dtype = first.data_ptr(), first.element_size(), first.dtype
        for tensor, start in zip(tensors, self.starts, strict=True):
            if tensor.data_ptr() != address + start * size or tensor.dtype != dtype or not tensor.is_contiguous():
                return None
        storage = first.untyped_storage()  # all are in this allocation: no other one can begin within its bytes
        if address + self.numel * size > storage.data_ptr() + storage.nbytes():
            return None
        return first.as_strided((self.numel,), (1,))


def local(param: torch.Tensor) -> torch.Tensor:
    """Return a parameter's rows on this rank as a plain tensor."""
    return rows_of(param).as_subclass(torch.Tensor)


def find_runs(params: Iterable[nn.Parameter]) -> list[ParamRun]:
    """Return the runs of some parameters, by address; parameters without elements on this rank are in none.

    Parameters that are not sharded are runs of one.
    """
    held = sorted((param for param in params if local(param).numel()), key=lambda param: local(param).data_ptr())
    positions: dict[int, dict[int, int]] = {}
    found: list[list[nn.Parameter]] = []
    for param in held:
        if found and _follows(found[-1][-1], param, positions):
            found[-1].append(param)
        else:
            found.append([param])
    return [_run(members) for members in found]


def _run(members: Sequence[nn.Parameter]) -> ParamRun:
    tensors = [local(param) for param in members]
    first, size = tensors[0].data_ptr(), tensors[0].element_size()
    starts = tuple((tensor.data_ptr() - first) // size for tensor in tensors)
    return ParamRun(tuple(members), starts, starts[-1] + tensors[-1].numel())


def _follows(before: nn.Parameter, after: nn.Parameter, positions: dict[int, dict[int, int]]) -> bool:
    """Return whether ``after`` is the lane's next parameter after ``before``, in the memory of the same lane."""
    one: ShardMeta | None = getattr(before, "shard_meta", None)
    other: ShardMeta | None = getattr(after, "shard_meta", None)
    if one is None or other is None or one.layout is not other.layout:
        return False
    places = positions.setdefault(id(one.layout), {p.start: at for at, p in enumerate(one.layout.placements)})
    if places[other.placement.start] != places[one.placement.start] + 1:
        return False
    here, there = local(before), local(after)
    apart = _first_element(other) - _first_element(one)
    return (
        here.dtype == there.dtype
        and here.is_contiguous()
        and there.is_contiguous()
        and there.data_ptr() - here.data_ptr() == apart * here.element_size()
        and here.untyped_storage().data_ptr() == there.untyped_storage().data_ptr()
    )


def _first_element(meta: ShardMeta) -> int:
    """Return the lane element of this rank's first element of a parameter."""
    return meta.placement.start + meta.element_range[0]


def parts(run: ParamRun, joined: torch.Tensor) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Yield each parameter of a run with its part of ``joined``, a tensor of the run's shape."""
    return ((param, run.part(joined, index)) for index, param in enumerate(run.params))
