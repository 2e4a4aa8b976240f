"""Clipping over shards equals clipping of the unsharded gradient, for several norms."""

import math

import pytest
import torch

from fullshard import clip_grad_norm_, fully_shard
from fullshard.comm import run_ranks
from fullshard.errors import ConfigError
from support.models import TinyLM, batches, lm_loss
from support.parity import assert_gradients, replicas, sharded_gradients


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("size", [1, 3])
def test_the_norm_and_the_clipped_gradients_are_those_of_the_unsharded_run(norm_type, size):
    reference, models = replicas(TinyLM, size)
    tokens = batches(1, 2 * size)[0]
    lm_loss(reference, tokens).backward()
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01, norm_type)

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        lm_loss(model, tokens[2 * comm.rank : 2 * comm.rank + 2]).backward()
        norm = clip_grad_norm_(model, 0.01, norm_type)
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
        return sharded_gradients(model)

    assert_gradients(run_ranks(size, work), reference)


def test_a_rank_without_any_rows_takes_part():
    _, models = replicas(lambda: torch.nn.Linear(1, 1, bias=False), 3)

    def work(comm):
        model = fully_shard(models[comm.rank], comm, wrap=None)
        model(torch.full((1, 1), 2.0)).sum().backward()
        return clip_grad_norm_(model, 1.0).item()

    assert run_ranks(3, work) == [2.0, 2.0, 2.0]


def test_bad_arguments_are_refused():
    with pytest.raises(ConfigError, match="above zero"):
        clip_grad_norm_(TinyLM(), 0.0)
    with pytest.raises(ConfigError, match="no sharded parameters"):
        clip_grad_norm_(TinyLM(), 1.0)


def test_parameters_left_out_of_sharding_count_once():
    reference, models = replicas(TinyLM, 2)
    tokens = batches(1, 2)[0]  # the same rows on both ranks, so that gradients of copies are equal
    lm_loss(reference, tokens).backward()
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01)

    def work(comm):
        model = models[comm.rank]
        fully_shard(model, comm, ignored_params=[model.blocks[0].side.bias])
        lm_loss(model, tokens).backward()
        torch.testing.assert_close(clip_grad_norm_(model, 0.01), expected, rtol=1e-5, atol=0)
        torch.testing.assert_close(
            model.blocks[0].side.bias.grad, reference.blocks[0].side.bias.grad, atol=1e-6, rtol=0
        )

    run_ranks(2, work)
