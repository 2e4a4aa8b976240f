"""Ranks that share a GPU: the behaviours, saving, and collectives while the device is late."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import fullshard
from fullshard.core.comm.process import comm_of_group
from support import group_cases as cases, staged_comm
from support.processes import first_gpu
from support.rank_script import parse, print_result
from support.saving_case import saving


def saved(ranks):
    found = saving(ranks.comm)
    assert all(found.values()), found


def late(ranks):
    """Compute is late when a collective is issued, and its result is used and freed as soon as it was waited for."""
    comm, numel = ranks.comm, 3 * cases.PIECE + 1
    total = torch.zeros((), device=comm.device)
    for step in range(30):
        torch.cuda._sleep(2_000_000)
        shard = torch.full((numel,), float(step + comm.rank), device=comm.device)
        full = torch.empty(comm.size * numel, device=comm.device)
        gathered = comm.all_gather(full, shard)
        gathered.wait()
        del shard
        reduced = torch.empty(numel, device=comm.device)
        work = comm.reduce_scatter(reduced, full)
        work.wait()
        del full, gathered, work
        torch.empty(comm.size * numel, device=comm.device).fill_(float("nan"))  # where the freed ones were
        total += reduced.sum()
    expected = sum((step + comm.rank) * comm.size * numel for step in range(30))
    assert total.item() == expected, (total.item(), expected)


def late_on_another_stream(ranks):
    """The stream that is current when a collective is issued and waited for is the one that is ordered."""
    side = torch.cuda.Stream(ranks.device)
    side.wait_stream(torch.cuda.current_stream(ranks.device))
    with torch.cuda.stream(side):
        late(ranks)
    torch.cuda.current_stream(ranks.device).wait_stream(side)


def no_wait(ranks):
    """Works that are dropped at once: their tensors outlive the copies, and the collectives stay in order."""
    comm = ranks.comm
    for step in range(50):
        comm.all_reduce(torch.full((2 * cases.PIECE,), float(step), device=comm.device))
    total = torch.ones(1, device=comm.device)
    comm.all_reduce(total).wait()
    assert total.item() == comm.size


CASES = {**cases.CASES, **{case.__name__: case for case in (saved, late, late_on_another_stream, no_wait)}}


def main():
    options = parse(CASES, __doc__, gpus=first_gpu())
    torch.backends.cuda.matmul.allow_tf32 = False
    everyone = staged_comm.init()
    staged_comm.STAGE_BYTES = 4 * cases.PIECE  # most of what is sent takes several pieces
    groups = cases.Groups(lambda group: comm_of_group(group, everyone.device))
    print_result(cases.run_cases(CASES, options.only, groups, everyone))
    fullshard.shutdown()


if __name__ == "__main__":
    main()
