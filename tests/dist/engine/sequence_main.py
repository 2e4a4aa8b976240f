"""One of two gloo processes that share rows; prints the largest difference of a weight to the run on full rows.

Of blocks as they are, and of compiled ones, with the number of graphs: blocks of a stack share one for each shape.
"""

import copy
import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

import fullshard
from fullshard.core.comm import SoloComm
from fullshard.program.models import compile_blocks
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

    def difference(model, changed=lambda model: None):
        model = fullshard.sequence_parallel(model, mesh["sequence"])
        changed(model)
        shared = train(fullshard.fully_shard(model), data)
        return max((shared[name] - weight).abs().max().item() for name, weight in full.items())

    found = [difference(copy.deepcopy(model)), difference(model, partial(compile_blocks, backend="eager"))]
    print("RESULT " + json.dumps([found, torch._dynamo.utils.counters["stats"]["unique_graphs"]]))
    fullshard.shutdown()
