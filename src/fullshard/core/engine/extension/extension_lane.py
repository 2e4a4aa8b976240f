"""The lane of a parameter whose class says what is gathered of it, and the parameter."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fullshard.core.comm import Work, settle, together
from fullshard.core.engine.extension.checksum import checksums
from fullshard.core.engine.extension.extension import Extension
from fullshard.core.engine.step.lane import BufferTracker, Lane, LaneState, ReusableBuffer
from fullshard.core.engine.step.param import ShardedParam
from fullshard.core.layout import LaneLayout, Placement
from fullshard.core.shards import FreedParameter, FullParameter
from fullshard.core.torch_private import is_traceable_wrapper
from fullshard.errors import ShardingError, WrapError


def even_layout(extension: Extension, ranks: int) -> LaneLayout:
    """Return the layout of a lane in which each rank has the same number of rows, and the last ones fewer, as in FSDP2.

    Raises:
        WrapError: A rank has none, and the class cannot know that.
    """
    shape = extension.values.shape
    if not shape:
        raise WrapError(
            f"Parameter {extension.name} is a scalar {extension.kind.__name__}, which has no rows to shard."
        )
    rows, row = -(-shape[0] // ranks), shape[1:].numel()
    without = ranks - -(-shape[0] // rows)
    if extension.packed and shape[0] % ranks:
        raise WrapError(
            f"Parameter {extension.name} {tuple(extension.full_shape)} is a {extension.kind.__name__}, which can be "
            f"cut into {shape[0]} equal groups of rows: they cannot be divided by {ranks} ranks. Shard over fewer."
        )
    if without and extension.takes_mesh_only:
        raise WrapError(
            f"Parameter {extension.name} {tuple(shape)} is a {extension.kind.__name__}, cut into {rows} rows a rank: "
            f"{without} of {ranks} ranks have none, and fsdp_pre_all_gather(mesh) cannot know how many others have. "
            "Shard over fewer ranks, or give the method its five arguments."
        )
    return LaneLayout(ranks, rows * row, (Placement(0, 0, shape.numel(), row, row),))


@dataclass(frozen=True)
class Form:
    """Shape and dtype of a tensor that each rank sends; the same on all."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _forms(sent: Sequence[torch.Tensor]) -> list[Form]:
    return [Form(tuple(one.shape), one.dtype) for one in sent]


class GatheredTensors(ReusableBuffer):
    """The memory of what is gathered of one parameter, and of the full parameter that its class makes of it.

    Attributes:
        forms: What each rank sends; empty before the first gather.
        by_rows: Indices of those of as many rows as the rank has, which the last ranks pad.
        sent: One buffer for each of them, (ranks * numel,).
        made: Further memory of the full parameter.
        result: The full parameter as its class made it, or None before the first gather.
        keeps_sent: True if the full parameter is partly in ``sent``.
    """

    def __init__(self, empty: torch.Tensor, device: Any, tracker: BufferTracker) -> None:
        """Start without memory."""
        self.sent: list[ReusableBuffer] = []
        self.made: list[ReusableBuffer] = []
        self.forms: list[Form] = []
        self.by_rows: frozenset[int] = frozenset()
        self.result: torch.Tensor | None = None
        self.keeps_sent = True
        super().__init__(empty, device, tracker)

    @property
    def tracker(self) -> BufferTracker:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Counts the memory."""
        return self._tracker

    @tracker.setter
    def tracker(self, tracker: BufferTracker) -> None:
        self._tracker = tracker
        for buffer in (*self.sent, *self.made):
            buffer.tracker = tracker

    def allocate(self, forms: Sequence[Form], by_rows: frozenset[int], ranks: int) -> None:
        """Allocate the buffers for what ``ranks`` ranks send."""
        self.forms, self.by_rows = list(forms), by_rows
        for form in forms:
            empty = self._device.empty(ranks * torch.Size(form.shape).numel(), form.dtype)
            self.sent.append(ReusableBuffer(empty, self._device, self.tracker))
        self.nbytes = sum(buffer.nbytes for buffer in self.sent)

    def adopt(self, result: torch.Tensor, named: Sequence[torch.Tensor]) -> None:
        """Take the full parameter as its class made it; free and allocate what the class ``named`` from now on.

        Nothing else: a scale inside ``result``, say, is read by what autograd saved, and not written again.
        """
        known = {buffer.tensor.untyped_storage()._cdata for buffer in self.sent}
        inside = _storages(result)
        self.keeps_sent = inside is None or not known.isdisjoint(inside)
        for tensor in named:
            storage = tensor.untyped_storage()
            if storage._cdata not in known and storage.nbytes():
                known.add(storage._cdata)
                self.made.append(ReusableBuffer(tensor, self._device, self.tracker))
        self.result = result
        self.nbytes = sum(buffer.nbytes for buffer in (*self.sent, *self.made))
        if type(result) is torch.Tensor:
            self.tensor, self.alias = result, result.data
        elif self.sent:
            self.tensor, self.alias = self.sent[0].tensor, self.sent[0].alias

    def lies_in_result(self, other: torch.Tensor) -> bool:
        """Return True if ``other`` is known to have no memory but that of the full parameter."""
        mine, others = _storages(other), _storages(self.result)
        return mine is not None and others is not None and mine <= others

    def take(self) -> None:
        """Allocate the memory of what is gathered."""
        for buffer in self.sent:
            buffer.take()

    def take_made(self) -> None:
        """Allocate the memory of the full parameter."""
        for buffer in self.made:
            buffer.take()

    def release_sent(self) -> None:
        """Free what was gathered."""
        for buffer in self.sent:
            buffer.release()

    def release(self) -> None:
        """Free all memory."""
        for buffer in (*self.sent, *self.made):
            buffer.release()


def _plain_parts(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """Return the tensors with memory inside ``tensor``; None if its class does not tell."""
    if type(tensor) is torch.Tensor:
        return [tensor]
    if not is_traceable_wrapper(tensor):
        return None
    parts = [_plain_parts(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0]]  # type: ignore[attr-defined]
    return None if None in parts else [one for part in parts for one in part or ()]


def _storages(tensor: torch.Tensor | None) -> set[int] | None:
    """Return what tells the memory inside ``tensor`` apart; None if its class does not tell."""
    parts = None if tensor is None else _plain_parts(tensor)
    return None if parts is None else {part.untyped_storage()._cdata for part in parts}


def _ordinary(function: Callable[..., None]) -> Callable[..., None]:
    """Make ordinary tensors in ``function``, also in an evaluation: those of inference could not be trained with."""
    return torch.inference_mode(mode=False)(torch.no_grad()(function))


class _Gathers:
    """The all-gathers of one lane under way."""

    def __init__(self, works: Sequence[Work]) -> None:
        """Wait for all ``works``."""
        self._works = works

    def wait(self) -> None:
        """See :meth:`Work.wait`."""
        for work in self._works:
            work.wait()

    def settle(self) -> None:
        """See :func:`settle`."""
        for work in self._works:
            settle(work)


@dataclass(eq=False)
class ExtensionLane(Lane):
    """The lane of one parameter: gathered is what its class returns, reduced the plain gradient.

    Attributes:
        extension: The class around the parameter; set before ``allocate``.
        out: What the class writes the full parameter to from the second gather on.
        metadata: What it keeps between the two calls of one gather.
        shown: A checksum of the full parameter while writes to it would be lost, or None.
    """

    extension: Extension = field(init=False)
    full: GatheredTensors = field(init=False)
    out: torch.Tensor | None = None
    metadata: Any = None
    shown: list[int] | None = None

    def _make_full(self) -> GatheredTensors:
        self.out = self.shown = None
        return GatheredTensors(self.device.empty(0, self.dtypes.compute), self.device, self.tracker)

    def full_view(self, place: int) -> torch.Tensor:
        """See :meth:`Lane.full_view`; before the first gather, a tensor that only has the shape."""
        if self.full.result is not None:
            return self.full.result
        empty = torch.empty((), dtype=self._dtype, device=self.full.tensor.device)
        return empty.expand(self.extension.full_shape)

    @property
    def _dtype(self) -> torch.dtype:
        """The dtype that the full parameter is asked for in."""
        # Bytes stay bytes where a unit is switched to its shards' own dtypes.
        return self.dtypes.compute if self.dtypes.compute.is_floating_point else self.extension.dtype

    def has_changed(self) -> bool:
        """Return True: it may take a collective to know what would be sent now."""
        return True

    def expect_writes(self) -> None:
        """See :meth:`Lane.expect_writes`."""
        self.shown = self._checksum()

    def _checksum(self) -> list[int] | None:
        parts = None if self.full.result is None else _plain_parts(self.full.result)
        return checksums(parts) if parts else None

    def write_back(self) -> None:
        """Refuse changes of the full parameter, of which the shard is not a part.

        Raises:
            ShardingError: It was changed.
        """
        shown, self.shown = self.shown, None
        # Writes through .data leave the version as it is.
        rewritten = shown is not None and shown != self._checksum()
        if rewritten or self.full.tensor._version != self.full.version:
            raise ShardingError(
                f"{self.extension.name} was changed inside unsharded(model). It is a {self.extension.kind.__name__}, "
                "whose full parameter is made of what was gathered: nothing is written back. Change the shard instead."
            )

    # Gather

    @_ordinary
    def issue_gather(self) -> None:
        """Start the all-gathers of what the class returns; nothing is rounded further."""
        comm = self.mesh.shard_group
        sent = self._sent() if self.full.forms else together(comm, self._sent)
        if not self.full.forms:
            self.full.allocate(*self._agree(sent), comm.size)
        sent = [self._padded(one) if place in self.full.by_rows else one for place, one in enumerate(sent)]
        forms = _forms(sent)
        if forms != self.full.forms:
            raise ShardingError(
                f"fsdp_pre_all_gather of {self.extension.name} returned {forms} and, in the first gather, "
                f"{self.full.forms}. It must return the same shapes and dtypes in each."
            )
        self.full.take()
        works = []
        for buffer, one in zip(self.full.sent, sent, strict=True):
            mine = buffer.alias.view(comm.size, -1)[comm.rank]
            mine.copy_(one.reshape(-1))
            works.append(comm.all_gather(buffer.alias.view(torch.uint8), mine.view(torch.uint8)))
        self.gather_work = _Gathers(works)
        self.state = LaneState.GATHERING

    @property
    def _most_rows(self) -> int:
        """Rows of each rank but the last ones."""
        return self.layout.shard_numel // self.layout.placements[0].row_numel

    def _sent(self) -> list[torch.Tensor]:
        """Return what this rank's class sends."""
        rows = self.rows.to(self.full.tensor.device, non_blocking=True)
        sent, self.metadata = self.extension.before_gather(rows, self.mesh.shard_group)
        return list(sent)

    def _rows_of(self, rank: int) -> int:
        placement = self.layout.placements[0]
        start, stop = self.layout.local_range(placement, rank)
        return (stop - start) // placement.row_numel

    @property
    def rows(self) -> torch.Tensor:
        """This rank's rows, a view of the shard."""
        start, stop = self.layout.local_range(self.layout.placements[0], self.mesh.shard_group.rank)
        return self.shard[: stop - start].view(-1, *self.shapes[0][1:])

    def _padded(self, one: torch.Tensor) -> torch.Tensor:
        rows, most = self._rows_of(self.mesh.shard_group.rank), self._most_rows
        if rows == most or one.shape[:1] != (rows,):
            return one
        return torch.cat([one, one.new_zeros(most - rows, *one.shape[1:])])

    def _agree(self, sent: Sequence[torch.Tensor]) -> tuple[list[Form], frozenset[int]]:
        """Compare what ranks send, in the first gather; return their forms, and which of them are rows to be padded."""
        by_rank = self.mesh.shard_group.all_gather_object(_forms(sent))
        rows, most = [self._rows_of(rank) for rank in range(len(by_rank))], self._most_rows
        padded = frozenset(
            place
            for place in range(min(map(len, by_rank)))
            # As long on each rank as its rows, which differ: other numbers may be as many as rows on one of them.
            if min(rows) < most and all(forms[place].shape[:1] == (n,) for forms, n in zip(by_rank, rows, strict=True))
        )
        by_rank = [
            [Form((most, *form.shape[1:]), form.dtype) if place in padded else form for place, form in enumerate(forms)]
            for forms in by_rank
        ]
        other = next((rank for rank, theirs in enumerate(by_rank) if theirs != by_rank[0]), None)
        if other is not None:
            shape, ranks = tuple(self.extension.full_shape), self.layout.world_size
            raise ShardingError(
                f"fsdp_pre_all_gather of {self.extension.name} {shape}, cut over {ranks} ranks, returned {by_rank[0]} "
                f"on rank 0 and {by_rank[other]} on rank {other}. Ranks must send equal parts: choose a number of "
                f"ranks that divides {shape[0]} rows, or return tensors padded to {most} rows."
            )
        return by_rank[0], padded

    def _gathered(self) -> list[torch.Tensor]:
        """Return what was gathered, each (rows, *rest), without the last ranks' padding."""
        found = []
        for place, (buffer, form) in enumerate(zip(self.full.sent, self.full.forms, strict=True)):
            one = buffer.tensor.view(-1, *form.shape[1:])
            # torch's FSDP2 hands over this padding too, and cannot gather a second time: ``out`` has no such rows.
            found.append(one[: self.extension.full_shape[0]] if place in self.full.by_rows else one)
        return found

    @_ordinary
    def finish_gather(self) -> None:
        """See :meth:`Lane.finish_gather`; the class makes the full parameter."""
        super().finish_gather()
        full, out, metadata = self.full, self.out, self.metadata
        if full.result is None:
            made, named = self.extension.after_gather(self._gathered(), metadata, self._dtype)
            full.adopt(self._in_shape(made), named)
        else:
            full.take_made()
            assert out is not None
            shown_as, out.__class__ = out.__class__, type(full.result)
            made = self.extension.write_gathered(self._gathered(), metadata, self._dtype, out)
            out.__class__ = shown_as
            self._refuse_other_memory(made)
        full.version = full.tensor._version
        self.metadata = None
        if not full.keeps_sent:
            if self.unsettled is not None:
                settle(self.unsettled)
                self.unsettled = None
            full.release_sent()

    def _in_shape(self, made: torch.Tensor) -> torch.Tensor:
        """Return the full parameter without the padding rows of the last ranks."""
        shape = self.extension.full_shape
        if made.shape == shape:
            return made
        if made.shape[1:] != shape[1:] or len(made) < shape[0]:
            raise ShardingError(
                f"fsdp_post_all_gather of {self.extension.name}, a {self.extension.kind.__name__}, returned a full "
                f"parameter of shape {tuple(made.shape)}. It must have the parameter's shape {tuple(shape)}, or more "
                "rows, of which the last ones are padding."
            )
        return made[: shape[0]]

    def _refuse_other_memory(self, made: torch.Tensor | None) -> None:
        """Refuse a class that ignores ``out``: modules would compute with memory that nobody wrote."""
        if made is not None and made is not self.out and not self.full.lies_in_result(made):
            raise ShardingError(
                f"fsdp_post_all_gather of {self.extension.name}, a {self.extension.kind.__name__}, was given out= and "
                "returned a tensor with other memory. From the second gather on it must write the full parameter into "
                "out, as for torch's FSDP2."
            )

    def add_gradient(self, place: int, gradient: torch.Tensor) -> None:
        """See :meth:`Lane.add_gradient`; copied at once: with one parameter, waiting saves no operator."""
        super().add_gradient(place, gradient)
        self.copy_held()


class ExtensionParam(ShardedParam):
    """A parameter whose full Parameter is made by its class, in the first gather."""

    lane: ExtensionLane

    def bind(self, *, trainable: bool) -> None:
        """See :meth:`ShardedParam.bind`."""
        made = self.lane.full.result
        kind = torch.Tensor if made is None else type(made)
        if kind is torch.Tensor:
            self.plain_class, self.shown_class, self.freed_class = nn.Parameter, FullParameter, FreedParameter
        else:
            self.plain_class, self.shown_class, self.freed_class = kind, kind, _freed_class(kind)
        super().bind(trainable=trainable)
        self.made = made
        if made is not None:
            self.lane.out = self.lane.full.alias if kind is torch.Tensor else self.full

    def to_unsharded(self) -> None:
        """See :meth:`ShardedParam.to_unsharded`."""
        if self.made is not self.lane.full.result:
            with torch.inference_mode(mode=False):  # training after an evaluation computes its gradient
                self.bind(trainable=self.trainable)
        super().to_unsharded()


@functools.lru_cache
def _freed_class(kind: type) -> type:
    """Return the class of full parameters of ``kind`` while their memory is free: any use is refused."""
    refuse = classmethod(FreedParameter.__torch_function__.__func__)  # type: ignore[attr-defined]
    return type(kind.__name__, (kind,), {"__torch_function__": refuse})
