"""Optimizer states of FSDP1's wrapper on rank threads."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from fullshard.compat.torch_fsdp.api import FullOptimStateDictConfig, OptimStateKeyType, StateDictType
from fullshard.compat.torch_fsdp.fully_sharded_data_parallel import FullyShardedDataParallel as FSDP
from fullshard.core.shards import rows_of
from fullshard.core.testing import run_ranks
from fullshard.errors import CheckpointError, MismatchError, ProcessGroupError, ShardingError
from fullshard.state.saving.shard_tensor import ShardTensor
from support.fsdp1 import KINDS, on_ranks
from support.models import batches, lm_loss
from support.parity import replicas

FULL, SHARDED, LOCAL = (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT)


def groups_of(model):
    """Two groups, in another order than the model's."""
    small = [p for name, p in model.named_parameters() if "norm" in name]
    rest = [p for name, p in model.named_parameters() if "norm" not in name]
    return [{"params": small, "lr": 3e-3}, {"params": rest, "weight_decay": 0.1}]


def adamw(model):
    return torch.optim.AdamW(groups_of(model), lr=1e-2)


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def adagrad(model):
    """It has state where a rank has no rows, and counts no steps there."""
    return torch.optim.Adagrad(model.parameters(), lr=1e-2)


def train(model, optimizer, loss_of, seed=1):
    for tokens in batches(2, 2, seed=seed):
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(comm, model, plain, kind, optimizer_of):
    both = [(one, optimizer_of(one)) for one in (model, plain)]
    for one, optimizer in both:
        train(one, optimizer, KINDS[kind][1])
    return both[0][1], both[1][1]


def assert_close_states(ours, theirs):
    """State dicts by name or number."""
    assert ours["state"].keys() == theirs["state"].keys()
    for key, state in theirs["state"].items():
        assert list(ours["state"][key]) == list(state)
        for what, value in state.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(ours["state"][key][what], value, atol=1e-6, rtol=1e-4)
            else:
                assert ours["state"][key][what] == value
    assert ours["param_groups"] == theirs["param_groups"]


def by_name(optimizer, model):
    return FSDP.rekey_optim_state_dict(optimizer.state_dict(), OptimStateKeyType.PARAM_NAME, model, optim=optimizer)


def sorted_groups(state):
    return state | {"param_groups": [g | {"params": sorted(g["params"])} for g in state["param_groups"]]}


CASES = [
    ("lm", adamw, 1),
    ("lm", momentum, 4),
    ("lm_frozen_parts", adamw, 4),
    ("t5", adamw, 2),
    ("normed", adamw, 4),
    ("normed", adagrad, 4),
]


@pytest.mark.parametrize(("kind", "optimizer_of", "size"), CASES)
def test_optimizer_state_is_the_plain_optimizer_s_by_name(kind, optimizer_of, size):
    def work(comm, model, plain):
        optimizer, other = trained(comm, model, plain, kind, optimizer_of)
        state = FSDP.optim_state_dict(model, optimizer)
        expected = by_name(other, plain)
        assert_close_states(sorted_groups(state), expected)
        assert_close_states(sorted_groups(FSDP.optim_state_dict(model, optimizer, optimizer.state_dict())), expected)
        legacy = FSDP.full_optim_state_dict(model, optimizer)
        assert legacy == {} if comm.rank else legacy.keys() == state.keys()
        plain_again = optimizer_of(plain)
        numbered = FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, plain, optim=plain_again)
        assert_close_states(numbered, other.state_dict())
        plain_again.load_state_dict(numbered)
        # Back, into what is there.
        FSDP.optim_state_dict_to_load(model, optimizer, expected, load_directly=True)
        assert_close_states(sorted_groups(FSDP.optim_state_dict(model, optimizer)), expected)

    on_ranks(kind, size, work)


def test_it_comes_back_on_another_number_of_ranks_and_the_runs_stay_together():
    def save(comm, model, plain):
        optimizer, _ = trained(comm, model, plain, "lm", adamw)
        return model.state_dict(), FSDP.optim_state_dict(model, optimizer)

    weights, state = on_ranks("lm", 2, save)[0]

    def load(comm, model, plain, how):
        model.load_state_dict(weights)
        optimizer = torch.optim.AdamW(groups_of(model), lr=0.5)
        rank0 = state if comm.rank == 0 else None
        own_part = {
            "to_load": lambda: FSDP.optim_state_dict_to_load(model, optimizer, state),
            "shard": lambda: FSDP.shard_full_optim_state_dict(state, model, optim=optimizer),
            "scatter": lambda: FSDP.scatter_full_optim_state_dict(rank0, model, optim=optimizer),
        }[how]()
        optimizer.load_state_dict(own_part)
        assert [group["lr"] for group in optimizer.param_groups] == [3e-3, 1e-2]
        train(model, optimizer, lm_loss, seed=3)
        return model.state_dict()

    runs = [
        on_ranks("lm", size, lambda c, m, p, how=how: load(c, m, p, how))[0]
        for size, how in ((2, "to_load"), (3, "shard"), (4, "scatter"))
    ]
    for other in runs[1:]:
        for name, value in runs[0].items():
            torch.testing.assert_close(other[name], value, atol=2e-6, rtol=1e-4)


def test_rank0_only_gives_and_takes_it_on_rank_0():
    def work(comm, model, plain):
        optimizer, _ = trained(comm, model, plain, "lm", adamw)
        FSDP.set_state_dict_type(model, FULL, None, FullOptimStateDictConfig(rank0_only=True))
        state = FSDP.optim_state_dict(model, optimizer)
        assert (state == {}) is (comm.rank > 0)
        fresh = adamw(model)
        fresh.load_state_dict(FSDP.optim_state_dict_to_load(model, fresh, state))
        for ours, theirs in zip(fresh.state.values(), optimizer.state.values(), strict=True):
            assert all(torch.equal(ours[key], theirs[key]) for key in theirs)

    on_ranks("lm", 3, work)


@pytest.mark.parametrize("kind", [SHARDED, LOCAL])
def test_sharded_and_local_optimizer_states_come_back(kind):
    def work(comm, model, plain):
        optimizer, _ = trained(comm, model, plain, "lm", adamw)
        FSDP.set_state_dict_type(model, kind)
        state = FSDP.optim_state_dict(model, optimizer)
        assert any(isinstance(v, ShardTensor) for of in state["state"].values() for v in of.values()) is (
            kind is SHARDED
        )
        fresh = adamw(model)
        fresh.load_state_dict(FSDP.optim_state_dict_to_load(model, fresh, state))
        legacy = adamw(model)
        sharded = FSDP.sharded_optim_state_dict(model, optimizer)
        legacy.load_state_dict(FSDP.flatten_sharded_optim_state_dict(sharded, model, legacy))
        for one in (fresh, legacy):
            for param, theirs in optimizer.state.items():
                if param.nbytes:
                    assert all(torch.equal(one.state[param][key], theirs[key]) for key in theirs)

    on_ranks("lm", 4, work)


def test_without_an_optimizer_numbers_are_those_of_the_parameters():
    def work(comm, model, plain):
        optimizer, other = trained(comm, model, plain, "lm", momentum)
        state = FSDP.optim_state_dict(model, optimizer)
        fresh = momentum(model)
        fresh.load_state_dict(FSDP.shard_full_optim_state_dict(state, model))
        for ours, theirs in zip(fresh.state.values(), optimizer.state.values(), strict=True):
            assert torch.equal(ours["momentum_buffer"], theirs["momentum_buffer"])
        numbered = FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, plain)
        assert_close_states(numbered, other.state_dict())
        named = FSDP.optim_state_dict_to_load(model, optimizer, state, is_named_optimizer=True)
        assert set(named["state"]) <= set(state["state"])

    on_ranks("lm", 2, work)


def test_states_that_do_not_fit_are_refused():
    class Pair:
        def size(self):
            return 7

    def work(comm, model, plain):
        optimizer, other = trained(comm, model, plain, "lm", adamw)
        state = FSDP.optim_state_dict(model, optimizer)
        texts = []
        for wrong, match in (
            (other.state_dict(), "rekey_optim_state_dict"),
            ({}, "rank0_only"),
            ({**state, "state": {**state["state"], "embed.weight": {"exp_avg": torch.zeros(3, 3)}}}, "shape"),
            ({**state, "param_groups": state["param_groups"][:1]}, "did not step"),
        ):
            with pytest.raises(CheckpointError, match=match) as caught:
                FSDP.optim_state_dict_to_load(model, optimizer, wrong)
            texts.append(str(caught.value))
        with pytest.raises(ProcessGroupError, match="7 ranks"):
            FSDP.optim_state_dict(model, optimizer, group=Pair())
        with pytest.raises(CheckpointError, match="names or all numbers"):
            FSDP.rekey_optim_state_dict(
                {"state": {0: {}, "a": {}}, "param_groups": []}, OptimStateKeyType.PARAM_ID, plain
            )
        with pytest.warns(FutureWarning, match="optim_input"):
            FSDP.rekey_optim_state_dict(
                other.state_dict(), OptimStateKeyType.PARAM_NAME, plain, groups_of(plain), optim=other
            )
        return texts

    first, second = on_ranks("lm", 2, work)
    assert first == second


class Parts(nn.Module):
    """Two wrapped modules, one with a wrapped one inside, and parameters beside them, some of the same short names."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))
        self.first = nn.Linear(6, 5)
        self.between = nn.Linear(5, 5)
        self.last = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))

    def forward(self, x):
        return self.last(self.between(self.first(x * self.weight).relu()))


def with_parts(size, work):
    """Run ``work(comm, model, plain)`` where the root is not wrapped."""

    def rank(comm, model, plain):
        model.first = FSDP(model.first, comm)
        model.last[1] = FSDP(model.last[1], comm)
        model.last = FSDP(model.last, comm)
        return work(comm, model, plain)

    _, models = replicas(Parts, 2 * size)
    return run_ranks(size, lambda comm: rank(comm, models[comm.rank], models[size + comm.rank]))


def trained_parts(comm, model, optimizer):
    for step in range(2):
        x = torch.randn(2 * comm.size, 6, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()  # the same rows on each rank, so that what is beside needs no reduction
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", [FULL, SHARDED, LOCAL])
def test_a_model_of_which_only_parts_are_wrapped_has_one_optimizer_state(kind):
    def work(comm, model, plain):
        both = [(one, torch.optim.AdamW([*one.parameters()][::-1], lr=1e-2)) for one in (model, plain)]
        for one, optimizer in both:
            trained_parts(comm, one, optimizer)
        (_, optimizer), (_, other) = both
        expected = by_name(other, plain)
        assert_close_states(sorted_groups(FSDP.optim_state_dict(model, optimizer)), sorted_groups(expected))
        FSDP.set_state_dict_type(model, kind)
        state = FSDP.optim_state_dict(model, optimizer)
        assert state["state"].keys() == expected["state"].keys()
        assert type(state["state"]["weight"]["exp_avg"]) is torch.Tensor, "what is beside is full on each rank"
        fresh = torch.optim.AdamW(model.parameters(), lr=0.5)
        fresh.load_state_dict(FSDP.optim_state_dict_to_load(model, fresh, state))
        assert fresh.param_groups[0]["lr"] == 1e-2
        for param in model.parameters():
            for key, value in optimizer.state[param].items():
                assert torch.equal(rows_of(fresh.state[param][key]), rows_of(value))

    with_parts(3, work)


def test_a_state_of_rank_0_is_given_to_all_parts():
    def work(comm, model, plain):
        optimizer, other = (torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, plain))
        for one, stepping in ((model, optimizer), (plain, other)):
            trained_parts(comm, one, stepping)
        state = FSDP.full_optim_state_dict(model, optimizer)
        assert (state == {}) is (comm.rank > 0)
        fresh = torch.optim.AdamW(model.parameters(), lr=0.5)
        fresh.load_state_dict(FSDP.scatter_full_optim_state_dict(state, model, optim=fresh))
        assert_close_states(sorted_groups(FSDP.optim_state_dict(model, fresh)), by_name(other, plain))

    with_parts(2, work)


def test_parameters_beside_the_parts_that_were_not_saved_are_left_to_the_caller():
    def work(comm, model, plain):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        trained_parts(comm, model, optimizer)
        state = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
        del state["state"]["between.bias"]
        state["param_groups"][0]["params"].remove("between.bias")
        with pytest.raises(CheckpointError, match=r"did not step 1 parameters.*between\.bias"):
            FSDP.optim_state_dict_to_load(model, optimizer, state, load_directly=True)
        number = [name for name, _ in model.named_parameters()].index("between.bias")
        loaded = FSDP.shard_full_optim_state_dict(state, model, optim=optimizer)
        expected = [one for one in range(len(optimizer.state)) if one != number]
        assert (loaded["param_groups"][0]["params"], sorted(loaded["state"])) == (expected, expected)
        loaded["param_groups"][0]["params"].insert(number, number)
        loaded["state"][number] = optimizer.state_dict()["state"][number]
        optimizer.load_state_dict(loaded)
        state["param_groups"][0]["params"].remove("first.bias")
        with pytest.raises(CheckpointError, match=r"did not step 1 parameters.*first\.bias"):
            FSDP.shard_full_optim_state_dict(state, model, optim=optimizer)

    with_parts(2, work)


def test_parts_over_different_numbers_of_ranks_have_no_state_in_common():
    def work(comm, model, plain):
        plain.first = FSDP(plain.first, comm)
        plain.last = FSDP(plain.last, comm.split([[0], [1]]))
        optimizer = torch.optim.SGD(plain.parameters(), lr=1e-2)
        with pytest.raises(ShardingError, match="sharded over 1 and 2 ranks"):
            FSDP.optim_state_dict(plain, optimizer)

    with_parts(2, work)


@pytest.mark.parametrize("rates", [(1e-2, 1e-2), (1e-2, 2e-2)])
def test_ranks_may_list_parameters_of_several_models_in_another_order_but_not_with_another_rate(rates):
    """A set of parameters, say, has another order in each process."""

    def work(comm, model, plain):
        params = [*model.parameters()]
        optimizer = torch.optim.AdamW(params[::-1] if comm.rank else params, lr=rates[comm.rank])
        with pytest.raises(MismatchError, match="learning rates") if rates[0] != rates[1] else nullcontext():
            trained_parts(comm, model, optimizer)

    with_parts(2, work)


def test_a_sharded_state_loads_into_a_model_that_is_wrapped_otherwise():
    def work(comm, model, plain):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        trained_parts(comm, model, optimizer)
        FSDP.set_state_dict_type(model, SHARDED)
        state = FSDP.optim_state_dict(model, optimizer)
        plain.between = FSDP(plain.between, comm)
        other = FSDP(plain, comm)
        FSDP.set_state_dict_type(other, SHARDED)
        params = [*other.parameters()]
        fresh = torch.optim.AdamW(params[::-1] if comm.rank else params, lr=0.5)
        fresh.load_state_dict(FSDP.optim_state_dict_to_load(other, fresh, state))
        full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
        assert_close_states(
            sorted_groups(FSDP.full_optim_state_dict(other, fresh, rank0_only=False)), sorted_groups(full)
        )

    with_parts(3, work)


def test_groups_that_were_removed_stay_away_and_options_stay_what_they_are():
    def work(comm, model, plain):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        trained_parts(comm, model, optimizer)
        given = optimizer.state_dict()
        expected = FSDP.optim_state_dict(model, optimizer)
        del given["param_groups"]
        state = FSDP.optim_state_dict(model, optimizer, given)
        assert list(state) == ["state"]
        assert_close_states(state | {"param_groups": 0}, expected | {"param_groups": 0})
        fresh = torch.optim.AdamW(model.parameters(), lr=0.5)
        fresh.load_state_dict(FSDP.optim_state_dict_to_load(model, fresh, state))
        assert fresh.param_groups[0]["lr"] == 0.5
        assert_close_states(FSDP.optim_state_dict(model, fresh) | {"param_groups": 0}, expected | {"param_groups": 0})

    with_parts(2, work)
