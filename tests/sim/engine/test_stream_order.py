"""On CUDA's streams nothing would be read before it is written, or freed before it is read."""

import re

import pytest
import torch

import fullshard
from fullshard import (
    BackwardPrefetch,
    MixedPrecision,
    ShardingStrategy,
    clip_grad_norm_,
    fully_shard,
    no_sync,
    vocab_parallel_loss,
)
from fullshard.core.engine import no_all_reduce
from fullshard.core.engine.setup import wrap
from fullshard.core.engine.step import unit
from fullshard.core.engine.step.lane import Lane, LaneState
from fullshard.core.testing import run_ranks
from support.models import TinyLM, batches, lm_loss, lm_with_frozen_parts, two_forwards_loss
from support.parity import replicas, size_for
from support.streams import CheckedDevice, CheckedWork, ReleasedMemoryError, StreamChecker, install
from support.tiny_lm import HiddenLM

LAYERS = 3
FULL, GRAD_OP, NO, HYBRID, HYBRID_ZERO2 = ShardingStrategy
PRE, POST, NONE = BackwardPrefetch
CHECKPOINTING = {"plain": None, "checkpoint": False, "reentrant checkpoint": True}
TRAININGS = [
    *((FULL, PRE, what) for what in CHECKPOINTING),
    *((FULL, POST, what) for what in ("plain", "reentrant checkpoint")),
    (FULL, NONE, "plain"),
    # the other strategies of one axis gather nothing in backward
    *((GRAD_OP, NONE, what) for what in ("plain", "reentrant checkpoint")),
    *((NO, NONE, what) for what in ("plain", "checkpoint")),
    *((HYBRID, prefetch, "plain") for prefetch in (PRE, NONE)),
    (HYBRID_ZERO2, NONE, "plain"),
    # four ranks take twice the time; checkpoints recompute in the shard group, on two ranks too
    *(pytest.param(HYBRID, PRE, what, marks=pytest.mark.slow) for what in ("checkpoint", "reentrant checkpoint")),
]


@pytest.fixture(autouse=True)
def _checked_device(monkeypatch):
    install(monkeypatch)


def check(body, *, make=lambda: TinyLM(layers=LAYERS), strategy=FULL, **options):
    """Violations of all ranks that run ``body(model)``; ranks are 2, or 2 x 2 for hybrid strategies."""
    size = size_for(strategy)
    _, models = replicas(make, size)

    def work(comm):
        with StreamChecker(comm.rank) as checker:
            mesh = checker.mesh(strategy, comm)
            model = fully_shard(models[comm.rank], mesh, strategy=strategy, **options)
            checker.names_from(model)
            body(model)
        assert checker.operations > 100
        return checker.violations

    return [violation for violations in run_ranks(size, work) for violation in violations]


def assert_ordered(violations):
    assert not violations, "\n".join(violations)


def train(model):
    """Two steps, each of three micro-batches: one whose gradients stay unsharded (or in the shard group), and two."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=1e-3, momentum=0.9)
    for tokens, not_yet in zip(batches(2, 2), (no_sync, no_all_reduce), strict=True):
        with not_yet(model):
            lm_loss(model, tokens).backward()
        two_forwards_loss(model, tokens).backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()


# The engine


@pytest.mark.parametrize(("strategy", "prefetch", "checkpointing"), TRAININGS)
def test_training_is_ordered(strategy, prefetch, checkpointing):
    def make():
        return TinyLM(reentrant=CHECKPOINTING[checkpointing], layers=LAYERS)

    assert_ordered(check(train, make=make, strategy=strategy, prefetch=prefetch))


LOW = MixedPrecision(param="bf16", reduce="bf16", reduce_sum="fp32")


@pytest.mark.parametrize(
    ("options", "strategy"),
    [
        ({"mp_policy": LOW}, FULL),
        ({"mp_policy": LOW}, HYBRID),
        ({"mp_policy": MixedPrecision(param="fp16", reduce="fp16")}, FULL),
        ({"mp_policy": MixedPrecision(param="bf16", reduce="fp32")}, HYBRID),
        ({"make": lm_with_frozen_parts}, FULL),
        ({"make": lm_with_frozen_parts, "frozen": "replicate"}, HYBRID),
    ],
)
def test_training_is_ordered_with(options, strategy):
    assert_ordered(check(train, strategy=strategy, **options))


def train_with_tables_at_home(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for tokens, not_yet in zip(batches(2, 2), (no_sync, no_all_reduce), strict=True):
        with not_yet(model):
            vocab_parallel_loss(model(tokens[:, :-1]), model.head, tokens[:, 1:]).backward()
        lm_loss_of(model, tokens).backward()  # logits, of the gathered table
        vocab_parallel_loss(model(tokens[:, :-1]), model.head, tokens[:, 1:]).backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()


def lm_loss_of(model, tokens):
    return model.head(model(tokens[:, :-1])).square().mean()


@pytest.mark.parametrize(("mp_policy", "strategy"), [(LOW, FULL), (None, HYBRID)])
def test_tables_that_stay_home_are_ordered(mp_policy, strategy, monkeypatch):
    monkeypatch.setattr(wrap, "LARGE_NUMEL", 500)
    options = {"make": lambda: HiddenLM(layers=LAYERS), "strategy": strategy, "tables": "home"}
    assert_ordered(check(train_with_tables_at_home, mp_policy=mp_policy, **options))


class Shortened(TinyLM):
    """Runs its first ``depth`` blocks only, so that the schedule's guess of the next one is wrong."""

    depth = LAYERS

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks[: self.depth]:
            x = block(x)
        return self.head(x)


def short_and_long(model):
    """Forwards, the second of which stops before a block that was gathered ahead for it."""
    (tokens,) = batches(1, 2)
    with torch.no_grad():
        for model.depth in (LAYERS, 1, LAYERS):
            lm_loss(model, tokens)


def all_kinds_of_calls(model):
    (tokens,) = batches(1, 2)
    short_and_long(model)
    with fullshard.unsharded(model):
        for param in model.parameters():
            param.data.mul_(0.5)
    for _ in fullshard.full_tensors(model):
        pass
    with no_all_reduce(model):
        lm_loss(model, tokens).backward()
    model.depth = 1  # of the other blocks the replicas have still to add up what the last backward gave
    lm_loss(model, tokens).backward()
    model.depth = LAYERS
    lm_loss(model, tokens)  # without backward
    handle = model.blocks[1].norm.register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        lm_loss(model, tokens).backward()
    handle.remove()
    lm_loss(model, tokens).backward()


@pytest.mark.parametrize("strategy", [FULL, NO, HYBRID_ZERO2])
def test_calls_around_training_are_ordered(strategy):
    assert_ordered(check(all_kinds_of_calls, make=lambda: Shortened(layers=LAYERS), strategy=strategy))


@pytest.fixture
def _offloaded(monkeypatch):
    """The CPU takes itself for a device, and copies reduced gradients to the host."""
    monkeypatch.setattr(Lane, "offloaded", True)


@pytest.mark.usefixtures("_offloaded")
@pytest.mark.parametrize(("strategy", "reduce"), [(FULL, "bfloat16"), (HYBRID, "float32")])
def test_gradients_are_on_the_host_before_it_reads_them(strategy, reduce):
    assert_ordered(check(train, strategy=strategy, mp_policy=MixedPrecision(reduce=reduce)))


# An engine that is broken is found out


def assert_reported(violations, pattern):
    found = any(re.fullmatch(pattern, violation) for violation in violations)
    assert found, "\n".join(violations) or "nothing reported"


def never_wait_for(name, monkeypatch):
    plain = CheckedWork.wait
    monkeypatch.setattr(CheckedWork, "wait", lambda work: None if work.name == name else plain(work))


@pytest.mark.parametrize(
    ("name", "strategy", "pattern"),
    [
        (
            "all-gather",
            FULL,
            r"rank 0: aten\.addmm on compute reads gathered parameters of blocks\.1 while all-gather on shard group "
            r"writes it: compute has not waited for shard group",
        ),
        (
            "reduce-scatter",
            FULL,
            r"rank 0: gradient of blocks\.1 is freed on compute while reduce-scatter on shard group reads it: .*",
        ),
        (
            "reduce-scatter",
            HYBRID,
            r"rank 3: all-reduce on replicate group reads reduced gradient of blocks\.1 while reduce-scatter on shard "
            r"group writes it: .*",
        ),
        (
            "replicate stream",
            HYBRID,
            r"rank 2: aten\.div_ on compute reads reduced gradient of blocks\.1 while all-reduce on replicate group "
            r"writes it: .*",
        ),
        (
            "all-reduce",
            FULL,
            r"rank 0: aten\.copy_ on numbers stream reads int64\S* \(given\) while all-reduce on shard group writes "
            r"it: .*",
        ),
    ],
)
def test_a_wait_left_out_is_reported(name, strategy, pattern, monkeypatch):
    never_wait_for(name, monkeypatch)
    assert_reported(check(train, strategy=strategy), pattern)


@pytest.mark.usefixtures("_offloaded")
def test_a_host_that_does_not_wait_is_reported(monkeypatch):
    monkeypatch.setattr(CheckedDevice, "host_ready", lambda self: None)
    assert_reported(
        check(train), r"rank 1: aten\.add_ on host reads host memory while aten\.copy_ on offload stream writes it: .*"
    )


def test_a_release_before_the_wait_is_reported(monkeypatch):
    plain = unit.Unit.reshard

    def reshard(self):
        for lane in self.lanes:
            lane.gather_work = None
        plain(self)

    monkeypatch.setattr(unit.Unit, "reshard", reshard)
    assert_reported(
        check(short_and_long, make=lambda: Shortened(layers=LAYERS)),
        r"rank 0: gathered parameters of blocks\.1 is released on compute while all-gather on shard group writes "
        r"it: .*",
    )


def test_a_gather_into_a_buffer_that_compute_still_reads_is_reported(monkeypatch):
    plain = unit.Unit.finish_gather

    def finish_gather(self):
        plain(self)
        for lane in self.lanes:
            lane.issue_gather()
            lane.finish_gather()
            lane.unsettled = None

    monkeypatch.setattr(unit.Unit, "finish_gather", finish_gather)
    assert_reported(
        check(train),
        r"rank 0: aten\.native_layer_norm on compute reads gathered parameters of blocks\.2 while all-gather on shard "
        r"group writes it: .*",
    )


def test_a_buffer_that_is_read_before_its_gather_is_reported(monkeypatch):
    def issue_gather(self):
        self.state = LaneState.GATHERING
        self.full.take()

    monkeypatch.setattr(Lane, "issue_gather", issue_gather)
    assert_reported(
        check(lambda model: lm_loss(model, batches(1, 2)[0])),
        r"rank 0: aten\.embedding on compute reads gathered parameters of \(root\) before anything is written there",
    )


def test_a_use_of_released_memory_is_reported(monkeypatch):
    plain = unit.Unit.to_sharded

    def to_sharded(self):
        plain(self)
        for lane in self.lanes:
            lane.full.release()

    monkeypatch.setattr(unit.Unit, "to_sharded", to_sharded)
    with pytest.raises(
        ReleasedMemoryError, match=r"aten.mm on compute reads gathered parameters of \(root\), which is"
    ):
        check(train, strategy=GRAD_OP)


# The checker itself


@pytest.fixture
def checker():
    with StreamChecker(0) as checker:
        yield checker


class _Silent:
    """A group of two ranks of which the other one sends nothing."""

    rank, size, device = 0, 2, torch.device("cpu")

    def all_gather(self, full, shard):
        return self

    def all_reduce(self, tensor, op="sum"):
        return self

    def wait(self):
        pass


def test_the_own_slice_of_a_gather_in_place_may_be_read_but_not_written(checker):
    full = torch.zeros(8)
    work = checker.comm(_Silent()).all_gather(full, full[:4])
    full[:4].sum()
    assert checker.violations == []
    full[:4].zero_()
    full[4:].sum()
    work.wait()
    full.zero_()
    assert checker.violations == [
        "rank 0: aten.zero_ on compute writes float32[8] (aten.zeros) while all-gather on shard group reads it: "
        "compute has not waited for shard group",
        "rank 0: aten.sum on compute reads float32[8] (aten.zeros) while all-gather on shard group writes it: "
        "compute has not waited for shard group",
    ]


def test_waiting_for_a_collective_orders_those_before_it_of_its_group_and_no_other(checker):
    one, two = (checker.comm(_Silent(), name) for name in ("one", "two"))
    first, second, third = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    one.all_reduce(first)
    two.all_reduce(second)
    one.all_reduce(third).wait()
    first.add_(1)
    third.add_(1)
    assert checker.violations == []
    second.add_(1)
    assert_reported(checker.violations, r"rank 0: aten.add_ on compute reads float32\[2\].* all-reduce on two group .*")


@pytest.mark.parametrize("held", [False, True])
def test_work_aside_must_hold_what_it_uses(checker, held):
    kept = [torch.ones(5)]
    total = torch.zeros(5)

    def work(values=kept[0] if held else None):
        total.add_(kept[0])
        kept.clear()

    done = checker.device.on_side_stream("replicate", work)
    del work
    assert bool(checker.violations) is not held
    done.wait()
    total.sum()
    assert len(checker.violations) == (not held)
