"""One rank of a run with a hybrid strategy, each rank told that it is alone on its machine."""

import json
import os
import sys

import torch.distributed as dist

from fullshard.core.comm import GlooComm, SoloComm, machine_axes
from fullshard.program.launch.programs import train as rank
from fullshard.program.train.setup import model as modelling

found = []


def watched(comm, ranks_each):
    replicate, shard = machine_axes(comm, ranks_each)
    timeout = dist.group.WORLD._get_backend(comm.device).options._timeout
    same = replicate.group._get_backend(comm.device).options._timeout == timeout
    found.append([type(replicate) is GlooComm, replicate.size, type(shard) is SoloComm, same])
    return replicate, shard


if __name__ == "__main__":
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    modelling.machine_axes = watched
    assert rank.main(sys.argv[1:]) == 0
    print("RESULT " + json.dumps(found))
