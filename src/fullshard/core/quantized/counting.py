"""Codes of 4-bit formats on a CPU, by counting bounds: what bitsandbytes' search finds, in a fraction of the time."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from fullshard.core.quantized.bitsandbytes_door import bitsandbytes

BLOCK = 64
"""Weights that share a scale in nf4 and fp4."""
PART = 1 << 17
"""Weights that are quantised at a time on a CPU, so that what is computed in between stays in the core's own cache."""


class BoundCounter:
    """Finds codes of nf4 or fp4 as bitsandbytes' search of its bounds does, on a CPU.

    A number's place among the 15 bounds is how many of them it is above. 15 comparisons of all numbers, by numpy's
    vector instructions, take less time than two look-ups in a table; torch's comparisons take ten times numpy's.
    All parts use the same memory: new memory for each took as long as the rest.
    """

    def __init__(self, type: str, most: int) -> None:
        """Take memory for parts of ``most`` weights."""
        self._first, self._steps = _bounds(type)
        self._numbers = [torch.empty(most, device="cpu") for _ in range(2)]
        self._above, self._found = (np.empty(most, np.uint8) for _ in range(2))

    def find(self, values: torch.Tensor, codes: torch.Tensor, largest: torch.Tensor) -> bool:
        """Write codes and largest values of blocks; False: there is nan or inf, and the codes are not written."""
        scaled, absolute = (numbers[: values.numel()] for numbers in self._numbers)
        scaled.copy_(values)
        torch.amax(torch.abs(scaled, out=absolute).view(-1, BLOCK), 1, out=largest)
        if not largest.isfinite().all():
            return False
        # No number is above 1 by more than a rounding, which no bound is near.
        scaled.view(-1, BLOCK).mul_((1.0 / largest.clamp(min=1e-38)).unsqueeze(1))
        numbers, above, found = scaled.numpy(), self._above[: values.numel()], self._found[: values.numel()]
        found.fill(self._first)
        for bound, step in self._steps:
            np.greater(numbers, bound, out=above.view(bool))
            if step != 1:
                np.multiply(above, step, out=above)
            np.add(found, above, out=found)
        # The first of two codes is the byte's upper half; of the two bytes as one number, the lower one.
        pairs = torch.from_numpy(found).view(torch.int16)
        second = torch.bitwise_right_shift(pairs, 8, out=torch.from_numpy(above).view(torch.int16))
        codes.copy_(pairs.bitwise_left_shift_(4).bitwise_or_(second))
        return True


@lru_cache(maxsize=2)
def _bounds(type: str) -> tuple[int, list[tuple[Any, Any]]]:
    """Return the lowest code, and each bound with the step to the next code, modulo 256."""
    with torch.device("cpu"):  # as in _dynamic_map
        values = bitsandbytes().functional.get_4bit_type(type, device="cpu", blocksize=BLOCK)
        order = torch.argsort(values)  # as bitsandbytes does: fp4 has zero twice
        middles = ((values[order[:-1]] + values[order[1:]]) / 2).numpy()
        steps = order.diff().to(torch.uint8).numpy()
        return int(order[0]), list(zip(middles, steps, strict=True))
