"""Cases of the engine on gloo processes: parity, memory and what ranks exchange."""

import datetime
import sys
from collections import Counter
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[2]))

import fullshard
from fullshard.core.comm import MemoryMeter, TorchComm
from fullshard.core.comm.process import host_sum_of
from fullshard.core.engine.setup import wrap
from fullshard.core.torch_private import dispatch_mode
from support.collectives import check_collectives, run_collectives
from support.models import KINDS, batches
from support.parity import ROWS_PER_RANK, assert_same_run, replicas, train_sharded, train_unsharded
from support.rank_script import parse, print_result

PARITY = ("lm_two_forwards", "lm_reentrant_two_forwards", "lm_frozen_parts", "t5_untied", "gpt2")


def parity(comm):
    """Three AdamW steps of a few kinds of models against the unsharded run; ranks as threads take them all."""
    for kind in PARITY:
        make, loss_of = KINDS[kind]
        reference, (model,) = replicas(make, 1)
        data = batches(3, comm.size * ROWS_PER_RANK)
        plain = train_unsharded(reference, loss_of, data)
        assert_same_run(train_sharded(model, comm, loss_of, data), plain)
        print("same:", kind, file=sys.stderr)
    return True


def torchs_collectives(comm):
    """By torch's own collectives, as groups of unknown backends: the protocol, the bits of ours, a run."""
    torchs = TorchComm(comm.group, comm.device)
    check_collectives(torchs)
    ours, theirs = (run_collectives(one, 1001) for one in (comm, torchs))
    torch.testing.assert_close(theirs, ours, rtol=0, atol=0)
    make, loss_of = KINDS["lm"]
    reference, (model,) = replicas(make, 1)
    data = batches(10, comm.size * ROWS_PER_RANK)
    assert_same_run(train_sharded(model, torchs, loss_of, data), train_unsharded(reference, loss_of, data))
    return True


class Wide(torch.nn.Module):
    """Blocks of one size and nearly nothing else: activations and the root do not hide the engine's own memory."""

    def __init__(self, layers=6, width=256):
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(width, 4 * width), torch.nn.ReLU(), torch.nn.Linear(4 * width, width))
            for _ in range(layers)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def memory(comm):
    """Tracked peak of forward and backward beside what there was before, and what the engine's own tracker counts."""
    torch.manual_seed(0)
    model = fullshard.fully_shard(Wide(), comm)
    x = torch.randn(2, 256)
    model(x).sum().backward()
    model.zero_grad()
    with MemoryMeter(comm.device) as meter:
        model(x).sum().backward()
    runtime = model._fullshard_runtime
    unit = max(u.lanes[0].full.nbytes for u in runtime.units if u.lanes)
    return {
        "above_start": meter.peak_bytes - meter.start_bytes,
        "shards": sum(lane.shard.nbytes for u in runtime.units for lane in u.lanes),
        "unit": unit,
        "largest_parameter": max(p.numel * 4 for _, p in runtime.all_params()),
        "gathered_peak": runtime.tracker.peak["gathered"],
        "gradients_peak": runtime.tracker.peak["gradients"],
    }


def building(comm):
    """Peak while sharding a model that is on the meta device: never more than one unit above the shards."""
    with torch.device("meta"):
        model = Wide(layers=8)
    with MemoryMeter(comm.device) as meter:
        model = fullshard.fully_shard(model, comm)
    runtime = model._fullshard_runtime
    with fullshard.unsharded(model):
        finite = all(bool(p.isfinite().all()) and p.std().item() > 0 for p in model.parameters())
    return {
        "above_start": meter.peak_bytes - meter.start_bytes,
        "shards": sum(lane.shard.nbytes for u in runtime.units for lane in u.lanes),
        "unit": max(u.lanes[0].full.nbytes for u in runtime.units if u.lanes),
        "initialised": finite,
    }


def exchange(comm):
    """Parts of every size go where they belong, also while one exchange follows another."""
    works = []
    for numel in (0, 3, 1_000_000):
        sent = [torch.full((numel + rank,), float(comm.rank + 10 * rank)) for rank in range(comm.size)]
        received = [torch.empty(numel + comm.rank) for _ in range(comm.size)]
        works.append((comm.exchange(received, sent), received, sent))
    right = True
    for work, received, _ in works:
        work.wait()
        right &= all(bool((part == rank + 10 * comm.rank).all()) for rank, part in enumerate(received))
    return {"right": right}


def host_sum(comm):
    """The group that ranks with a GPU each make beside NCCL."""
    add = host_sum_of(comm.group, datetime.timedelta(seconds=60))
    flags = torch.tensor([1, 0, comm.rank])
    add(flags)
    return {"flags": flags.tolist()}


def labels(comm):
    """How often each label occurs in a profiled step, and which were made in a step before, without a profiler."""
    torch.manual_seed(0)
    model = fullshard.fully_shard(Wide(3, 16), comm)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(torch.randn(2, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with Labelled() as without:
        step()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step()
    found = Counter(event.name for event in profiled.events() if event.name.startswith("fullshard::"))
    return {"units": [unit.name for unit in model._fullshard_runtime.units], "labels": found, "without": without.names}


class Labelled(dispatch_mode):
    """Labels that are begun inside the context, which are operators."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func).startswith("profiler._record_function_enter"):
            self.names.append(args[0])
        return func(*args, **(kwargs or {}))


CASES = {case.__name__: case for case in (parity, torchs_collectives, memory, building, exchange, host_sum, labels)}


def main():
    options = parse(CASES, __doc__)
    torch.set_num_threads(1)
    wrap.TINY_NUMEL = 0  # the models are so small that the engine would merge all of their blocks
    comm = fullshard.init()
    results = {name: CASES[name](comm) for name in options.only}
    print_result(comm.all_gather_object(results))
    fullshard.shutdown()


if __name__ == "__main__":
    main()
