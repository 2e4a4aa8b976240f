"""What a plan counts: live tensor bytes by storage, and its own work, by the operators that it runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch

from fullshard.errors import ConfigError

_ALLOWANCE: ContextVar[list[float] | None] = ContextVar("allowance", default=None)
"""The operators that plans may still take, one number."""


class TooMuchWorkError(ConfigError):
    """A plan was abandoned at its limit."""


@contextmanager
def work_limit(operators: int) -> Iterator[None]:
    """End plans inside the context by :class:`TooMuchWorkError` once they have taken so many operators together."""
    token = _ALLOWANCE.set([operators])
    try:
        yield
    finally:
        _ALLOWANCE.reset(token)


def spend(operators: int) -> None:
    """Count work of a plan; called wherever it may be much. What takes as long as an operator counts as one.

    Raises:
        TooMuchWorkError: It is more than the limit.
    """
    allowance = _ALLOWANCE.get()
    if allowance is None:
        return
    allowance[0] -= operators
    if allowance[0] < 0:
        raise TooMuchWorkError("A plan took more operators than its limit, and was abandoned.")


PHASES = ("before_first_step", "forward", "backward", "optimizer")
"""The phases of a plan: everything before the measured steps, and the three parts of a step."""


class _Held:
    """A live storage: its bytes, its owner, whether its values are unknown, and whether it is the host's."""

    def __init__(self, nbytes: int, owner: str | None, ref: weakref.ref[torch.UntypedStorage]) -> None:
        self.nbytes = nbytes
        self.owner = owner
        self.fake = self.on_host = False
        self.ref = ref


class MemoryTracker:
    """Counts live bytes by storage: views share one, and a storage counts until its last tensor is gone.

    Storages marked as the host's, and those made from them, are counted apart in ``host_live`` and ``host_peak``.

    Attributes:
        live: Bytes alive now.
        host_live: The same in host memory.
        host_peak: Highest ``host_live`` so far.
        peaks: Highest ``live`` of each phase since :meth:`restart`.
        owned: Live bytes by the owners of storages, as far as these have one.
        phase: Returns the phase that a change belongs to.
        owner: Returns the owner of a new storage, or None.
        on_peak: Called when ``live`` exceeds everything since :meth:`restart`.
        on_change: Called after each change of ``live``.
    """

    def __init__(self) -> None:
        """Start with nothing alive, before the first step."""
        self.live = self.host_live = self.host_peak = 0
        self.peaks: dict[str, int] = {}
        self.owned: dict[str, int] = {}
        self.owner: Callable[[], str | None] = lambda: None
        self.phase: Callable[[], str] = lambda: PHASES[0]
        self.on_peak: Callable[[], None] = lambda: None
        self.on_change: Callable[[], None] = lambda: None
        self._highest = 0
        self._held: dict[int, _Held] = {}

    def restart(self, phase: Callable[[], str], on_peak: Callable[[], None]) -> None:
        """Forget all peaks, and measure the phases given from now on."""
        self.phase, self.on_peak = phase, on_peak
        self.peaks, self._highest = {}, 0
        self._change(0)

    def see(self, tensor: torch.Tensor, *, fake: bool = False) -> None:
        """Count the storage of ``tensor``, if it is new; tensors on the meta device have no memory.

        Args:
            tensor: An input or an output of an operator.
            fake: Whether the values of its storage are unknown from now on.
        """
        if tensor.layout is not torch.strided or tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        held = self._held.get(key)
        if held is None:
            ref = weakref.ref(storage, partial(self._gone, key))
            held = self._held[key] = _Held(storage.nbytes(), self.owner(), ref)
            self._change(held.nbytes, owner=held.owner)
        held.fake = held.fake or fake

    def to_host(self, tensor: torch.Tensor) -> None:
        """Count the storage of ``tensor`` as host memory from now on."""
        self.see(tensor)
        held = self._held[tensor.untyped_storage()._cdata]
        if not held.on_host:
            self._change(-held.nbytes, owner=held.owner)
            held.on_host, held.owner = True, None
            self._change(held.nbytes, on_host=True)

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is in host memory."""
        held = self._held.get(tensor.untyped_storage()._cdata) if not tensor.is_meta else None
        return held is not None and held.on_host

    def is_fake(self, tensor: torch.Tensor) -> bool:
        """Return whether the values of ``tensor`` are unknown."""
        if tensor.is_meta or tensor.layout is not torch.strided:
            return True
        held = self._held.get(tensor.untyped_storage()._cdata)
        return held is not None and held.fake

    def resized(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Count a storage again after it was resized in place."""
        held = self._held.get(storage._cdata)
        if held is not None:
            before, held.nbytes = held.nbytes, nbytes
            self._change(held.nbytes - before, on_host=held.on_host, owner=held.owner)

    def size_of(self, storage: torch.UntypedStorage, otherwise: int) -> int:
        """Return the counted bytes of a storage, or ``otherwise`` if it has not been seen."""
        held = self._held.get(storage._cdata)
        return otherwise if held is None else held.nbytes

    def touch(self, nbytes: int) -> None:
        """Count memory that an operator allocates and frees before it returns."""
        if nbytes:
            self._change(nbytes)
            self._change(-nbytes)

    def _gone(self, key: int, _ref: Any) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self._change(-held.nbytes, on_host=held.on_host, owner=held.owner)

    def _change(self, nbytes: int, *, on_host: bool = False, owner: str | None = None) -> None:
        if on_host:
            self.host_live += nbytes
            self.host_peak = max(self.host_peak, self.host_live)
            return
        if owner is not None:
            self.owned[owner] = self.owned.get(owner, 0) + nbytes
        phase = self.phase()
        before, self.live = self.live, self.live + nbytes
        self.peaks[phase] = max(self.peaks.get(phase, 0), before, self.live)
        if self.live > self._highest:
            self._highest = self.live
            self.on_peak()
        self.on_change()
