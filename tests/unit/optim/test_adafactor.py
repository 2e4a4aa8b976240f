"""Adafactor in both conventions on one rank, against transformers' and torch's own."""

import copy

import pytest
import torch
import transformers
from torch import nn

from fullshard.core.layout import ShardMeta, plan_unit
from fullshard.core.optim.adafactor import Adafactor, TorchAdafactor, matrices_of
from fullshard.errors import ConfigError
from support.optimizers import batches, train, zoo

PEERS = {Adafactor: transformers.Adafactor, TorchAdafactor: torch.optim.Adafactor}

SETTINGS = [
    (Adafactor, {}),
    (Adafactor, {"warmup_init": True, "clip_threshold": 0.1}),
    (Adafactor, {"lr": 1e-3, "relative_step": False, "scale_parameter": False, "beta1": 0.9, "weight_decay": 0.01}),
    (Adafactor, {"lr": 2e-3, "relative_step": False, "weight_decay": 0.1, "eps": (1e-8, 0.5), "decay_rate": -0.5}),
    (TorchAdafactor, {}),
    (TorchAdafactor, {"lr": 5e-3, "weight_decay": 0.1, "maximize": True, "d": 1.5}),
    (TorchAdafactor, {"lr": torch.tensor(2e-2), "eps": (1e-3, 0.5), "beta2_decay": -0.5}),
]


def params(*shapes, dtype=torch.float32, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape in shapes]


def give_gradients(given, step, factor=1.0):
    draw = torch.Generator().manual_seed(100 + step)
    for param in given:
        param.grad = (torch.randn(param.shape, generator=draw) * factor).to(param.dtype)


def run(optimizer, given, steps, first=0):
    for step in range(first, first + steps):
        give_gradients(given, step)
        optimizer.step()


def assert_same_state(ours, theirs, **tolerances):
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for number, state in theirs["state"].items():
        assert list(ours["state"][number]) == list(state)
        for key, value in state.items():
            torch.testing.assert_close(ours["state"][number][key], value, **tolerances)


@pytest.mark.parametrize(("ours", "options"), SETTINGS)
def test_training_equals_the_peers_in_weights_state_and_groups(ours, options):
    models = [zoo(), zoo()]
    optimizers = [make(model.parameters(), **options) for make, model in zip((ours, PEERS[ours]), models, strict=True)]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, batches(10, 1))
    for mine, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    assert_same_state(*[optimizer.state_dict() for optimizer in optimizers], rtol=2e-4, atol=1e-12)


def test_half_precision_is_computed_in_float32_as_transformers_does():
    for dtype in (torch.bfloat16, torch.float16):
        mine, theirs = [params((7, 5), (3, 4, 5), (6,), (), dtype=dtype) for _ in range(2)]
        options = {"beta1": 0.9, "weight_decay": 0.1}
        optimizers = Adafactor(mine, **options), transformers.Adafactor(theirs, **options)
        for optimizer, given in zip(optimizers, (mine, theirs), strict=True):
            run(optimizer, given, 10)
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
        assert_same_state(*[optimizer.state_dict() for optimizer in optimizers])


def test_torchs_convention_computes_half_precision_in_float32():
    narrow = params((7, 5), (3, 4, 5), (6,), dtype=torch.bfloat16)
    wide = [nn.Parameter(param.detach().float()) for param in narrow]
    eps = (torch.finfo(torch.bfloat16).eps, 1e-3)  # the default is that of the parameter's dtype
    optimizers = TorchAdafactor(narrow), torch.optim.Adafactor(wide, eps=eps)
    for step in range(10):
        give_gradients(narrow, step, factor=1e-3)
        for param, reference in zip(narrow, wide, strict=True):
            reference.grad = param.grad.float()
        for optimizer in optimizers:
            optimizer.step()
        for param, reference in zip(narrow, wide, strict=True):
            reference.data = reference.data.bfloat16().float()
            torch.testing.assert_close(param.float(), reference, rtol=0, atol=0)
    assert optimizers[0].state[narrow[0]]["row_var"].dtype == torch.float32


@pytest.mark.parametrize("ours", PEERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loaded_state_goes_on_where_it_was_saved_in_float32(ours, dtype):
    first = params((7, 5), (6,), dtype=dtype)
    optimizer = ours(first)
    run(optimizer, first, 3)
    second = copy.deepcopy(first)
    resumed = ours(second)
    saved = copy.deepcopy(optimizer.state_dict())
    resumed.load_state_dict(saved)
    assert_same_state(resumed.state_dict(), saved, rtol=0, atol=0)
    assert all(v.dtype == torch.float32 for s in resumed.state.values() for v in s.values() if torch.is_tensor(v))
    for one, given in ((optimizer, first), (resumed, second)):
        run(one, given, 3, first=3)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert saved["state"][0]["step"] == 3  # not counted on


@pytest.mark.parametrize("ours", PEERS)
def test_state_dicts_are_exchanged_with_the_peers(ours):
    for make, other in ((ours, PEERS[ours]), (PEERS[ours], ours)):
        first = params((7, 5), (6,))
        optimizer = make(first)
        run(optimizer, first, 3)
        second = copy.deepcopy(first)
        resumed = other(second)
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for one, given in ((optimizer, first), (resumed, second)):
            run(one, given, 3, first=3)
        for a, b in zip(first, second, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_state_is_loaded_as_a_users_hook_leaves_it():
    given = params((3, 4))
    optimizer = Adafactor(given)
    run(optimizer, given, 2)
    saved = optimizer.state_dict()
    optimizer.register_load_state_dict_pre_hook(
        lambda _optimizer, state: {**state, "state": {0: {**state["state"][0], "step": 7}}}
    )
    optimizer.load_state_dict(saved)
    assert optimizer.state[given[0]]["step"] == 7


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda p: Adafactor(p, lr=1e-3), "got lr=0.001. Leave lr out, or add relative_step=False"),
        (lambda p: Adafactor(p, relative_step=False, warmup_init=True), "relative_step is off"),
        (lambda p: Adafactor(p, relative_step=False), "needs a learning rate, and lr is None"),
        (lambda p: Adafactor([{"params": p, "lr": 1e-3}]), "lr=0.001 and relative_step=True: the"),
        (lambda p: TorchAdafactor(p, lr=-1.0), "lr must be one number >= 0; got -1.0"),
        (lambda p: TorchAdafactor(p, lr=torch.ones(2)), "lr must be one number >= 0"),
        (lambda p: TorchAdafactor(p, beta2_decay=0.1), "beta2_decay must be <= 0; got 0.1"),
        (lambda p: TorchAdafactor(p, eps=(-1.0, 1e-3)), "eps must be"),
        (lambda p: TorchAdafactor(p, eps=(None, -1e-3)), "eps must be"),
        (lambda p: TorchAdafactor(p, d=0.5), "d must be >= 1; got 0.5"),
        (lambda p: TorchAdafactor(p, weight_decay=-0.1), "weight_decay must be >= 0"),
    ],
)
def test_settings_that_the_peers_refuse_are_refused(make, text):
    with pytest.raises(ConfigError, match=text):
        make(params((2, 2)))


@pytest.mark.parametrize("ours", PEERS)
def test_a_sparse_gradient_is_refused(ours):
    table = nn.Embedding(5, 3, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ConfigError, match=r"\(5, 3\), is sparse"):
        ours(table.parameters()).step()


@pytest.mark.parametrize("ours", PEERS)
def test_what_has_no_gradient_or_requires_none_is_left_alone(ours):
    given = params((3, 4), (3, 4), (0, 4), (5,))
    before = [param.detach().clone() for param in given]
    optimizer = ours(given)
    give_gradients(given, 0)
    given[0].grad = None
    given[1].requires_grad_(False)
    optimizer.step()
    assert [torch.equal(a, b) for a, b in zip(given, before, strict=True)] == [True, True, True, False]
    assert [bool(optimizer.state.get(param)) for param in given] == [False, False, False, True]


@pytest.mark.parametrize("ours", PEERS)
def test_a_closure_computes_gradients_and_its_loss_is_returned(ours):
    given = params((3, 4))
    optimizer = ours(given)

    def closure():
        optimizer.zero_grad()
        loss = given[0].square().sum()
        loss.backward()
        return loss

    before = given[0].detach().square().sum()
    assert optimizer.step(closure) == before
    assert given[0].square().sum() < before


@pytest.mark.parametrize(("ours", "options"), [(Adafactor, {"weight_decay": 0.1, "beta1": 0.9}), (TorchAdafactor, {})])
def test_a_step_never_waits_for_the_device(ours, options):
    given = [nn.Parameter(param.detach().to("meta")) for param in params((3, 4), (2, 3, 4), (5,))]
    optimizer = ours(given, **options)
    for param in given:
        param.grad = torch.empty_like(param)
    for _ in range(2):
        optimizer.step()  # a value read on the meta device is an error


def test_transformers_schedule_reads_the_learning_rate():
    read = []
    for make in (Adafactor, transformers.Adafactor):
        given = params((3, 4), (5,))
        optimizer = make([{"params": given[:1]}, {"params": given[1:], "scale_parameter": False}], warmup_init=True)
        schedule = transformers.optimization.AdafactorSchedule(optimizer, initial_lr=0.5)
        assert schedule.get_last_lr() == [0.5, 0.5]
        for step in range(3):
            give_gradients(given, step)
            optimizer.step()
            schedule.step()
            read.append([float(lr) for lr in schedule.get_last_lr()])
    assert read[:3] == read[3:]
    assert Adafactor._get_lr(optimizer.param_groups[0], {}) == 0.0  # a rank that holds no rows of the parameter


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
@pytest.mark.parametrize("shape", [(2, 2, 30_000), (2, 7, 5, 1000), (1, 64, 500), (3, 40_000), (9, 30, 20), (4, 3)])
def test_sums_and_products_of_all_ranks_are_those_of_the_whole(shape, ranks):
    lane = plan_unit((shape,), ranks).lanes[0]
    height, width = shape[-2:]
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    squares = whole.square().view(-1, height, width)
    rows, columns, products = torch.zeros(squares[..., 0].numel()), torch.zeros(len(squares), width), []
    by_hand = whole.view_as(squares) * (squares.sum(2, keepdim=True) + squares.sum(1, keepdim=True) + squares.mean())
    for rank in range(ranks):
        meta = ShardMeta("p", (), shape, lane, lane.placements[0], rank)
        start, stop = meta.element_range
        if start == stop:
            continue
        local, matrices = whole.view(-1)[start:stop].view(meta.local_shape), matrices_of(meta)
        mine = matrices.sums_of_squares(local)
        all_rows = slice(0, None) if matrices.held == "elements" else slice(start // width, stop // width)
        whole_here = matrices.held == "matrices"
        here = slice(start // (height * width), stop // (height * width)) if whole_here else slice(0, None)
        rows[all_rows] += mine[0]
        columns[here] += mine[1]
        statistics = squares.sum(2).view(-1)[all_rows], squares.sum(1)[here], squares.mean().expand(len(columns))[here]
        products.append(matrices.scaled(local, statistics, lambda r, c, m: r + c + m).view(-1))
    torch.testing.assert_close(rows.view(-1, height), squares.sum(2))
    torch.testing.assert_close(columns, squares.sum(1))
    torch.testing.assert_close(torch.cat(products), by_hand.view(-1))


@pytest.mark.parametrize(
    "schedule",
    [
        lambda it: torch.optim.lr_scheduler.LambdaLR(it, lambda step: 1.0),
        lambda it: torch.optim.lr_scheduler.CosineAnnealingLR(it, 10),
        lambda it: transformers.get_linear_schedule_with_warmup(it, 2, 10),
    ],
)
def test_a_schedule_of_relative_steps_is_refused_with_the_rule(schedule):
    optimizer = Adafactor(params((3, 4)))
    with pytest.raises(ConfigError, match=r"computes its learning rate, .* lr=… and relative_step=False"):
        schedule(optimizer)
    assert "initial_lr" not in optimizer.param_groups[0]
    transformers.optimization.AdafactorSchedule(optimizer)
    schedule(Adafactor(params((3, 4)), lr=1e-3, relative_step=False))
