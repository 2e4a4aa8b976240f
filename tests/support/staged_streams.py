"""Collectives in host memory under the checker of stream order: which copy waits for what, and what the CPU does when.

The staging stream of a group has a clock, and so has the thread that runs its collectives: what it does to host buffers
is ordered after a copy only by ``CudaStaging.settle``, and a copy that it issues comes after what it did before. Jobs
run in the rank's own thread, as early or as late as a thread could run them.
"""

from collections import deque

import torch

from fullshard.core.comm.staged import Job, Stage, StagedComm
from support.streams import ShownComm, span

THREAD = "collectives thread"


class CheckedStaging:
    """A :class:`~fullshard.core.comm.staged.CudaStaging` with CUDA's streams for a checker, and the CPU's memory."""

    def __init__(self, checker, name):
        self.checker, self.clocks = checker, checker.clocks
        self.device = torch.device("cpu")
        self.side = f"{name} staging stream"
        self.thread = f"{name} {THREAD}"

    def issued(self):
        return self.clocks.mark(self.clocks.current)

    def begin(self, mark):
        self.clocks.wait(self.side, mark)

    def copy(self, target, source):
        self.clocks.wait(self.side, self.clocks.mark(self.thread))
        time = self.clocks.tick(self.side)
        self.checker.access(source, span(source), "copy", self.side, time, writes=False)
        self.checker.access(target, span(target), "copy", self.side, time, writes=True)
        with self.checker.silent():
            target.copy_(source)

    def settle(self):
        self.clocks.wait(self.thread, self.clocks.mark(self.side))
        for stream in (self.side, self.thread):
            self.checker.over[stream] = self.clocks.time[stream]

    def copied(self):
        return self.clocks.mark(self.side)

    def wait(self, mark):
        self.clocks.wait(self.clocks.current, mark)

    def empty_host(self, nbytes):
        with self.checker.silent():
            host = torch.empty(nbytes, dtype=torch.uint8)
        buffer = self.checker._buffer(host.untyped_storage(), host)
        buffer.home, buffer.name, buffer.undefined = self.thread, "a host buffer", [(0, nbytes)]
        return host


class HostComm(ShownComm):
    """The group on the CPU: shows a checker what the thread of collectives reads and writes."""

    def __init__(self, checker, inner, thread):
        super().__init__(checker, inner)
        self.thread = thread

    def _run(self, name, issue, reads, writes):
        time = self.checker.clocks.tick(self.thread)
        for writing, operands in ((False, reads), (True, writes)):
            for tensor, bounds in operands:
                if tensor.untyped_storage()._cdata not in self.checker._buffers:  # made by the thread itself
                    self.checker._buffer(tensor.untyped_storage(), tensor).home = self.thread
                self.checker.access(tensor, bounds, name, self.thread, time, writes=writing)
        with self.checker.silent():
            return issue()


class Early:
    """Runs a job when it is submitted."""

    def __init__(self, checker, settle):
        self.checker, self.settle = checker, settle

    def submit(self, work):
        job = Job(work)
        self.run(job)
        return job

    def run(self, job):
        with self.checker.silent():
            job.run()
        self.settle()
        job.drop()

    def finish(self):
        pass


class Late(Early):
    """Runs a job when it, or one that was submitted after it, is waited for."""

    def __init__(self, checker, settle):
        super().__init__(checker, settle)
        self.queue = deque()

    def submit(self, work):
        job = _LateJob(work, self)
        self.queue.append(job)
        return job

    def finish(self, last=None):
        while self.queue and (last is None or last in self.queue):
            self.run(self.queue.popleft())


class _LateJob(Job):
    def __init__(self, work, jobs):
        super().__init__(work)
        self.jobs = jobs

    def wait(self):
        self.jobs.finish(self)
        super().wait()


def staged(checker, inner, when, name="shard"):
    """``inner`` as a group whose collectives run in host memory; ``when`` is :class:`Early` or :class:`Late`."""
    staging = CheckedStaging(checker, name)
    jobs = when(checker, staging.settle)
    comm = StagedComm(HostComm(checker, inner, staging.thread), Stage(staging, jobs))
    checker.jobs = [*getattr(checker, "jobs", ()), jobs]
    return comm
