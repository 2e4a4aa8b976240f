"""Train under Ray Train: its TorchTrainer starts the ranks and makes their process group, which fullshard joins.

Checkpoints are fullshard's own, in a directory that all machines see: after a failure, or when the program is started
again, training resumes from the newest one.

Run here with ray 2.60.0, on one machine without GPUs (tests/dist/launch/test_ray_train.py); not on several machines.

Example:
    pip install "ray[train]"
    python deploy/ray_train.py --workers 8 --gpu --storage /shared/ray
"""

from __future__ import annotations

import argparse
from pathlib import Path

import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from transformers import T5Config, T5ForConditionalGeneration

import fullshard


def train_rank(settings: dict) -> None:
    """Train as one rank; replace model and batches with yours."""
    comm = fullshard.init()  # the group that Ray made
    torch.manual_seed(0)  # every rank makes the same model
    shape = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(**shape, dropout_rate=0.0, decoder_start_token_id=0)).to(comm.device)
    model = fullshard.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with fullshard.Checkpoints(Path(settings["storage"], "checkpoints"), keep_last=2) as checkpoints:
        restored = checkpoints.load(model, optimizer)
        for step in range(restored.step + 1 if restored else 1, settings["steps"] + 1):
            rows = torch.randint(2, 64, (settings["batch_size"], 8), generator=torch.Generator().manual_seed(step))
            ids = rows.chunk(comm.size)[comm.rank].to(comm.device)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpoints.save(model, optimizer, step=step)
            mean = loss.detach() / comm.size
            comm.all_reduce(mean).wait()
            ray.train.report({"step": step, "loss": mean.item()})
            if comm.rank == 0:
                print(f"step {step}: loss {mean.item():.6f}", flush=True)


def main() -> None:
    """Start the ranks; rank 0 prints each step's loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="ranks, on all machines together")
    parser.add_argument("--gpu", action="store_true", help="a GPU for each rank")
    parser.add_argument("--storage", type=Path, required=True, help="directory that all machines see")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch_size", type=int, default=8, help="rows of a step, over all ranks")
    options = parser.parse_args()
    storage = str(options.storage.resolve())
    TorchTrainer(
        train_rank,
        train_loop_config={"storage": storage, "steps": options.steps, "batch_size": options.batch_size},
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        run_config=RunConfig(storage_path=storage, failure_config=FailureConfig(max_failures=3)),
    ).fit()


if __name__ == "__main__":
    main()
