"""Collectives in host memory read and write nothing too early, neither on the device nor in their host buffers."""

import re

import pytest
import torch

from fullshard import MixedPrecision, ShardingStrategy, clip_grad_norm_, full_tensors, fully_shard, no_sync, unsharded
from fullshard.core.comm import staged as staged_module
from fullshard.core.comm.staged import StagedWork
from fullshard.core.testing import run_ranks
from support.collectives import PIECE, check_collectives
from support.optimizers import batches as zoo_batches, of_rank, train as train_zoo, zoo
from support.parity import replicas, size_for, two_by_two
from support.staged import OPTIMIZERS
from support.staged_streams import CheckedStaging, Early, Late, staged
from support.streams import StreamChecker, install
from support.tiny_lm import TinyLM, batches, lm_loss

TIMES = {"early": Early, "late": Late}
FULL, GRAD_OP, NO, HYBRID, HYBRID_ZERO2 = ShardingStrategy


@pytest.fixture(autouse=True)
def _checked_device(monkeypatch):
    install(monkeypatch)
    monkeypatch.setattr(staged_module, "STAGE_BYTES", 4 * PIECE)  # most of what is sent takes several pieces


def axes(checker, comm, when, strategy):
    """All ranks on one axis, or for the hybrid strategies 2 replicas of 2 ranks."""
    if not strategy.needs_two_axes:
        return staged(checker, comm, when)
    replicate, shard = two_by_two(comm)
    return staged(checker, replicate, when, "replicate"), staged(checker, shard, when)


def check(body, when, *, strategy=FULL):
    """Violations of all ranks that run ``body(mesh, rank)``; ranks are 2, or 2 x 2 for hybrid strategies."""

    def work(comm):
        with StreamChecker(comm.rank) as checker:
            body(axes(checker, comm, when, strategy), comm.rank)
            for jobs in checker.jobs:
                jobs.finish()
        assert checker.operations > 100
        return checker.violations

    return [violation for violations in run_ranks(size_for(strategy), work) for violation in violations]


def training(strategy=FULL, **options):
    """Two steps of two micro-batches each, a clip, a step; then the full parameters, streamed and shown."""
    _, models = replicas(lambda: TinyLM(layers=3), 4)

    def body(mesh, rank):
        model = fully_shard(models[rank], mesh, strategy=strategy, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        for tokens in batches(2, 2):
            with no_sync(model):
                lm_loss(model, tokens).backward()
            lm_loss(model, tokens).backward()
            clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        for _ in full_tensors(model):
            pass
        with unsharded(model):
            pass

    return body


def assert_ordered(violations):
    assert not violations, "\n".join(violations)


@pytest.mark.parametrize(
    ("strategy", "when"),
    [(FULL, "early"), (FULL, "late"), (GRAD_OP, "late"), (NO, "early"), (HYBRID, "early"), (HYBRID_ZERO2, "late")],
)
def test_training_is_ordered(strategy, when):
    assert_ordered(check(training(strategy), TIMES[when], strategy=strategy))


@pytest.mark.parametrize(
    ("strategy", "when", "precision"),
    [
        (FULL, "early", MixedPrecision(param="bf16", reduce="bf16", reduce_sum="fp32")),
        (FULL, "late", MixedPrecision(messages="bf16")),
        (HYBRID, "early", MixedPrecision(messages="bf16")),
    ],
)
def test_training_with_narrow_messages_is_ordered(strategy, when, precision):
    assert_ordered(check(training(strategy, mp_policy=precision), TIMES[when], strategy=strategy))


@pytest.mark.parametrize("when", TIMES)
def test_optimizers_that_exchange_parts_are_ordered(when):
    models, data = [zoo() for _ in range(2)], zoo_batches(3, 2)

    def body(mesh, rank):
        model = fully_shard(models[rank], mesh, wrap=None)
        train_zoo(model, OPTIMIZERS["Muon"](model.parameters()), [of_rank(batch, rank) for batch in data])

    assert_ordered(check(body, TIMES[when]))


@pytest.mark.parametrize("when", TIMES)
def test_every_collective_is_ordered(when):
    assert_ordered(check(lambda mesh, rank: check_collectives(mesh), TIMES[when]))


def test_a_work_that_nobody_waits_for_keeps_its_tensors():
    def body(mesh, rank):
        for _ in range(60):
            mesh.all_reduce(torch.ones(2 * PIECE))
        mesh.barrier()

    assert_ordered(check(body, Late))


# A communicator that is broken is found out


def assert_reported(violations, pattern):
    found = any(re.fullmatch(pattern, violation) for violation in violations)
    assert found, "\n".join(violations) or "nothing reported"


@pytest.mark.parametrize("when", TIMES)
def test_a_copy_that_does_not_wait_for_what_was_issued_before_is_reported(when, monkeypatch):
    monkeypatch.setattr(CheckedStaging, "begin", lambda self, mark: None)
    assert_reported(
        check(training(), TIMES[when]),
        r"rank 0: copy on shard staging stream reads .* while aten\.copy_ on compute writes it: .*",
    )


@pytest.mark.parametrize("when", TIMES)
def test_a_wait_left_out_is_reported(when, monkeypatch):
    def wait(work):
        if work._job is not None:
            work._job.wait()

    monkeypatch.setattr(StagedWork, "wait", wait)
    assert_reported(
        check(training(), TIMES[when]),
        r"rank 1: aten\.\w+ on compute reads .* while copy on shard staging stream writes it: .*",
    )


def never_settle(self, copies):
    self.bring(copies)


def settle_after_copies_only(self, copies):
    copies = list(copies)
    self.bring(copies)
    if copies:
        self.staging.settle()


def test_a_collective_that_does_not_wait_for_its_copy_is_reported(monkeypatch):
    monkeypatch.setattr(staged_module.Stage, "fetch", never_settle)
    assert_reported(
        check(training(), Early),
        r"rank 0: all-gather on shard collectives thread reads a host buffer while copy on shard staging stream writes "
        r"it: .*",
    )


def test_a_host_buffer_that_is_used_again_before_its_copy_is_done_is_reported(monkeypatch):
    monkeypatch.setattr(staged_module.Stage, "fetch", settle_after_copies_only)
    assert_reported(
        check(lambda mesh, rank: check_collectives(mesh), Early),
        r"rank 0: broadcast on shard collectives thread writes a host buffer while copy on shard staging stream reads "
        r"it: .*",
    )


def test_tensors_that_are_dropped_before_their_copy_is_done_are_reported(monkeypatch):
    def run(self, job):
        with self.checker.silent():
            job.run()
        job.drop()

    monkeypatch.setattr(Early, "run", run)

    def body(mesh, rank):
        for _ in range(60):
            mesh.all_reduce(torch.ones(2 * PIECE))

    assert_reported(
        check(body, Early),
        r"rank 0: float32\[2000\] .* is freed on compute while copy on shard staging stream (reads|writes) it: .*",
    )
