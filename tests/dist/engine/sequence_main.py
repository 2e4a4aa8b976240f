"""One of two gloo processes that share rows; prints the largest difference of a weight to the run on full rows."""

import copy
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

import fullshard
from fullshard.core.comm import SoloComm
from support.models import t5
from support.shared_rows import adamw, batches_of


def train(model, data):
    optimizer = adamw(model)
    for step in data:
        for batch in step[0]:
            model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with fullshard.unsharded(model):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


if __name__ == "__main__":
    fullshard.init()
    torch.manual_seed(0)
    model = t5().train()
    data, alone = batches_of(model, steps=3), copy.deepcopy(model)
    full = train(fullshard.fully_shard(alone, SoloComm(torch.device("cpu"))), data)
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("rows", "sequence"))
    shared = train(fullshard.fully_shard(fullshard.sequence_parallel(model, mesh["sequence"])), data)
    print("RESULT " + json.dumps([max((shared[name] - weight).abs().max().item() for name, weight in full.items())]))
    fullshard.shutdown()
