"""One gloo process of a test: three steps as ranks of one machine, or, with ``apart``, of a machine each."""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import fullshard
from fullshard.core.comm import shutdown
from fullshard.core.engine.registry import runtime_of
from support.models import TinyLM, batches, lm_loss
from support.parity import optimizer_for, rows_for


def steps(comm):
    """How many reduces were under way at most, and the hash of the trained weights."""
    torch.manual_seed(1)
    model = fullshard.fully_shard(TinyLM(), comm)
    optimizer = optimizer_for(model)
    runtime = runtime_of(model)
    issued = []
    for unit in runtime.units:
        begin = unit.issue_reduce

        def noted(begin=begin, **options):
            issued.append(sum(one.reducing for one in runtime.units))
            begin(**options)

        unit.issue_reduce = noted
    for tokens in batches(3, 4):
        lm_loss(model, rows_for(comm, tokens)).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = hashlib.sha256()
    for value in fullshard.full_state_dict(model).values():
        weights.update(value.numpy().tobytes())
    return {"behind": runtime.device.reduces_behind, "under_way": max(issued), "sha256": weights.hexdigest()}


def main():
    torch.set_num_threads(1)
    if sys.argv[1] == "apart":
        os.environ["FULLSHARD_MACHINE"] = os.environ["RANK"]
    comm = fullshard.init()
    found = steps(comm)
    if comm.rank == 0:
        print("RESULT " + json.dumps(found))
    comm.barrier()
    shutdown()


if __name__ == "__main__":
    main()
