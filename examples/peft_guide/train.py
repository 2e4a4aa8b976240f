"""The program of PEFT's FSDP guide: a T5 learns the sentiment of FinancialPhraseBank's sentences, with LoRA or whole.

One line tells it from a program for Accelerate: the import of ``Accelerator``.

Example:
    fullshard launch --config_file fsdp_config.yaml train.py
"""

from __future__ import annotations

import argparse
import os

import torch
from datasets import load_dataset
from peft import LoraConfig, TaskType, get_peft_model
from peft.utils.other import fsdp_auto_wrap_policy
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, default_data_collator, get_linear_schedule_with_warmup

from fullshard.compat.accelerate import Accelerator  # the program for Accelerate: from accelerate import Accelerator

MAX_LENGTH, LABEL_LENGTH = 64, 4


def tokenized(dataset, tokenizer):
    """Ids of every row, padded to ``MAX_LENGTH``; padding of labels is -100."""

    def ids(rows):
        batch = tokenizer(rows["sentence"], max_length=MAX_LENGTH, padding="max_length", truncation=True)
        labels = tokenizer(rows["label"], max_length=LABEL_LENGTH, padding="max_length", truncation=True)["input_ids"]
        batch["labels"] = [[-100 if i == tokenizer.pad_token_id else i for i in row] for row in labels]
        return batch

    return dataset.map(ids, batched=True, remove_columns=dataset["train"].column_names, load_from_cache_file=False)


def train_epoch(model, loader, optimizer, scheduler, *, shown: bool) -> float:
    """One pass over the training rows; returns the mean of the batches' losses."""
    model.train()
    total = torch.zeros(())
    for batch in tqdm(loader, disable=not shown):
        loss = model(**batch).loss
        total += loss.detach().float().cpu()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return (total / len(loader)).item()


@torch.no_grad()
def predict(accelerator, model, loader, tokenizer) -> list[str]:
    """The likeliest label of each held-out row, on every rank: each token given those before it."""
    model.eval()
    texts: list[str] = []
    for batch in loader:
        likeliest = accelerator.gather_for_metrics(torch.argmax(model(**batch).logits, -1))
        texts += tokenizer.batch_decode(likeliest.cpu().numpy(), skip_special_tokens=True)
    return texts


def main() -> None:
    """Train, measure, save."""
    options = parse()
    accelerator = Accelerator()
    torch.manual_seed(options.seed)
    model = AutoModelForSeq2SeqLM.from_pretrained(options.model)
    if not options.full:
        lora = LoraConfig(task_type=TaskType.SEQ_2_SEQ_LM, inference_mode=False, r=8, lora_alpha=32, lora_dropout=0.1)
        model = get_peft_model(model, lora)
    files = {name: os.path.join(options.data, f"financial_phrase_bank_{name}.jsonl") for name in ("train", "val")}
    dataset = load_dataset("json", data_files=files)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    with accelerator.main_process_first():
        rows = tokenized(dataset, tokenizer)
    batches = {"collate_fn": default_data_collator, "batch_size": options.batch_size, "pin_memory": True}
    train_loader = DataLoader(rows["train"], shuffle=True, **batches)
    eval_loader = DataLoader(rows["val"], **batches)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    scheduler = get_linear_schedule_with_warmup(optimizer, 0, len(train_loader) * options.epochs)
    if getattr(accelerator.state, "fsdp_plugin", None) is not None and not options.full:
        accelerator.state.fsdp_plugin.auto_wrap_policy = fsdp_auto_wrap_policy(model)
    model, train_loader, eval_loader, optimizer, scheduler = accelerator.prepare(
        model, train_loader, eval_loader, optimizer, scheduler
    )
    accelerator.print(model)
    for epoch in range(options.epochs):
        loss = train_epoch(model, train_loader, optimizer, scheduler, shown=accelerator.is_local_main_process)
        found, wanted = predict(accelerator, model, eval_loader, tokenizer), list(dataset["val"]["label"])
        right = sum(one.strip() == other.strip() for one, other in zip(found, wanted, strict=True))
        accelerator.print(f"epoch {epoch}: loss {loss:.4f}, accuracy {100 * right / len(wanted):.2f} %")
        accelerator.print(f"predictions: {found[:10]}\nlabels:      {wanted[:10]}")
    accelerator.wait_for_everyone()
    model.save_pretrained(options.output)  # every rank calls it; the first one writes
    accelerator.end_training()


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Fine-tune a T5 on FinancialPhraseBank, sharded.")
    parser.add_argument("--model", default="t5-base", help="directory with a T5 and its tokenizer")
    parser.add_argument("--data", default="temp/data/FinancialPhraseBank-v1.0", help="directory with the .jsonl files")
    parser.add_argument("--output", default="phrasebank-t5", help="where the trained model or adapter goes")
    parser.add_argument("--full", action="store_true", help="train the whole model (default: LoRA)")
    parser.add_argument("--batch-size", type=int, default=8, help="rows of a batch on each rank (default: 8)")
    parser.add_argument("--epochs", type=int, default=1, help="passes over the rows (default: 1)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (default: 0.001)")
    parser.add_argument("--seed", type=int, default=0, help="of the adapter's first values (default: 0)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
