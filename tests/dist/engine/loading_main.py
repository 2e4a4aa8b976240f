"""One gloo process of a test: load a T5 by shard from the directory ``sys.argv[1]``; prints figures of both ranks."""

import json
import re
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, T5ForConditionalGeneration

import fullshard
from fullshard.core.engine import local_tensors
from fullshard.state.saving import Pretrained, load


def peak_bytes(field):
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text()).group(1)) * 1024


def growth(action):
    """Peak resident bytes of this process during ``action``, above what it had before."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = peak_bytes("VmRSS")
    action()
    return peak_bytes("VmHWM") - before


def main():
    torch.set_num_threads(1)
    comm = fullshard.init()
    path = sys.argv[1]
    with torch.device("meta"):
        model = T5ForConditionalGeneration(AutoConfig.from_pretrained(path))
    comm.all_gather_object(None)  # what a first exchange takes is not the loading's
    source = Pretrained(path)
    while_sharding = growth(lambda: fullshard.fully_shard(model, comm, weights=source))
    while_loading = growth(lambda: load(model, path))
    figures = {
        "while_sharding": while_sharding,
        "while_loading": while_loading,
        "shards": sum(local.tensor.nbytes for local in local_tensors(model)),
        "bytes_read": source.bytes_read,
        "sums": {local.name: local.tensor.double().sum().item() for local in local_tensors(model)},
    }
    everyone = comm.all_gather_object(figures)
    if comm.rank == 0:
        print("RESULT " + json.dumps(everyone))
    fullshard.shutdown()


if __name__ == "__main__":
    main()
