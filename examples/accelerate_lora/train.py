"""Train a LoRA adapter, or all of a T5, to write a sentence's label, with Accelerate's API on fullshard's engine.

Example:
    fullshard launch --config_file fsdp_config.yaml train.py --train sentences.jsonl --held-out more_sentences.jsonl
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, TaskType, get_peft_model
from peft.utils.other import fsdp_auto_wrap_policy
from torch.utils.data import DataLoader
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, get_linear_schedule_with_warmup

from fullshard.compat.accelerate import Accelerator

SOURCE_TOKENS, LABEL_TOKENS = 64, 4


def encode(tokenizer: Any, path: Path) -> list[dict[str, torch.Tensor]]:
    """Return the rows of a JSONL file (``sentence`` and ``label``) as int64 tensors of fixed lengths.

    Equal lengths let ``gather_for_metrics`` join the batches of all ranks. Labels of padding are -100.
    """
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    fixed = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
    sources = tokenizer([row["sentence"] for row in rows], max_length=SOURCE_TOKENS, **fixed)
    targets = tokenizer([row["label"] for row in rows], max_length=LABEL_TOKENS, **fixed)
    labels = targets["input_ids"].masked_fill(targets["attention_mask"] == 0, -100)
    columns = {"input_ids": sources["input_ids"], "attention_mask": sources["attention_mask"], "labels": labels}
    return [{name: column[i] for name, column in columns.items()} for i in range(len(rows))]


class Run:
    """A model prepared by Accelerate, with its optimizer, schedule and data."""

    def __init__(self, options: argparse.Namespace, accelerator: Accelerator) -> None:
        """Load the model, add the adapter, read the data and prepare everything."""
        self.accelerator = accelerator
        self.tokenizer = AutoTokenizer.from_pretrained(options.model)
        model = AutoModelForSeq2SeqLM.from_pretrained(options.model)
        if not options.full:
            model = get_peft_model(
                model, LoraConfig(TaskType.SEQ_2_SEQ_LM, r=options.rank, lora_alpha=32, lora_dropout=0.1)
            )
            plugin = getattr(accelerator.state, "fsdp_plugin", None)
            if plugin is not None:  # the adapter's layers become units of their own, so that only they are reduced
                plugin.auto_wrap_policy = fsdp_auto_wrap_policy(model)
        with accelerator.main_process_first():
            train, held_out = (encode(self.tokenizer, path) for path in (options.train, options.held_out))
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
        steps = -(-len(train) // options.batch_size) * options.epochs
        self.model, self.optimizer, self.scheduler, self.train_loader, self.eval_loader = accelerator.prepare(
            model,
            optimizer,
            get_linear_schedule_with_warmup(optimizer, 0, steps),
            DataLoader(train, batch_size=options.batch_size, shuffle=True),
            DataLoader(held_out, batch_size=options.batch_size),
        )

    def train(self) -> float:
        """Train on every row once; return the mean loss of this rank's batches."""
        self.model.train()
        losses = []
        for batch in self.train_loader:
            loss = self.model(**batch).loss
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(loss.detach().float())
        return torch.stack(losses).mean().item()

    @torch.no_grad()
    def evaluate(self) -> tuple[float, Counter[tuple[str, str]]]:
        """Return the accuracy over the held-out rows, and how often each (label, prediction) occurred.

        A prediction is the most likely token at each position, given the label's tokens before it.
        """
        self.model.eval()
        pairs: Counter[tuple[str, str]] = Counter()
        for batch in self.eval_loader:
            predicted = self.model(**batch).logits.argmax(-1)
            predicted = predicted.masked_fill(batch["labels"] == -100, self.tokenizer.pad_token_id)
            labels = batch["labels"].masked_fill(batch["labels"] == -100, self.tokenizer.pad_token_id)
            both = self.accelerator.gather_for_metrics((labels, predicted))
            texts = (self.tokenizer.batch_decode(ids, skip_special_tokens=True) for ids in both)
            pairs.update(zip(*texts, strict=True))
        right = sum(count for (label, found), count in pairs.items() if label == found)
        return right / pairs.total(), pairs

    def save(self, directory: Path) -> None:
        """Write the adapter, or the full model, for ``from_pretrained``; every rank calls this."""
        self.accelerator.wait_for_everyone()
        self.accelerator.unwrap_model(self.model).save_pretrained(
            directory,
            is_main_process=self.accelerator.is_main_process,
            save_function=self.accelerator.save,
            state_dict=self.accelerator.get_state_dict(self.model),
        )


def main() -> None:
    """Train, evaluate after each epoch, save."""
    options = parse()
    accelerator = Accelerator()
    torch.manual_seed(options.seed)
    run = Run(options, accelerator)
    accelerator.print(run.model)
    for epoch in range(1, options.epochs + 1):
        loss = run.train()
        accuracy, pairs = run.evaluate()
        accelerator.print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.2%}")
        for (label, found), count in sorted(pairs.items()):
            accelerator.print(f"{count:6} {label!r} predicted as {found!r}")
    run.save(options.output)
    accelerator.end_training()


def parse() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description="Train a T5 to label sentences, sharded.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", default="t5-base", help="name or directory of a T5 with its tokenizer")
    parser.add_argument("--train", type=Path, required=True, help="JSONL file with sentence and label")
    parser.add_argument("--held-out", type=Path, required=True, help="JSONL file to evaluate on")
    parser.add_argument(
        "--output", type=Path, default=Path("trained"), help="directory of the trained adapter or model"
    )
    parser.add_argument("--full", action="store_true", help="train all of the model instead of an adapter")
    parser.add_argument("--rank", type=int, default=8, help="rank of the adapter's matrices")
    parser.add_argument("--batch-size", type=int, default=8, help="rows per process and step")
    parser.add_argument("--epochs", type=int, default=1, help="passes over the training rows")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate at the first step")
    parser.add_argument("--seed", type=int, default=0, help="seed of the adapter and of the order of rows")
    return parser.parse_args()


if __name__ == "__main__":
    main()
