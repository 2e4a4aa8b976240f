"""Philox 4x32 by its definition (Salmon et al., 2011), and what T5's attention drops by it."""

import numpy as np
import torch

ROUNDS = 7
MULTIPLIERS, RAISES = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
MASK = np.uint64(0xFFFFFFFF)


def philox(counter, key, rounds=ROUNDS):
    """The four numbers of each counter (four arrays), 32 bits each, as uint64."""
    a, b, c, d = (np.asarray(one, dtype=np.uint64) for one in counter)
    first, second = (np.uint64(one) for one in key)
    for _ in range(rounds):
        one, other = np.uint64(MULTIPLIERS[0]) * a, np.uint64(MULTIPLIERS[1]) * c
        a, b, c, d = (other >> np.uint64(32)) ^ b ^ first, other & MASK, (one >> np.uint64(32)) ^ d ^ second, one & MASK
        first, second = (first + np.uint64(RAISES[0])) & MASK, (second + np.uint64(RAISES[1])) & MASK
    return a, b, c, d


def kept(seed, rows, heads, queries, keys, rate):
    """Which weights stay, bool, (rows, heads, queries, keys): four keys have one counter, and each 24 bits."""
    fours = -(-keys // 4)
    of, query, four = np.meshgrid(np.arange(rows * heads), np.arange(queries), np.arange(fours), indexing="ij")
    numbers = np.stack(philox((four, query, of, 0 * of), (seed & 0xFFFFFFFF, seed >> 32)), axis=-1)
    stays = (numbers.reshape(rows, heads, queries, 4 * fours)[..., :keys] >> np.uint64(8)) >= round(rate * (1 << 24))
    return torch.from_numpy(stays)
