"""Fixed shapes: few, the same in every process, and every micro-batch of every epoch is in one of them."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch

from fullshard.program.data import (
    MOST_SHAPES,
    CollateSpec,
    EpochPlan,
    TokenPlan,
    fixed_shapes,
    padding_share,
    step_sizes,
    steps,
)
from fullshard.program.data.batching.shapes import choose_shapes, positions
from fullshard.program.train.run.assemble import padding_note
from support.one_step import tokenized


def rows(count, seed=0):
    generator = np.random.default_rng(seed)
    sources, targets = generator.integers(1, 200, count), generator.integers(2, 40, count)
    return tokenized([[5] * n for n in sources], [[6] * n for n in targets])


def plan_of(given, *, tokens, causal, world_size=2):
    if not tokens:
        return EpochPlan(len(given), world_size, 4, seed=1, lengths=given.lengths, accumulation=2)
    lengths = given.source_ids.lengths, given.target_ids.lengths
    return TokenPlan(*lengths, causal=causal, world_size=world_size, batch_tokens=900, accumulation=2, seed=1)


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_every_batch_of_every_epoch_has_one_of_few_shapes_and_the_same_tokens(causal, packed, tokens):
    given = rows(301)
    plan = plan_of(given, tokens=tokens, causal=causal)
    own = CollateSpec(0, causal=causal, packed=packed, prompts=False)
    shapes = fixed_shapes(plan, given, own)
    fixed = CollateSpec(0, causal=causal, packed=packed, prompts=False, shapes=shapes)
    assert shapes == fixed_shapes(plan, rows(301), own), "another process chooses the same"
    assert 1 <= len(shapes) <= MOST_SHAPES
    total = real = 0
    for epoch in range(3):
        for rank in range(2):
            made = (steps(given, plan.for_epoch(epoch), rank, spec) for spec in (own, fixed))
            for some, others in zip(*made, strict=True):
                for one, other in zip(some, others, strict=True):
                    assert (*other.input_ids_BS.shape, other.labels_BT.shape[1]) in shapes
                    assert (one.target_tokens, one.tokens) == (other.target_tokens, other.tokens)
                    assert (other.labels_BT != -100).sum() == (one.labels_BT != -100).sum()
                    assert other.indices[: len(one.indices)] == one.indices
                    assert all(other.fillers[len(one.indices) :])
                    if epoch == 0:
                        real += other.tokens
                        total += other.input_ids_BS.numel() + (0 if causal else other.labels_BT.numel())
    assert padding_share(plan, given, fixed) == pytest.approx(1 - real / total)
    more = (1 - padding_share(plan, given, own)) / (1 - padding_share(plan, given, fixed))
    assert more < 1.5, "lengths from 3 to 240, but few batches to choose from"


def test_rows_of_one_length_have_one_shape_and_no_more_padding():
    given = tokenized([[5] * 9] * 40, [[6] * 5] * 40)
    assert fixed_shapes(plan_of(given, tokens=False, causal=False), given, CollateSpec(0)) == ((4, 9, 5),)


def test_the_shapes_of_a_causal_model_have_the_fewest_positions():
    lengths = [7, 11, 12, 30, 31, 45, 61, 62, 90, 100]
    found = {(2, length, length): 1.0 + length % 3 for length in lengths}

    def total(chosen):
        return sum(count * min(2 * size for size in chosen if size >= shape[1]) for shape, count in found.items())

    chosen = [source for _, source, _ in choose_shapes(found, causal=True, longest=(100, 100))]
    best = min(total([*some, 100]) for some in combinations(lengths[:-1], len(chosen) - 1))
    assert total(chosen) == best
    fewer = min(total([*some, 100]) for some in combinations(lengths[:-1], len(chosen) - 2))
    assert fewer > 1.03 * sum(count * positions(shape, causal=True) for shape, count in found.items())


def test_lengths_from_128_on_are_multiples_of_8_up_to_the_longest():
    found = {(1, 129, 3): 1.0, (1, 301, 3): 1.0}
    assert choose_shapes(found, causal=False, longest=(301, 3)) == ((1, 136, 3), (1, 301, 3))


def test_fillers_are_rows_that_do_not_count():
    given = rows(5)
    plan = EpochPlan(5, 1, 4, lengths=given.lengths)
    spec = CollateSpec(0, shapes=((4, 200, 40),))
    last = [batch for step in steps(given, plan, 0, spec) for batch in step][-1]
    assert last.fillers == (False, True, True, True)
    assert torch.equal(last.input_ids_BS[0], last.input_ids_BS[3])
    assert (last.labels_BT[1:] == -100).all()


@pytest.mark.parametrize("tokens", [False, True])
def test_packed_rows_of_a_fixed_shape_have_one_size_of_their_starts(tokens):
    """Ways of attention hand them to compiled blocks, which are compiled for each size."""
    given = rows(301)
    plan = plan_of(given, tokens=tokens, causal=True)
    own = CollateSpec(0, causal=True, packed=True, prompts=False)
    fixed = replace(own, shapes=fixed_shapes(plan, given, own))
    found = set()
    for step in steps(given, plan, 0, fixed):
        for batch in step:
            packing = batch.packing
            lengths = packing.starts.diff()
            assert packing.starts[0] == 0
            assert lengths.sum() == batch.input_ids_BS.numel()
            assert 0 <= lengths.min() <= lengths.max() <= packing.longest == batch.input_ids_BS.shape[1]
            found.add((batch.input_ids_BS.shape, packing.starts.shape))
    assert len(found) == len(dict(found)) <= MOST_SHAPES


def test_the_note_of_padding_says_that_fixed_shapes_exceed_a_budget_of_tokens():
    given = rows(301)
    plan = plan_of(given, tokens=True, causal=True)
    spec = replace(own := CollateSpec(0, causal=True), shapes=fixed_shapes(plan, given, own))
    most = max(positions(shape, causal=True) for shape in spec.shapes)
    assert most > 900
    note = padding_note(plan, given, spec, padding_share(plan, given, spec))
    assert note.endswith(f"the largest has {most:,}, where training.per_device_train_batch_tokens is 900")


def test_the_heaviest_step_is_that_of_the_largest_fixed_shape():
    given = rows(301)
    plan = plan_of(given, tokens=True, causal=False)
    spec = replace(own := CollateSpec(0, prompts=False), shapes=fixed_shapes(plan, given, own))
    made = [
        max(batch.input_ids_BS.numel() + batch.labels_BT.numel() for batch in step)
        for step in steps(given, plan, 0, spec)
    ]
    assert step_sizes(plan, given, 0, spec).tolist() == made
