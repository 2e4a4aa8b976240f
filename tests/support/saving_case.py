"""Checkpoints, pretrained weights and full saves of a sharded T5: what comes back is what was written, to the bit."""

import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch

import fullshard
from support.models import t5
from support.parity import replicas
from support.states import rank_runs


@contextmanager
def late_stream(device):
    """On CUDA, a stream other than the default one, which is busy for a while."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream(device)):
        torch.cuda._sleep(100_000_000)
        yield


def saving(comm):
    """Whether checkpoints, written at once and in the background, and full saves give back the bits on the device."""
    folder = Path(comm.all_gather_object(tempfile.mkdtemp())[0])
    reference, (model,) = replicas(t5, 1)
    reference.save_pretrained(folder / "pretrained")
    comm.barrier()
    with torch.device("meta"):
        model = t5()
    model = fullshard.fully_shard(model, comm, weights=fullshard.Pretrained(folder / "pretrained"))
    expected = reference.state_dict()
    state = fullshard.full_state_dict(model)
    found = {"pretrained": all(torch.equal(value, expected[name]) for name, value in state.items())}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    with fullshard.Checkpoints(folder / "checkpoints", ranks=comm) as checkpoints:
        for step, background in ((1, False), (2, True)):
            for param in model.parameters():
                param.grad = torch.full_like(param, float(step))
            optimizer.step()
            before = [(name, part.cpu()) for name, _, _, part in rank_runs(model, optimizer)]
            checkpoints.save(model, optimizer, step=step, background=background)
            for param in model.parameters():
                param.data.mul_(3.0)  # issued while the copy to the host may be under way
            checkpoints.load(model, optimizer)
            after = [(name, part.cpu()) for name, _, _, part in rank_runs(model, optimizer)]
            same = [a == b and torch.equal(x, y) for (a, x), (b, y) in zip(before, after, strict=True)]
            found["background" if background else "checkpoint"] = all(same)
        with late_stream(comm.device):  # what is read must not come before what is issued here
            for param in model.parameters():
                param.data.mul_(3.0)
            checkpoints.load(model, optimizer)
            after = [(name, part.cpu()) for name, _, _, part in rank_runs(model, optimizer)]
            same = [a == b and torch.equal(x, y) for (a, x), (b, y) in zip(before, after, strict=True)]
            found["on_a_stream_of_its_own"] = all(same)
    fullshard.save(model, folder / "full")
    state = fullshard.full_state_dict(model)
    if comm.rank == 0:
        again = type(reference).from_pretrained(folder / "full").state_dict()
        found["full"] = all(torch.equal(value, again[name]) for name, value in state.items())
    return found
