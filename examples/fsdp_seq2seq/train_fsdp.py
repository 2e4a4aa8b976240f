"""Fine-tune a T5 with FullyShardedDataParallel: fullshard's, or torch's own under the same names.

Example:
    torchrun --nproc_per_node 2 train_fsdp.py --engine fullshard --model t5-base --table data/wikihowAll.csv
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from data import Collate, read_rows
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.models.t5.modeling_t5 import T5Block

PACKAGES = {"fullshard": "fullshard.compat.torch_fsdp", "torch": "torch.distributed.fsdp"}
CHECKPOINT_WRAPPER = {
    "fullshard": "fullshard.compat.torch_fsdp",
    "torch": "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Sharding:
    """The names of one implementation of FSDP, and the model wrapped with them."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        """Import the implementation that ``--engine`` names."""
        self.options = options
        self.device = device
        self.fsdp = importlib.import_module(PACKAGES[options.engine])
        self.wrapping = importlib.import_module(PACKAGES[options.engine] + ".wrap")
        self.checkpointing = importlib.import_module(CHECKPOINT_WRAPPER[options.engine])

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that every wrapper of the model gets."""
        return {
            "sharding_strategy": self.fsdp.ShardingStrategy[self.options.strategy],
            "backward_prefetch": self.fsdp.BackwardPrefetch[self.options.prefetch],
            "mixed_precision": self.precision(),
            "device_id": self.device,
        }

    def precision(self) -> Any:
        """Return the mixed precision policy, or None for float32 throughout."""
        mixed = self.fsdp.MixedPrecision
        if self.options.precision == "fp32":
            return None
        if self.options.precision == "bf16-reduce":  # compute in float32, send gradients in bfloat16
            return mixed(reduce_dtype=torch.bfloat16)
        dtype = DTYPES[self.options.precision]
        return mixed(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype)

    def wrap(self, model: torch.nn.Module) -> Any:
        """Return the model with every T5Block and the rest of it as FSDP units."""
        if self.options.wrap == "manual":
            with self.wrapping.enable_wrap(wrapper_cls=self.fsdp.FullyShardedDataParallel, **self.arguments()):
                for blocks in (model.encoder.block, model.decoder.block):
                    for i, block in enumerate(blocks):
                        blocks[i] = self.wrapping.wrap(block)
                model = self.wrapping.wrap(model)
        else:
            policy = functools.partial(self.wrapping.transformer_auto_wrap_policy, transformer_layer_cls={T5Block})
            model = self.fsdp.FullyShardedDataParallel(model, auto_wrap_policy=policy, **self.arguments())
        if self.options.checkpoint_activations:
            self.checkpointing.apply_activation_checkpointing(
                model,
                checkpoint_wrapper_fn=functools.partial(
                    self.checkpointing.checkpoint_wrapper,
                    checkpoint_impl=self.checkpointing.CheckpointImpl.NO_REENTRANT,
                ),
                check_fn=lambda module: isinstance(module, T5Block),
            )
        return model

    def scaler(self) -> Any:
        """Return the gradient scaler, which does nothing unless gradients are float16."""
        module = importlib.import_module(PACKAGES[self.options.engine] + ".sharded_grad_scaler")
        return module.ShardedGradScaler(self.device.type, enabled=self.options.precision == "fp16")

    def save(self, model: Any, path: Path) -> None:
        """Write the full state dict, gathered on rank 0; every rank calls this."""
        fsdp = self.fsdp
        # torch's FSDP reads freed memory if it offloads a model that is on the CPU already.
        offload = self.options.engine == "fullshard" or self.device.type != "cpu"
        settings = fsdp.FullStateDictConfig(offload_to_cpu=offload, rank0_only=True)
        with fsdp.FullyShardedDataParallel.state_dict_type(model, fsdp.StateDictType.FULL_STATE_DICT, settings):
            state = model.state_dict()
        if dist.get_rank() == 0:
            torch.save(state, path)


class Trainer:
    """A sharded model with its optimizer, learning rate schedule and data."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        """Load the model and the rows, shard the model, then build the optimizer over the shards."""
        self.device = device
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        collate = Collate(tokenizer, options.source_tokens, options.target_tokens)
        self.loaders = {}
        for split, batch_size in (("train", options.batch_size), ("validation", options.eval_batch_size)):
            rows = read_rows(options.table, split, options.rows)
            sampler = DistributedSampler(rows, shuffle=split == "train", seed=options.seed)
            self.loaders[split] = DataLoader(rows, batch_size=batch_size, sampler=sampler, collate_fn=collate)
        self.sharding = Sharding(options, device)
        self.model = self.sharding.wrap(AutoModelForSeq2SeqLM.from_pretrained(options.model))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.lr)
        self.scheduler = StepLR(self.optimizer, step_size=1, gamma=options.gamma)
        self.scaler = self.sharding.scaler()

    def train(self, epoch: int) -> float:
        """Return the mean loss of a target token over one pass through the training rows."""
        self.model.train()
        self.loaders["train"].sampler.set_epoch(epoch)
        mean = self.run("train", self.step)
        self.scheduler.step()
        return mean

    @torch.no_grad()
    def validate(self) -> float:
        """Return the mean loss of a target token over the held-out rows."""
        self.model.eval()
        return self.run("validation", lambda loss: None)

    def step(self, loss: torch.Tensor) -> None:
        """Update the model by one batch's loss."""
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        self.model.clip_grad_norm_(1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def run(self, split: str, then: Any) -> float:
        """Return the mean loss over all ranks' batches of ``split``; call ``then`` with each batch's loss."""
        total = torch.zeros(2, device=self.device)
        for batch in self.loaders[split]:
            batch = {name: tensor.to(self.device) for name, tensor in batch.items()}
            loss = self.model(**batch, use_cache=False).loss  # a cache is not recomputed with the activations
            then(loss)
            tokens = (batch["labels"] != -100).sum()
            total += torch.stack([loss.detach().float() * tokens, tokens])
        dist.all_reduce(total)
        return (total[0] / total[1]).item()


def main() -> None:
    """Train; save the model of every epoch whose validation loss is the lowest so far."""
    options = parse()
    torch.manual_seed(options.seed)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        report = print if dist.get_rank() == 0 else lambda *_: None
        trainer, best = Trainer(options, device), float("inf")
        report(trainer.model)
        for epoch in range(1, options.epochs + 1):
            start = time.perf_counter()
            line = f"epoch {epoch}: training loss {trainer.train(epoch):.6f}"
            if options.validate:
                loss = trainer.validate()
                line += f", validation loss {loss:.6f}"
            seconds = time.perf_counter() - start
            peak = f", at most {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB" if on_gpu else ""
            report(f"{line}, {seconds:.1f} s{peak}")
            if options.validate and options.save and loss < best:
                best = loss
                trainer.sharding.save(trainer.model, Path(options.output))
                report(f"saved to {options.output}")
    finally:
        dist.destroy_process_group()


def parse() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description="Fine-tune a T5 on WikiHow with FSDP.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--engine", choices=sorted(PACKAGES), default="fullshard", help="whose FullyShardedDataParallel")
    add("--model", default="t5-base", help="name or directory of a T5 with its tokenizer")
    add("--table", default="data/wikihowAll.csv", help="WikiHow's CSV file")
    add("--rows", type=int, default=None, help="at most this many rows of each split")
    add("--source-tokens", type=int, default=512, help="longest article, in tokens")
    add("--target-tokens", type=int, default=150, help="longest summary, in tokens")
    add("--batch-size", type=int, default=4, help="rows per rank and training step")
    add("--eval-batch-size", type=int, default=4, help="rows per rank and validation step")
    add("--epochs", type=int, default=2, help="passes over the training rows")
    add("--lr", type=float, default=2e-3, help="learning rate")
    add("--gamma", type=float, default=0.7, help="factor of the learning rate after each epoch")
    add("--seed", type=int, default=1, help="seed of the order of rows and of dropout")
    add("--precision", choices=["fp32", "bf16", "bf16-reduce", "fp16"], default="fp32", help="of parameters and sums")
    add("--strategy", default="FULL_SHARD", help="name of a ShardingStrategy, such as SHARD_GRAD_OP")
    add("--prefetch", choices=["BACKWARD_PRE", "BACKWARD_POST"], default="BACKWARD_PRE", help="in backward")
    add("--wrap", choices=["auto", "manual"], default="auto", help="by a policy, or block by block")
    add("--checkpoint-activations", action="store_true", help="recompute each block's activations in backward")
    add("--validate", action=argparse.BooleanOptionalAction, default=True, help="after each epoch")
    add("--save", action=argparse.BooleanOptionalAction, default=True, help="keep the best model's state dict")
    add("--output", default="best.pt", help="where the state dict is written")
    return parser.parse_args()


if __name__ == "__main__":
    main()
