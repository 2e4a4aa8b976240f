"""Ranks of a gloo group that is used by torch's own collectives, as groups of unknown backends are, and by ours."""

import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

import fullshard
from fullshard.core.comm import GlooComm, TorchComm
from support.collectives import check_collectives, run_collectives
from support.models import KINDS, batches
from support.parity import ROWS_PER_RANK, assert_same_run, replicas, train_sharded, train_unsharded
from support.rank_script import found, parse, print_result, run_checks

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def comms():
    group = dist.group.WORLD
    return GlooComm(group), TorchComm(group, torch.device("cpu"))


@case
def collectives_give_what_the_protocol_says():
    check_collectives(comms()[1])


@case
def each_collective_gives_the_bits_of_gloos():
    ours, torchs = (run_collectives(comm, 1001) for comm in comms())
    assert ours.keys() == torchs.keys()
    for name in ours:
        torch.testing.assert_close(
            torchs[name], ours[name], rtol=0, atol=0, msg=lambda text, name=name: f"{name} {text}"
        )


@case
def a_sharded_run_equals_the_unsharded_run():
    make, loss_of = KINDS["lm"]
    reference, (model,) = replicas(make, 1)
    _, comm = comms()
    data = batches(10, comm.size * ROWS_PER_RANK)
    assert_same_run(train_sharded(model, comm, loss_of, data), train_unsharded(reference, loss_of, data))


def collective_times():
    """Milliseconds, minimum and median of 12 interleaved rounds, of our gloo and of torch's, at 64 MiB in all."""
    full, shard = torch.ones(16 << 20), torch.empty((16 << 20) // dist.get_world_size())
    taken = {}
    for _ in range(12):
        for name, comm in zip(("ours", "torch's"), comms(), strict=True):
            for kind, run in {
                "all-gather": lambda comm=comm: comm.all_gather(full, shard),
                "reduce-scatter": lambda comm=comm: comm.reduce_scatter(shard, full),
                "gather": lambda comm=comm: comm.gather(shard, full if comm.rank == 0 else None),
                "all-reduce of 16 B": lambda comm=comm: comm.all_reduce(torch.ones(4)),
            }.items():
                comm.barrier()
                started = time.perf_counter()
                work = run()
                work.wait()
                fullshard.core.comm.settle(work)
                taken.setdefault(f"{kind}, {name}", []).append(1e3 * (time.perf_counter() - started))
    return {key: [round(min(times), 2), round(statistics.median(times), 2)] for key, times in taken.items()}


def main():
    options = parse(CASES | {"collective_times": collective_times}, __doc__)
    torch.set_num_threads(1)
    fullshard.init(timeout_s=100)
    checks = [name for name in options.only if name in CASES]
    result = run_checks(CASES, checks)
    if len(options.only) == 1 and not checks:
        result = found(collective_times)
    print_result(result)
    fullshard.shutdown()


if __name__ == "__main__":
    main()
