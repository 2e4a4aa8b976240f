"""Modules that are moved, exchanged, renamed or replaced after sharding, in every face, beside the unsharded model."""

import functools
import warnings

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fullshard
from fullshard.compat.accelerate import FullyShardedDataParallelPlugin as Plugin, prepare
from fullshard.compat.torch_fsdp import fsdp2
from fullshard.compat.torch_fsdp.fully_sharded_data_parallel import FullyShardedDataParallel as FSDP
from fullshard.compat.torch_fsdp.optim_state import full_optim_state_dict
from fullshard.compat.torch_fsdp.wrap import ModuleWrapPolicy, transformer_auto_wrap_policy
from fullshard.core.engine import local_tensors, registry, sharded_roots, state_entries
from fullshard.core.engine.setup import api
from fullshard.core.optim import step_in_backward
from fullshard.core.optim.average import ExponentialMovingAverage
from fullshard.core.testing import run_ranks
from fullshard.errors import MismatchError, ShardingError
from fullshard.state.saving.pieces import plan_save
from support.models import Block, TinyLM, batches, lm_loss

SIZE, ROWS = 2, 2


def accelerate(model, comm):
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    return prepare.shard(model, Plugin(fsdp_version=2, auto_wrap_policy=policy), comm)


def by_fsdp2(model, comm):
    for block in model.blocks:
        fsdp2.fully_shard(block, mesh=comm)
    return fsdp2.fully_shard(model, mesh=comm)


FACES = {
    "native": fullshard.fully_shard,
    "native, one unit": functools.partial(fullshard.fully_shard, wrap=None),
    "FSDP1": lambda model, comm: FSDP(model, comm, auto_wrap_policy=ModuleWrapPolicy({Block})),
    "FSDP1, one unit": FSDP,
    "FSDP2": by_fsdp2,
    "Accelerate": accelerate,
}


def exchanged(model):
    model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]


def reversed_list(model):
    model.blocks = nn.ModuleList(list(model.blocks)[::-1])


def last_first(model):
    model.blocks.insert(0, model.blocks.pop(3))


def layers_exchanged(model):
    first, second = model.blocks[0], model.blocks[1]
    first.side, second.side = second.side, first.side


def wrapped(model):
    model.blocks[1] = nn.Sequential(model.blocks[1])


def registered_twice(model):
    model.blocks[2].neighbour = model.blocks[3]


FOLLOWED = [exchanged, reversed_list, last_first, layers_exchanged, wrapped, registered_twice]


def train(model, change, take=lambda tokens: tokens):
    """Four AdamW steps; ``change`` comes after the first one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step, tokens in enumerate(batches(4, SIZE * ROWS)):
        if step == 1:
            change(model)
        lm_loss(model, take(tokens)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def make():
    torch.manual_seed(0)
    return TinyLM()


@pytest.mark.parametrize("change", FOLLOWED)
@pytest.mark.parametrize("face", FACES)
def test_moved_modules_train_and_are_saved_under_the_names_of_now(face, change):
    reference, models = make(), [make() for _ in range(SIZE)]
    plain = train(reference, change)
    names = {id(param): name for name, param in reference.named_parameters()}
    moments = {names[id(param)]: state["exp_avg"] for param, state in plain.state.items()}

    def work(comm):
        model = FACES[face](models[comm.rank], comm)
        optimizer = train(model, change, lambda tokens: tokens[comm.rank * ROWS : (comm.rank + 1) * ROWS])
        root = sharded_roots(model)[0]
        local = [one.name for one in local_tensors(root)]
        return fullshard.full_state_dict(root), full_optim_state_dict(root, optimizer), local

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Accelerate's words on its plugin
        (weights, states, local), *_ = run_ranks(SIZE, work)
    torch.testing.assert_close(weights, dict(reference.state_dict()), atol=1e-5, rtol=0)
    found = {name: state["exp_avg"] for name, state in states["state"].items() if name in moments}
    torch.testing.assert_close(found, moments, atol=1e-5, rtol=0)
    assert set(local) == {name for name, _ in reference.named_parameters()}


def test_an_average_and_optimizers_in_backward_follow_an_exchange():
    reference, models = make(), [make() for _ in range(SIZE)]
    averaged = AveragedModel(reference, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    plain = torch.optim.AdamW(reference.parameters(), lr=0.02)
    data = batches(4, SIZE * ROWS)
    for step, tokens in enumerate(data):
        if step == 2:
            exchanged(reference)
            exchanged(averaged.module)
        lm_loss(reference, tokens).backward()
        plain.step()
        plain.zero_grad()
        averaged.update_parameters(reference)
    moments = {
        name: plain.state[param]["exp_avg"] for name, param in reference.named_parameters() if plain.state[param]
    }

    def work(comm):
        model = fullshard.fully_shard(models[comm.rank], comm)
        steps = step_in_backward(model, functools.partial(torch.optim.AdamW, lr=0.02))
        average = ExponentialMovingAverage(model, 0.5)
        for step, tokens in enumerate(data):
            if step == 2:
                exchanged(model)
            lm_loss(model, tokens[comm.rank * ROWS : (comm.rank + 1) * ROWS]).backward()
            average.update()
        plan = plan_save(model, steps, gradients=False, average=average)
        with average.applied():
            applied = fullshard.full_state_dict(model)
        return applied, [(piece.name, piece.start, piece.tensor.clone()) for piece in plan.pieces]

    found = run_ranks(SIZE, work)
    torch.testing.assert_close(found[0][0], dict(averaged.module.state_dict()), atol=1e-5, rtol=0)
    saved = {}
    for name, start, run in (piece for _, pieces in found for piece in pieces):
        saved.setdefault(name, {})[start] = run
    joined = {name: torch.cat([runs[start] for start in sorted(runs)]) for name, runs in saved.items()}
    for name, moment in moments.items():
        torch.testing.assert_close(joined[f"optimizer/{name}/exp_avg"], moment.flatten(), atol=1e-5, rtol=0)
    for name, value in averaged.module.named_parameters():
        torch.testing.assert_close(joined[f"average/{name}"], value.detach().flatten(), atol=1e-5, rtol=0)


def test_the_first_state_after_an_exchange_has_the_names_of_now_without_a_pass():
    models = [make() for _ in range(SIZE)]
    reference = make()
    exchanged(reference)

    def work(comm):
        model = FSDP(models[comm.rank], comm, auto_wrap_policy=ModuleWrapPolicy({Block}))
        exchanged(model)
        entries = {entry.name: entry.meta.name for entry in state_entries(model)}
        assert all(name in (meta, "head.weight") for name, meta in entries.items())
        return model.state_dict()

    for state in run_ranks(SIZE, work):
        torch.testing.assert_close(dict(state), dict(reference.state_dict()), atol=0, rtol=0)


def shared(model):
    model.blocks[1] = model.blocks[0]


def replaced(model):
    model.head = nn.Linear(24, 50, bias=False)
    nn.init.constant_(model.head.weight, 0.1)  # equal on all ranks


def replaced_inside(model):
    replaced(getattr(model, "module", model))


def parameters_exchanged(model):
    first, second = model.blocks[0].side, model.blocks[1].side
    first.weight, second.weight = second.weight, first.weight


def tied(model):
    model.blocks[0].register_parameter("table", model.embed.weight)


REFUSED = {
    shared: r"blocks\.1\.\w+\.weight is no longer part",
    replaced: r"head\.weight",
    replaced_inside: r"head\.weight",
    parameters_exchanged: r"blocks\.0\.side\.weight was replaced",
    tied: r"embed\.weight was registered as blocks\.0\.table",
}


@pytest.mark.parametrize("change", REFUSED)
@pytest.mark.parametrize("face", FACES)
def test_what_cannot_be_followed_is_refused_in_the_next_pass_and_when_saving(face, change):
    models = [make() for _ in range(SIZE)]
    data = batches(1, ROWS)[0]

    def work(comm):
        model = FACES[face](models[comm.rank], comm)
        lm_loss(model, data).backward()
        change(model)
        root = sharded_roots(model)[0]
        for use in (lambda: lm_loss(model, data), lambda: fullshard.full_state_dict(root)):
            with pytest.raises(ShardingError, match=REFUSED[change]):
                use()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_ranks(SIZE, work)


def test_ranks_that_move_modules_differently_are_told():
    models = [make() for _ in range(SIZE)]
    data = batches(1, ROWS)[0]

    def work(comm):
        model = fullshard.fully_shard(models[comm.rank], comm, wrap=None)
        lm_loss(model, data).backward()
        if comm.rank:
            exchanged(model)
        with pytest.raises(MismatchError, match=r"under its old name on rank 0 is .* on rank 1"):
            lm_loss(model, data).backward()

    run_ranks(SIZE, work)


def test_a_step_of_an_unchanged_model_looks_at_names_once(monkeypatch):
    looks, model = [], make()
    follow = registry.follow_tree
    monkeypatch.setattr(api, "follow_tree", lambda runtime: (looks.append(1), follow(runtime)))

    def work(comm):
        sharded = fullshard.fully_shard(model, comm)
        for tokens in batches(3, ROWS):
            lm_loss(sharded, tokens).backward()

    run_ranks(1, work)
    assert looks == [1]
