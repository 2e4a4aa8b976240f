"""Fine-tune a T5 with fullshard's own functions: weights read in shards, losses exact over all ranks.

Example:
    torchrun --nproc_per_node 2 train_native.py --model t5-base --table data/wikihowAll.csv
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
import torch.distributed as dist
from data import Collate, Row, read_rows
from torch.nn import functional
from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Block

import fullshard
from fullshard import MixedPrecision, TransformerBlocks, fully_shard


def shares(rows: list[Row], batch_size: int) -> Iterator[list[Row]]:
    """Yield this rank's rows of each global batch: every row once, and equally many batches on every rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for start in range(0, len(rows), batch_size * world_size):
        first = start + rank * batch_size
        yield rows[first : min(first + batch_size, start + batch_size * world_size)]


def loss_sum(model, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss summed over this rank's target tokens, and the number of target tokens on all ranks."""
    logits = model(**batch).logits
    total = functional.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten(), reduction="sum")
    tokens = (batch["labels"] != -100).sum()
    dist.all_reduce(tokens)
    return total, tokens


def mean_loss(model, collate: Collate, rows: list[Row], options, optimizer=None) -> float:
    """Return the mean loss of a target token over one pass; with an optimizer, train on each batch."""
    sums = torch.zeros(2, device=options.device)
    for share in shares(rows, options.batch_size):
        batch = {name: tensor.to(options.device) for name, tensor in collate(share).items()}
        total, tokens = loss_sum(model, batch)
        if optimizer is not None:
            # The engine averages gradients over ranks: this factor makes it the mean over all target tokens.
            (total * dist.get_world_size() / tokens).backward()
            fullshard.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        sums += torch.stack([total.detach(), tokens / dist.get_world_size()])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main() -> None:
    """Train; keep the model with the lowest validation loss."""
    options = parse()
    torch.manual_seed(options.seed)
    train_rows, held_out = (read_rows(options.table, split, options.rows) for split in ("train", "validation"))
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    collate = Collate(tokenizer)
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
    report = print if dist.get_rank() == 0 else lambda *_: None
    report(fullshard.units(model))
    best = float("inf")
    for epoch in range(1, options.epochs + 1):
        generator = torch.Generator().manual_seed(options.seed + epoch)
        order = torch.randperm(len(train_rows), generator=generator).tolist()
        train_loss = mean_loss(model.train(), collate, [train_rows[i] for i in order], options, optimizer)
        with torch.no_grad():
            loss = mean_loss(model.eval(), collate, held_out, options)
        scheduler.step()
        report(f"epoch {epoch}: training loss {train_loss:.4f}, validation loss {loss:.4f}")
        report(f"memory: {fullshard.memory_summary(model)}")
        if loss < best:
            best = loss
            fullshard.save(model, options.output, tokenizer=tokenizer)  # streamed through rank 0
            report(f"saved to {options.output}")
    fullshard.shutdown()


def parse() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description="Fine-tune a T5 on WikiHow, sharded.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", default="t5-base", help="directory of a T5 with its tokenizer")
    parser.add_argument("--table", default="data/wikihowAll.csv", help="WikiHow's CSV file")
    parser.add_argument("--output", default="best", help="directory of the best model, for from_pretrained")
    parser.add_argument("--rows", type=int, default=None, help="at most this many rows of each split")
    parser.add_argument("--batch-size", type=int, default=4, help="rows per rank and step")
    parser.add_argument("--epochs", type=int, default=2, help="passes over the training rows")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate")
    parser.add_argument("--gamma", type=float, default=0.7, help="factor of the learning rate after each epoch")
    parser.add_argument("--seed", type=int, default=1, help="seed of the order of rows and of dropout")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    return parser.parse_args()


if __name__ == "__main__":
    main()
