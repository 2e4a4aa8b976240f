"""Train a small model on the ranks of a launch, started by test_launch_machines.py; every rank prints a RESULT."""

import json
import os
import socket
from pathlib import Path

import torch
from torch import nn

import fullshard
from fullshard.core.comm import gloo

STEPS, WIDTH = 4, 160


def main():
    comm = fullshard.init()
    torch.manual_seed(0)
    batches = torch.randn(STEPS, 4 * comm.size, WIDTH)
    alone = train(make(), list(batches))
    model = fullshard.fully_shard(make(), comm)
    mine = train(model, [batch.chunk(comm.size)[comm.rank] for batch in batches])
    comm.all_reduce(mine).wait()
    result = {
        "rank": comm.rank,
        "host": socket.gethostname(),
        "local": [os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"], os.environ["GROUP_RANK"]],
        "error": float((mine / comm.size - alone).abs().max()),
        "losses": alone.tolist(),
        "reads_memory": gloo._GROUPS[comm.group].memory is not None,
        "sent_bytes": sent_bytes(),
    }
    comm.barrier()
    print("RESULT", json.dumps(result), flush=True)
    fullshard.shutdown()


class Block(nn.Module):
    """Large enough for ranks of one host to read each other's memory."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def make():
    torch.manual_seed(1)
    return nn.Sequential(*(Block() for _ in range(4)), nn.Linear(WIDTH, 1))


def train(model, batches):
    """Losses, (steps,), of this rank."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in batches:
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean() / WIDTH
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def sent_bytes():
    """What has left this machine by interfaces other than the loopback."""
    lines = [line.split(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    return sum(int(counts.split()[8]) for name, counts in lines if name.strip() != "lo")


if __name__ == "__main__":
    main()
