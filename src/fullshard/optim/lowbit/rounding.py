"""Stochastic rounding to bfloat16 by random bits that depend only on what is rounded, not on who rounds it or when."""

from __future__ import annotations

import torch

_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""SplitMix64's constants: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014."""

_WORD = 2**64 - 1


def stream_key(*parts: int) -> int:
    """A 64-bit number of its own for each tuple of numbers, for :func:`random_words`; parts are hashed one by one."""
    key = 0
    for part in parts:
        key = _mixed((key ^ part & _WORD) + _GAMMA)
    return key


def random_words(key: int, start: int, stop: int, device: torch.device) -> torch.Tensor:
    """64 random bits for each of the elements ``start`` to ``stop``: output number i of SplitMix64 seeded with ``key``.

    The generator is a counter and a mixer, so that any part of a stream is computed alone, on any device, the same.

    Returns:
        int64, (stop - start,).
    """
    words = torch.arange(start, stop, device=device)  # int64; products and sums wrap around, as they should
    words.mul_(_signed(_GAMMA)).add_(_signed(key + _GAMMA & _WORD))
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        words.bitwise_xor_(_shifted(words, shift)).mul_(_signed(factor))
    return words.bitwise_xor_(_shifted(words, 31))


def sixteen_bits(words: torch.Tensor, field: int) -> torch.Tensor:
    """The bits ``16 * field`` to ``16 * field + 15`` of words of :func:`random_words`; int32, 0 to 65535."""
    return (words >> 16 * field).bitwise_and_(0xFFFF).to(torch.int32)


def round_to_bfloat16(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Round to one of the two neighbours in bfloat16, to the nearer one more often: on average nothing is lost.

    The 16 bits of a float32 that bfloat16 does not have, over 2 ** 16, are the distance to the neighbour nearer to
    zero; random bits are added to them and the carry, if there is one, goes into the bits that stay. What bfloat16
    can hold stays exactly; infinities and nans stay. The method is that of Zamirai et al., "Revisiting BFloat16
    Training", https://arxiv.org/abs/2010.06192.

    Args:
        values: float32.
        bits: Random, int32, 0 to 65535, of the same shape; consumed.

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
    """Shift to the right and fill up with zeros; torch's own fills up with the sign."""
    return (words >> shift).bitwise_and_(2 ** (64 - shift) - 1)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word
