"""The whole model on rank 0, run by run: each element once, never more than the limit, in step on every rank."""

import pytest
import torch
from torch import nn

from fullshard import MixedPrecision, ShardingStrategy, fully_shard
from fullshard.core.engine import full_runs, full_state_dict, saved_tensors
from fullshard.core.testing import RecordingComm, run_ranks
from support.models import KINDS, TinyLM, batches, lm_with_frozen_parts, t5
from support.parity import alone, on_ranks, replicas, train_sharded, two_by_two


class Odd(nn.Module):
    """Persistent and other buffers, a left-out parameter that is not contiguous, a tie, a module in two places."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(37, 6)
        self.head = nn.Linear(6, 37, bias=False)
        self.head.weight = self.embed.weight
        self.norms = nn.ModuleList(nn.BatchNorm1d(6) for _ in range(2))
        self.again = self.norms[0]
        self.register_buffer("big", torch.arange(900, dtype=torch.float64).view(30, 30).t())
        self.register_buffer("fleeting", torch.ones(3), persistent=False)
        self.scale = nn.Parameter(torch.tensor(2.5))
        self.outside = nn.Parameter(torch.randn(50, 40).t())


def collect(model, limit_bytes):
    """The streamed tensors; every element must come once."""
    saved = {one.names[0]: one for one in saved_tensors(model)}
    seen = {name: torch.zeros(one.shape, dtype=torch.int32) for name, one in saved.items()}
    whole = {name: torch.empty(one.shape, dtype=one.dtype) for name, one in saved.items()}
    steps = 0
    for runs in full_runs(model, limit_bytes):
        steps += 1
        assert sum(flat.nbytes for _, _, flat in runs) <= limit_bytes
        for name, start, flat in runs:
            assert flat.dtype == saved[name].dtype
            assert flat.dim() == 1
            assert flat.numel() > 0
            whole[name].view(-1)[start : start + flat.numel()] = flat
            seen[name].view(-1)[start : start + flat.numel()] += 1
    return steps, seen, whole


@pytest.mark.parametrize(
    ("make", "size", "limit_bytes"),
    [
        (Odd, 1, 3000),
        (Odd, 3, 500),
        (Odd, 4, 10**9),
        (TinyLM, 2, 500),
        (TinyLM, 4, 3000),
        (t5, 2, 3000),
        (t5, 3, 10**9),
    ],
)
def test_every_element_comes_once_in_steps_of_the_limit(make, size, limit_bytes):
    reference, models = replicas(make, size)
    expected = reference.state_dict()

    def work(comm):
        ledger = RecordingComm(comm)
        left = [models[comm.rank].outside] if make is Odd else []
        model = fully_shard(models[comm.rank], ledger, wrap=None if make is Odd else "auto", ignored_params=left)
        before = len(ledger.entries)
        steps, seen, whole = collect(model, limit_bytes)
        return steps, ledger.names[before:], seen, whole

    by_rank = run_ranks(size, work)
    steps, calls, seen, whole = by_rank[0]
    assert all(other[0] == steps and other[1] == calls for other in by_rank)
    compared = ["all_gather_object"] if size > 1 and "all_gather_object" in calls else []  # buffers, once
    assert calls[: len(compared)] == compared
    assert set(calls[len(compared) :]) == ({"gather"} if size > 1 else set())
    assert all(bool((count == 1).all()) for count in seen.values())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in whole.items())
    for _, _, seen_there, _ in by_rank[1:]:
        assert not any(count.any() for count in seen_there.values())
    if limit_bytes == 10**9:
        assert len(calls) <= steps < 40


@pytest.mark.parametrize("strategy", ShardingStrategy)
def test_copies_take_no_part(strategy):
    reference, models = replicas(lm_with_frozen_parts, 4)

    def work(comm):
        replicate, shard = (RecordingComm(axis) for axis in two_by_two(comm))
        mesh = (replicate, shard) if strategy.needs_two_axes else RecordingComm(comm)
        model = fully_shard(models[comm.rank], mesh, strategy=strategy, frozen="replicate")
        ledger = shard if strategy.needs_two_axes else mesh
        before = len(ledger.entries)
        _, seen, whole = collect(model, 2000)
        return "gather" in ledger.names[before:], seen, whole

    by_rank = run_ranks(4, work)
    took_part = [gathered for gathered, _, _ in by_rank]
    if strategy is ShardingStrategy.NO_SHARD:
        assert took_part == [False] * 4
    else:
        assert took_part == ([True, True, False, False] if strategy.needs_two_axes else [True] * 4)
    assert not any(count.any() for _, seen, _ in by_rank[1:] for count in seen.values())
    _, seen, whole = by_rank[0]
    assert all(bool((count == 1).all()) for count in seen.values())
    assert all(torch.equal(tensor, reference.state_dict()[name]) for name, tensor in whole.items())


@pytest.mark.parametrize("make", [TinyLM, Odd])
def test_what_rank_0_holds_whole_is_not_copied_nor_a_tensor_that_is_out_of_order(make):
    """A run is a view of the model, or a copy of no more than itself."""
    _, (model,) = replicas(make, 1)

    alone(model, wrap=None, ignored_params=[model.outside] if make is Odd else [])
    storages = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    copied = [
        flat.untyped_storage().nbytes()
        for runs in full_runs(model, 640)
        for *_, flat in runs
        if flat.untyped_storage().data_ptr() not in storages
    ]
    assert bool(copied) == (make is Odd)
    assert max(copied, default=0) <= 640


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_runs_hold_for_as_many_steps_as_asked_and_take_no_more_than_the_limit(ahead):
    reference, models = replicas(TinyLM, 2)

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        whole = {name: torch.full(p.shape, torch.nan) for name, p in reference.named_parameters()}
        storages, waiting, held = {}, [], 0

        def write(runs):
            for name, start, flat in runs:
                whole[name].view(-1)[start : start + flat.numel()] = flat

        for runs in full_runs(model, 6000, ahead=ahead):
            storages |= {flat.untyped_storage().data_ptr(): flat.untyped_storage().nbytes() for *_, flat in runs}
            waiting.append(runs)
            held = max(held, len(waiting))
            if len(waiting) > ahead:
                write(waiting.pop(0))
        for runs in waiting:
            write(runs)
        return whole, sum(storages.values()), held

    whole, nbytes, held = run_ranks(2, work)[0]
    assert held == ahead + 1
    assert 0 < nbytes <= 6000
    assert all(torch.equal(whole[name], p) for name, p in reference.named_parameters())


@pytest.mark.parametrize(("kind", "size"), [("lm", 1), ("t5", 3), ("t5_untied", 3), ("bart", 3), ("gpt2", 3)])
def test_the_full_state_dict_loads_into_the_unsharded_model(kind, size, tmp_path):
    make, loss_of = KINDS[kind]
    reference, models = replicas(make, size)
    data = batches(2, 2 * size)

    def work(comm):
        _, _, weights = train_sharded(models[comm.rank], comm, loss_of, data)
        return full_state_dict(models[comm.rank]), weights

    (state, weights), *others = run_ranks(size, work)
    assert all(other == {} for other, _ in others)
    expected = reference.state_dict()
    assert state.keys() == expected.keys()
    assert all(type(tensor) is torch.Tensor and not tensor.requires_grad for tensor in state.values())
    ties = {frozenset(n for n in expected if expected[n].data_ptr() == t.data_ptr()) for t in expected.values()}
    assert ties == {frozenset(n for n in state if state[n] is t) for t in state.values()}
    torch.save(state, tmp_path / "state.pt")
    reference.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True), strict=True)
    assert all(torch.equal(p, weights[name]) for name, p in reference.named_parameters())


def test_the_full_state_dict_has_every_name_of_buffers_and_of_modules_in_two_places():
    reference, models = replicas(Odd, 2)

    def work(comm):
        return full_state_dict(fully_shard(models[comm.rank], comm, wrap=None))

    state, _ = run_ranks(2, work)
    expected = reference.state_dict()
    assert state.keys() == expected.keys()
    assert "fleeting" not in state
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    reference.load_state_dict(state, strict=True)


def test_the_dtype_is_the_shards_whatever_is_computed_in():
    def work(comm, model):
        return {tensor.dtype for tensor in full_state_dict(model).values()}

    assert on_ranks(2, TinyLM, work, mp_policy=MixedPrecision(param="bf16"))[0] == {torch.float32}
