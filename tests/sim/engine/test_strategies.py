"""The same model gives the same losses and weights under every strategy and way of wrapping."""

import ast
import copy
import pickle
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import fullshard
from fullshard import MinNumel, ShardingStrategy, fully_shard, units
from fullshard.core.testing import RecordingComm, run_ranks
from fullshard.errors import ConfigError, ProcessGroupError, WrapError
from support.models import KINDS, TinyLM, batches, lm_loss
from support.parity import alone, assert_trains_alike, replicas, size_for, two_by_two

pytestmark = pytest.mark.parity

FULL, GRAD_OP, NO, HYBRID, HYBRID_ZERO2 = ShardingStrategy


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        *((GRAD_OP, kind) for kind in ("t5_checkpoint_reentrant", "lm_two_forwards")),
        *((NO, kind) for kind in ("t5", "lm_frozen_parts", "lm_checkpoint")),
        *((HYBRID, kind) for kind in ("t5_checkpoint_reentrant", "lm_two_forwards", "lm_frozen_parts")),
        *((HYBRID_ZERO2, kind) for kind in ("t5", "lm_checkpoint")),
    ],
)
def test_every_strategy_gives_the_unsharded_run(strategy, kind):
    """FULL_SHARD, the default, is the subject of test_parity.py."""
    assert_trains_alike(*KINDS[kind], size_for(strategy), steps=4, strategy=strategy)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize(("shards", "two_axes"), [(True, False), (True, True), (False, False)])
def test_a_strategy_is_what_it_says_of_itself_and_not_its_name(shards, two_axes, keeps):
    """So a new one is a member in policy.py, a word of sharding.strategy in config/schema.py, and documentation."""
    strategy = SimpleNamespace(name="NEW", shards=shards, keeps_after_forward=keeps, needs_two_axes=two_axes)
    assert_trains_alike(TinyLM, lm_loss, size_for(strategy), steps=4, strategy=strategy, tables="home")


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


def test_hybrid_gathers_inside_the_group_and_reduces_across():
    _, models = replicas(TinyLM, 4)

    def work(comm):
        replicate, shard = (RecordingComm(axis) for axis in two_by_two(comm))
        model = fully_shard(models[comm.rank], (replicate, shard), strategy=HYBRID)
        lm_loss(model, batches(1, 2)[0]).backward()
        return set(replicate.names), set(shard.names), units(model).world_size

    for replicate, shard, ranks in run_ranks(4, work):
        assert "all_gather" not in replicate
        assert "all_reduce" in replicate
        assert {"all_gather", "reduce_scatter"} <= shard
        assert ranks == 2


def test_meshes_that_do_not_fit_the_strategy():
    def work(comm):
        with pytest.raises(ProcessGroupError, match="takes a mesh with 2 axes"):
            fully_shard(TinyLM(), comm, strategy=HYBRID)
        pair = two_by_two(comm)
        with pytest.raises(ProcessGroupError, match="NO_SHARD"):
            fully_shard(TinyLM(), pair, strategy=NO)

    run_ranks(4, work)


@pytest.mark.parametrize("numel", [500, 2000])
def test_wrapping_by_size_gives_the_unsharded_run(numel):
    assert_trains_alike(TinyLM, lm_loss, steps=4, wrap=MinNumel(numel))


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

    with pytest.raises(WrapError, match="choose a smaller number"):
        alone(TinyLM(), wrap=MinNumel(10**6))
