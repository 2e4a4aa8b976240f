"""Codes of 4-bit formats by a table, on a CPU: what bitsandbytes' search finds, in an eighth of the time."""

from __future__ import annotations

from functools import lru_cache

import torch

from fullshard.quantized.bitsandbytes_door import bitsandbytes

BLOCK = 64
"""Weights that share a scale in nf4 and fp4."""
PART = 1 << 18
"""Weights that are quantised at a time on a CPU, so that what is computed in between stays in a cache."""
_CELLS = 512
"""Cells of the numbers from 0 to 1; the closest bounds, fp4's beside zero, are 0.005 apart."""
_LAST_BITS = torch.tensor(2.0**23 + _CELLS)
"""Numbers from 2^23 to 2^24 have no digits behind the point."""


class Table:
    """Finds codes of nf4 or fp4 as bitsandbytes' search of its bounds does, on a CPU.

    Rounding is monotone: a bound in a lower cell is below the number, one in a higher cell above it, and the one that
    may be in its own cell is compared. All parts use the same memory: new memory for each took as long as the rest.
    """

    def __init__(self, type: str, most: int) -> None:
        """Take memory for parts of ``most`` weights."""
        self._bounds, self._codes = _cells(type)
        self._numbers = [torch.empty(most, device="cpu") for _ in range(3)]
        self._found = torch.empty(most, dtype=torch.uint8, device="cpu")
        self._low = torch.empty(most // 2, dtype=torch.int16, device="cpu")

    def find(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return codes and largest values of blocks; None: there is nan or inf."""
        scaled, second, third = (numbers[: values.numel()] for numbers in self._numbers)
        scaled.copy_(values)
        largest = torch.abs(scaled, out=second).view(-1, BLOCK).amax(1)
        if not largest.isfinite().all():
            return None
        # No number is above 1 by more than a rounding, which no bound and no cell is near.
        scaled.view(-1, BLOCK).mul_((1.0 / largest.clamp(min=1e-38)).unsqueeze(1))
        cell = _cell_of(scaled, second)
        # The sign bit of bound minus number: a comparison and a sum of booleans take four times as long.
        bound = torch.index_select(self._bounds, 0, cell, out=third)
        above = bound.sub_(scaled).view(torch.int32).bitwise_right_shift_(31)
        cell.sub_(above, alpha=self._bounds.numel())
        found = torch.index_select(self._codes, 0, cell, out=self._found[: values.numel()]).view(torch.int16)
        low = torch.bitwise_right_shift(found, 8, out=self._low[: found.numel()])
        return found.bitwise_left_shift_(4).bitwise_or_(low).to(torch.uint8), largest


def _cell_of(scaled: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return the cell of numbers from -1 to 1, int32, in ``out``: what their sum with 2^23 has as last bits."""
    return torch.add(_LAST_BITS, scaled, alpha=_CELLS, out=out).view(torch.int32).bitwise_and_(4 * _CELLS - 1)


@lru_cache(maxsize=2)
def _cells(type: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bound in each cell, or inf; and codes: of all cells' numbers up to their bounds, then above them."""
    with torch.device("cpu"):  # as in _dynamic_map
        values = bitsandbytes().functional.get_4bit_type(type, device="cpu", blocksize=BLOCK)
        order = torch.argsort(values)  # as bitsandbytes does: fp4 has zero twice
        middles = (values[order[:-1]] + values[order[1:]]) / 2
        places = _cell_of(middles, torch.empty_like(middles))
        bounds = torch.full((2 * _CELLS + 1,), torch.inf).index_copy_(0, places.long(), middles)
        below = torch.searchsorted(places, torch.arange(2 * _CELLS + 1, dtype=torch.int32))
        above = below + bounds.isfinite()
        return bounds, order[torch.cat([below, above])].to(torch.uint8)
