"""The law of the engine: a sharded run equals the unsharded run on the joint batch."""

import copy
from functools import partial

import torch

from fullshard import clip_grad_norm_, fully_shard, unsharded
from fullshard.core.shards import rows_of

ROWS_PER_RANK = 2


def steps_for(ranks):
    """Steps of a comparison: ten on two ranks. More ranks cost more a step, and what they break shows in three."""
    return 10 if ranks <= 2 else 3


def optimizer_for(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)


def train_unsharded(model, loss_of, data):
    """Losses, gradient norms and final weights of the plain run."""
    optimizer, losses, norms = optimizer_for(model), [], []
    for tokens in data:
        loss = loss_of(model, tokens)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, {name: p.detach().clone() for name, p in model.named_parameters()}


def train_sharded(model, comm, loss_of, data, mesh=None, sharded=False, optimizer=None, **options):
    """The same on this rank's rows of each batch; losses are averaged over ranks."""
    model = model if sharded else fully_shard(model, mesh or comm, **options)
    optimizer, losses, norms = optimizer or optimizer_for(model), [], []
    for tokens in data:
        loss = loss_of(model, tokens[comm.rank * ROWS_PER_RANK : (comm.rank + 1) * ROWS_PER_RANK])
        loss.backward()
        norms.append(clip_grad_norm_(model, 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().reshape(1).clone()
        comm.all_reduce(mean).wait()
        losses.append(mean.item() / comm.size)
    with unsharded(model):
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return losses, norms, weights


def replicas(make, count):
    """``count`` equal models and one more as the reference."""
    torch.manual_seed(0)
    reference = make()
    return reference, [copy.deepcopy(reference) for _ in range(count)]


def assert_same_run(sharded, plain, tolerance=1e-5):
    """Losses and weights agree within ``tolerance``, norms within that share of themselves."""
    for name, ours, theirs in zip(("losses", "norms"), sharded[:2], plain[:2], strict=True):
        worst = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(ours, theirs, strict=True))
        assert worst <= tolerance, f"{name} differ by {worst:.1e}: {ours} against {theirs}"
    assert sharded[2].keys() == plain[2].keys()
    for name, ours in sharded[2].items():
        worst = (ours - plain[2][name]).abs().max().item()
        assert worst <= tolerance, f"{name} differs by {worst:.1e}"


def sharded_gradients(model):
    """Of every parameter: which rows this rank holds, and their gradient as a plain tensor."""
    rows = {p: None if p.grad is None else rows_of(p.grad) for p in model.parameters()}
    return {p.shard_meta.name: (p.shard_meta.row_range, grad) for p, grad in rows.items()}


def assert_gradients(by_rank, reference, tolerance=1e-5):
    """What :func:`sharded_gradients` gave on each rank is the reference's gradient, cut up; no row is missing.

    ``tolerance`` is a share of the parameter's largest gradient where that is above 1: products of small matrices are
    rounded otherwise where memory lies otherwise.
    """
    expected = {name: p.grad for name, p in reference.named_parameters()}
    for grads in by_rank:
        for name, ((first, last), grad) in grads.items():
            if expected[name] is None:
                assert grad is None, f"{name} has a gradient where none is due"
            else:
                assert grad is not None, f"{name} lacks its gradient, if only one without rows"
                allowed = tolerance * max(1.0, expected[name].abs().max().item())
                told = partial("{}, from row {}: {}".format, name, first)
                wanted = expected[name][first:last].to(grad.device)  # gradients may be in host memory
                torch.testing.assert_close(grad, wanted, atol=allowed, rtol=0, msg=told)
