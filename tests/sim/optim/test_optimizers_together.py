"""Every optimizer with everything around a step: the run of the same optimizer on the unsharded model."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from fullshard import ShardedGradScaler, clip_grad_norm_, fully_shard, no_sync, step_in_backward
from fullshard.core.optim import Places, repoint
from fullshard.core.optim.adafactor import Adafactor, TorchAdafactor
from fullshard.core.optim.lowbit import AdamW8bit, AdamWBF16
from fullshard.core.optim.muon import Muon, muon_groups
from fullshard.core.policy import CPUOffload
from fullshard.core.shards import rows_of
from fullshard.core.testing import run_ranks
from fullshard.errors import ConfigError, MismatchError
from support.optimizers import assert_same_updates, batches, loss_of, of_rank, whole, zoo

RANKS, STEPS = 2, 3


def muon(model):
    """Of one parameter, a Muon for it alone."""
    if isinstance(model, nn.Module):
        return Muon(muon_groups(model), lr=0.02, ns_dtype=torch.float32)
    return Muon(
        [{"params": model, "use_muon": len(model[0].shard_meta.global_shape) == 2}], lr=0.02, ns_dtype=torch.float32
    )


def assert_same(name, ours, reference):
    assert_same_updates(ours, reference, TOLERANCE.get(name, 1e-4))


def of_params(make, **options):
    return lambda model: make(model.parameters() if isinstance(model, nn.Module) else model, **options)


# With the usual eps, Adam's step of a gradient that is all but zero is that of its rounding.
OPTIMIZERS = {
    "AdamW": of_params(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, eps=1e-4),
    "SGD": of_params(torch.optim.SGD, lr=0.05, momentum=0.9),
    "Adafactor": of_params(Adafactor),
    "TorchAdafactor": of_params(TorchAdafactor),
    "Muon": muon,
    "AdamW8bit": of_params(AdamW8bit, lr=1e-2),
    "AdamWBF16": of_params(AdamWBF16, lr=1e-2),
}
MADE_OF_GROUPS = {"Adafactor": Adafactor, "TorchAdafactor": TorchAdafactor, "Muon": Muon, "AdamW8bit": AdamW8bit}
COMMUNICATE = tuple(MADE_OF_GROUPS)
TOLERANCE = {"AdamW8bit": 0.02, "AdamWBF16": 0.05}
"""Where states are rounded, a gradient that differs in its last bit may move one to the next number."""
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def on_ranks(work, **options):
    """Weights, and what else ``work(model, comm)`` returns, of the first rank of a run on :func:`zoo`."""
    models = [zoo() for _ in range(RANKS)]

    def rank(comm):
        model = fully_shard(models[comm.rank], comm, **{"wrap": None, **options})
        result = work(model, comm)
        return whole(model), result

    return run_ranks(RANKS, rank)[0]


def weights(model):
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def steps(model, optimizer, data):
    for batch in data:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


def of(data, comm):
    return [of_rank(batch, comm.rank) for batch in data]


@every_optimizer
def test_steps_of_accumulated_clipped_and_offloaded_gradients_are_those_of_the_unsharded_model(name):
    def run(model, data, clip, waits=lambda model: nullcontext()):
        optimizer, norms = OPTIMIZERS[name](model), []
        for first, second in zip(data[::2], data[1::2], strict=True):
            optimizer.zero_grad()
            with waits(model):
                loss_of(model, first).backward()
            loss_of(model, second).backward()
            norms.append(clip(model))
            optimizer.step()
        return torch.stack(norms)

    data, model, limit = batches(2 * STEPS, RANKS), zoo(), 0.5
    norms = run(model, data, lambda model: nn.utils.clip_grad_norm_(model.parameters(), limit))
    ours, found = on_ranks(
        lambda model, comm: run(model, of(data, comm), lambda model: clip_grad_norm_(model, limit), no_sync),
        offload_policy=CPUOffload(pin_memory=False),
    )
    assert (norms > limit).all()
    torch.testing.assert_close(found, norms, rtol=1e-3, atol=0)
    assert_same(name, ours, weights(model))


@pytest.mark.parametrize("name", ["AdamW", "Adafactor", "Muon", "AdamW8bit"])
def test_a_step_with_an_infinite_gradient_on_one_rank_is_skipped_on_all(name):
    data = batches(STEPS, RANKS)

    def work(model, comm):
        optimizer, scaler = OPTIMIZERS[name](model), ShardedGradScaler("cpu", init_scale=1024.0)
        for step, batch in enumerate(of(data, comm)):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch)).backward()
            kept = (
                copy.deepcopy(optimizer.state_dict()["state"]),
                [rows_of(param).clone() for param in model.parameters()],
            )
            if step == 1 and comm.rank == 1:
                next(rows_of(p.grad) for p in model.parameters() if p.grad is not None and p.nbytes).view(-1)[0] = (
                    torch.inf
                )
            scaler.step(optimizer)
            scaler.update()
            same = [torch.equal(a, rows_of(b)) for a, b in zip(kept[1], model.parameters(), strict=True) if b.nbytes]
            assert all(same) if step == 1 else not any(same)
            if step == 1:
                torch.testing.assert_close(optimizer.state_dict()["state"], kept[0], rtol=0, atol=0)
        return scaler.get_scale()

    assert on_ranks(work)[1] == 512.0


@every_optimizer
def test_steps_in_backward_are_those_after_it_or_refused_on_every_rank(name):
    data = batches(STEPS, RANKS)

    def in_backward(model, comm):
        if name in COMMUNICATE:
            with pytest.raises(ConfigError, match=r"cannot step .* in backward: .* ranks hold parts of it"):
                step_in_backward(model, OPTIMIZERS[name])
            return
        step_in_backward(model, OPTIMIZERS[name])
        for batch in of(data, comm):
            loss_of(model, batch).backward()

    after, _ = on_ranks(lambda model, comm: steps(model, OPTIMIZERS[name](model), of(data, comm)))
    ours, _ = on_ranks(in_backward)
    if name not in COMMUNICATE:
        assert_same(name, ours, after)


@pytest.mark.parametrize("name", COMMUNICATE)
def test_matrices_that_are_whole_on_a_rank_are_stepped_in_backward(name):
    """Adafactor sees vectors too: theirs is a norm of the whole."""
    data = [torch.randn(4, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(STEPS)]
    models = [nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4)))]
    models += [copy.deepcopy(models[0]) for _ in range(3)]

    def work(comm, *, inside):
        model = fully_shard(models[comm.rank + RANKS * inside], comm, wrap=None)
        assert all(len(param.shard_meta.owners) == 1 for param in model.parameters())
        optimizer = step_in_backward(model, OPTIMIZERS[name]) if inside else OPTIMIZERS[name](list(model.parameters()))
        for batch in data:
            model(batch[comm.rank * 2 :][:2]).square().mean().backward()
            if not inside:
                optimizer.step()
                optimizer.zero_grad()
        return whole(model)

    results = [run_ranks(RANKS, partial(work, inside=inside))[0] for inside in (False, True)]
    for key, value in results[0].items():
        torch.testing.assert_close(results[1][key], value, atol=1e-6, rtol=0)


@every_optimizer
def test_one_that_was_made_and_stepped_before_sharding_goes_on_with_its_state(name):
    first, *rest = batches(STEPS + 1, RANKS)
    model = zoo()
    steps(model, OPTIMIZERS[name](model), [first, *rest])
    models = [zoo() for _ in range(RANKS)]

    def work(comm):
        model = models[comm.rank]
        optimizer, places = OPTIMIZERS[name](model), Places(model)
        steps(model, optimizer, [first])
        fully_shard(model, comm, wrap=None)
        repoint(optimizer, [places])
        steps(model, optimizer, of(rest, comm))
        return whole(model)

    assert_same(name, run_ranks(RANKS, work)[0], weights(model))


@pytest.mark.parametrize("name", COMMUNICATE)
def test_one_that_lacks_what_a_rank_holds_no_rows_of_is_told_on_every_rank(name):
    def work(model, comm):
        groups = OPTIMIZERS[name](model).param_groups
        held = [group | {"params": [param for param in group["params"] if param.nbytes]} for group in groups]
        optimizer = MADE_OF_GROUPS[name](held)
        loss_of(model, of(batches(1, RANKS), comm)[0]).backward()
        with pytest.raises(ConfigError, match=rf"{type(optimizer).__name__} .*needs the same parameters"):
            optimizer.step()

    on_ranks(work)


def decays_by_rows(model, comm):
    few = [param for param in model.parameters() if rows_of(param).numel() < 100]
    more = [param for param in model.parameters() if rows_of(param).numel() >= 100]
    return torch.optim.AdamW([{"params": more}, {"params": few, "weight_decay": 0.0}], lr=1e-3)


APART = {
    "groups by a rank's own rows": (
        decays_by_rows,
        r"\S+ is in group \d \(weight_decay=0\.\d+\) on rank 0 and in group \d \(weight_decay=0\.\d+\) on rank 1",
    ),
    "no parameters without rows": (
        lambda model, comm: torch.optim.SGD([param for param in model.parameters() if param.nbytes], lr=1e-3),
        r"\S+ is in .*group 0.* on rank .* no optimizer that has stepped",
    ),
    "another option": (
        lambda model, comm: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=comm.rank / 2),
        r"group 0 \(momentum=0\.0\) on rank 0 and in group 0 \(momentum=0\.5\) on rank 1",
    ),
}


@pytest.mark.parametrize("kind", APART)
def test_elementwise_optimizers_that_differ_between_ranks_are_told_at_the_next_backward(kind):
    make, text = APART[kind]

    def work(model, comm):
        optimizer, data = make(model, comm), of(batches(2, RANKS), comm)
        steps(model, optimizer, data[:1])
        with pytest.raises(MismatchError, match=text) as error:
            loss_of(model, data[1]).backward()
        return comm.all_gather_object(str(error.value))

    told = on_ranks(work)[1]
    assert len(set(told)) == 1


def test_optimizers_that_ranks_step_alike_are_no_difference():
    def work(model, comm):
        params = list(model.parameters())
        first = params[:5][:: 1 - 2 * comm.rank]  # as of a set
        parts = [torch.optim.SGD(first, lr=1e-3), torch.optim.AdamW(params[5:])]
        late, data = torch.optim.SGD([nn.Parameter(torch.zeros(comm.rank + 1))], lr=1), of(batches(4, RANKS), comm)
        for batch in data:
            loss_of(model, batch).backward()
            for one in parts[:: 1 - 2 * comm.rank]:  # in another order
                one.step()
            late.step()
            parts[0].param_groups = [{**group, "lr": 0.1} for group in parts[0].param_groups]

    on_ranks(work)


def test_optimizers_that_hooks_step_are_no_difference():
    """A rank without rows of a parameter never runs the hook."""

    def work(model, comm):
        each = {param: torch.optim.SGD([param], lr=1e-3) for param in model.parameters()}
        for param in each:
            param.register_post_accumulate_grad_hook(lambda param: each[param].step())
        for batch in of(batches(3, RANKS), comm):
            loss_of(model, batch).backward()
            model.zero_grad()

    on_ranks(work)
