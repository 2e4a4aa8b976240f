"""Parts of one model with other ranks or another strategy than the rest: blocks on every rank, groups' own experts."""

import copy

import pytest
import torch
from torch import nn

from fullshard import CPUOffload, ShardingStrategy, clip_grad_norm_, full_state_dict, fully_shard, save
from fullshard.core.optim import ShardedGradScaler
from fullshard.core.shards import rows_of
from fullshard.core.testing import run_ranks
from fullshard.errors import MismatchError, ShardingError
from fullshard.state.saving import Checkpoints
from support.models import TinyLM, batches, lm_loss
from support.parity import (
    ROWS_PER_RANK,
    assert_same_run,
    mesh_for,
    replicas,
    train_sharded,
    train_unsharded,
    weights_of,
)

pytestmark = pytest.mark.parity

FULL, NONE, GRAD_OP = ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD, ShardingStrategy.SHARD_GRAD_OP
HYBRID = ShardingStrategy.HYBRID_SHARD
RANKS = 4
EXPERT = 2
"""Index of the expert among the modules of :func:`parts`."""


@pytest.mark.parametrize(
    ("inner", "outer", "offload"),
    [
        (NONE, FULL, None),
        (FULL, NONE, None),
        (NONE, GRAD_OP, CPUOffload()),
        (HYBRID, FULL, None),
        (FULL, HYBRID, None),
        (NONE, HYBRID, None),
    ],
)
def test_blocks_of_another_strategy_train_as_unsharded(inner, outer, offload):
    size = RANKS if HYBRID in (inner, outer) else 2
    reference, models = replicas(TinyLM, size)
    data = batches(4, size * ROWS_PER_RANK)
    plain = train_unsharded(reference, lm_loss, data)

    def work(comm):
        model = models[comm.rank]
        for block in model.blocks[::2]:
            fully_shard(block, mesh_for(inner, comm), wrap=None, strategy=inner, offload_policy=offload)
        model = fully_shard(model, mesh_for(outer, comm), wrap=None, strategy=outer, offload_policy=offload)
        run = train_sharded(model, comm, lm_loss, data, sharded=True)
        return run, full_state_dict(model)

    runs = run_ranks(size, work)
    for run, _ in runs:
        assert_same_run(run, plain)
    for name, value in runs[0][1].items():
        torch.testing.assert_close(value, runs[0][0][2].get(name, value), atol=0, rtol=0)


def parts(group):
    """The modules of a model whose third is an expert, another one in each group; the rest is equal."""
    torch.manual_seed(0)
    rest = [nn.Linear(8, 12), nn.Linear(12, 23), nn.Linear(12, 8)]
    torch.manual_seed(42 + group)
    return [*rest[:EXPERT], nn.Linear(23, 12), *rest[EXPERT:]]


def unsharded_experts(group_size, steps, max_norm):
    """Losses of each rank, norms, and each group's weights of a model that holds all experts."""
    groups = RANKS // group_size
    model = nn.ModuleList(parts(0))
    experts = nn.ModuleList(parts(group)[EXPERT] for group in range(groups))
    params = [p for i, part in enumerate(model) if i != EXPERT for p in part.parameters()] + [*experts.parameters()]
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    losses, norms = [], []
    for data in steps:
        of_rank = []
        for rank, x in enumerate(data.chunk(RANKS)):
            for index, part in enumerate(model):
                x = (experts[rank // group_size] if index == EXPERT else part)(x)
            of_rank.append(x.square().mean())
        (sum(of_rank) / RANKS).backward()
        for param in experts.parameters():
            param.grad.mul_(groups)  # an expert's gradient is the mean over the ranks of its group
        norms.append(torch.nn.utils.clip_grad_norm_(params, max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in of_rank])
    weights = []
    for expert in experts:
        model[EXPERT] = expert
        weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return losses, norms, weights


def on_ranks(size, strategy, work, outer=FULL):
    """Run ``work(comm, model)`` on each rank: two units on all ranks around one on the rank's group of ``size``."""
    models = [parts(rank // size) for rank in range(RANKS)]  # not on the threads, which share random numbers

    def rank_work(comm):
        group = comm.split([list(range(first, first + size)) for first in range(0, RANKS, size)])
        modules = models[comm.rank]
        fully_shard(modules[EXPERT], group, wrap=None, strategy=strategy)
        model = nn.Sequential(*modules)
        return work(comm, fully_shard(model, comm, wrap=lambda module: module is modules[1], strategy=outer))

    return run_ranks(RANKS, rank_work)


@pytest.mark.parametrize(("size", "strategy"), [(1, FULL), (2, FULL), (2, NONE)])
def test_experts_of_groups_train_as_the_unsharded_model_of_all_experts(size, strategy):
    torch.manual_seed(7)
    steps = torch.randn(5, 2 * RANKS, 8)
    losses, norms, weights = unsharded_experts(size, steps, 0.05)

    def work(comm, model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        mine, mine_norms = [], []
        for data in steps:
            loss = model(data.chunk(RANKS)[comm.rank]).square().mean()
            loss.backward()
            mine_norms.append(clip_grad_norm_(model, 0.05).item())
            optimizer.step()
            optimizer.zero_grad()
            mine.append(loss.item())
        return mine, mine_norms, weights_of(model)

    for rank, (mine, mine_norms, shown) in enumerate(on_ranks(size, strategy, work)):
        torch.testing.assert_close(mine, [of_rank[rank] for of_rank in losses], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(mine_norms, norms, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(shown, weights[rank // size], atol=1e-5, rtol=1e-5)


def test_the_largest_gradient_is_that_of_any_expert():
    def work(comm, model):
        (model(torch.ones(2, 8)).square().mean() * (1 + comm.rank)).backward()
        return clip_grad_norm_(model, 1.0, float("inf")).item()

    assert len(set(on_ranks(2, NONE, work))) == 1


def test_all_ranks_skip_a_step_for_one_experts_gradient():
    def work(comm, model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = ShardedGradScaler("cpu", init_scale=4.0)
        scaler.scale(model(torch.ones(2, 8)).mean()).backward()
        if comm.rank == 1:
            rows_of(model[EXPERT].weight.grad)[0, 0] = float("inf")
        before = copy.deepcopy(rows_of(model[0].bias.detach()))
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale(), torch.equal(before, rows_of(model[0].bias.detach()))

    assert on_ranks(1, FULL, work, outer=NONE) == [(2.0, True)] * RANKS


def test_a_rank_that_skips_its_expert_is_named():
    def work(comm, model):
        first, shared, expert, last = model

        def forward(x):
            x = shared(first(x))
            return last(expert(x) if comm.rank else x[:, :12])

        model.forward = forward
        with pytest.raises(MismatchError, match="Ranks run different units"):
            model(torch.ones(2, 8)).square().mean().backward()

    on_ranks(1, FULL, work)


def test_experts_of_groups_are_not_saved_as_one_model(tmp_path):
    def work(comm, model):
        for saving in (
            lambda: full_state_dict(model),
            lambda: save(model, tmp_path / "model"),
            lambda: Checkpoints(tmp_path / "run", ranks=comm).save(model, step=1),
        ):
            with pytest.raises(ShardingError, match=r"2\.weight and 1 other parameters .* some of the model's 4 ranks"):
                saving()

    on_ranks(2, FULL, work)
