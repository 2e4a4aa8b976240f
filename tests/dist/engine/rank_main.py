"""Cases of the engine on gloo processes: parity, memory, generation, streaming and what ranks exchange."""

import datetime
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import fullshard
from fullshard.core.comm import MemoryMeter
from fullshard.core.comm.process import host_sum_of
from fullshard.core.engine.setup import wrap
from fullshard.core.testing import RecordingComm
from fullshard.errors import MismatchError
from support.models import KINDS, TinyLM, batches, lm_loss, t5
from support.parity import ROWS_PER_RANK, assert_same_run, replicas, train_sharded, train_unsharded
from support.rank_script import parse, print_result


def parity(comm):
    """Every kind of model, three AdamW steps, against the unsharded run; ranks as threads take ten."""
    for kind, (make, loss_of) in KINDS.items():
        reference, (model,) = replicas(make, 1)
        data = batches(3, comm.size * ROWS_PER_RANK)
        plain = train_unsharded(reference, loss_of, data)
        assert_same_run(train_sharded(model, comm, loss_of, data), plain)
        print("same:", kind, file=sys.stderr)
    return {"kinds": list(KINDS)}


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
    """Tracked peak of forward and backward beside what there was before, and the engine's own account."""
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
        "gathered_peak": runtime.account.peak["gathered"],
        "gradients_peak": runtime.account.peak["gradients"],
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


def generation(comm):
    """Greedy generation under sharding equals generation of the unsharded model, and the model still trains."""
    reference, (model,) = replicas(t5, 1)
    tokens = batches(1, 4, seed=3)[0]
    expected = reference.eval().generate(tokens, max_new_tokens=8, do_sample=False)
    ledger = RecordingComm(comm)
    model = fullshard.fully_shard(model, ledger).eval()
    rows = slice(2 * comm.rank, 2 * comm.rank + 2)
    got = model.generate(tokens[rows], max_new_tokens=8, do_sample=False)
    width = min(got.shape[1], expected.shape[1])
    live = model._fullshard_runtime.account.live["gathered"]
    return {"equal": torch.equal(got[:, :width], expected[rows, :width]), "gathered_after": live}


def streaming(comm):
    """The streamed full model equals the unsharded one on rank 0, and no unit is left gathered."""
    reference, (model,) = replicas(t5, 1)
    model = fullshard.fully_shard(model, comm)
    expected = {name: p for name, p in reference.named_parameters()}
    names, equal = [], True
    for _, tensors in fullshard.full_tensors(model):
        for name, tensor in tensors.items():
            names.append(name)
            assert (tensor is None) == (comm.rank != 0)
            if tensor is not None:
                equal = equal and torch.equal(tensor, expected[name])
    return {"equal": equal, "names": sorted(names) == sorted(expected)}


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


def mismatch(comm):
    """Ranks that run blocks in different orders are told, each of them."""
    torch.manual_seed(0)
    model = fullshard.fully_shard(TinyLM(), comm)
    if comm.rank:
        model.blocks = torch.nn.ModuleList(reversed(model.blocks))
    try:
        lm_loss(model, batches(1, 2)[0])
    except MismatchError as error:
        return {"message": str(error)}
    return {"message": ""}


def host_sum(comm):
    """The group that ranks with a GPU each make beside NCCL."""
    add = host_sum_of(comm.group, datetime.timedelta(seconds=60))
    flags = torch.tensor([1, 0, comm.rank])
    add(flags)
    return {"flags": flags.tolist()}


CASES = {
    case.__name__: case for case in (parity, memory, building, generation, streaming, exchange, host_sum, mismatch)
}


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
