"""Ranks as threads: sharded runs equal the unsharded run, for every kind of model and several world sizes."""

import pytest

from fullshard.testing import run_ranks
from support.models import KINDS, batches
from support.parity import ROWS_PER_RANK, assert_same_run, replicas, steps_for, train_sharded, train_unsharded

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3])
def test_a_sharded_run_equals_the_unsharded_run(kind, size):
    make, loss_of = KINDS[kind]
    reference, models = replicas(make, size)
    data = batches(steps_for(size), size * ROWS_PER_RANK)
    plain = train_unsharded(reference, loss_of, data)
    runs = run_ranks(size, lambda comm: train_sharded(models[comm.rank], comm, loss_of, data))
    for run in runs:
        assert_same_run(run, plain)


@pytest.mark.parametrize("kind", ["lm", "t5", "lm_frozen_parts"])
@pytest.mark.parametrize("size", [1, 4])
def test_one_rank_takes_the_same_path_and_four_ranks_agree(kind, size):
    test_a_sharded_run_equals_the_unsharded_run(kind, size)


@pytest.mark.parametrize("wrap", [None, lambda module: type(module).__name__ in {"T5LayerFF", "T5Block"}])
def test_the_wrapping_does_not_change_the_run(wrap):
    make, loss_of = KINDS["t5"]
    reference, models = replicas(make, 2)
    data = batches(4, 2 * ROWS_PER_RANK)
    plain = train_unsharded(reference, loss_of, data)
    for run in run_ranks(2, lambda comm: train_sharded(models[comm.rank], comm, loss_of, data, wrap=wrap)):
        assert_same_run(run, plain)
