"""Weights for a model with a peft adapter: the base model's read from files by shards, the adapter's from memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from fullshard.engine import WantedTensor, WeightReader
from fullshard.errors import InvariantError
from fullshard.policy import Quantize
from fullshard.saving.weights import Pretrained


class AdaptedWeights:
    """Weight source for ``fully_shard(peft_model, weights=AdaptedWeights(Pretrained(path), values))``, one per rank."""

    def __init__(self, base: Pretrained, values: Mapping[str, torch.Tensor]) -> None:
        """Keep the adapter's values for the life of this object.

        ``base`` has the tensor names of the model without an adapter. ``values`` have those of peft's model; they are
        the same on every rank.
        """
        self._base = base
        self._values = values

    @property
    def quantize(self) -> Quantize | None:
        """How the base model's linear layers are quantised."""
        return self._base.quantize

    def open(self, model: Any, wanted: list[WantedTensor]) -> WeightReader:
        """See :meth:`fullshard.engine.WeightSource.open`.

        Raises:
            CheckpointError: The files do not fit the base model.
        """
        under = model.get_base_model()
        prefix = next(f"{path}." for path, module in model.named_modules() if module is under)
        plain: dict[str, str] = {}
        of_base = []
        for one in wanted:
            if one.names[0] in self._values:
                continue
            # peft may register the input embedding a second time, outside of the model.
            inside = [name.removeprefix(prefix) for name in one.names if name.startswith(prefix)]
            renamed = [name.replace(".base_layer.", ".") for name in inside]
            if not renamed:
                raise InvariantError(f"{one.names[0]} belongs neither to the adapter nor to its base model.")
            plain |= dict.fromkeys(one.names, renamed[0])
            of_base.append(replace(one, names=renamed))
        return _Reader(self._base.open(under, of_base), plain, self._values)


class _Reader:
    """Reads each tensor from the files or from the adapter's values."""

    def __init__(self, base: WeightReader, plain: Mapping[str, str], values: Mapping[str, torch.Tensor]) -> None:
        """Read from ``base`` under the names that ``plain`` gives, or from ``values``."""
        self._base = base
        self._plain = plain
        self._values = values

    def has(self, name: str) -> bool:
        """See :meth:`fullshard.engine.WeightReader.has`."""
        return name in self._values or (name in self._plain and self._base.has(self._plain[name]))

    def read(self, name: str, start: int, out: torch.Tensor) -> None:
        """See :meth:`fullshard.engine.WeightReader.read`."""
        if name in self._values:
            out.copy_(self._values[name].reshape(-1)[start : start + out.numel()])
        else:
            self._base.read(self._plain[name], start, out)
