"""One gloo process of a test: LoRA over nf4 read by shard from ``sys.argv[1]``; rank 0 prints bits and the run."""

import hashlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import fullshard
from support import quantized
from support.models import batches, seq2seq_loss
from support.parity import ROWS_PER_RANK, train_sharded
from support.quantized import t5


def main():
    torch.set_num_threads(1)
    comm = fullshard.init()
    model = quantized.sharded_from_files(t5, sys.argv[1], comm, quantized.NF4)
    bits = {
        name: [hashlib.sha256(part.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest() for part in parts]
        for name, parts in quantized.stored(model).items()
    }
    data = batches(10, comm.size * ROWS_PER_RANK)
    losses, norms, weights = train_sharded(model, comm, seq2seq_loss, data, sharded=True)
    adapter = {name: value.tolist() for name, value in weights.items() if "lora_" in name}
    if comm.rank == 0:
        print("RESULT " + json.dumps({"bits": bits, "losses": losses, "norms": norms, "adapter": adapter}))
    fullshard.shutdown()


if __name__ == "__main__":
    main()
