"""Stochastic rounding to bfloat16 by random bits that depend only on a key and the element's number."""

from __future__ import annotations

import torch

_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""SplitMix64's constants: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014."""

_WORD = 2**64 - 1


def stream_key(*parts: int) -> int:
    """Return a 64-bit hash of a tuple of numbers, for :func:`random_words`."""
    key = 0
    for part in parts:
        key = _mixed((key ^ part & _WORD) + _GAMMA)
    return key


def random_words(key: int, start: int, stop: int, device: torch.device) -> torch.Tensor:
    """Return 64 random bits for each of the elements ``start`` to ``stop``: output i of SplitMix64 seeded with ``key``.

    The generator is a counter and a mixer, so any part of a stream can be computed alone, on any device, with the same
    result.

    Returns:
        int64, (stop - start,).
    """
    words = torch.arange(start, stop, device=device)  # int64; products and sums wrap around, as they should
    words.mul_(_signed(_GAMMA)).add_(_signed(key + _GAMMA & _WORD))
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        words.bitwise_xor_(_shifted(words, shift)).mul_(_signed(factor))
    return words.bitwise_xor_(_shifted(words, 31))


def sixteen_bits(words: torch.Tensor, field: int) -> torch.Tensor:
    """Return the bits ``16 * field`` to ``16 * field + 15`` of words of :func:`random_words`; int32, 0 to 65535."""
    return (words >> 16 * field).bitwise_and_(0xFFFF).to(torch.int32)


def round_to_bfloat16(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Round to one of the two neighbors in bfloat16, to the nearer one more often, so that the mean is exact.

    The 16 bits of a float32 that bfloat16 lacks, over 2 ** 16, are the distance to the neighbor nearer to zero; random
    bits are added to them and the carry, if any, goes into the bits that remain. Values that bfloat16 can represent,
    infinities and nans are unchanged. The method is that of Zamirai et al., "Revisiting BFloat16 Training",
    https://arxiv.org/abs/2010.06192.

    Args:
        values: float32.
        bits: Random, int32, 0 to 65535, of the same shape; overwritten.

    Returns:
        bfloat16, of the same shape.
    """
    carried = bits.add_(values.view(torch.int32)).bitwise_and_(-0x10000).view(torch.float32)
    return torch.where(values.isfinite(), carried, values).to(torch.bfloat16)


def _mixed(word: int) -> int:
    word &= _WORD
    word = (word ^ word >> 30) * _FIRST & _WORD
    word = (word ^ word >> 27) * _SECOND & _WORD
    return word ^ word >> 31


def _shifted(words: torch.Tensor, shift: int) -> torch.Tensor:
    """Shift right, filling with zeros; torch's own shift fills with the sign."""
    return (words >> shift).bitwise_and_(2 ** (64 - shift) - 1)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word
