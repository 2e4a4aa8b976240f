"""The same model gives the same losses and weights under every strategy, prefetch and way of wrapping."""

import ast
import copy
import functools
import pickle
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fullshard
from fullshard import BackwardPrefetch, MinNumel, ShardingStrategy, full_tensors, fully_shard, units
from fullshard.core.testing import RecordingComm, run_ranks
from fullshard.errors import ConfigError, ProcessGroupError, WrapError
from support.models import KINDS, TinyLM, batches, lm_loss, lm_with_frozen_parts
from support.parity import ROWS_PER_RANK, assert_same_run, replicas, steps_for, train_sharded, train_unsharded

pytestmark = pytest.mark.parity

TWO_BY_TWO = ([[0, 2], [1, 3]], [[0, 1], [2, 3]])


def mesh_for(strategy, comm):
    """All ranks on one axis, or for the hybrid strategies 2 replicas of 2 ranks."""
    if not strategy.needs_two_axes:
        return comm
    replicate, shard = TWO_BY_TWO
    return comm.split(replicate), comm.split(shard)


@pytest.mark.parametrize(
    "kind", ["t5", "lm_two_forwards", "lm_frozen_parts", "lm_checkpoint", "t5_checkpoint_reentrant"]
)
@pytest.mark.parametrize("strategy", [one for one in ShardingStrategy if one is not ShardingStrategy.FULL_SHARD])
def test_every_strategy_gives_the_unsharded_run(strategy, kind):
    """FULL_SHARD, the default, is the subject of test_parity.py."""
    make, loss_of = KINDS[kind]
    size = 4 if strategy.needs_two_axes else 2
    reference, models = replicas(make, size)
    data = batches(steps_for(size), size * ROWS_PER_RANK)
    plain = train_unsharded(reference, loss_of, data)

    def work(comm):
        mesh = mesh_for(strategy, comm)
        return train_sharded(models[comm.rank], comm, loss_of, data, mesh=mesh, strategy=strategy)

    for run in run_ranks(size, work):
        assert_same_run(run, plain)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize(("shards", "two_axes"), [(True, False), (True, True), (False, False)])
def test_a_strategy_is_what_it_says_of_itself_and_not_its_name(shards, two_axes, keeps):
    """So a new one is a member in policy.py, a word of sharding.strategy in config/schema.py, and documentation."""
    strategy = SimpleNamespace(name="NEW", shards=shards, keeps_after_forward=keeps, needs_two_axes=two_axes)
    size = 4 if two_axes else 2
    reference, models = replicas(TinyLM, size)
    data = batches(steps_for(size), size * ROWS_PER_RANK)
    plain = train_unsharded(reference, lm_loss, data)

    def work(comm):
        return train_sharded(
            models[comm.rank], comm, lm_loss, data, mesh=mesh_for(strategy, comm), strategy=strategy, tables="home"
        )

    for run in run_ranks(size, work):
        assert_same_run(run, plain)


def test_no_code_compares_a_strategy_by_name():
    names = {one.name for one in ShardingStrategy} | {one.value for one in ShardingStrategy}
    compared = []
    for path in Path(fullshard.__file__).parent.rglob("*.py"):
        if "compat" in path.parts:  # torch's and Accelerate's strategies are translated there, by their names
            continue
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Compare)]
        compared += [f"{path}:{node.lineno}" for node in nodes if names & set(re.findall(r"\w+", ast.unparse(node)))]
    assert compared == []


def test_users_see_the_strategies_as_before():
    assert [(one.name, one.value) for one in ShardingStrategy] == [
        ("FULL_SHARD", "full_shard"),
        ("SHARD_GRAD_OP", "shard_grad_op"),
        ("NO_SHARD", "no_shard"),
        ("HYBRID_SHARD", "hybrid_shard"),
        ("HYBRID_SHARD_ZERO2", "hybrid_shard_zero2"),
    ]
    for one in ShardingStrategy:
        assert ShardingStrategy(one.value) is ShardingStrategy[one.name] is pickle.loads(pickle.dumps(one))
        assert copy.deepcopy(one) is one
        assert repr(one) == f"<ShardingStrategy.{one.name}: {one.value!r}>"
    # as earlier versions pickled it
    assert pickle.loads(b"cfullshard.policy\nShardingStrategy\n(Vno_shard\ntR.") is ShardingStrategy.NO_SHARD


def trained(kind, **options):
    """Four steps of two ranks."""
    make, loss_of = KINDS[kind]
    _, models = replicas(make, 2)
    data = batches(4, 2 * ROWS_PER_RANK)
    return run_ranks(2, lambda comm: train_sharded(models[comm.rank], comm, loss_of, data, **options))


as_by_default = functools.cache(trained)


@pytest.mark.parametrize("kind", ["t5", "lm_two_forwards", "lm_checkpoint", "lm_reentrant_two_forwards"])
@pytest.mark.parametrize("prefetch", BackwardPrefetch)
def test_prefetch_changes_when_and_never_what(prefetch, kind):
    for run, other in zip(trained(kind, prefetch=prefetch), as_by_default(kind), strict=True):
        assert run[:2] == other[:2]
        assert all(torch.equal(run[2][name], other[2][name]) for name in run[2])


@pytest.mark.parametrize(
    ("prefetch", "expected"),
    [
        (BackwardPrefetch.BACKWARD_PRE, "AG AG RS AG RS AG RS RS RS AR"),
        (BackwardPrefetch.BACKWARD_POST, "AG RS AG RS AG RS AG RS RS AR"),
        (BackwardPrefetch.NONE, "AG RS AG RS AG RS AG RS RS AR"),
    ],
)
def test_what_backward_issues_under_each_prefetch(prefetch, expected):
    forward, backward, _ = ledger_of(prefetch=prefetch)
    assert forward == ["AG"] * 5
    assert backward == expected.split()


def ledger_of(size=2, **options):
    """Collectives of forward and backward of the second step, and the peak of gathered bytes, on rank 0."""
    short = {"all_gather": "AG", "reduce_scatter": "RS", "all_reduce": "AR"}
    _, models = replicas(TinyLM, size)

    def work(comm):
        ledger = RecordingComm(comm)
        model = fully_shard(models[comm.rank], ledger, **options)
        for tokens in batches(2, 2):
            ledger.entries.clear()
            loss = lm_loss(model, tokens)
            forward = [short[name] for name in ledger.names]
            loss.backward()
        backward = [short[name] for name in ledger.names][len(forward) :]
        return forward, backward, model._fullshard_runtime.account.peak["gathered"]

    return run_ranks(size, work)[0]


def test_shard_grad_op_gathers_once_and_no_shard_never():
    forward, backward, _ = ledger_of(strategy=ShardingStrategy.SHARD_GRAD_OP)
    assert forward == ["AG"] * 5
    assert "AG" not in backward
    assert backward.count("RS") == 5
    forward, backward, peak = ledger_of(strategy=ShardingStrategy.NO_SHARD)
    assert forward == []
    assert backward == ["AR"] * 6
    assert peak == 0


def test_gathered_memory_of_full_shard_is_two_blocks_and_of_shard_grad_op_the_model():
    *_, full = ledger_of()
    *_, kept = ledger_of(strategy=ShardingStrategy.SHARD_GRAD_OP)
    assert kept - full == 2 * 10_368  # bytes of a gathered block, of which there are four


def test_hybrid_gathers_inside_the_group_and_reduces_across():
    _, models = replicas(TinyLM, 4)

    def work(comm):
        replicate, shard = (RecordingComm(axis) for axis in mesh_for(ShardingStrategy.HYBRID_SHARD, comm))
        model = fully_shard(models[comm.rank], (replicate, shard), strategy=ShardingStrategy.HYBRID_SHARD)
        lm_loss(model, batches(1, 2)[0]).backward()
        return set(replicate.names), set(shard.names), units(model).world_size

    for replicate, shard, ranks in run_ranks(4, work):
        assert "all_gather" not in replicate
        assert "all_reduce" in replicate
        assert {"all_gather", "reduce_scatter"} <= shard
        assert ranks == 2


@pytest.mark.parametrize("strategy", ShardingStrategy)
def test_the_streamed_model_is_whole_under_every_strategy(strategy):
    reference, models = replicas(lm_with_frozen_parts, 4)
    expected = dict(reference.named_parameters())

    def work(comm):
        model = fully_shard(models[comm.rank], mesh_for(strategy, comm), strategy=strategy)
        return {name: t for _, tensors in full_tensors(model) for name, t in tensors.items()}

    first, *others = run_ranks(4, work)
    assert first.keys() == expected.keys()
    assert all(torch.equal(first[name], expected[name]) for name in expected)
    assert all(value is None for other in others for value in other.values())


def test_meshes_that_do_not_fit_the_strategy():
    def work(comm):
        with pytest.raises(ProcessGroupError, match="takes a mesh with 2 axes"):
            fully_shard(TinyLM(), comm, strategy=ShardingStrategy.HYBRID_SHARD)
        pair = mesh_for(ShardingStrategy.HYBRID_SHARD, comm)
        with pytest.raises(ProcessGroupError, match="NO_SHARD"):
            fully_shard(TinyLM(), pair, strategy=ShardingStrategy.NO_SHARD)

    run_ranks(4, work)


@pytest.mark.parametrize("numel", [500, 900, 2000])
def test_wrapping_by_size_gives_the_unsharded_run(numel):
    reference, models = replicas(TinyLM, 2)
    data = batches(4, 2 * ROWS_PER_RANK)
    plain = train_unsharded(reference, lm_loss, data)
    for run in run_ranks(2, lambda c: train_sharded(models[c.rank], c, lm_loss, data, wrap=MinNumel(numel))):
        assert_same_run(run, plain)


def test_wrapping_by_size_counts_what_no_unit_inside_holds():
    def work(comm):
        table = units(fully_shard(TinyLM(), comm, wrap=MinNumel(900)))
        return [row.unit for row in table.rows]

    # up and down have 960 elements each; what is left of a block, 24 * 24 + 3 * 24, is too small
    (names,) = run_ranks(1, work)
    assert names[1:] == [name for i in range(4) for name in (f"blocks.{i}.up", f"blocks.{i}.down")]


def test_a_size_that_nothing_reaches_is_an_error():
    with pytest.raises(ConfigError, match="at least 1"):
        MinNumel(0)

    def work(comm):
        with pytest.raises(WrapError, match="choose a smaller number"):
            fully_shard(TinyLM(), comm, wrap=MinNumel(10**6))

    run_ranks(1, work)
