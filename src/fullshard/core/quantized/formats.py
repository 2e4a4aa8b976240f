"""Formats of quantised weights: numbers to codes and scales and back, a run of blocks at a time.

A *block* shares a scale: 64 neighbours of the flattened weight (nf4) or a row (int8). Quantising a block
reads nothing outside of it, so every rank quantises its own blocks, equal to those of the full weight to the bit. Both
tensors are stored as bytes: no mixed precision casts them, and one lane of a unit holds all of them.

bitsandbytes is imported when the first weight needs it. On a CPU the codes of nf4 are found by counting
bounds: what bitsandbytes' search finds, in a fraction of the time.
"""

from __future__ import annotations

import importlib
import logging
import re
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import prod
from typing import Any, Protocol

import numpy as np
import torch

from fullshard.core.policy import Quantize
from fullshard.errors import ConfigError

OLDEST = (0, 50)
"""The first version with kernels for CPUs."""

_REMEDY = "pip install 'fullshard[quantization]'"


@lru_cache(maxsize=1)
def bitsandbytes() -> Any:
    """Return the module ``bitsandbytes``.

    Raises:
        ConfigError: It is missing, or too old.
    """
    # On import it logs that the package `kernels` is missing, whose kernel is not used here.
    log = logging.getLogger("bitsandbytes")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        module = importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise ConfigError(f"Quantised weights need bitsandbytes, which is missing ({error}): {_REMEDY}.") from error
    finally:
        log.setLevel(before)
    version = str(getattr(module, "__version__", "0"))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigError(f"Quantised weights need bitsandbytes {oldest} or newer; found {version}: {_REMEDY}.")
    return module


def keep_quiet() -> None:
    """Suppress bitsandbytes' log about a missing kernel that is not used; peft imports bitsandbytes too."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def loaded() -> Any | None:
    """Return bitsandbytes if somebody has imported it: only then can a model have its layers."""
    return bitsandbytes() if "bitsandbytes.nn" in sys.modules else None


BLOCK = 64
"""Weights that share a scale in nf4."""
PART = 1 << 17
"""Weights that are quantised at a time on a CPU, so that what is computed in between stays in the core's own cache."""


class BoundCounter:
    """Finds codes of nf4 as bitsandbytes' search of its bounds does, on a CPU.

    A number's code is how many of the 15 bounds it is above. 15 comparisons of all numbers, by numpy's vector
    instructions, take less time than two look-ups in a table; torch's comparisons take ten times numpy's. All parts
    use the same memory: new memory for each took as long as the rest.
    """

    def __init__(self, most: int) -> None:
        """Take memory for parts of ``most`` weights."""
        self._bounds = _bounds()
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
        found.fill(0)
        for bound in self._bounds:
            np.greater(numbers, bound, out=above.view(bool))
            np.add(found, above, out=found)
        # The first of two codes is the byte's upper half; of the two bytes as one number, the lower one.
        pairs = torch.from_numpy(found).view(torch.int16)
        second = torch.bitwise_right_shift(pairs, 8, out=torch.from_numpy(above).view(torch.int16))
        codes.copy_(pairs.bitwise_left_shift_(4).bitwise_or_(second))
        return True


@lru_cache(maxsize=1)
def _bounds() -> Any:
    """Return the numbers in the middle between two of nf4's, which ascend; an array of 15 float32."""
    with torch.device("cpu"):  # as in _dynamic_map
        values = bitsandbytes().functional.get_4bit_type("nf4", device="cpu", blocksize=BLOCK)
        return ((values[:-1] + values[1:]) / 2).numpy()


Shape = tuple[int, int]
"""Of a weight: (out_features, in_features)."""

_DEQUANTISED = 1 << 19
"""Weights that are dequantised at a time into kept memory: 2 MiB in float32 stay in the cache until they are copied."""
OUTER_BLOCK = 256
"""Scales that share a scale of their own, with double quantisation."""


class Format(Protocol):
    """A format of weights.

    Attributes:
        codes: Name of the module's parameter of codes; it includes the format, so that no other format's are loaded.
        scales: Name of the parameter of scales.
        type: Its name in :class:`fullshard.Quantize`.
    """

    codes: str
    scales: str
    type: str

    def block(self, shape: Shape) -> int:
        """Return the number of weights in a block."""
        ...

    def code_bytes(self, weights: int) -> int:
        """Return the bytes of the codes of so many weights, from the start of a block on."""
        ...

    def codes_shape(self, shape: Shape) -> tuple[int, ...]:
        """Return the shape of the codes, in bytes: with the weight's rows, if a byte belongs to one row only."""
        ...

    def scales_bytes(self, shape: Shape) -> int:
        """Return the bytes of the scales."""
        ...

    def quantise(self, values: torch.Tensor, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantise a run of blocks.

        Args:
            values: (n,), from the start of a block to the end of one, or of the weight; in the weight's own dtype.
            shape: That of the weight.

        Returns:
            Codes, uint8, (code_bytes(n),), and the largest absolute value of each block, float32.
        """
        ...

    def pack(self, largest: torch.Tensor, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return the scales, uint8, (scales_bytes,), or their bytes from ``start`` to ``stop``.

        Args:
            largest: The largest absolute values of all blocks, float32.
            start: The first byte.
            stop: The byte after the last one; None: all.
        """
        ...

    def dequantise(self, codes: torch.Tensor, scales: torch.Tensor, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight, ``shape``."""
        ...

    def dequantise_run(
        self, codes: torch.Tensor, start: int, scales: torch.Tensor, shape: Shape, dtype: torch.dtype
    ) -> tuple[int, torch.Tensor]:
        """Return a run of the weight's elements as :meth:`dequantise` would.

        Args:
            codes: A run of the flattened codes.
            start: First byte of the run.
            scales: All scales of the weight.
            shape: That of the weight.
            dtype: Dtype of the result.

        Returns:
            The first element in the flattened weight, and the elements, (n,).
        """
        ...

    def linear(
        self, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, shape: Shape, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return ``x @ weight.T + bias`` in the dtype of ``x``."""
        ...

    def weight_in_backward(
        self, codes: torch.Tensor, scales: torch.Tensor, shape: Shape, own: torch.dtype, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the weight, in ``dtype``, that the gradient is multiplied with; ``own``: the weight's own dtype."""
        ...

    def parts(
        self, codes: torch.Tensor, scales: torch.Tensor, shape: Shape, own: torch.dtype, dtype: torch.dtype
    ) -> Iterator[torch.Tensor]:
        """Yield :meth:`weight_in_backward`, flattened, in parts of some 500,000 weights; perhaps still in ``own``.

        If ``dtype`` is ``own``, it is also the weight by which :meth:`linear` multiplies.
        """
        ...


SCALES = re.compile(r"(?P<layer>.+)\.(?P<type>nf4|int8)(?P<double>_double)?_scales")
"""Full name of a parameter of scales, which includes the quantisation of its layer."""


def quantisations(names: Iterable[str]) -> list[str]:
    """Return the quantisations of a model's or checkpoint's tensors by their names, such as ``nf4 (double)``."""
    matches = (SCALES.fullmatch(name) for name in names)
    return sorted({f"{m['type']} (double)" if m["double"] else m["type"] for m in matches if m is not None})


def format_of(quantize: Quantize) -> Format:
    """Return the format of a policy.

    Raises:
        ConfigError: bitsandbytes is missing or too old.
    """
    bitsandbytes()
    return Int8() if quantize.type == "int8" else NF4(double=quantize.double_quant)


def rounded(format: Format, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a full weight, (out_features, in_features), quantised and dequantised again; in ``dtype``."""
    shape = (weight.shape[0], weight.shape[1])
    codes, largest = format.quantise(weight.reshape(-1), shape)
    return format.dequantise(codes.reshape(format.codes_shape(shape)), format.pack(largest), shape, dtype)


class NF4:
    """nf4 of bitsandbytes: two codes a byte, a scale for 64 weights; scales are float32 or quantised again.

    Scales in memory: float32 for each block; with double quantisation the float32 scales of 256 scales each, their
    float32 mean, and a byte for each block. Floats are first, where they are aligned.
    """

    type, codes = "nf4", "nf4"

    def __init__(self, *, double: bool) -> None:
        """Quantise the scales too if ``double``."""
        self.double = double
        self.scales = "nf4_double_scales" if double else "nf4_scales"
        if double:
            _dynamic_map(torch.device("cpu"))  # now: while a step is planned, operators give no values

    def block(self, shape: Shape) -> int:
        """See :meth:`Format.block`."""
        return BLOCK

    def code_bytes(self, weights: int) -> int:
        """See :meth:`Format.code_bytes`."""
        return -(-weights // 2)

    def codes_shape(self, shape: Shape) -> tuple[int, ...]:
        """See :meth:`Format.codes_shape`."""
        rows, width = shape
        return (self.code_bytes(rows * width),) if width % 2 else (rows, width // 2)

    def _outer(self, weights: int) -> tuple[int, int]:
        """Return the number of blocks, and of float32 numbers before their bytes."""
        blocks = -(-weights // BLOCK)
        return blocks, -(-blocks // OUTER_BLOCK) + 1

    def scales_bytes(self, shape: Shape) -> int:
        """See :meth:`Format.scales_bytes`."""
        blocks, floats = self._outer(prod(shape))
        return 4 * floats + blocks if self.double else 4 * blocks

    def quantise(self, values: torch.Tensor, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`Format.quantise`."""
        if values.device.type != "cpu":
            return self._by_search(values)
        # bitsandbytes has no kernel of its own for CPUs: it searches bounds, 21 of its 29 ns a weight.
        weights = values.numel()
        codes = torch.empty(self.code_bytes(weights), dtype=torch.uint8, device=values.device)
        largest = torch.empty(-(-weights // BLOCK), device=values.device)
        counter = BoundCounter(min(weights, PART))
        for low in range(0, weights, PART):
            high = min(low + PART, weights)
            part = codes[low // 2 : self.code_bytes(high)], largest[low // BLOCK : -(-high // BLOCK)]
            if (high - low) % BLOCK or not counter.find(values[low:high], *part):
                for target, made in zip(part, self._by_search(values[low:high]), strict=True):
                    target.copy_(made)
        return codes, largest

    def _by_search(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, state = bitsandbytes().functional.quantize_4bit(values, blocksize=BLOCK, quant_type=self.type)
        return codes.reshape(-1), state.absmax

    def pack(self, largest: torch.Tensor, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """See :meth:`Format.pack`."""
        if not self.double:
            return largest.view(torch.uint8)[start:stop]
        # One mean over all, as in bitsandbytes, because its last bit depends on the order of additions.
        mean = largest.mean()
        blocks, floats = self._outer(largest.numel() * BLOCK)
        head = 4 * floats
        stop = head + blocks if stop is None else stop
        made = [torch.empty(0, dtype=torch.uint8, device=largest.device)]
        if start < head:
            numbers = torch.cat([_outer_scales(largest - mean), mean.view(1)])
            made.append(numbers.view(torch.uint8)[start:stop])
        if stop > head:
            low, high = max(start - head, 0), stop - head
            first = low // OUTER_BLOCK * OUTER_BLOCK
            codes, _ = _quantise_scales(largest[first : -(-high // OUTER_BLOCK) * OUTER_BLOCK] - mean)
            made.append(codes[low - first : high - first])
        return torch.cat(made)

    def _state(self, scales: torch.Tensor, shape: Shape, dtype: torch.dtype) -> Any:
        """Return bitsandbytes' state of a weight."""
        make = bitsandbytes().functional.QuantState
        size = torch.Size(shape)
        if not self.double:
            return make(scales.view(torch.float32), size, None, BLOCK, self.type, dtype)
        _, floats = self._outer(prod(shape))
        numbers = scales[: 4 * floats].view(torch.float32)
        outer = make(numbers[:-1], None, _dynamic_map(scales.device), OUTER_BLOCK, None, torch.float32)
        return make(scales[4 * floats :], size, None, BLOCK, self.type, dtype, numbers[-1], outer)

    def dequantise(self, codes: torch.Tensor, scales: torch.Tensor, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """See :meth:`Format.dequantise`."""
        state = self._state(scales, _rows_of_blocks(prod(shape)), dtype)
        return bitsandbytes().functional.dequantize_4bit(codes.reshape(-1, 1), state).reshape(shape)

    def parts(
        self, codes: torch.Tensor, scales: torch.Tensor, shape: Shape, own: torch.dtype, dtype: torch.dtype
    ) -> Iterator[torch.Tensor]:
        """See :meth:`Format.parts`."""
        functional, flat, weights = bitsandbytes().functional, codes.reshape(-1, 1), prod(shape)
        largest = self._largest(self._state(scales, shape, own))
        for low in range(0, weights, _DEQUANTISED):
            high = min(low + _DEQUANTISED, weights)
            blocks = largest[low // BLOCK : -(-high // BLOCK)]
            state = functional.QuantState(blocks, torch.Size(_rows_of_blocks(high - low)), None, BLOCK, self.type, own)
            yield functional.dequantize_4bit(flat[low // 2 : -(-high // 2)], state).reshape(-1)

    def _largest(self, state: Any) -> torch.Tensor:
        """Return the scale of each block, float32."""
        if not self.double:
            return state.absmax
        return bitsandbytes().functional.dequantize_blockwise(state.absmax, state.state2) + state.offset

    def dequantise_run(
        self, codes: torch.Tensor, start: int, scales: torch.Tensor, shape: Shape, dtype: torch.dtype
    ) -> tuple[int, torch.Tensor]:
        """See :meth:`Format.dequantise_run`."""
        functional = bitsandbytes().functional
        largest = self._largest(self._state(scales, shape, dtype))
        before = start % (BLOCK // 2)
        first, stop = 2 * (start - before), min(2 * (start + codes.numel()), prod(shape))
        blocks = largest[first // BLOCK : -(-stop // BLOCK)].contiguous()
        part = functional.QuantState(blocks, torch.Size(_rows_of_blocks(stop - first)), None, BLOCK, self.type, dtype)
        padded = torch.cat([codes.new_zeros(before), codes]).reshape(-1, 1)
        return 2 * start, functional.dequantize_4bit(padded, part).reshape(-1)[2 * before :]

    def linear(
        self, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, shape: Shape, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See :meth:`Format.linear`: bitsandbytes' operator, whose kernel depends on the device."""
        if x.numel() == 0 or shape[1] % BLOCK:
            return torch.nn.functional.linear(x, self.dequantise(codes, scales, shape, x.dtype), bias)
        state = self._state(scales, shape, x.dtype)
        operator = torch.ops.bitsandbytes.gemm_4bit.default
        packed = codes.reshape(-1, 1)
        if not self.double:
            return operator(x, packed, shape, state.absmax, BLOCK, self.type, bias=bias)
        return operator(
            x,
            packed,
            shape,
            state.state2.absmax,
            BLOCK,
            self.type,
            bias=bias,
            absmax_8bit=state.absmax,
            absmax_code=state.state2.code,
            absmax_offset=state.offset,
        )

    def weight_in_backward(
        self, codes: torch.Tensor, scales: torch.Tensor, shape: Shape, own: torch.dtype, dtype: torch.dtype
    ) -> torch.Tensor:
        """See :meth:`Format.weight_in_backward`: bitsandbytes rounds it to the weight's own dtype first."""
        return self.dequantise(codes, scales, shape, own).to(dtype)


def _rows_of_blocks(weights: int) -> Shape:
    """Return the shape for dequantising a run of blocks.

    bitsandbytes 0.50's CPU kernel uses wrong scales for widths such as 32, 96 and 160, where a block of 64 ends inside
    a row; its scales are right if rows are blocks, or for a single row. Its threads share rows.
    """
    return (1, weights) if weights % BLOCK else (weights // BLOCK, BLOCK)


class Int8:
    """int8 of bitsandbytes (LLM.int8), weights only: a byte for each weight and a float32 scale for each row.

    Activations are not rounded. ``Linear8bitLt`` computes so when it trains on a CPU; on a GPU and in evaluation it
    rounds activations as well.
    """

    type, codes, scales = "int8", "int8", "int8_scales"

    def block(self, shape: Shape) -> int:
        """See :meth:`Format.block`."""
        return shape[1]

    def code_bytes(self, weights: int) -> int:
        """See :meth:`Format.code_bytes`."""
        return weights

    def codes_shape(self, shape: Shape) -> tuple[int, ...]:
        """See :meth:`Format.codes_shape`."""
        return shape

    def scales_bytes(self, shape: Shape) -> int:
        """See :meth:`Format.scales_bytes`."""
        return 4 * shape[0]

    def quantise(self, values: torch.Tensor, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`Format.quantise`."""
        # bitsandbytes rounds weights to float16 before.
        rows = values.view(-1, shape[1]).to(torch.float16)
        codes, largest, _ = bitsandbytes().functional.int8_vectorwise_quant(rows)
        return codes.reshape(-1).view(torch.uint8), largest

    def pack(self, largest: torch.Tensor, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """See :meth:`Format.pack`."""
        return largest.view(torch.uint8)[start:stop]

    def dequantise(self, codes: torch.Tensor, scales: torch.Tensor, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """See :meth:`Format.dequantise`."""
        rows = codes.view(torch.int8).view(shape)
        return bitsandbytes().functional.int8_vectorwise_dequant(rows, scales.view(torch.float32)).to(dtype)

    def dequantise_run(
        self, codes: torch.Tensor, start: int, scales: torch.Tensor, shape: Shape, dtype: torch.dtype
    ) -> tuple[int, torch.Tensor]:
        """See :meth:`Format.dequantise_run`."""
        width = shape[1]
        row, before = divmod(start, width)
        stop = -(-(start + codes.numel()) // width)
        after = stop * width - start - codes.numel()
        padded = torch.cat([codes.new_zeros(before), codes, codes.new_zeros(after)])
        rows = self.dequantise(padded, scales[4 * row : 4 * stop], (stop - row, width), dtype)
        return start, rows.reshape(-1)[before : before + codes.numel()]

    def linear(
        self, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, shape: Shape, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See :meth:`Format.linear`."""
        weight = self.weight_in_backward(codes, scales, shape, x.dtype, x.dtype)
        return torch.nn.functional.linear(x, weight, bias)

    def weight_in_backward(
        self, codes: torch.Tensor, scales: torch.Tensor, shape: Shape, own: torch.dtype, dtype: torch.dtype
    ) -> torch.Tensor:
        """See :meth:`Format.weight_in_backward`: bitsandbytes' layer rounds differently from ``dequantise``."""
        steps = scales.view(torch.float32).unsqueeze(1).mul(1.0 / 127.0)
        return codes.view(torch.int8).view(shape).to(dtype).mul_(steps)

    def parts(
        self, codes: torch.Tensor, scales: torch.Tensor, shape: Shape, own: torch.dtype, dtype: torch.dtype
    ) -> Iterator[torch.Tensor]:
        """See :meth:`Format.parts`."""
        rows, width = shape
        step = max(1, _DEQUANTISED // width)
        for low in range(0, rows, step):
            high = min(low + step, rows)
            part = codes.view(shape)[low:high], scales[4 * low : 4 * high], (high - low, width)
            yield self.weight_in_backward(*part, own, dtype).reshape(-1)


def _quantise_scales(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and float32 scales of scales less their mean, by bitsandbytes."""
    codes, outer = bitsandbytes().functional.quantize_blockwise(values, blocksize=OUTER_BLOCK)
    return codes, outer.absmax


def _outer_scales(values: torch.Tensor) -> torch.Tensor:
    """Return the same scales without the codes, which take 15 ns each."""
    full = values.numel() // OUTER_BLOCK * OUTER_BLOCK
    found = values[:full].view(-1, OUTER_BLOCK).abs().amax(1)
    if full < values.numel():
        found = torch.cat([found, values[full:].abs().amax(0, keepdim=True)])
    return found if bool(found.isfinite().all()) else _quantise_scales(values)[1]  # nan is the kernel's own affair


@lru_cache(maxsize=16)
def _dynamic_map(device: torch.device) -> torch.Tensor:
    """Return the 256 values of bitsandbytes' 8-bit codes, float32."""
    with torch.device("cpu"):  # its numbers are read, even while the model is built on the meta device
        return bitsandbytes().functional.create_dynamic_map().to(device)
