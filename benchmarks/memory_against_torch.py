"""Peak tensor memory and step time of one training step: fullshard against torch's fully_shard, in one run.

Two gloo ranks, a T5 of t5-small's shapes with random weights, AdamW, fp32. Both engines are measured by the same
tracker (fullshard.comm.MemoryMeter: the CPU allocator's own events), steps are interleaved A B A B.

    python benchmarks/memory_against_torch.py [--steps 6] [--out benchmarks/results/memory_t5_small.json]
"""

import argparse
import gc
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Block

import fullshard
from fullshard.comm import MemoryMeter, RecordingComm, init_from_env, shutdown

BATCH, SOURCE, TARGET = 4, 128, 48


def make_model():
    torch.manual_seed(0)
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=32128,
            d_model=512,
            d_kv=64,
            d_ff=2048,
            num_layers=6,
            num_heads=8,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )


class Contender:
    def __init__(self, name, comm):
        self.name = name
        self.model = make_model()
        if name == "torch":
            for module in self.model.modules():
                if isinstance(module, T5Block):
                    torch_fully_shard(module)
            torch_fully_shard(self.model)
        else:
            self.model = fullshard.fully_shard(self.model, comm)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.times, self.losses = [], []

    def step(self, source, target):
        loss = self.model(input_ids=source, labels=target).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def measure(name, comm, source, target, device):
    """Peak of one whole step after two warm ones, alone in the process: parameters and optimizer state included."""
    contender = Contender(name, comm)
    for _ in range(2):
        contender.step(source, target)
    with MemoryMeter(device) as meter:
        contender.step(source, target)
    result = {"peak_bytes": meter.peak_bytes, "before_step_bytes": meter.start_bytes}
    del contender
    gc.collect()
    return result


def rank_main(args):
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    comm = RecordingComm(init_from_env())
    generator = torch.Generator().manual_seed(100 + comm.rank)
    source = torch.randint(2, 32000, (BATCH, SOURCE), generator=generator)
    target = torch.randint(2, 32000, (BATCH, TARGET), generator=generator)
    names = ("torch", "fullshard")
    memory = {name: measure(name, comm, source, target, comm.device) for name in names}
    contenders = [Contender(name, comm) for name in names]
    for step in range(args.steps + 2):
        for contender in contenders:
            dist.barrier()
            start = time.perf_counter()
            loss = contender.step(source, target)
            if step >= 2:
                contender.times.append(time.perf_counter() - start)
            contender.losses.append(loss)
    everyone = comm.all_gather_object(memory)
    if comm.rank == 0:
        report(args, contenders, everyone)
    shutdown()


def report(args, contenders, everyone):
    torch_one, ours = contenders
    peaks = {name: max(m[name]["peak_bytes"] for m in everyone) for name in everyone[0]}
    result = {
        "command": "python " + " ".join(sys.argv),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "model": "T5, t5-small shapes, fp32, AdamW, 2 gloo ranks, batch 4x128/48",
        "peak_tensor_bytes_per_rank": peaks,
        "peak_ratio": round(peaks["fullshard"] / peaks["torch"], 4),
        "per_rank": everyone,
        "step_seconds_median": {c.name: round(statistics.median(c.times), 4) for c in contenders},
        "step_seconds_min": {c.name: round(min(c.times), 4) for c in contenders},
        "step_ratio_median": round(statistics.median(ours.times) / statistics.median(torch_one.times), 4),
        "step_ratio_min": round(min(ours.times) / min(torch_one.times), 4),
        "losses_agree_within": max(abs(a - b) for a, b in zip(ours.losses, torch_one.losses, strict=True)),
    }
    print(json.dumps(result, indent=2))
    if args.out:
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        Path(args.out).write_text(json.dumps(result, indent=2) + "\n")


def launch():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, *sys.argv], env=env | {"RANK": str(r), "LOCAL_RANK": str(r)})
        for r in range(2)
    ]
    return max(rank.wait() for rank in ranks)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6, help="timed steps of each engine")
    parser.add_argument("--out", default="benchmarks/results/memory_t5_small.json", help="where to write the result")
    args = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(args)
        return 0
    return launch()


if __name__ == "__main__":
    sys.exit(main())
