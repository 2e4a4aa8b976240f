"""Adafactor over shards: the unsharded optimizer's weights and state, and the bytes that ranks exchange."""

from functools import partial

import pytest
import torch
import transformers
from torch import nn

from fullshard import MixedPrecision, fully_shard
from fullshard.core.optim.adafactor import Adafactor, TorchAdafactor, matrices_of
from fullshard.core.testing import RecordingComm, ThreadComm, run_ranks
from support.optimizers import (
    LAYOUTS,
    assert_same_updates,
    batches,
    of_rank,
    sharded_weights,
    train,
    unsharded_weights,
    whole,
    zoo,
)

PEERS = {Adafactor: transformers.Adafactor, TorchAdafactor: torch.optim.Adafactor}

SETTINGS = {
    "transformers, relative step": (Adafactor, {}),
    "transformers, own rate": (
        Adafactor,
        {"lr": 1e-3, "relative_step": False, "scale_parameter": False, "beta1": 0.9, "weight_decay": 0.01},
    ),
    "torch": (TorchAdafactor, {}),
    "torch, upwards": (TorchAdafactor, {"lr": 5e-3, "weight_decay": 0.1, "maximize": True}),
}

EXCHANGES = ["exchange"] * 3  # statistics there, totals back, squares of updates


ONE, EACH = LAYOUTS
CASES = [(setting, *how) for setting in SETTINGS for how in ((2, EACH), (3, ONE))] + [("torch", 4, EACH)]


@pytest.mark.parity
@pytest.mark.parametrize(("setting", "ranks", "layout"), CASES)
def test_steps_equal_the_peers_on_the_unsharded_model(setting, ranks, layout):
    make, options = SETTINGS[setting]
    ours = sharded_weights(lambda model: make(model.parameters(), **options), ranks, **LAYOUTS[layout])
    assert_same_updates(ours, unsharded_weights(lambda model: PEERS[make](model.parameters(), **options), ranks))


@pytest.mark.parity
def test_slow_warm_up_equals_the_peers():
    # In float64: 20 steps of it move weights by a few thousand units in the last place of float32.
    ours, theirs = [
        run(lambda model, make=make: make(model.double().parameters(), warmup_init=True), 2, **options)
        for make, run, options in (
            (Adafactor, sharded_weights, LAYOUTS[EACH]),
            (transformers.Adafactor, unsharded_weights, {}),
        )
    ]
    assert_same_updates(ours, theirs, 1e-9)


class Leaf(nn.Module):
    def __init__(self, number, shape):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(number)))


class Given(nn.Module):
    """Parameters without a forward: tests give gradients by hand."""

    def __init__(self, *shapes):
        super().__init__()
        self.leaves = nn.ModuleList(Leaf(number, shape) for number, shape in enumerate(shapes))

    @property
    def weights(self):
        return [leaf.weight for leaf in self.leaves]


def is_leaf(module):
    return isinstance(module, Leaf)


def gradient(number, step, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * number + step))


def give_gradients(model, step, without=()):
    """This rank's part of the same gradients for any number of ranks, of the parameters that it holds any of."""
    for number, param in enumerate(model.weights):
        meta = getattr(param, "shard_meta", None)
        shape = param.shape if meta is None else meta.global_shape
        start, stop = (0, param.numel()) if meta is None else meta.element_range
        param.grad = None
        if start < stop and number not in without:
            full = gradient(number, step, shape).reshape(-1)
            param.grad = full[start:stop].view(param.shape).to(param.dtype)


def ledgers(ranks, make, shapes, of=slice(None), steps=2, without=()):
    """What each rank issues in the last of ``steps`` steps."""
    models = [Given(*shapes) for _ in range(ranks)]

    def work(comm):
        comm = RecordingComm(comm)
        model = fully_shard(models[comm.rank], comm, wrap=None)
        optimizer = make(model.weights[of])
        for step in range(steps):
            comm.entries.clear()
            give_gradients(model, step, without)
            optimizer.step()
        comm.owners = [param.shard_meta.owners for param in model.weights]
        return comm

    return run_ranks(ranks, work)


@pytest.mark.parametrize("make", PEERS)
def test_a_step_sends_a_row_of_each_split_matrix_and_three_numbers_twice_halved(make):
    rows, columns = 64, 48
    for ledger in ledgers(2, make, [(rows, columns)]):
        assert ledger.names == EXCHANGES
        # A rank sends half of the sums over columns, of the rows' and of the parameter's; the other half's totals; and
        # the update's: 4 bytes each.
        assert ledger.sent_bytes == 4 * (columns + 2) + 4


def test_a_matrix_whose_rows_are_split_sends_its_rows_sums_too():
    for ledger in ledgers(2, Adafactor, [(1, 60_000)]):
        assert ledger.names == EXCHANGES
        assert ledger.sent_bytes == 4 * (60_000 + 1 + 1) + 4


def test_whole_matrices_of_a_split_parameter_send_two_numbers():
    for ledger in ledgers(2, Adafactor, [(4, 32, 16)]):
        assert ledger.names == EXCHANGES
        assert ledger.sent_bytes <= 4 * 2 + 4  # the first number's total comes from one of the two ranks


def test_only_ranks_that_share_a_matrix_send_anything():
    shapes = [(100, 48), (130, 48), (120, 48), (60, 48)]
    shared_by_two = 0
    for matrix in range(len(shapes)):
        sent = ledgers(4, Adafactor, shapes, slice(matrix, matrix + 1))
        owners = sent[0].owners[matrix]
        shared_by_two += len(owners) == 2
        assert [ledger.rank for ledger in sent if ledger.sent_bytes] == (list(owners) if len(owners) > 1 else [])
    assert shared_by_two


def test_what_is_sent_does_not_depend_on_gradients():
    some, all_of_them = [
        [ledger.entries for ledger in ledgers(2, Adafactor, [(64, 48)], without=without)] for without in ([0], [])
    ]
    assert some == all_of_them


def test_where_no_parameter_is_split_nothing_is_exchanged():
    for ledger in ledgers(2, Adafactor, [(8, 8), (8, 8)]):
        assert ledger.names == []


@pytest.mark.parity
@pytest.mark.parametrize(("make", "layout"), [(Adafactor, ONE), (TorchAdafactor, EACH)])
def test_the_parts_of_state_are_the_unsharded_optimizers_each_element_written_once(make, layout):
    model = zoo()
    theirs = PEERS[make](model.parameters())
    train(model, theirs, batches(2, 3))
    models = [zoo() for _ in range(3)]

    def work(comm):
        model = fully_shard(models[comm.rank], comm, **LAYOUTS[layout])
        optimizer = make(model.parameters())
        train(model, optimizer, [of_rank(batch, comm.rank) for batch in batches(2, 3)])
        return optimizer

    ours = run_ranks(3, work)
    for number, state in theirs.state_dict()["state"].items():
        for key, value in state.items():
            if key in {make.row_key, make.column_key}:
                check_parts([(one, one.param_groups[0]["params"][number]) for one in ours], key, value)


def check_parts(holders, key, value):
    written = torch.full((value.numel(),), torch.nan)
    for optimizer, param in holders:
        part = optimizer.state_part(param, key)
        state = optimizer.state.get(param)
        assert part.shape == value.shape
        assert bool(state) == bool(part.numel)
        if state:
            mine, (start, stop), (first, last) = state[key], part.held, part.written
            assert tuple(mine.shape) == part.local_shape
            torch.testing.assert_close(mine.view(-1), value.view(-1)[start:stop], rtol=1e-3, atol=1e-12)
            assert written[first:last].isnan().all()
            written[first:last] = mine.view(-1)[first - start : last - start]
    torch.testing.assert_close(written.view_as(value), value, rtol=1e-3, atol=1e-12)


def test_state_that_has_an_element_for_each_of_the_parameters_is_said_to_have_no_part():
    def work(comm):
        model = fully_shard(Given((64, 48), (64,)), comm, wrap=None)
        optimizer = Adafactor(model.parameters(), beta1=0.9)
        keys = ("step", "RMS", "exp_avg", "exp_avg_sq")
        return [optimizer.state_part(param, key) for param in model.weights for key in keys]

    assert run_ranks(2, work) == [[None] * 8] * 2


SHAPES = [(130, 48), (9, 20, 10), (700,), (1, 50_000), (3, 4, 5, 6), (), (2, 60, 400)]


def test_the_shapes_given_by_hand_are_held_in_every_way():
    def work(comm):
        model = fully_shard(Given(*SHAPES), comm, wrap=is_leaf)
        found = [matrices_of(param.shard_meta) for param in model.weights if len(param.shard_meta.owners) > 1]
        return {None if one is None else (one.held, len(one.meta.global_shape)) for one in found}

    assert set().union(*run_ranks(4, work)) >= {("rows", 2), ("matrices", 3), ("elements", 2), ("elements", 3), None}


def by_hand(make, ranks, dtype=torch.float32, without=lambda step: (), peer=False):
    """Weights after five steps with the same gradients for any number of ranks."""
    models = [Given(*SHAPES).to(dtype) for _ in range(ranks)]
    if peer:
        return steps_by_hand(models[0], make, without)

    def work(comm):
        model = fully_shard(models[comm.rank], comm, wrap=is_leaf)
        steps_by_hand(model, make, without)
        return whole(model)

    return run_ranks(ranks, work)[0]


def steps_by_hand(model, make, without):
    optimizer = make(model.parameters())
    for step in range(5):
        give_gradients(model, step, without(step))
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


@pytest.mark.parametrize("make", PEERS)
def test_a_parameter_without_a_gradient_in_a_step_is_as_it_is_unsharded(make):
    def without(step):
        return [step, step + 1]

    reference = by_hand(PEERS[make], 1, without=without, peer=True)
    for ranks in (2, 4):
        ours = by_hand(make, ranks, without=without)
        for name, param in reference.items():
            torch.testing.assert_close(ours[name], param, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("make", "options"), [(Adafactor, {"weight_decay": 0.1, "beta1": 0.9}), (TorchAdafactor, {})])
def test_bf16_parameters_end_where_they_do_unsharded(make, options):
    reference = by_hand(partial(make, **options), 1, torch.bfloat16, peer=True)
    ours = by_hand(partial(make, **options), 3, torch.bfloat16)
    for name, param in reference.items():
        differ = ours[name] != param
        assert differ.float().mean() < 1e-3, name  # a sum in another order may round to the neighbour
        torch.testing.assert_close(ours[name], param, rtol=2**-7, atol=1e-3)


def test_float64_works_on_ranks_that_share_nothing():
    def work(comm):
        model = fully_shard(Given((100, 48), (130, 48), (120, 48), (60, 48)).double(), comm, wrap=None)
        optimizer = Adafactor([model.weights[0]])
        give_gradients(model, 0)
        optimizer.step()
        return len(model.weights[0].shard_meta.owners)

    assert run_ranks(4, work) == [2] * 4


def test_gradients_that_are_narrower_than_the_shards_are_computed_with_in_float32():
    def work(comm):
        policy = MixedPrecision(param="bfloat16", reduce="float32")
        model = fully_shard(models[comm.rank], comm, mp_policy=policy, wrap=None)
        optimizer = Adafactor(model.parameters())
        train(model, optimizer, [of_rank(batch, comm.rank) for batch in batches(2, 2)])
        return {v.dtype for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)}

    models = [zoo() for _ in range(2)]
    assert run_ranks(2, work) == [{torch.float32}] * 2


def test_optimizers_of_one_model_agree_once_and_then_exchange_only():
    def work(comm: ThreadComm):
        comm = RecordingComm(comm)
        model = fully_shard(Given((64, 48)), comm, wrap=None)
        optimizer = Adafactor(model.parameters())
        names = []
        for step in range(2):
            comm.entries.clear()
            give_gradients(model, step)
            optimizer.step()
            names.append(comm.names)
        return names

    assert run_ranks(2, work) == [[["all_gather_object", *EXCHANGES], EXCHANGES]] * 2
