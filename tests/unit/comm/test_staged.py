"""Collectives in host memory with real threads: their errors, their buffers, and what they keep alive."""

import threading
import weakref

import pytest
import torch

from fullshard.core.comm import Comm
from fullshard.core.testing import run_ranks
from support import staged_comm
from support.collectives import PIECE, check_collectives
from support.staged_comm import HostStaging, JobThread, Stage, StagedComm


class Counting(HostStaging):
    """Lists the host memory that it gives."""

    def __init__(self):
        self.given = []

    def empty_host(self, nbytes):
        self.given.append(nbytes)
        return super().empty_host(nbytes)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_collective_in_two_host_buffers_however_large_it_is(size, monkeypatch):
    monkeypatch.setattr(staged_comm, "STAGE_BYTES", 4 * PIECE)

    def work(comm):
        staging = Counting()
        group = StagedComm(comm, Stage(staging))
        assert isinstance(group, Comm)
        check_collectives(group)
        return staging

    for staging in run_ranks(size, work):
        assert staging.given == [4 * PIECE] * 2


def test_an_error_is_raised_by_whoever_waits_and_the_next_job_runs():
    jobs, done = JobThread(lambda: None), []
    failed, after = jobs.submit(lambda: 1 / 0), jobs.submit(lambda: done.append(threading.current_thread().name))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            failed.wait()
    after.wait()
    assert done == ["fullshard collectives"]


class Held:
    """Something that a job uses."""


def test_what_a_job_uses_lives_until_its_copies_are_done():
    copied, settled, gone = threading.Event(), threading.Event(), threading.Event()
    alive_at_settle = []

    def settle():
        copied.wait()
        alive_at_settle.append(not gone.is_set())
        settled.set()

    jobs, held = JobThread(settle), Held()
    weakref.finalize(held, gone.set)
    job = jobs.submit(lambda held=held: None)
    job.wait()
    del job, held
    copied.set()
    settled.wait()
    assert gone.wait(10)
    assert alive_at_settle == [True]


def test_the_thread_ends_with_its_group():
    jobs = JobThread(lambda: None)
    ran = []
    jobs.submit(lambda: ran.append(threading.current_thread())).wait()
    (thread,) = ran
    assert thread.daemon
    del jobs
    thread.join(10)
    assert not thread.is_alive()


def test_a_job_may_change_tensors_of_inference_mode():
    def work(comm):
        group = StagedComm(comm, Stage(HostStaging()))
        with torch.inference_mode():
            total = torch.ones(3)
        group.all_reduce(total).wait()
        return total.tolist()

    assert run_ranks(2, work) == [[2.0] * 3] * 2
