"""The kernels of T5's attention, in Triton; imported only where they run.

Places are positions of keys and queries, and a *distance* is the key's place minus the query's. Scores and their
log-sum-exp are powers of two, because a GPU has an instruction for these.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

# A kernel has thirty arguments, and a line for each would hide what it does.
# fmt: off

_LOG2E = tl.constexpr(1.4426950408889634)

_SCAN = tl.constexpr(512)
"""Segment numbers that are compared at once."""

_ROUNDS = tl.constexpr(7)
"""Rounds of Philox: the fewest that pass the tests of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3"."""

_LENGTHS = ("queries", "keys", "heads", "reach", "drop", "seg_q_row", "seg_k_row")
"""Arguments whose values do not make another kernel."""


@triton.jit
def _rows(base, start, stride, count, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr):
    """Load ROWS rows of D values from ``start`` on, (ROWS, BD), with zeros outside."""
    row, column = start + tl.arange(0, ROWS), tl.arange(0, BD)
    inside = (row[:, None] < count) & (column[None, :] < D)
    return tl.load(base + row.to(tl.int64)[:, None] * stride + column[None, :], mask=inside, other=0.0)


@triton.jit
def _store(base, start, stride, count, values, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr):
    """Store rows as :func:`_rows` loads them."""
    row, column = start + tl.arange(0, ROWS), tl.arange(0, BD)
    inside = (row[:, None] < count) & (column[None, :] < D)
    at = base + row.to(tl.int64)[:, None] * stride + column[None, :]
    tl.store(at, values.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _numbers(SEGMENTS, start, count, other, GIVEN: tl.constexpr, ROWS: tl.constexpr):
    """Return the segment numbers of places: 1 if none are given, and ``other`` outside of the sequence."""
    place = start + tl.arange(0, ROWS)
    if GIVEN:
        return tl.load(SEGMENTS + place, mask=place < count, other=other)
    return tl.where(place < count, 1, other)


@triton.jit
def _span(SEGMENTS, numbers, count, GIVEN: tl.constexpr):
    """Return the first place that any of ``numbers``, negative ones left out, may see, and the one after the last."""
    high = tl.max(numbers, 0)
    low = tl.min(tl.where(numbers < 0, high, numbers), 0)
    first, after = tl.full([], 0, tl.int32) + count, tl.full([], 0, tl.int32)
    if GIVEN:
        for start in range(0, count, _SCAN):
            place = start + tl.arange(0, _SCAN)
            number = tl.load(SEGMENTS + place, mask=place < count, other=-1)
            seen = (number >= low) & (number <= high) & (number >= 0)
            first = tl.minimum(first, tl.min(tl.where(seen, place, count), 0))
            after = tl.maximum(after, tl.max(tl.where(seen, place + 1, 0), 0))
    else:
        first = tl.where((low <= 1) & (high >= 1), 0, first)
        after = tl.where((low <= 1) & (high >= 1), count, after)
    return first, after


@triton.jit
def _dot(left, right, PRECISION: tl.constexpr):
    """Multiply matrices, in fp32; "wide" is for Triton's interpreter, which multiplies the bits of bf16."""
    if PRECISION == "wide":
        return tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
    return tl.dot(left, right, input_precision=PRECISION)


@triton.jit
def _scores(
    left, right, query, key, number_q, number_k, BIAS, far, scale, reach, NEAR: tl.constexpr, HAS_BIAS: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr
):
    """Return the scores of a tile with the bias, in fp32; -inf where a query does not see a key.

    ``left`` and ``right`` are the queries' and keys' rows, or the keys' and queries' for a transposed tile; places and
    segment numbers have an axis of one in the other's direction. Tiles that are not NEAR have one bias, ``far``.
    """
    scores = _dot(left, tl.trans(right), PRECISION) * (scale * _LOG2E)
    if HAS_BIAS:
        if NEAR:
            distance = tl.minimum(tl.maximum(key - query, -reach), reach)
            scores += tl.load(BIAS + distance + reach) * _LOG2E
        else:
            scores += far * _LOG2E
    seen = number_q == number_k
    if CAUSAL and NEAR:
        seen = seen & (key <= query)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def _kept(seed, row, start_q, start_k, drop, BM: tl.constexpr, BN: tl.constexpr):
    """Return where dropout keeps a weight, (BM, BN), whatever the tiles: of row and head, query, and key."""
    query = start_q + tl.arange(0, BM)
    four = start_k // 4 + tl.arange(0, BN // 4)
    zero = tl.zeros([BM, BN // 4], tl.int32)
    a, b, c, d = tl.philox(seed, zero + four[None, :], zero + query[:, None], zero + row, zero, _ROUNDS)
    both = tl.join(tl.join(_large(a, drop), _large(c, drop)), tl.join(_large(b, drop), _large(d, drop)))
    return tl.reshape(both, (BM, BN)) != 0


@triton.jit
def _large(number, drop):
    return ((number >> 8).to(tl.int32) >= drop).to(tl.int8)


@triton.jit
def _phases(first, after, start, reach, OWN: tl.constexpr, OTHER: tl.constexpr):
    """Return block numbers: where those seen begin, near ones begin, near ones end, and those seen end.

    ``start`` is the first place of a block of OWN places, [first, after) what it may see, in blocks of OTHER places. A
    block that is not near has all its places at least ``reach`` before all of ours, or behind.
    """
    begin, end = first // OTHER, tl.cdiv(after, OTHER)
    near = tl.minimum(tl.maximum(tl.maximum(start - reach + 1, 0) // OTHER, begin), end)
    far = tl.minimum(tl.maximum(tl.cdiv(start + OWN - 1 + reach, OTHER), near), end)
    return begin, near, far, end


@triton.jit
def _ends(BIAS, head, reach, HAS_BIAS: tl.constexpr):
    """Return a head's biases by distance, and those of the keys far before and far behind a query."""
    BIAS += head * (2 * reach + 1)
    if HAS_BIAS:
        return BIAS, tl.load(BIAS), tl.load(BIAS + 2 * reach)
    return BIAS, 0.0, 0.0


@triton.jit
def _forward_blocks(
    acc, total, top, begin, end, q, query, number_q, K, V, k_place, v_place, keys, SEGMENTS_K, BIAS, far, scale, reach,
    seed, row, start_q, drop, NEAR: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SEG: tl.constexpr, CAUSAL: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr
):
    """Add blocks of keys to the sums of a block of queries: their values, their weights, and the largest score."""
    for block in range(begin, end):
        start_k = block * BN
        key = start_k + tl.arange(0, BN)
        k, v = _rows(K, start_k, k_place, keys, D, BD, BN), _rows(V, start_k, v_place, keys, D, BD, BN)
        number_k = _numbers(SEGMENTS_K, start_k, keys, -1, HAS_SEG, BN)
        scores = _scores(
            q, k, query[:, None], key[None, :], number_q[:, None], number_k[None, :], BIAS, far, scale, reach, NEAR,
            HAS_BIAS, CAUSAL, PRECISION
        )
        above = tl.maximum(top, tl.max(scores, 1))
        finite = tl.where(above == float("-inf"), 0.0, above)  # a query that has seen no key yet
        weights, shrink = tl.exp2(scores - finite[:, None]), tl.exp2(top - finite)
        total = total * shrink + tl.sum(weights, 1)
        if DROP:
            weights = tl.where(_kept(seed, row, start_q, start_k, drop, BM, BN), weights, 0.0)
        acc = acc * shrink[:, None] + _dot(weights.to(v.dtype), v, PRECISION)
        top = above
    return acc, total, top


@triton.jit(do_not_specialize=_LENGTHS)
def forward(
    Q, K, V, BIAS, SEGMENTS_Q, SEGMENTS_K, SEED, OUT, LSE, heads, queries, keys, scale, reach, drop, grow, q_row,
    q_head, q_place, k_row, k_head, k_place, v_row, v_head, v_place, seg_q_row, seg_k_row, D: tl.constexpr,
    BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SEG_Q: tl.constexpr,
    HAS_SEG: tl.constexpr, CAUSAL: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr
):
    """Compute a block of queries of one head: its output, and its log-sum-exp, infinity where a query sees no key."""
    blocks = tl.cdiv(queries, BM)
    row, start_q = tl.program_id(0) // blocks, (tl.program_id(0) % blocks) * BM
    batch, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    Q += batch * q_row + head * q_head
    K += batch * k_row + head * k_head
    V += batch * v_row + head * v_head
    SEGMENTS_K += batch * seg_k_row
    query = start_q + tl.arange(0, BM)
    number_q = _numbers(SEGMENTS_Q + batch * seg_q_row, start_q, queries, -2, HAS_SEG_Q, BM)
    q = _rows(Q, start_q, q_place, queries, D, BD, BM)
    seed = tl.load(SEED) if DROP else 0
    first, after = _span(SEGMENTS_K, number_q, keys, HAS_SEG)
    if CAUSAL:
        after = tl.minimum(after, start_q + BM)
    begin, near, far, end = _phases(first, after, start_q, reach, BM, BN)
    if CAUSAL:
        far = end
    elif not HAS_BIAS:
        far = near
    BIAS, low, high = _ends(BIAS, head, reach, HAS_BIAS)
    acc, total = tl.zeros([BM, BD], tl.float32), tl.zeros([BM], tl.float32)
    top = tl.full([BM], float("-inf"), tl.float32)
    acc, total, top = _forward_blocks(
        acc, total, top, begin, near, q, query, number_q, K, V, k_place, v_place, keys, SEGMENTS_K, BIAS, low, scale,
        reach, seed, row, start_q, drop, False, D, BD, BM, BN, HAS_BIAS, HAS_SEG, CAUSAL, DROP, PRECISION
    )
    acc, total, top = _forward_blocks(
        acc, total, top, near, far, q, query, number_q, K, V, k_place, v_place, keys, SEGMENTS_K, BIAS, low, scale,
        reach, seed, row, start_q, drop, True, D, BD, BM, BN, HAS_BIAS, HAS_SEG, CAUSAL, DROP, PRECISION
    )
    acc, total, top = _forward_blocks(
        acc, total, top, far, end, q, query, number_q, K, V, k_place, v_place, keys, SEGMENTS_K, BIAS, high, scale,
        reach, seed, row, start_q, drop, False, D, BD, BM, BN, HAS_BIAS, HAS_SEG, CAUSAL, DROP, PRECISION
    )
    none = total == 0.0
    out = acc * (grow / tl.where(none, 1.0, total))[:, None]
    _store(OUT + (batch * queries * heads + head) * D, start_q, heads * D, queries, out, D, BD, BM)
    lse = tl.where(none, float("inf"), top + tl.log2(tl.where(none, 1.0, total)))
    tl.store(LSE + row.to(tl.int64) * queries + query, lse, mask=query < queries)


@triton.jit
def _by_bucket(tile, start_q, start_k, BUCKET, reach, BM: tl.constexpr, BN: tl.constexpr, BUCKETS: tl.constexpr):
    """Return the sums of a tile's elements by the bucket of their distance, (BUCKETS,).

    Rows are turned, each by its number, so that a column has one distance where it has not wrapped around, and one that
    is BN less for each time that it has. Columns are summed, then the columns of each bucket.
    """
    row, column, name = tl.arange(0, BM)[:, None], tl.arange(0, BN)[None, :], tl.arange(0, BUCKETS)
    turned, wrapped = tl.gather(tile, (row + column) % BN, 1), (row + column) // BN
    sums = tl.zeros([BUCKETS], tl.float32)
    for times in tl.static_range((BM + BN - 2) // BN + 1):
        distance = start_k - start_q - times * BN + tl.arange(0, BN)
        bucket = tl.load(BUCKET + tl.minimum(tl.maximum(distance, -reach), reach) + reach)
        of_distance = tl.sum(tl.where(wrapped == times, turned, 0.0), 0)
        sums += tl.sum(tl.where(bucket[:, None] == name[None, :], of_distance[:, None], 0.0), 0)
    return sums


@triton.jit
def _backward_q_blocks(
    dq, sums, begin, end, q, do, query, number_q, lse, delta, K, V, k_place, v_place, keys, SEGMENTS_K, BIAS, BUCKET,
    far, scale, reach, seed, row, start_q, drop, grow, NEAR: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BUCKETS: tl.constexpr, SUMMED: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_SEG: tl.constexpr, CAUSAL: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr
):
    """Add the gradients of blocks of keys to that of a block of queries, and to the sums by bucket."""
    of_far = tl.zeros([BM], tl.float32)
    for block in range(begin, end):
        start_k = block * BN
        key = start_k + tl.arange(0, BN)
        k, v = _rows(K, start_k, k_place, keys, D, BD, BN), _rows(V, start_k, v_place, keys, D, BD, BN)
        number_k = _numbers(SEGMENTS_K, start_k, keys, -1, HAS_SEG, BN)
        scores = _scores(
            q, k, query[:, None], key[None, :], number_q[:, None], number_k[None, :], BIAS, far, scale, reach, NEAR,
            HAS_BIAS, CAUSAL, PRECISION
        )
        dp = _dot(do, tl.trans(v), PRECISION)
        if DROP:
            dp = tl.where(_kept(seed, row, start_q, start_k, drop, BM, BN), dp * grow, 0.0)
        ds = tl.exp2(scores - lse[:, None]) * (dp - delta[:, None])
        dq += _dot(ds.to(k.dtype), k, PRECISION)
        if SUMMED:
            if NEAR:
                sums += _by_bucket(ds, start_q, start_k, BUCKET, reach, BM, BN, BUCKETS)
            else:
                of_far += tl.sum(ds, 1)
    return dq, sums, tl.sum(of_far, 0)


@triton.jit(do_not_specialize=_LENGTHS)
def backward_q(
    Q, K, V, BIAS, BUCKET, SEGMENTS_Q, SEGMENTS_K, SEED, OUT, LSE, DO, DQ, DELTA, SUMS, heads, queries, keys, scale,
    reach, drop, grow, q_row, q_head, q_place, k_row, k_head, k_place, v_row, v_head, v_place, do_row, do_head,
    do_place, seg_q_row, seg_k_row, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SEG_Q: tl.constexpr, HAS_SEG: tl.constexpr, CAUSAL: tl.constexpr, DROP: tl.constexpr,
    PRECISION: tl.constexpr, BUCKETS: tl.constexpr, SUMMED: tl.constexpr
):
    """Compute the gradient of a block of queries, its sums by bucket, and DELTA: outputs times gradients, summed."""
    blocks = tl.cdiv(queries, BM)
    row, start_q = tl.program_id(0) // blocks, (tl.program_id(0) % blocks) * BM
    batch, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    Q += batch * q_row + head * q_head
    K += batch * k_row + head * k_head
    V += batch * v_row + head * v_head
    SEGMENTS_K += batch * seg_k_row
    query = start_q + tl.arange(0, BM)
    number_q = _numbers(SEGMENTS_Q + batch * seg_q_row, start_q, queries, -2, HAS_SEG_Q, BM)
    q = _rows(Q, start_q, q_place, queries, D, BD, BM)
    do = _rows(DO + batch * do_row + head * do_head, start_q, do_place, queries, D, BD, BM)
    of_head = (batch * queries * heads + head) * D
    out = _rows(OUT + of_head, start_q, heads * D, queries, D, BD, BM)
    of_row = row.to(tl.int64) * queries + query
    lse = tl.load(LSE + of_row, mask=query < queries, other=float("inf"))
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(DELTA + of_row, delta, mask=query < queries)
    seed = tl.load(SEED) if DROP else 0
    first, after = _span(SEGMENTS_K, number_q, keys, HAS_SEG)
    if CAUSAL:
        after = tl.minimum(after, start_q + BM)
    begin, near, far, end = _phases(first, after, start_q, reach, BM, BN)
    if CAUSAL:
        far = end
    elif not HAS_BIAS:
        far = near
    BIAS, low, high = _ends(BIAS, head, reach, HAS_BIAS)
    dq, sums = tl.zeros([BM, BD], tl.float32), tl.zeros([BUCKETS], tl.float32)
    dq, sums, before = _backward_q_blocks(
        dq, sums, begin, near, q, do, query, number_q, lse, delta, K, V, k_place, v_place, keys, SEGMENTS_K, BIAS,
        BUCKET, low, scale, reach, seed, row, start_q, drop, grow, False, D, BD, BM, BN, BUCKETS, SUMMED, HAS_BIAS,
        HAS_SEG, CAUSAL, DROP, PRECISION
    )
    dq, sums, _ = _backward_q_blocks(
        dq, sums, near, far, q, do, query, number_q, lse, delta, K, V, k_place, v_place, keys, SEGMENTS_K, BIAS, BUCKET,
        low, scale, reach, seed, row, start_q, drop, grow, True, D, BD, BM, BN, BUCKETS, SUMMED, HAS_BIAS, HAS_SEG,
        CAUSAL, DROP, PRECISION
    )
    dq, sums, behind = _backward_q_blocks(
        dq, sums, far, end, q, do, query, number_q, lse, delta, K, V, k_place, v_place, keys, SEGMENTS_K, BIAS, BUCKET,
        high, scale, reach, seed, row, start_q, drop, grow, False, D, BD, BM, BN, BUCKETS, SUMMED, HAS_BIAS, HAS_SEG,
        CAUSAL, DROP, PRECISION
    )
    _store(DQ + of_head, start_q, heads * D, queries, dq * scale, D, BD, BM)
    if SUMMED:
        name = tl.arange(0, BUCKETS)
        sums += tl.where(name == tl.load(BUCKET), before, 0.0)
        sums += tl.where(name == tl.load(BUCKET + 2 * reach), behind, 0.0)
        tl.store(SUMS + tl.program_id(0).to(tl.int64) * BUCKETS + name, sums)


@triton.jit
def _backward_k_blocks(
    dk, dv, begin, end, k, v, key, number_k, Q, DO, LSE, DELTA, q_place, do_place, queries, SEGMENTS_Q, BIAS, far,
    scale, reach, seed, row, start_k, drop, grow, NEAR: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SEG_Q: tl.constexpr, CAUSAL: tl.constexpr,
    DROP: tl.constexpr, PRECISION: tl.constexpr
):
    """Add the gradients of blocks of queries to those of a block of keys and values; tiles are transposed."""
    for block in range(begin, end):
        start_q = block * BM
        query = start_q + tl.arange(0, BM)
        q, do = _rows(Q, start_q, q_place, queries, D, BD, BM), _rows(DO, start_q, do_place, queries, D, BD, BM)
        number_q = _numbers(SEGMENTS_Q, start_q, queries, -2, HAS_SEG_Q, BM)
        lse = tl.load(LSE + query, mask=query < queries, other=float("inf"))
        delta = tl.load(DELTA + query, mask=query < queries, other=0.0)
        scores = _scores(
            k, q, query[None, :], key[:, None], number_q[None, :], number_k[:, None], BIAS, far, scale, reach, NEAR,
            HAS_BIAS, CAUSAL, PRECISION
        )
        weights = tl.exp2(scores - lse[None, :])
        dp = _dot(v, tl.trans(do), PRECISION)
        used = weights
        if DROP:
            kept = tl.trans(_kept(seed, row, start_q, start_k, drop, BM, BN))
            used, dp = tl.where(kept, weights, 0.0), tl.where(kept, dp * grow, 0.0)
        dv += _dot(used.to(do.dtype), do, PRECISION)
        dk += _dot((weights * (dp - delta[None, :])).to(q.dtype), q, PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=_LENGTHS)
def backward_k(
    Q, K, V, BIAS, SEGMENTS_Q, SEGMENTS_K, SEED, LSE, DO, DELTA, DK, DV, heads, queries, keys, scale, reach, drop, grow,
    q_row, q_head, q_place, k_row, k_head, k_place, v_row, v_head, v_place, do_row, do_head, do_place, seg_q_row,
    seg_k_row, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_SEG_Q: tl.constexpr, HAS_SEG: tl.constexpr, CAUSAL: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr
):
    """Compute the gradients of a block of keys and values; DELTA is :func:`backward_q`'s."""
    blocks = tl.cdiv(keys, BN)
    row, start_k = tl.program_id(0) // blocks, (tl.program_id(0) % blocks) * BN
    batch, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    Q += batch * q_row + head * q_head
    K += batch * k_row + head * k_head
    V += batch * v_row + head * v_head
    DO += batch * do_row + head * do_head
    SEGMENTS_Q += batch * seg_q_row
    LSE += row.to(tl.int64) * queries
    DELTA += row.to(tl.int64) * queries
    key = start_k + tl.arange(0, BN)
    number_k = _numbers(SEGMENTS_K + batch * seg_k_row, start_k, keys, -1, HAS_SEG, BN)
    k, v = _rows(K, start_k, k_place, keys, D, BD, BN), _rows(V, start_k, v_place, keys, D, BD, BN)
    seed = tl.load(SEED) if DROP else 0
    first, after = _span(SEGMENTS_Q, number_k, queries, HAS_SEG_Q)
    if CAUSAL:
        first = tl.maximum(first, start_k)
    begin, near, far, end = _phases(first, after, start_k, reach, BN, BM)
    if CAUSAL:
        near = tl.minimum(begin, end)
    elif not HAS_BIAS:
        far = near
    BIAS, low, high = _ends(BIAS, head, reach, HAS_BIAS)
    dk, dv = tl.zeros([BN, BD], tl.float32), tl.zeros([BN, BD], tl.float32)
    dk, dv = _backward_k_blocks(
        dk, dv, begin, near, k, v, key, number_k, Q, DO, LSE, DELTA, q_place, do_place, queries, SEGMENTS_Q, BIAS, high,
        scale, reach, seed, row, start_k, drop, grow, False, D, BD, BM, BN, HAS_BIAS, HAS_SEG_Q, CAUSAL, DROP, PRECISION
    )
    dk, dv = _backward_k_blocks(
        dk, dv, near, far, k, v, key, number_k, Q, DO, LSE, DELTA, q_place, do_place, queries, SEGMENTS_Q, BIAS, high,
        scale, reach, seed, row, start_k, drop, grow, True, D, BD, BM, BN, HAS_BIAS, HAS_SEG_Q, CAUSAL, DROP, PRECISION
    )
    dk, dv = _backward_k_blocks(
        dk, dv, far, end, k, v, key, number_k, Q, DO, LSE, DELTA, q_place, do_place, queries, SEGMENTS_Q, BIAS, low,
        scale, reach, seed, row, start_k, drop, grow, False, D, BD, BM, BN, HAS_BIAS, HAS_SEG_Q, CAUSAL, DROP, PRECISION
    )
    of_head = (batch * keys * heads + head) * D
    _store(DK + of_head, start_k, heads * D, keys, dk * scale, D, BD, BN)
    _store(DV + of_head, start_k, heads * D, keys, dv * grow, D, BD, BN)
