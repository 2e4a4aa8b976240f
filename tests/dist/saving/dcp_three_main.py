"""What one of 3 gloo processes of the tests of distributed checkpoints runs: ``dcp_three_main.py DIRECTORY``.

Reads what 2 ranks wrote, and writes that again. It imports nothing slow, so not what the 2 run.
"""

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from fullshard.core.comm import GlooComm, settle
from fullshard.state.saving.dcp import load_dcp, save_dcp
from support.odd import adafactor, adagrad, eight_bit, gathered, odd
from support.states import assert_same_bits


def sums_in_order(comm):
    """Whether a reduce-scatter adds in the order of ranks for every rank, by messages and by reading memory."""
    draw, right = torch.Generator().manual_seed(0), []
    for one in (GlooComm(comm.group, direct=False), comm):
        for dtype in (torch.float32, torch.bfloat16):
            fulls = [torch.randn(600, generator=draw).to(dtype) for _ in range(comm.size)]
            shard = torch.empty(200)
            work = one.reduce_scatter(shard, fulls[comm.rank].clone())
            work.wait()
            settle(work)
            total = fulls[0].float() + fulls[1].float() + fulls[2].float()
            right.append(torch.equal(shard, total[200 * comm.rank : 200 * comm.rank + 200]))
    return comm.all_gather_object(right)


def main(directory):
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=r"\d+ of ignored_params are trainable")
    dist.init_process_group("gloo")
    sums = sums_in_order(GlooComm(dist.group.WORLD))
    kinds = {"adafactor": adafactor, "eight_bit": eight_bit, "odd": adagrad, "copies": adagrad}
    for name, make in kinds.items():
        model = odd(7)
        optimizer = make(model, lr=0.5)
        load_dcp(model, optimizer, directory / name)
        assert_same_bits(gathered(model, optimizer), torch.load(directory / f"{name}.pt"))
    save_dcp(model, optimizer, directory / "odd_of_three")
    if dist.get_rank() == 0:
        split = [p.shard_meta.name for p in model.parameters() if getattr(p, "shard_meta", None) and p.shape[-1] == 225]
        print("RESULT " + json.dumps({"split": split, "sums": sums}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
