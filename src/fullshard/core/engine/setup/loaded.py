"""Values that a model has already, which no initializer may change."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fullshard.core.torch_private import dispatch_mode, is_traceable_wrapper, plain_functions, tree_leaves, tree_map

_RAW = {torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__}
"""What gives memory that is then written without torch."""


class KeepLoaded:
    """Context in which initializers of modules change only what had no memory on entry.

    An initializer fills all that its module holds, often its children's too, whatever of it was loaded before. Here it
    reads loaded values, and what it writes to them goes nowhere: in place, through views, ``.data`` or numpy. What it
    puts in their place is taken out again on exit.
    """

    def __init__(self, model: nn.Module) -> None:
        """Find the parameters and buffers of ``model`` that have memory."""
        owners: list[dict[str, Any]] = [d for m in model.modules() for d in (m._parameters, m._buffers)]
        self._held = [
            (slots, key, tensor, _alias(tensor))
            for slots in owners
            for key, tensor in slots.items()
            if tensor is not None and not tensor.is_meta
        ]
        storages = {storage for *_, alias in self._held for storage in _storages(alias)}
        self._modes = _OfRawMemory(storages), _OfOperators(storages)

    def __enter__(self) -> None:
        """Keep them from here on, in this thread."""
        for mode in self._modes:
            mode.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put them back where they were."""
        for mode in reversed(self._modes):
            mode.__exit__(kind, error, trace)
        for slots, key, tensor, alias in self._held:
            slots[key] = tensor
            if _storages(tensor) != _storages(alias):
                tensor.data = alias


class _OfOperators(dispatch_mode):
    """Lets no operator write to some storages."""

    def __init__(self, storages: set[int]) -> None:
        super().__init__()
        self._storages = storages

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, on copies in place of what it must not write."""
        kwargs = kwargs or {}
        written = list(_written(func, args, kwargs))
        kept = [tensor for tensor in written if not self._storages.isdisjoint(_storages(tensor))]
        if not kept:
            return func(*args, **kwargs)
        aliases = [one.alias_info for one in func._schema.returns]
        if len(written) == 1 and len(aliases) < 2 and all(aliases):
            return written[0]  # it would do nothing else; a copy of a table may take gigabytes
        copies = {id(tensor): tensor.clone() for tensor in kept}
        originals = {id(copies[id(tensor)]): tensor for tensor in kept}
        made = func(
            *tree_map(lambda value: copies.get(id(value), value), args),
            **tree_map(lambda value: copies.get(id(value), value), kwargs),
        )
        return tree_map(lambda value: originals.get(id(value), value), made)


class _OfRawMemory(TorchFunctionMode):
    """Gives numpy and others copies of some storages."""

    def __init__(self, storages: set[int]) -> None:
        super().__init__()
        self._storages = storages

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch."""
        if func in _RAW and not self._storages.isdisjoint(_storages(args[0])):
            args = (args[0].clone(), *args[1:])
        return func(*args, **(kwargs or {}))


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operator writes."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor))


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    with plain_functions():
        return tensor.detach()


def _storages(tensor: torch.Tensor) -> frozenset[int]:
    """Return the identities of a tensor's memory, or of that of its parts."""
    if is_traceable_wrapper(tensor):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        parts = (getattr(tensor, name) for name in names)  # a DTensor's mesh is among them
        return frozenset(chain.from_iterable(_storages(one) for one in parts if isinstance(one, torch.Tensor)))
    with plain_functions():
        return frozenset({tensor.untyped_storage()._cdata})
