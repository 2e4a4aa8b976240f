"""AdamW of 8-bit and of bfloat16 states over shards: the unsharded optimizer's weights and state, bit for bit.

Where states are rounded, a gradient that differs in its last bit may move a number to the next code, and the run with
it: after 20 steps by some 1e-2 of the update, sharded or not. So runs are compared on gradients that are the same to
the last bit: given ones, those of the joint batch added up over the same parts of it, or computed in float64.
"""

import copy

import pytest
import torch
from torch import nn

import support.optimizers
from fullshard import fully_shard, step_in_backward
from fullshard.core.layout import elementwise
from fullshard.core.optim.lowbit import AdamW8bit, AdamWBF16
from fullshard.core.testing import RecordingComm, run_ranks
from support.optimizers import (
    LAYOUTS,
    assert_same_updates,
    batches,
    copies,
    of_rank,
    sharded_weights,
    steps_for,
    train,
    train_by_parts,
    unsharded_weights,
    update_errors,
    whole,
    zoo,
)

MAKERS = {
    "8 bits": lambda model: AdamW8bit(model.parameters(), lr=1e-2),
    "bfloat16": lambda model: AdamWBF16(model.parameters(), lr=1e-2, seed=3),
}
every_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
ONE, EACH = LAYOUTS


def whole_gradients(model, steps, skipped=()):
    """For each step a gradient by name; None for the parameters in ``skipped`` at odd steps."""
    draw = torch.Generator().manual_seed(1)
    return [
        {
            name: None if number % 2 and name in skipped else torch.randn(param.shape, generator=draw) / 10
            for name, param in model.named_parameters()
        }
        for number in range(steps)
    ]


def take(model, gradients):
    """Give each parameter, or this rank's rows of it, its gradient."""
    for name, param in model.named_parameters():
        grad, meta = gradients[name], getattr(param, "shard_meta", None)
        if grad is None or not param.nbytes:
            param.grad = None
        else:
            start, stop = meta.element_range if meta else (0, grad.numel())
            param.grad = grad.reshape(-1)[start:stop].view(param.shape).to(param.dtype).clone()


def given_run(model, optimizer, gradients):
    for of_step in gradients:
        take(model, of_step)
        optimizer.step()


def joined(parts, key):
    """The unsharded tensor from ``(StatePart, tensor)`` of each rank; what several hold must be the same."""
    shape = parts[0][0].shape
    flat = torch.full((torch.Size(shape).numel(),), -1.0, dtype=torch.float64)
    seen = flat.clone()
    for part, tensor in parts:
        start, stop = part.held
        if start == stop:
            continue
        assert tuple(tensor.shape) == part.local_shape
        held, values = seen[start:stop], tensor.reshape(-1).double()
        assert torch.equal(held[held != -1], values[held != -1]), key
        seen[start:stop] = values
        first, end = part.written
        assert (flat[first:end] == -1).all()
        flat[first:end] = values[first - start : end - start]
    assert torch.equal(flat, seen)
    return flat.view(shape)


@pytest.mark.parametrize(("ranks", "layout"), [(2, EACH), (3, ONE), (4, EACH)])
@every_maker
def test_equal_gradients_give_the_very_same_weights_and_states(make, ranks, layout):
    reference, gradients = zoo(), whole_gradients(zoo(), 5, skipped=("tall.weight", "scale"))
    unsharded = make(reference)
    given_run(reference, unsharded, gradients)
    models = [zoo() for _ in range(ranks)]

    def work(comm):
        model = fully_shard(models[comm.rank], comm, **LAYOUTS[layout])
        optimizer = make(model)
        given_run(model, optimizer, gradients)
        return optimizer, dict(model.named_parameters()), whole(model)

    results = run_ranks(ranks, work)
    for name, param in reference.named_parameters():
        assert all(torch.equal(weights[name], param) for _, _, weights in results)
        holders = [(optimizer, own[name]) for optimizer, own, _ in results if own[name].nbytes]
        assert all(not optimizer.state[own[name]] for optimizer, own, _ in results if not own[name].nbytes)
        for key, expected in unsharded.state[param].items():
            values = [optimizer.state[own][key] for optimizer, own in holders]
            if not isinstance(expected, torch.Tensor) or not expected.ndim:
                assert values == [expected] * len(values)
                continue
            parts = [part_of(optimizer, own, key) for optimizer, own in holders]
            assert {value.dtype for value in values} == {expected.dtype}
            assert torch.equal(joined(list(zip(parts, values, strict=True)), key), expected.double())


def part_of(optimizer, param, key):
    part = optimizer.state_part(param, key) if isinstance(optimizer, AdamW8bit) else None
    return part or elementwise(param.shard_meta)


def weights_by_parts(make, ranks):
    """The unsharded run on the joint batch, whose gradient is added up over what the ranks would each have of it."""
    model = zoo()
    train_by_parts(model, make(model), batches(steps_for(ranks), ranks), ranks)
    return {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.mark.parity
@pytest.mark.parametrize(("name", "ranks", "layout"), [("8 bits", 3, ONE), ("8 bits", 4, EACH), ("bfloat16", 3, EACH)])
def test_steps_equal_the_unsharded_run_on_the_joint_batch(name, ranks, layout):
    ours = sharded_weights(MAKERS[name], ranks, **LAYOUTS[layout])
    assert_same_updates(ours, weights_by_parts(MAKERS[name], ranks))


@pytest.mark.parity
def test_steps_equal_the_one_backward_of_the_joint_batch_in_float64(monkeypatch):
    # Its sums differ by 1e-16, which is gone in the float32 that optimizers compute in.
    monkeypatch.setattr(support.optimizers, "zoo", lambda seed=0: zoo(seed).double())
    data = batches
    monkeypatch.setattr(
        support.optimizers, "batches", lambda *about: [(tokens, to.double()) for tokens, to in data(*about)]
    )
    make = MAKERS["8 bits"]
    errors = update_errors(sharded_weights(make, 4, **LAYOUTS[ONE]), unsharded_weights(make, 4))
    assert max(errors.values()) <= 1e-4


def test_parameters_exchanged_for_others_in_the_same_places_share_scales_too():
    first, second, data = copies(zoo(), 2), copies(zoo(), 2), batches(4, 2)

    def work(comm):
        old, new = (fully_shard(models[comm.rank], comm, **LAYOUTS[EACH]) for models in (first, second))
        optimizer = MAKERS["8 bits"](old)
        mine = [of_rank(batch, comm.rank) for batch in data]
        train(old, optimizer, mine[:1])
        optimizer.param_groups[0]["params"] = list(new.parameters())
        optimizer.state.clear()
        train(new, optimizer, mine[1:])
        return whole(new)

    ours, reference = run_ranks(2, work)[0], zoo()
    train_by_parts(reference, MAKERS["8 bits"](reference), data[1:], 2)
    assert_same_updates(ours, dict(reference.named_parameters()))


def test_a_block_that_many_ranks_hold_parts_of_has_one_scale():
    ranks = 32  # of 128 elements each
    torch.manual_seed(0)
    models = copies(nn.Linear(64, 64, bias=False), ranks)
    reference = copy.deepcopy(models[0])
    gradients = whole_gradients(reference, 3)
    given_run(reference, MAKERS["8 bits"](reference), gradients)

    def work(comm):
        model = fully_shard(models[comm.rank], comm, wrap=None)
        given_run(model, MAKERS["8 bits"](model), gradients)
        return whole(model)["weight"]

    assert all(torch.equal(weight, reference.weight) for weight in run_ranks(ranks, work))


CUT = ["all_gather_object", "exchange", "exchange"]  # once, whether ranks have the same parameters; then each step


@pytest.mark.parametrize(("width", "names", "sent"), [(256, [], 0), (200, CUT, 2 * 2 * 4)])
def test_ranks_exchange_two_numbers_a_cut_block_and_nothing_where_none_is_cut(width, names, sent):
    torch.manual_seed(0)
    models = copies(nn.Linear(width, 30), 2)
    gradients = whole_gradients(models[0], 2)

    def work(comm):
        ledger = RecordingComm(comm)
        model = fully_shard(models[comm.rank], ledger, wrap=None)
        before = len(ledger.entries)
        given_run(model, MAKERS["8 bits"](model), gradients)
        entries = ledger.entries[before:]
        return [entry.collective for entry in entries], sum(entry.sent_bytes for entry in entries)

    assert run_ranks(2, work) == [(names, sent)] * 2


@every_maker
def test_a_resumed_sharded_run_goes_on_as_if_it_had_not_stopped(make):
    models, gradients = [zoo() for _ in range(3)], whole_gradients(zoo(), 6)

    def work(comm):
        model = fully_shard(models[comm.rank], comm, wrap=None)
        first = make(model)
        given_run(model, first, gradients[:3])
        weights = [param.detach().clone() for param in model.parameters()]
        state = copy.deepcopy(first.state_dict())
        given_run(model, first, gradients[3:])
        through = [param.detach().clone() for param in model.parameters()]
        with torch.no_grad():
            for param, weight in zip(model.parameters(), weights, strict=True):
                param.copy_(weight)
        second = make(model)
        second.load_state_dict(state)
        given_run(model, second, gradients[3:])
        return [torch.equal(param, old) for param, old in zip(model.parameters(), through, strict=True)]

    assert all(all(same) for same in run_ranks(3, work))


def after_and_in_backward(original, make, data, ranks=2):
    """Weights after a step for each batch by one optimizer, and by one in backward."""
    models = copies(original, 2 * ranks)

    def work(comm, inside):
        model = fully_shard(models[comm.rank + ranks * inside], comm, wrap=None)
        optimizer = None if inside else make(model.parameters())
        if inside:
            step_in_backward(model, make)
        for batch in data:
            model(batch).square().sum().backward()
            if optimizer:
                optimizer.step()
                optimizer.zero_grad()
        return whole(model)

    return [run_ranks(ranks, lambda comm, inside=inside: work(comm, inside))[0] for inside in (False, True)]


def test_steps_in_backward_where_no_block_is_cut():
    torch.manual_seed(0)
    model, data = nn.Linear(256, 30), [torch.randn(3, 256) for _ in range(2)]
    after, inside = after_and_in_backward(model, lambda params: AdamW8bit(params, lr=1e-2), data)
    assert all(torch.equal(after[name], inside[name]) for name in after)


def test_steps_in_backward_round_as_one_optimizer_does():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(24, 24).bfloat16() for _ in range(4)))
    model[1].requires_grad_(False)  # frozen ones have a number too
    data = [torch.randn(3, 24).bfloat16() for _ in range(2)]
    after, within = after_and_in_backward(model, lambda params: AdamWBF16(params, lr=1e-2, seed=3), data, 3)
    assert all(torch.equal(after[name], within[name]) for name in after)
