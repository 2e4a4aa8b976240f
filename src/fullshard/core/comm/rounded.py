"""Gathers and reduces with rounded messages, which are narrower than the numbers on both sides."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch.nn import functional as F

from fullshard.core.comm.protocol import Comm, Work, settle
from fullshard.core.policy import Messages

BLOCK = 128
"""Numbers that share a scale in fp8: 4 bytes of scale for 128 of codes, together 0.258 of float32's bytes."""

_PIECE = 1 << 20
"""Numbers converted to or from fp8 at once on a CPU: their temporaries are float32, and a unit's would be as large as
its parameters. A multiple of BLOCK."""

_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_SMALLEST = torch.finfo(torch.float32).tiny


class _Format(Protocol):
    """The format of numbers in messages, of which there is one in each of R rows.

    Attributes:
        itemsize: Bytes of a number in a message, without scales; wider floating numbers are rounded.
    """

    itemsize: int

    def empty(self, parts: int, numel: int, like: torch.Tensor) -> torch.Tensor:
        """Return memory for messages of ``numel`` numbers, one in each of ``parts`` rows, on the device of ``like``."""
        ...

    def write(self, messages: torch.Tensor, numbers: torch.Tensor) -> None:
        """Round ``numbers``, (R, numel), into rows of :meth:`empty`."""
        ...

    def read(self, messages: torch.Tensor, numbers: torch.Tensor) -> None:
        """Write the numbers of messages to ``numbers``, (R, numel)."""
        ...

    def add(self, terms: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        """Write the sum of rows' numbers, added in their order and in the dtype of ``total``, to it, (numel,)."""
        ...


class _BFloat16:
    """Each number rounded to the nearest bfloat16."""

    itemsize = 2

    def empty(self, parts: int, numel: int, like: torch.Tensor) -> torch.Tensor:
        """See :meth:`_Format.empty`."""
        return like.new_empty(parts, numel, dtype=torch.bfloat16)

    def write(self, messages: torch.Tensor, numbers: torch.Tensor) -> None:
        """See :meth:`_Format.write`."""
        messages.copy_(numbers)

    def read(self, messages: torch.Tensor, numbers: torch.Tensor) -> None:
        """See :meth:`_Format.read`."""
        numbers.copy_(messages)

    def add(self, terms: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        """See :meth:`_Format.add`."""
        total.copy_(terms[0])
        for term in terms[1:]:
            total.add_(term)


class _Float8:
    """Blocks of :data:`BLOCK` numbers, each divided by the scale that makes its largest 448 and rounded to float8_e4m3.

    A block with a non-finite number arrives as nan. A message is the blocks' scales in float32, then the codes.
    """

    itemsize = 1

    def empty(self, parts: int, numel: int, like: torch.Tensor) -> torch.Tensor:
        """See :meth:`_Format.empty`; rows are aligned for float32."""
        messages = like.new_empty(parts, 4 * (_blocks(numel) + -(-numel // 4)), dtype=torch.uint8)
        if numel % 4:
            messages[:, 4 * _blocks(numel) + numel :].zero_()
        return messages

    def write(self, messages: torch.Tensor, numbers: torch.Tensor) -> None:
        """See :meth:`_Format.write`."""
        for message, row in zip(messages, numbers, strict=True):
            self._write(message, row)

    def _write(self, message: torch.Tensor, numbers: torch.Tensor) -> None:
        scales, codes = _split(message, numbers.numel())
        for low in range(0, numbers.numel(), _PIECE):
            piece = numbers[low : low + _PIECE].float()
            target = codes[low : low + _PIECE]
            blocks = _in_blocks(piece)
            scale = scales[low // BLOCK :][: len(blocks)]
            # Not below the smallest normal number, so that zeros are not divided by zero.
            scale.copy_(blocks.abs().amax(1).div_(_LARGEST).clamp_min_(_SMALLEST))
            target.copy_((blocks / scale[:, None]).view(-1)[: len(target)])

    def read(self, messages: torch.Tensor, numbers: torch.Tensor) -> None:
        """See :meth:`_Format.read`."""
        for message, row in zip(messages, numbers, strict=True):
            self._read(message, row)

    def add(self, terms: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        """See :meth:`_Format.add`."""
        for rank, term in enumerate(terms):
            self._read(term, total, add=rank > 0)

    def _read(self, message: torch.Tensor, numbers: torch.Tensor, *, add: bool = False) -> None:
        scales, codes = _split(message, numbers.numel())
        for low in range(0, numbers.numel(), _PIECE):
            piece = _decoded(codes[low : low + _PIECE])
            blocks = _in_blocks(piece)
            values = (blocks * scales[low // BLOCK :][: len(blocks), None]).view(-1)[: len(piece)]
            target = numbers[low : low + _PIECE]
            if add:
                target.add_(values)
            else:
                target.copy_(values)


class _WholeFloat8(_Float8):
    """The same messages and numbers in few operators, however large a lane is: each is a kernel that must be launched.

    A conversion holds at most one row in float32, which is a rank's part.
    """

    def write(self, messages: torch.Tensor, numbers: torch.Tensor) -> None:
        """See :meth:`_Format.write`."""
        scales, codes = _split(messages, numbers.shape[1])
        for blocks, scale in _with_scales(numbers, scales):
            # Not abs().amax(), which would hold a copy of all numbers.
            scale.copy_(torch.linalg.vector_norm(blocks, math.inf, dim=-1, keepdim=True))
        scales.div_(_LARGEST).clamp_min_(_SMALLEST)
        for row, code, own in zip(numbers.split(1), codes.split(1), scales.split(1), strict=True):
            for (blocks, scale), (target, _) in zip(_with_scales(row, own), _with_scales(code, own), strict=True):
                target.copy_(blocks.float() / scale)

    def read(self, messages: torch.Tensor, numbers: torch.Tensor) -> None:
        """See :meth:`_Format.read`."""
        if numbers.dtype == torch.float32:
            self._decode(messages, numbers)
            return
        for message, row in zip(messages.split(1), numbers.split(1), strict=True):
            values = row.new_empty(row.shape, dtype=torch.float32)
            self._decode(message, values)
            row.copy_(values)

    def add(self, terms: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        """See :meth:`_Format.add`."""
        self.read(terms[0][None], total[None])
        values = torch.empty_like(total, dtype=torch.float32)
        for term in terms[1:]:
            self._decode(term[None], values[None])
            total.add_(values)

    def _decode(self, messages: torch.Tensor, numbers: torch.Tensor) -> None:
        """Write the numbers of messages to ``numbers``, (R, numel) in float32."""
        scales, codes = _split(messages, numbers.shape[1])
        numbers.copy_(codes)
        for blocks, scale in _with_scales(numbers, scales):
            blocks.mul_(scale)


_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def _decoded(codes: torch.Tensor) -> torch.Tensor:
    """Return the numbers of ``codes``, (numel,), in float32."""
    # On the CPU, torch's own cast took 16.5 ms for 4 million codes, a look-up in a table 3.1 ms.
    return torch.index_select(_VALUES, 0, codes.view(torch.uint8).int())


def _blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def _in_blocks(numbers: torch.Tensor) -> torch.Tensor:
    """Return ``numbers``, (numel,), as (blocks, BLOCK), padded with zeros."""
    short = -len(numbers) % BLOCK
    return (F.pad(numbers, (0, short)) if short else numbers).view(-1, BLOCK)


def _split(message: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales, (…, blocks) in float32, and codes, (…, numel), of messages in fp8."""
    first = 4 * _blocks(numel)
    codes = message.narrow(-1, first, numel)
    return message.narrow(-1, 0, first).view(torch.float32), codes.view(torch.float8_e4m3fn)


def _with_scales(rows: torch.Tensor, scales: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield full blocks of ``rows``, (R, blocks, BLOCK), and the last short ones, with their scales, (R, …, 1)."""
    full = rows.shape[1] // BLOCK
    if full:
        yield rows[:, : full * BLOCK].unflatten(1, (full, BLOCK)), scales[:, :full, None]
    if rows.shape[1] % BLOCK:
        yield rows[:, None, full * BLOCK :], scales[:, full:, None]


_FORMATS: dict[Messages, tuple[_Format, _Format]] = {
    "bf16": (_BFloat16(), _BFloat16()),
    "fp8": (_Float8(), _WholeFloat8()),
}
"""For devices on which lanes are converted in pieces, and whole."""


class RoundedGroup:
    """The gathers and reduces of a group, with rounded messages.

    Every rank has the same numbers after a gather, because its own part is rounded too; a reduce adds rounded terms,
    including this rank's own, in rank order and in the dtype of the result. Numbers no wider than the messages are sent
    unchanged. Besides the caller's buffers, a gather holds one message for each rank until it is waited for, and a
    reduce two for each rank until its work is released.

    Attributes:
        rank: This rank's place in the group.
        size: Number of ranks.
        whole: Whether lanes are converted in a few operators, as on CUDA, instead of pieces that fit into a cache. In
            fp8 this takes a rank's part in float32.
    """

    def __init__(self, inner: Comm, messages: Messages) -> None:
        """Send through ``inner``."""
        self.rank, self.size = inner.rank, inner.size
        self.whole = inner.device.type == "cuda"
        self._inner = inner
        self._messages: Messages = messages

    @property
    def _format(self) -> _Format:
        return _FORMATS[self._messages][self.whole]

    def _rounds(self, tensor: torch.Tensor) -> bool:
        return self.itemsize(tensor.dtype) < tensor.dtype.itemsize

    def itemsize(self, dtype: torch.dtype) -> int:
        """Return the bytes of a number of ``dtype`` in a message, without scales."""
        return min(dtype.itemsize, self._format.itemsize) if dtype.is_floating_point else dtype.itemsize

    def rounded(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return ``numbers``, (numel,), as every rank has them after a gather."""
        if not self._rounds(numbers):
            return numbers
        message = self._format.empty(1, numbers.numel(), numbers)
        self._format.write(message, numbers.view(1, -1))
        arrived = torch.empty_like(numbers)
        self._format.read(message, arrived.view(1, -1))
        return arrived

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Work:
        """See :meth:`Comm.all_gather`; ``full`` is written when the result is waited for."""
        if not self._rounds(full):
            return self._inner.all_gather(full, shard)
        messages = self._format.empty(self.size, shard.numel(), shard)
        self._format.write(messages[self.rank].view(1, -1), shard.view(1, -1))
        work = self._inner.all_gather(messages.view(-1), messages[self.rank])
        return _Gather(work, messages, full.view(self.size, -1), self._format)

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor) -> Work:
        """See :meth:`Comm.reduce_scatter`; each pair of ranks exchanges messages."""
        if not self._rounds(full):
            return self._inner.reduce_scatter(shard, full)
        rows = self._format.empty(self.size, shard.numel(), full)
        self._format.write(rows, full.view(self.size, -1))
        messages = rows.unbind()
        own = messages[self.rank]
        terms = [own if message is own else torch.empty_like(message) for message in messages]
        # The message of this rank to itself stays in place.
        received, sent = ([one if one is not own else own[:0] for one in ones] for ones in (terms, messages))
        return _Sum(self._inner.exchange(received, sent), terms, messages, shard, self._format)


class _Gather:
    """Messages of all ranks under way."""

    def __init__(self, work: Work, messages: torch.Tensor, slices: torch.Tensor, form: _Format) -> None:
        """Fill, once ``work`` is done, each of ``slices``, (size, S), with the numbers of its message."""
        self._work = work
        self._messages: torch.Tensor | None = messages
        self._slices = slices
        self._format = form

    def wait(self) -> None:
        """See ``wait``; afterwards, other ranks have also read this one's message."""
        if self._messages is None:
            return
        self._work.wait()
        self._format.read(self._messages, self._slices)
        # Settled here and not by the caller: units that stay gathered for long would keep their messages.
        settle(self._work)
        self._messages = None


class _Sum:
    """Terms of a sum under way."""

    def __init__(
        self,
        work: Work,
        terms: Sequence[torch.Tensor],
        sent: Sequence[torch.Tensor],
        total: torch.Tensor,
        form: _Format,
    ) -> None:
        """Add, once ``work`` is done, the numbers of ``terms``, one of each rank, into ``total``, (S,)."""
        self._work: Work | None = work
        self._terms = terms
        # Kept, like the terms, until this object is released: a side stream may be the one that waits, and the
        # allocator would give their memory to the compute stream at once.
        self._sent = sent
        self._total = total
        self._format = form

    def wait(self) -> None:
        """See :meth:`fullshard.core.comm.protocol.Work.wait`."""
        if self._work is None:
            return
        self._work.wait()
        settle(self._work)
        self._work = None
        self._format.add(self._terms, self._total)
