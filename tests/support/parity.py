"""The law of the engine: a sharded run equals the unsharded run on the joint batch."""

import copy
from contextlib import nullcontext
from functools import partial

import torch

from fullshard import clip_grad_norm_, fully_shard, unsharded
from fullshard.core.comm import SoloComm
from fullshard.core.shards import rows_of
from fullshard.core.testing import RecordingComm, run_ranks
from support.tiny_lm import batches

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
    model = model if sharded else fully_shard(model, mesh or mesh_for(options.get("strategy"), comm), **options)
    optimizer, losses, norms = optimizer or optimizer_for(model), [], []
    for tokens in data:
        loss = loss_of(model, rows_for(comm, tokens))
        loss.backward()
        norms.append(clip_grad_norm_(model, 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().reshape(1).clone()
        comm.all_reduce(mean).wait()
        losses.append(mean.item() / comm.size)
    return losses, norms, weights_of(model)


def alone(model, **options):
    """``model`` sharded over a group of this rank alone."""
    return fully_shard(model, SoloComm(torch.device("cpu")), **options)


def weights_of(model):
    """Copies of the full parameters by name."""
    with unsharded(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def is_sharded(model):
    return hasattr(model, "_fullshard_runtime")


def where_sharded(context, model):
    """``context(model)`` of a sharded model; of another one nothing."""
    return context(model) if is_sharded(model) else nullcontext()


def rows_for(comm, batch):
    """This rank's rows of a joint batch."""
    return batch[comm.rank * ROWS_PER_RANK : (comm.rank + 1) * ROWS_PER_RANK]


def two_by_two(comm):
    """Four ranks as two replicas of two ranks each: the groups across replicas, and those inside."""
    return comm.split([[0, 2], [1, 3]]), comm.split([[0, 1], [2, 3]])


def mesh_for(strategy, comm):
    """All ranks on one axis, or for the hybrid strategies on two."""
    return two_by_two(comm) if strategy is not None and strategy.needs_two_axes else comm


def size_for(strategy, otherwise=2):
    """How many ranks a test of ``strategy`` takes."""
    return 4 if strategy.needs_two_axes else otherwise


def replicas(make, count):
    """``count`` equal models and one more as the reference."""
    torch.manual_seed(0)
    reference = make()
    return reference, [copy.deepcopy(reference) for _ in range(count)]


def on_ranks(size, make, work, *, recorded=False, **options):
    """What ``work(comm, model)`` returns on each of ``size`` ranks, of equal models sharded with ``options``.

    ``recorded``: ``comm`` is a :class:`RecordingComm`, and the model's.
    """
    _, models = replicas(make, size)

    def rank(comm):
        comm = RecordingComm(comm) if recorded else comm
        return work(comm, _sharded(models[comm.rank], comm, None, options))

    return run_ranks(size, rank)


def assert_same_run(sharded, plain, tolerance=1e-5):
    """Losses and weights agree within ``tolerance``, norms within that share of themselves."""
    for name, ours, theirs in zip(("losses", "norms"), sharded[:2], plain[:2], strict=True):
        worst = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(ours, theirs, strict=True))
        assert worst <= tolerance, f"{name} differ by {worst:.1e}: {ours} against {theirs}"
    assert sharded[2].keys() == plain[2].keys()
    for name, ours in sharded[2].items():
        worst = (ours - plain[2][name]).abs().max().item()
        assert worst <= tolerance, f"{name} differs by {worst:.1e}"


def assert_trains_alike(make, loss_of, size=2, *, steps=None, shard=None, dtype=None, tolerance=1e-5, **options):
    """Train with and without sharding: losses, norms and weights on every rank are those of the unsharded run.

    Args:
        make: Makes the model.
        loss_of: ``loss_of(model, tokens)``, a mean over rows.
        size: How many ranks, as threads.
        steps: How many steps; :func:`steps_for` by default.
        shard: ``shard(model, comm)`` shards a rank's model in place of ``fully_shard`` with ``options``.
        dtype: Which the model is cast to first.
        tolerance: Of :func:`assert_same_run`.
        options: For ``fully_shard``.

    Returns:
        The model of each rank.
    """
    reference, models = replicas(make if dtype is None else lambda: make().to(dtype), size)
    data = batches(steps or steps_for(size), size * ROWS_PER_RANK)
    plain = train_unsharded(reference, loss_of, data)

    def work(comm):
        model = _sharded(models[comm.rank], comm, shard, options)
        return train_sharded(model, comm, loss_of, data, sharded=True)

    for run in run_ranks(size, work):
        assert_same_run(run, plain, tolerance)
    return models


def assert_gradients_alike(make, run, size=2, *, shard=None, dtype=None, tolerance=1e-5, **options):
    """The gradients that ``run(model, rows)`` leaves are those of the unsharded model, where ``rows`` cuts nothing.

    ``rows(batch)`` gives a rank its part of a joint batch. The rest is as in :func:`assert_trains_alike`.
    """
    reference, models = replicas(make if dtype is None else lambda: make().to(dtype), size)
    run(reference, lambda batch: batch)

    def work(comm):
        model = _sharded(models[comm.rank], comm, shard, options)
        run(model, lambda batch: batch.chunk(size)[comm.rank])
        return sharded_gradients(model)

    assert_gradients(run_ranks(size, work), reference, tolerance)
    return models


def _sharded(model, comm, shard, options):
    return shard(model, comm) if shard else fully_shard(model, mesh_for(options.get("strategy"), comm), **options)


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
