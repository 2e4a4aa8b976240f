"""What one of 3 gloo processes of the tests of distributed checkpoints runs: ``dcp_three_main.py DIRECTORY``.

Reads what 2 ranks wrote, and writes that again. It imports nothing slow, so not what the 2 run.
"""

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from fullshard.saving.dcp import load_dcp, save_dcp
from support.odd import adagrad, gathered, odd
from support.states import assert_same_bits


def main(directory):
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    dist.init_process_group("gloo")
    for name in ("odd", "copies"):
        model = odd(7)
        optimizer = adagrad(model, lr=0.5)
        load_dcp(model, optimizer, directory / name)
        assert_same_bits(gathered(model, optimizer), torch.load(directory / f"{name}.pt"))
    save_dcp(model, optimizer, directory / "odd_of_three")
    if dist.get_rank() == 0:
        split = [p.shard_meta.name for p in model.parameters() if getattr(p, "shard_meta", None) and p.shape[-1] == 225]
        print("RESULT " + json.dumps(split), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
