"""Ranks that call different collectives, or are late, or end, on gloo processes.

Every case has a group and a thread of its own: a group whose ranks parted is of no use afterwards, and together the
waits of all cases take as long as the longest. Writes ``DIRECTORY/rankR.json``, from case to outcome.
"""

import datetime
import json
import logging
import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from fullshard import Checkpoints, MinNumel, fully_shard
from fullshard.core.comm import GlooComm, settle, watchdog
from fullshard.errors import UserError
from support.collectives import finish
from support.rank_script import parse, print_result

LARGE = 50_000  # elements
ELSEWHERE_S = 6.0  # many polls longer than what is a long wait
WARN_S = 3.0


def elsewhere():
    """Something honest that takes long."""
    threading.Event().wait(ELSEWHERE_S)


def gather(comm, numel=8):
    work = comm.all_gather(torch.zeros(numel * comm.size), torch.zeros(numel))
    work.wait()
    settle(work)


def scatter(comm, numel=8):
    work = comm.reduce_scatter(torch.zeros(numel), torch.ones(numel * comm.size))
    work.wait()
    settle(work)


def kinds(comm):
    """One size, one dtype, two collectives."""
    comm.announce("reduce-scatter of unit blocks.3" if comm.rank else "all-gather of unit blocks.2")
    (scatter if comm.rank else gather)(comm)


def sizes(comm):
    """gloo by itself ends a process over this one."""
    gather(comm, 8 + comm.rank)


def dtypes(comm):
    """As many bytes, of two dtypes."""
    dtype = torch.int32 if comm.rank else torch.float32
    comm.all_gather(torch.zeros(8, dtype=dtype), torch.zeros(4, dtype=dtype)).wait()


def sums(comm):
    """All-reduces of two sizes."""
    comm.all_reduce(torch.zeros(4 + 4 * comm.rank)).wait()


def large_sums(comm):
    """All-reduces of two sizes that take two steps."""
    comm.all_reduce(torch.zeros(100_000 + comm.rank)).wait()


def purposes(comm):
    """The same collective of the same size, for two units: values would arrive in the wrong one."""
    comm.announce(f"all-gather of unit blocks.{comm.rank}")
    gather(comm)


def reading(comm):
    """Ranks that read each other's memory: the same size, for two units."""
    gather(comm, LARGE)
    comm.announce(f"all-gather of unit blocks.{comm.rank}")
    gather(comm, LARGE)


def large_kinds(comm):
    """One of two ranks that read each other's memory offers what the other one does not want."""
    gather(comm, LARGE)
    (scatter if comm.rank else gather)(comm, LARGE)


def large_honest(comm):
    """A rank that is busy before it reads, and another that waits for it before it changes what it gave."""
    full, mine = torch.zeros(LARGE * comm.size), torch.full((LARGE,), comm.rank + 1.0)
    work = comm.all_gather(full, mine)
    if comm.rank == comm.size - 1:
        elsewhere()
    work.wait()
    settle(work)
    full.view(comm.size, -1)[comm.rank] = -1
    comm.barrier()
    return str(full.view(comm.size, -1)[:, -1].tolist())


def opinions(comm):
    """Ranks that announce different things meet in an all-reduce: so they find out that they differ."""
    comm.announce(f"all-gather of unit blocks.{comm.rank}")
    total = torch.tensor([comm.rank])
    comm.all_reduce(total).wait()
    return f"sum {total.item()}"


def ahead(comm):
    """Rank 1 runs one unit more, and everything before agrees."""
    for _ in range(200 + comm.rank):
        gather(comm)
    comm.barrier()


def objects(comm):
    """Collectives without tensors are watched too."""
    if comm.rank:
        comm.barrier()
    else:
        comm.all_gather_object("a")


def calls(comm):
    """Each rank exchanges an object, as the same collective, in another public call."""
    if comm.rank:
        Checkpoints("nowhere", ranks=comm)
    else:
        fully_shard(torch.nn.Linear(4, 4), comm)


def prefetched(comm):
    """Rank 0 issued a collective that rank 1 never does, and waits in one that rank 1 is in as well."""
    gather(comm)
    if comm.rank == 0:
        early = comm.all_gather(torch.zeros(16), torch.zeros(8))
        scatter(comm)
        early.wait()
    else:
        scatter(comm)


def skipped_pass(comm):
    """Rank 0 evaluates between two steps of training, rank 1 does not."""
    torch.manual_seed(0)
    model = fully_shard(torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4))), comm, wrap=MinNumel(1))
    x = torch.ones(2, 8)
    model(x).sum().backward()
    if comm.rank == 0:
        with torch.no_grad():
            model(x)
    model(x).sum().backward()


def collectives(comm):
    """Ranks that agree get the right results, the same bits on every rank, in one step or two."""
    generator = torch.Generator().manual_seed(comm.rank)
    for numel in (0, 1, 2, 8192, 8193, 100_003):
        mine = torch.randn(numel, generator=generator)
        everyone = comm.all_gather_object(mine)
        assert torch.equal(everyone[comm.rank], mine)
        total, largest, told = mine.clone(), mine.clone(), mine.clone()
        comm.all_reduce(total).wait()
        assert torch.equal(total, sum(everyone[1:], start=everyone[0].clone()))
        comm.all_reduce(largest, "max").wait()
        assert torch.equal(largest, torch.stack(everyone).amax(0))
        comm.broadcast(told, source=1).wait()
        assert torch.equal(told, everyone[1])
        full = torch.empty(comm.size, numel) if comm.rank == 1 else None
        comm.gather(mine, full, target=1).wait()
        assert full is None or torch.equal(full, torch.stack(everyone))
    return "as expected"


def collectives_reading(comm):
    """The same between ranks that read each other's memory, small ones too: without a message."""
    comm.hides_messages()  # a collective, by messages

    def refused(*arguments, **options):
        raise AssertionError("a message")

    comm._exchange = refused
    run = [GlooComm.all_gather, GlooComm.reduce_scatter, GlooComm.all_reduce, GlooComm.exchange]
    for numel in (1, 8193):
        shard, full = torch.ones(numel), torch.ones(comm.size * numel)
        parts = [torch.ones(numel) for _ in range(comm.size)]
        given = [(full.clone(), shard), (shard.clone(), full), (shard.clone(),), (parts, [shard] * comm.size)]
        for collective, tensors in zip(run, given, strict=True):
            finish(collective(comm, *tensors))
    del comm._exchange
    return collectives(comm)


def two_comms(comm):
    """All comms of a group number its collectives together, so that ranks may use any: no desync."""
    gather(comm)
    gather(GlooComm(comm.group) if comm.rank else comm)
    gather(comm)
    return "no error"


def honest(comm):
    """The last rank is busy; the others wait, and all is well."""
    gather(comm)
    if comm.rank == comm.size - 1:
        elsewhere()
    total = torch.ones(2)
    comm.all_reduce(total).wait()
    return f"sum {total[0].item():.0f}"


def honest_behind(comm):
    """The last rank is busy between issuing a collective and waiting for it."""
    full = torch.zeros(2 * comm.size)
    work = comm.all_gather(full, torch.ones(2))
    if comm.rank == comm.size - 1:
        elsewhere()
    work.wait()
    comm.barrier()
    return f"sum {full.sum().item():.0f}"


def third(comm):
    """Two ranks agree, the third does not."""
    (scatter if comm.rank == 2 else gather)(comm)


def late(comm):
    """Ranks 0 and 1 part while rank 2 is busy."""
    gather(comm)
    if comm.rank == 2:
        elsewhere()
    (scatter if comm.rank == 1 else gather)(comm)


def timeout(comm):
    """Rank 1 does not come in time."""
    store = comm.group.get_group_store()
    if comm.rank == 1:
        store.get("given up")
        return "no error"
    comm.announce("all-gather of unit blocks.2")
    try:
        return gather(comm)
    finally:
        store.set("given up", "")


def leaves(comm, numel=8):
    """Rank 1's process ends."""
    gather(comm, numel)
    if comm.rank == 1:
        return "no error"
    comm.announce("all-gather of unit blocks.2")
    return gather(comm, numel)


def leaves_reading(comm):
    """The same between ranks that read each other's memory."""
    return leaves(comm, LARGE)


READING = {
    *("collectives_reading", "reading", "large_sums", "large_kinds", "large_honest", "skipped_pass", "two_comms"),
    "leaves_reading",
}
"""Cases in which ranks read each other's memory; in the others, all that they say goes by messages."""


CASES = {
    case.__name__: case
    for case in (
        *(kinds, sizes, dtypes, sums, large_sums, purposes, reading, large_kinds, large_honest, opinions, ahead),
        *(objects, prefetched, skipped_pass, collectives, collectives_reading, two_comms, honest, honest_behind),
        *(third, late, timeout, leaves, leaves_reading, calls),
    )
}


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def run(case, comm, outcomes):
    """Run a case, and one more collective on its group if it failed: that has to fail for the same reason."""
    started = time.monotonic()
    errors = []
    try:
        text = CASES[case](comm)
    except UserError as error:
        text = f"{type(error).__name__}: {error}"
        errors.append(error)
    ended = time.monotonic()
    seconds = ended - started
    if errors:
        try:
            comm.barrier()
        except UserError as error:
            errors.append(error)
    outcomes[case] = {"text": text, "seconds": seconds, "then": [type(error).__name__ for error in errors[1:]]}
    outcomes[case]["ended"] = ended


def main():
    options = parse(CASES, __doc__)
    torch.set_num_threads(1)
    watchdog.WARN_S = WARN_S
    log = Lines()
    logging.getLogger("fullshard").addHandler(log)
    dist.init_process_group("gloo")
    limits = {case: datetime.timedelta(seconds=4 if case == "timeout" else 60) for case in options.only}
    comms = {case: GlooComm(dist.new_group(timeout=limit), direct=case in READING) for case, limit in limits.items()}
    outcomes = {}
    threads = [threading.Thread(target=run, args=(case, comm, outcomes)) for case, comm in comms.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rank = dist.get_rank()
    result = {"outcomes": outcomes, "log": log.lines}
    if rank == 1 and any(case.startswith("leaves") for case in comms):
        # The process is gone at once: an interpreter takes seconds to end on a busy machine, and they are not the wait.
        result["gone"] = time.monotonic()
        (options.directory / f"rank{rank}.json").write_text(json.dumps(result))
        os._exit(0)
    (options.directory / f"rank{rank}.json").write_text(json.dumps(result))
    if not any(case.startswith("leaves") for case in comms):
        # Rank 0 holds the store: a rank that comes late asks there what the others found.
        store = dist.group.WORLD.get_group_store()
        store.set(f"rank {rank} is done", "")
        store.wait([f"rank {r} is done" for r in range(dist.get_world_size())])
    print_result(outcomes)


if __name__ == "__main__":
    main()
