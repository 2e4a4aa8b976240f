"""A script as torch's MNIST tutorial: processes that are spawned, and each draws the model with a seed of its own."""

import copy
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

from fullshard.compat.torch_fsdp import FullyShardedDataParallel as FSDP, StateDictType
from support.processes import free_port

RANKS, STEPS = 2, 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3)
        self.fc1, self.fc2 = nn.Linear(8 * 5 * 5, 16), nn.Linear(16, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        return F.log_softmax(self.fc2(F.relu(self.fc1(torch.flatten(x, 1)))), dim=1)


def train(model, images, digits):
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        F.nll_loss(model(images[step]), digits[step]).backward()
        optimizer.step()
    return model


def worker(rank, path):
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    torch.manual_seed(100 + rank)
    net = Net()
    plain = copy.deepcopy(net)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(STEPS, 2 * RANKS, 1, 14, 14, generator=generator)
    digits = torch.randint(0, 10, (STEPS, 2 * RANKS), generator=generator)
    model = train(FSDP(net), images.chunk(RANKS, 1)[rank], digits.chunk(RANKS, 1)[rank])
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        state = model.state_dict()
    if rank == 0:
        expected = train(plain, images, digits).state_dict()
        Path(path).write_text(
            json.dumps({name: (state[name] - expected[name]).abs().max().item() for name in expected})
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    mp.spawn(worker, (sys.argv[1],), nprocs=RANKS)
