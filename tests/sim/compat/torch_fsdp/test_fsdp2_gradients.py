"""Gradients of FSDP2 modules on rank threads: norms over ranks, accumulation, replicas, divide factors and hooks."""

import pytest
import torch
from torch import nn

from fullshard import unsharded
from fullshard.compat.torch_fsdp.fsdp2 import fully_shard
from fullshard.core.shards import Shard
from fullshard.core.testing import RecordingComm, run_ranks
from support.fsdp2 import SIZE, rows_of, shard, with_models
from support.models import TinyLM, batches, lm_loss
from support.parity import ROWS_PER_RANK, optimizer_for, replicas


def plain_run(model, data, **clip):
    optimizer, losses, norms = optimizer_for(model), [], []
    for tokens in data:
        loss = lm_loss(model, tokens)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, **clip).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, None


@pytest.mark.parametrize(("norm_type", "foreach"), [(2.0, None), (2.0, False), (1.0, None), (float("inf"), None)])
def test_torchs_clip_grad_norm_is_that_of_the_unsharded_run(norm_type, foreach):
    reference, models = replicas(TinyLM, SIZE)
    data = batches(3, SIZE * ROWS_PER_RANK)
    clip = {"norm_type": norm_type, "foreach": foreach}
    _, norms, _ = plain_run(reference, data, **clip)

    def work(comm):
        model = shard(models[comm.rank], comm)
        optimizer, found = optimizer_for(model), []
        for tokens in data:
            lm_loss(model, tokens[comm.rank * ROWS_PER_RANK : (comm.rank + 1) * ROWS_PER_RANK]).backward()
            found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, **clip).item())
            optimizer.step()
            optimizer.zero_grad()
        with unsharded(model):
            return found, {name: p.detach().clone() for name, p in model.named_parameters()}

    expected = dict(reference.named_parameters())
    for found, weights in run_ranks(SIZE, work):
        assert found == pytest.approx(norms, rel=1e-5)
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[name], atol=1e-5, rtol=0)


def test_a_gradients_norm_is_the_whole_gradients_and_a_rank_without_rows_takes_part():
    def work(comm, model):
        model = fully_shard(model, mesh=comm)
        model(torch.ones(2, 3)).sum().backward()
        weight = model.weight
        norms = [weight.grad.norm(), torch.linalg.vector_norm(weight.grad.detach()), torch.norm(weight.grad)]
        assert type(weight.grad * 2) is Shard
        return len(weight), [norm.item() for norm in norms]

    rows, norms = zip(
        *with_models(SIZE, work, lambda: nn.Linear(3, 1)), strict=True
    )  # one row: one rank has none of the weight
    assert sorted(rows) == [0, 1]
    assert norms[0] == norms[1] == pytest.approx([2 * 3**0.5] * 3)


def test_norms_of_columns_are_of_all_ranks_and_norms_of_rows_of_the_rows_here():
    def work(comm, model):
        model = fully_shard(model, mesh=comm)
        model(torch.ones(2, 4)).sum().backward()
        grad = model.weight.grad
        assert torch.equal(grad.norm(dim=1), torch.full(grad.shape[:1], 4.0))
        assert type(grad.norm(dim=1)) is Shard
        return grad.norm(dim=0)

    for columns in with_models(SIZE, work, lambda: nn.Linear(4, 4)):
        torch.testing.assert_close(columns, torch.full((4,), 4.0))


def test_torchs_scaler_skips_on_every_rank_what_overflows_on_one():
    def work(comm, model):
        model = fully_shard(model, mesh=comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(model(torch.ones(2, 40)).sum()).backward()
        if comm.rank == 1:
            model.weight.grad.to_local()[0, 0] = float("inf")
        before = model.weight.detach().clone()
        scaler.step(optimizer)
        return torch.equal(model.weight, before)

    assert with_models(SIZE, work, lambda: nn.Linear(40, 40)) == [True, True]


@pytest.mark.parametrize("recurse", [True, False])
def test_without_gradient_sync_nothing_is_reduced_and_the_sum_comes_right(recurse):
    reference, models = replicas(TinyLM, SIZE)
    for tokens in batches(2, SIZE * ROWS_PER_RANK):
        lm_loss(reference, tokens).backward()

    def work(comm):
        ledger = RecordingComm(comm)
        model = shard(models[comm.rank], ledger)
        target = model if recurse else model.blocks[1]
        counts = []
        for sync, tokens in zip((False, True), rows_of(comm, 2), strict=True):
            target.set_requires_gradient_sync(sync, recurse=recurse)
            lm_loss(model, tokens).backward()
            counts.append(ledger.names.count("reduce_scatter"))
        return counts, {p.shard_meta.name: (p.shard_meta.row_range, p.grad) for p in model.parameters()}

    for counts, grads in run_ranks(SIZE, work):
        assert counts == ([0, 5] if recurse else [4, 9])
        for name, ((first, last), grad) in grads.items():
            expected = dict(reference.named_parameters())[name].grad
            if expected is None:
                assert grad is None
            else:
                torch.testing.assert_close(grad.as_subclass(torch.Tensor), expected[first:last], atol=1e-5, rtol=0)


def test_hybrid_meshes_and_requires_all_reduce():
    reference, models = replicas(TinyLM, 4)
    for tokens in batches(2, 4 * ROWS_PER_RANK):
        lm_loss(reference, tokens).backward()
    expected = dict(reference.named_parameters())

    def work(comm):
        replicate, inside = comm.split([[0, 2], [1, 3]]), comm.split([[0, 1], [2, 3]])
        ledger = RecordingComm(replicate)
        model = shard(models[comm.rank], (ledger, inside))
        lm_loss(model, rows_of(comm, 1)[0]).backward()  # in the first pass ranks compare what they do
        model.zero_grad()
        counts = []
        for across, tokens in zip((False, True), rows_of(comm, 2), strict=True):
            model.set_requires_all_reduce(across)
            before = ledger.names.count("all_reduce")
            lm_loss(model, tokens).backward()
            counts.append(ledger.names.count("all_reduce") - before)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        return counts, norm, {p.shard_meta.name: (p.shard_meta.row_range, p.grad) for p in model.parameters()}

    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), float("inf"))
    for counts, found, grads in run_ranks(4, work):
        assert counts == [1, 6]  # one for each unit, and one for the flags of parameters
        torch.testing.assert_close(found, norm)
        for name, ((first, last), grad) in grads.items():
            if expected[name].grad is not None:
                torch.testing.assert_close(
                    grad.as_subclass(torch.Tensor), expected[name].grad[first:last], atol=1e-5, rtol=0
                )


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_divide_factors_and_hooks_act_on_the_modules_own_unit():
    def work(comm, model):
        torch.manual_seed(0)
        model = shard(model, comm)
        tokens = rows_of(comm, 1)[0]
        lm_loss(model, tokens).backward()
        plain = gradients(model)
        model.zero_grad()
        model.blocks[0].set_gradient_divide_factor(4.0)
        with pytest.warns(FutureWarning, match="set_gradient_divide_factor"):
            model.blocks[1].set_reduce_scatter_divide_factor(1.0)
        model.blocks[2].set_all_reduce_hook(lambda gradient: gradient.mul_(3))
        lm_loss(model, tokens).backward()
        factors = [SIZE / 4, SIZE / 1, 3.0, 1.0]
        for name, gradient in gradients(model).items():
            number = name.removeprefix("blocks.").partition(".")[0]
            factor = factors[int(number)] if number.isdigit() else 1.0
            torch.testing.assert_close(
                gradient.as_subclass(torch.Tensor), plain[name].as_subclass(torch.Tensor) * factor
            )

    with_models(SIZE, work)
