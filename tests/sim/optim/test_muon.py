"""Muon on shards equals Muon on the full model; only split matrices are sent, each once there and once back."""

import pytest
import torch
from torch import nn

from fullshard import MixedPrecision, ShardingStrategy, fully_shard
from fullshard.core.optim import muon_rounds
from fullshard.core.optim.muon import Muon, muon_groups
from fullshard.core.optim.muon_rounds import SplitMatrix, newton_schulz_flops, plan_rounds
from fullshard.core.shards import rows_of
from fullshard.core.testing import RecordingComm, run_ranks
from fullshard.errors import ConfigError
from support.optimizers import (
    LAYOUTS,
    ROWS,
    TOKENS,
    assert_same_updates,
    batches,
    copies,
    loss_of,
    of_rank,
    sharded_weights,
    steps_for,
    train,
    unsharded_weights,
    whole,
    zoo,
)
from support.parity import two_by_two
from support.streams import StreamChecker, install

FP32 = {"lr": 0.02, "ns_dtype": torch.float32}


def sorted_groups(model):
    return Muon(muon_groups(model, adamw_lr=3e-3), **FP32)


@pytest.fixture(scope="module")
def references():
    return {ranks: unsharded_weights(sorted_groups, ranks) for ranks in (2, 3, 4)}


ONE, EACH = LAYOUTS


@pytest.mark.parametrize(("ranks", "layout"), [(2, EACH), (3, ONE), (3, EACH), (4, ONE)])
def test_steps_end_where_the_unsharded_run_does(ranks, layout, references):
    assert_same_updates(sharded_weights(sorted_groups, ranks, **LAYOUTS[layout]), references[ranks])


def test_several_groups_with_their_own_options_end_where_the_unsharded_run_does():
    def make(model):
        first = [param for name, param in model.named_parameters() if name.startswith(("tall", "table"))]
        chosen = {id(param) for param in first}
        rest = [param for param in model.parameters() if id(param) not in chosen]
        groups = [
            {"params": first, "lr": 0.01, "momentum": 0.8, "nesterov": False},
            {"params": rest, "adjust_lr_fn": "match_rms_adamw", "ns_dtype": "float64", "ns_steps": 4},
        ]
        return Muon(groups, **FP32)

    reference = unsharded_weights(make, 3, steps=6)
    assert_same_updates(sharded_weights(make, 3, steps=6, **LAYOUTS["a unit each"]), reference)


def test_a_small_round_changes_nothing_but_the_number_of_exchanges(monkeypatch, references):
    at_once = sharded_weights(sorted_groups, 3, steps=3, **LAYOUTS["a unit each"])
    monkeypatch.setattr(muon_rounds, "ROUND_BYTES", 4 * 500)
    one_by_one = sharded_weights(sorted_groups, 3, steps=3, **LAYOUTS["a unit each"])
    assert_same_updates(one_by_one, at_once, 1e-5)


def test_replicas_of_a_hybrid_mesh_stay_equal_and_end_where_the_unsharded_run_does(references):
    models = copies(zoo(), 4)

    def work(comm):
        mesh = two_by_two(comm)
        model = fully_shard(models[comm.rank], mesh, wrap=None, strategy=ShardingStrategy.HYBRID_SHARD)
        train(model, sorted_groups(model), [of_rank(batch, comm.rank) for batch in batches(steps_for(4), 4)])
        return whole(model)

    weights = run_ranks(4, work)
    for other in weights[1:]:
        assert all(torch.equal(other[name], weight) for name, weight in weights[0].items())
    assert_same_updates(weights[0], references[4])


# What is sent


class Recorded:
    """The exchanges of each step, and what they were announced as."""

    def __init__(self, comm):
        self.comm = RecordingComm(comm)
        self.announced = []
        announce = self.comm.announce
        self.comm.announce = lambda what: (self.announced.append(what), announce(what))

    def step(self, optimizer):
        self.comm.entries.clear()
        self.announced.clear()
        optimizer.step()
        return [entry for entry in self.comm.entries if entry.collective != "all_gather_object"]


def split_sizes(metas, steps=5):
    """The split matrices, and the work of whole ones on each rank, straight from the layout."""
    split, fixed = [], [0] * metas[0].layout.world_size
    for meta in metas:
        work = newton_schulz_flops(*meta.global_shape, steps)
        ranges = [meta.layout.local_range(meta.placement, rank) for rank in meta.owners]
        if len(ranges) == 1:
            fixed[meta.owners[0]] += work
        else:
            split.append(SplitMatrix(meta.owners[0], tuple(stop - start for start, stop in ranges), work))
    return split, fixed


@pytest.mark.parametrize(("layout", "dtype"), [(ONE, torch.float32), (EACH, torch.bfloat16)])
def test_each_piece_of_a_split_matrix_travels_once_there_and_once_back_and_nothing_else(layout, dtype):
    models = copies(zoo(), 3)
    data = batches(2, 3)

    def work(comm):
        recorded = Recorded(comm)
        model = fully_shard(models[comm.rank], recorded.comm, **LAYOUTS[layout])
        optimizer = Muon(muon_groups(model), ns_dtype=dtype)
        entries = []
        for batch in data:
            optimizer.zero_grad()
            loss_of(model, of_rank(batch, comm.rank)).backward()
            entries.append(recorded.step(optimizer))
        metas = [param.shard_meta for param in optimizer.param_groups[0]["params"]]
        split, fixed = split_sizes(metas)
        plan = plan_rounds(split, fixed, 10**9)
        assert split
        assert len(plan.rounds) == 1
        there = back = 0
        for one, owner in zip(split, plan.owners, strict=True):
            if owner == comm.rank:
                back += one.numel - one.piece_of(comm.rank)
            elif comm.rank in one.sharers:
                there += one.piece_of(comm.rank)
        expected = [("exchange", there * dtype.itemsize), ("exchange", back * dtype.itemsize)]
        assert [[(entry.collective, entry.sent_bytes) for entry in step] for step in entries] == [expected] * 2
        return there + back

    assert sum(run_ranks(3, work)) > 0


def test_whole_matrices_and_adamws_parameters_are_stepped_without_any_exchange():
    torch.manual_seed(0)
    models = copies(nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4))), 2)
    tables = copies(nn.Embedding(64, 8), 2)

    def work(comm):
        recorded = Recorded(comm)
        model = fully_shard(models[comm.rank], recorded.comm, wrap=None)
        muon = Muon(model.parameters())
        assert all(len(param.shard_meta.owners) == 1 for param in muon.param_groups[0]["params"])
        model(torch.ones(1, 8)).sum().backward()
        split = fully_shard(tables[comm.rank], recorded.comm, wrap=None)
        adamw = Muon([{"params": list(split.parameters()), "use_muon": False}])
        split(torch.tensor([comm.rank])).sum().backward()
        assert len(split.weight.shard_meta.owners) == 2
        return recorded.step(muon), recorded.step(adamw)

    assert run_ranks(2, work) == [([], [])] * 2


def test_the_next_round_is_gathered_while_one_is_computed(monkeypatch):
    monkeypatch.setattr(muon_rounds, "ROUND_BYTES", 4 * 64)
    torch.manual_seed(0)
    models = copies(nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(6)), 2)
    original = muon_rounds.orthogonalised

    def work(comm):
        recorded = Recorded(comm)
        model = fully_shard(models[comm.rank], recorded.comm, wrap=lambda module: isinstance(module, nn.Linear))
        optimizer = Muon(model.parameters(), ns_dtype=torch.float32)
        for param in model.parameters():
            assert len(param.shard_meta.owners) == 2
            param.grad = torch.ones_like(param)
        logs[comm.rank] = recorded.announced
        recorded.step(optimizer)
        return [event.removeprefix("Muon: ") for event in recorded.announced if event.startswith("Muon: ")]

    logs = {}

    def note(batch, pieces):
        logs[batch[0].meta.rank].append("Muon: compute")
        return original(batch, pieces)

    monkeypatch.setattr(muon_rounds, "orthogonalised", note)
    there, back = "updates of round {} of 3", "orthogonal rows of round {} of 3"
    expected = [there.format(1)]
    for number in (1, 2, 3):
        if number < 3:
            expected.append(there.format(number + 1))
        expected += ["compute", back.format(number)]
    assert run_ranks(2, work) == [expected] * 2


# What is missing


class Idle(nn.Module):
    """Of two halves, each split over ranks, a step uses those it is told."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(TOKENS, 16)
        self.halves = nn.ModuleList(nn.Linear(16, 160) for _ in range(2))
        self.never = nn.Linear(16, 16)

    def forward(self, tokens, used):
        return sum(self.halves[index](self.table(tokens)).square().mean() for index in used)


def test_matrices_without_gradient_are_left_alone_and_all_ranks_meet():
    ranks = 3
    used = [(0,), (0, 1), (1,), (), (0, 1)]
    torch.manual_seed(0)
    model = Idle()
    models = copies(model, ranks)
    optimizer = Muon(model.parameters(), **FP32)
    data = [batch[0] for batch in batches(len(used), ranks)]

    def steps(model, optimizer, data):
        for tokens, indices in zip(data, used, strict=True):
            optimizer.zero_grad()
            if indices:
                model(tokens, indices).backward()
            optimizer.step()

    steps(model, optimizer, data)

    def work(comm):
        sharded = fully_shard(models[comm.rank], comm, wrap=lambda module: isinstance(module, nn.Linear))
        ours = Muon(sharded.parameters(), **FP32)
        steps(sharded, ours, [tokens[comm.rank * ROWS : (comm.rank + 1) * ROWS] for tokens in data])
        assert not any(ours.state.get(param) for param in sharded.never.parameters())
        return whole(sharded)

    reference = {name: param.detach() for name, param in model.named_parameters()}
    for name, weight in run_ranks(ranks, work)[0].items():
        torch.testing.assert_close(weight, reference[name], rtol=1e-4, atol=1e-5)


def test_frozen_matrices_are_not_exchanged_and_come_back_when_unfrozen():
    torch.manual_seed(0)
    models = copies(nn.Sequential(nn.Linear(8, 64, bias=False), nn.Linear(64, 8, bias=False)), 2)

    def work(comm):
        recorded = Recorded(comm)
        model = fully_shard(models[comm.rank], recorded.comm, wrap=lambda module: isinstance(module, nn.Linear))
        optimizer = Muon(model.parameters())
        sent = []
        for trainable in (False, True):
            model[0].weight.requires_grad_(trainable)
            model(torch.ones(1, 8)).sum().backward()
            sent.append(sum(entry.sent_bytes for entry in recorded.step(optimizer)))
            optimizer.zero_grad()
        return sent

    frozen, trainable = (sum(by_rank) for by_rank in zip(*run_ranks(2, work), strict=True))
    assert (frozen, trainable) == (2 * 256 * 2, 2 * 512 * 2)


def test_a_rank_without_any_rows_takes_part_and_has_no_state():
    models = copies(nn.Linear(16, 1, bias=False), 3)

    def work(comm):
        model = fully_shard(models[comm.rank], comm, wrap=None)
        optimizer = Muon(model.parameters())
        model(torch.ones(1, 16)).sum().backward()
        optimizer.step()
        return rows_of(model.weight).numel(), len(optimizer.state_dict()["state"])

    assert sorted(run_ranks(3, work)) == [(0, 0), (0, 0), (16, 1)]


def test_ranks_that_sort_parameters_in_another_way_are_told():
    models = copies(zoo(), 2)

    def work(comm):
        model = fully_shard(models[comm.rank], comm, wrap=None)
        groups = [{"params": [model.table.weight, model.tall.weight], "use_muon": True}]
        if comm.rank:
            groups = [
                {"params": [model.table.weight], "use_muon": True},
                {"params": [model.tall.weight], "use_muon": False},
            ]
        with pytest.raises(ConfigError, match=r"use_muon=True\) needs .* \(rank 0: 4, rank 1: 3\)"):
            Muon(groups).step()

    run_ranks(2, work)


def test_a_vector_given_to_muon_after_sharding_is_named():
    models = copies(zoo(), 2)

    def work(comm):
        model = fully_shard(models[comm.rank], comm, wrap=None)
        with pytest.raises(ConfigError, match=r"parameter norm.weight has shape \(20,\)"):
            Muon([{"params": list(model.norm.parameters()), "use_muon": True}])

    run_ranks(2, work)


# Precision


@pytest.mark.parametrize("layout", LAYOUTS)
def test_of_the_same_gradients_ranks_make_the_same_bits_in_bfloat16(layout, monkeypatch):
    monkeypatch.setattr(muon_rounds, "ROUND_BYTES", 1)  # nothing is put together with other matrices
    model = zoo()
    models = copies(model, 3)
    draw = torch.Generator().manual_seed(1)
    steps = [{n: torch.randn(p.shape, generator=draw) for n, p in model.named_parameters()} for _ in range(2)]

    def run(model, set_gradient):
        optimizer = Muon(model.parameters(), lr=0.02)
        for gradients in steps:
            for name, param in model.named_parameters():
                set_gradient(param, gradients[name])
            optimizer.step()

    def set_gradient(param, gradient):
        start, stop = param.shard_meta.element_range
        if start < stop:
            param.grad = gradient.reshape(-1)[start:stop].view(param.shape).clone()

    def work(comm):
        sharded = fully_shard(models[comm.rank], comm, **LAYOUTS[layout])
        run(sharded, set_gradient)
        return whole(sharded)

    run(model, lambda param, gradient: setattr(param, "grad", gradient))
    reference = dict(model.named_parameters())
    for name, weight in run_ranks(3, work)[0].items():
        torch.testing.assert_close(weight, reference[name].detach(), rtol=1e-6, atol=1e-7)


def test_bfloat16_compute_and_narrow_gradients_step():
    models = copies(zoo(), 2)

    def work(comm):
        policy = MixedPrecision(param="bf16", reduce="bf16")
        model = fully_shard(models[comm.rank], comm, wrap=None, mp_policy=policy)
        optimizer = Muon(muon_groups(model))
        train(model, optimizer, [of_rank(batch, comm.rank) for batch in batches(2, 2)])
        return all(param.isfinite().all() for param in model.parameters())

    assert all(run_ranks(2, work))


def test_groups_sorted_before_and_after_sharding_are_the_same():
    models = copies(zoo(), 3)

    def names(model):
        of = {id(param): name for name, param in model.named_parameters()}
        return [[of[id(param)] for param in group["params"]] for group in muon_groups(model)]

    expected = names(zoo())

    def work(comm):
        return names(fully_shard(models[comm.rank], comm, wrap=None))

    assert run_ranks(3, work) == [expected] * 3


# Streams


def test_on_cudas_streams_pieces_are_read_when_they_have_come(monkeypatch):
    install(monkeypatch)
    monkeypatch.setattr(muon_rounds, "ROUND_BYTES", 4 * 64)
    torch.manual_seed(0)
    models = copies(nn.Sequential(*(nn.Linear(8, 8) for _ in range(5))), 2)

    def work(comm):
        with StreamChecker(comm.rank) as checker:
            mesh = checker.mesh(ShardingStrategy.FULL_SHARD, comm)
            model = fully_shard(models[comm.rank], mesh, wrap=lambda module: isinstance(module, nn.Linear))
            checker.names_from(model)
            optimizer = Muon(model.parameters(), ns_dtype=torch.float32)
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(1, 8)).sum().backward()
                optimizer.step()
        return checker.violations

    assert run_ranks(2, work) == [[], []]
