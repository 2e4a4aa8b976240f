"""The tutorial's program on fullshard's own names, without its mistakes (README.md names them).

Example:
    torchrun --nproc_per_node 2 train_t5.py --model t5-base --data data
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import torch
import torch.distributed as dist
from summarization_dataset import Rows, load_dataset
from torch.nn import functional
from tqdm import tqdm
from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Block

import fullshard
from fullshard import MixedPrecision, TransformerBlocks, fully_shard
from fullshard.data import Example

SOURCE_TOKENS, TARGET_TOKENS = 512, 150


def shares(rows: list[Example], batch_size: int) -> Iterator[list[Example]]:
    """This rank's rows of each batch over all ranks: every row once, and the same number of batches everywhere."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for start in range(0, len(rows), batch_size * world_size):
        first = start + rank * batch_size
        yield rows[first : min(first + batch_size, start + batch_size * world_size)]


def encode(tokenizer, rows: list[Example], device: torch.device) -> dict[str, torch.Tensor]:
    """A batch padded to its longest row; labels of padding are -100, so that no loss is taken on it."""
    sources = [row.source for row in rows] or [""]  # a rank without rows takes part, with nothing to learn
    targets = [row.target for row in rows] or [""]
    batch = tokenizer(sources, max_length=SOURCE_TOKENS, truncation=True, padding=True, return_tensors="pt")
    found = tokenizer(targets, max_length=TARGET_TOKENS, truncation=True, padding=True, return_tensors="pt")
    learnt = found["attention_mask"].bool() if rows else torch.zeros_like(found["input_ids"], dtype=torch.bool)
    batch["labels"] = found["input_ids"].masked_fill(~learnt, -100)
    return {name: tensor.to(device) for name, tensor in batch.items()}


def loss_sum(model, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss summed over this rank's target tokens, and how many there are on all ranks."""
    logits = model(**batch).logits
    total = functional.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten(), reduction="sum")
    tokens = (batch["labels"] != -100).sum()
    dist.all_reduce(tokens)
    return total, tokens


def train_epoch(model, tokenizer, optimizer, rows: list[Example], options, epoch: int) -> float:
    """One pass over the rows in an order of its own; returns the mean loss of a target token."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(options.seed + epoch)).tolist()
    model.train()
    sums = torch.zeros(2, device=options.device)
    batches = list(shares([rows[i] for i in order], options.batch_size))
    for share in tqdm(batches, desc=f"epoch {epoch}", disable=dist.get_rank() != 0):
        total, tokens = loss_sum(model, encode(tokenizer, share, options.device))
        # The engine takes the mean over ranks: with this factor it is the mean over all target tokens.
        (total * dist.get_world_size() / tokens).backward()
        fullshard.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        sums += torch.stack([total.detach(), tokens / dist.get_world_size()])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


@torch.no_grad()
def validate(model, tokenizer, rows: list[Example], options) -> float:
    """The mean loss of a target token over the held-out rows."""
    model.eval()
    sums = torch.zeros(2, device=options.device)
    for share in shares(rows, options.batch_size):
        total, tokens = loss_sum(model, encode(tokenizer, share, options.device))
        sums += torch.stack([total, tokens / dist.get_world_size()])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main() -> None:
    """Train, keep the best model."""
    options = parse()
    torch.manual_seed(options.seed)
    data: dict[str, Rows] = load_dataset("wikihow", "all", data_dir=options.data)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    options.device = fullshard.init().device
    with torch.device("meta"):
        model = T5ForConditionalGeneration(T5Config.from_pretrained(options.model))
    model = fully_shard(
        model,
        wrap=TransformerBlocks({T5Block}),
        mp_policy=MixedPrecision(param=torch.bfloat16, reduce=torch.float32) if options.bf16 else None,
        weights=fullshard.Pretrained(options.model),  # each rank reads its own rows
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=options.gamma)
    started, best = datetime.now().strftime("%Y-%m-%d-%H%M%S"), float("inf")
    say = print if dist.get_rank() == 0 else lambda *_: None
    say(fullshard.units(model))
    for epoch in range(1, options.epochs + 1):
        train_loss = train_epoch(model, tokenizer, optimizer, data["train"][: options.rows], options, epoch)
        held_out = validate(model, tokenizer, data["validation"][: options.rows], options)
        scheduler.step()
        say(f"epoch {epoch}: loss {train_loss:.4f}, held-out loss {held_out:.4f}, {fullshard.memory_summary(model)}")
        if held_out < best:
            best = held_out
            directory = Path(options.output, f"T5-model-{started}-{epoch}-{held_out:.4f}")
            fullshard.save(model, directory, tokenizer=tokenizer)  # streamed through rank 0, for from_pretrained
            say(f"best so far: saved to {directory}")
    fullshard.shutdown()


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Fine-tune a T5 on WikiHow, sharded.")
    parser.add_argument("--model", default="t5-base", help="directory with a T5 and its tokenizer")
    parser.add_argument("--data", default="data", help="directory with wikihowAll.csv")
    parser.add_argument("--output", default=".", help="where the best models go")
    parser.add_argument("--rows", type=int, help="use so many rows of each split at most (default: all)")
    parser.add_argument("--batch-size", type=int, default=4, help="rows of a batch on each rank (default: 4)")
    parser.add_argument("--epochs", type=int, default=2, help="passes over the rows (default: 2)")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate (default: 0.002)")
    parser.add_argument("--gamma", type=float, default=0.7, help="factor of the rate after each epoch (default: 0.7)")
    parser.add_argument("--seed", type=int, default=1, help="of the order of rows and of dropout (default: 1)")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    return parser.parse_args()


if __name__ == "__main__":
    main()
