"""Clipping over shards equals clipping of the unsharded gradient, for several norms."""

import math

import pytest
import torch

from fullshard import clip_grad_norm_, fully_shard
from fullshard.core.comm import SoloComm
from fullshard.core.shards import rows_of
from fullshard.core.testing import run_ranks
from fullshard.errors import ConfigError, TrainingError
from support.models import TinyLM, batches, lm_loss, lm_with_frozen_parts
from support.parity import assert_gradients, replicas, sharded_gradients

NORMS = [1.0, 2.0, 3.0, math.inf]


@pytest.mark.parametrize("make", [TinyLM, lm_with_frozen_parts])
@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("size", [1, 3])
def test_the_norm_and_the_clipped_gradients_are_those_of_the_unsharded_run(norm_type, size, make):
    reference, models = replicas(make, size)
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


@pytest.mark.parametrize("norm_type", NORMS)
def test_a_rank_without_any_rows_takes_part(norm_type):
    _, models = replicas(lambda: torch.nn.Linear(1, 1, bias=False), 3)

    def work(comm):
        model = fully_shard(models[comm.rank], comm, wrap=None)
        model(torch.full((1, 1), 2.0)).sum().backward()
        return clip_grad_norm_(model, 1.0, norm_type).item()

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


def shards_with_gradients(comm, model, fill):
    """``model`` sharded over ``comm``, every shard with the gradient that ``fill(param)`` writes into it."""
    model = fully_shard(model, comm, wrap=None)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
        if param.nbytes:
            fill(param)
    return model


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_norm_of_narrow_gradients_is_computed_in_float32(dtype, norm_type):
    _, models = replicas(lambda: torch.nn.Linear(64, 64, dtype=dtype), 2)
    value = torch.tensor(99.0, dtype=dtype).item()  # the 1-norm, 411,840, is no float16
    expected = value if math.isinf(norm_type) else value * (64 * 65) ** (1 / norm_type)

    def work(comm):
        model = shards_with_gradients(comm, models[comm.rank], lambda p: p.grad.fill_(value))
        norm = clip_grad_norm_(model, expected / 4, norm_type)
        assert norm.dtype == torch.float32
        torch.testing.assert_close(norm.item(), expected, rtol=1e-5, atol=0)
        for param in model.parameters():
            if param.nbytes:
                assert param.grad.dtype == dtype
                rows = rows_of(param.grad)
                torch.testing.assert_close(rows, torch.full_like(rows, value / 4), rtol=1e-2, atol=0)

    run_ranks(2, work)


def test_without_any_gradient_the_norm_is_zero():
    _, models = replicas(TinyLM, 2)

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        return [clip_grad_norm_(model, 1.0, norm_type).item() for norm_type in (2.0, math.inf)]

    assert run_ranks(2, work) == [[0.0, 0.0]] * 2


class LossyComm:
    """A group whose maximum loses a nan, as gloo's does on some ranks."""

    def __init__(self, inner):
        self.inner = inner
        self.rank, self.size, self.device = inner.rank, inner.size, inner.device

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def all_reduce(self, tensor, op="sum"):
        if op == "max":
            tensor.nan_to_num_(nan=0.0, posinf=math.inf)
        return self.inner.all_reduce(tensor, op)


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_norm_that_is_not_finite_is_the_same_on_every_rank(norm_type, value):
    _, models = replicas(lambda: torch.nn.Linear(16, 4, bias=False), 2)

    def work(comm):
        def fill(param):
            param.grad.fill_(1.0)
            if comm.rank == 1:
                rows_of(param.grad)[0, 0] = value

        model = shards_with_gradients(LossyComm(comm), models[comm.rank], fill)
        before = model.weight.grad.clone()
        with pytest.raises(TrainingError, match=r"is (inf|nan) and must be a finite number"):
            clip_grad_norm_(model, 1.0, norm_type, error_if_nonfinite=True)
        clip_grad_norm_(model, math.inf, norm_type)
        assert torch.equal(before.nan_to_num(7.0), model.weight.grad.nan_to_num(7.0))  # measured only
        norm = clip_grad_norm_(model, 1.0, norm_type)
        assert norm.isnan() if math.isnan(value) else norm.isinf()
        assert rows_of(model.weight.grad).count_nonzero() == (32 if math.isnan(value) else comm.rank)

    run_ranks(2, work)


def test_parameters_shared_by_different_groups_of_ranks_make_one_norm():
    _, models = replicas(lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 16)), 2)

    def work(comm):
        model = shards_with_gradients(comm, models[comm.rank], lambda p: p.grad.fill_(1.0))
        whole = torch.nn.Parameter(torch.zeros(5))  # as of a unit that is not sharded: whole on every rank
        whole.shard_comm, whole.grad = SoloComm(comm.device), torch.ones(5)
        model[0].register_parameter("whole", whole)
        return clip_grad_norm_(model, 1.0).item()

    assert run_ranks(2, work) == pytest.approx([math.sqrt(20 + 80 + 5)] * 2)
