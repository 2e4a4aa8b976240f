"""The rivals of stage ``headline``: Hugging Face's Trainer with FSDP2, and a loop on FSDP2. Run as a process each."""

import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from benchmarks.gpu.headline import WARM

RATE = 5e-5
RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


class Clock(TrainerCallback):
    """Notes the end of each step, with the work that was issued done."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def tick(self) -> None:
        """Note the end of a step."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.time())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the end of a step of the Trainer."""
        self.tick()


def main() -> None:
    """Train as the argument says, and print the figures after ``RESULT``."""
    given = json.loads(sys.argv[1])
    folder, task = Path(given["folder"]), given["task"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    causal = not AutoConfig.from_pretrained(folder).is_encoder_decoder
    ids = [_ids(tokenizer, row, causal=causal) for row in rows]
    dtype = torch.float32 if not task["lora"] else torch.bfloat16
    kind: Any = AutoModelForCausalLM if causal else AutoModelForSeq2SeqLM
    model = kind.from_pretrained(folder, dtype=dtype)
    collate = DataCollatorForSeq2Seq(tokenizer, model=model)
    if task["lora"]:
        from peft import LoraConfig, get_peft_model  # noqa: PLC0415 (only for LoRA)

        model = get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    clock = Clock()
    if given["contender"].startswith("Trainer"):
        order = _by_trainer(model, ids, collate, clock, given, causal=causal)
    else:
        order = _by_loop(model, ids, collate, clock, given)
    timed = clock.ends[WARM:]
    tokens = [sum(len(ids[i]["input_ids"]) + (0 if causal else len(ids[i]["labels"])) for i in step) for step in order]
    print(
        "RESULT "
        + json.dumps(
            {
                "tokens_per_s": round(sum(tokens[WARM : len(clock.ends)]) / (timed[-1] - clock.ends[WARM - 1]), 1),
                "reserved_bytes": torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0,
                "first_step_at": clock.ends[0],
            }
        )
    )


def _ids(tokenizer: Any, row: dict[str, str], *, causal: bool) -> dict[str, list[int]]:
    end = [tokenizer.eos_token_id]
    source, target = (tokenizer(row[name], add_special_tokens=False).input_ids for name in ("source", "target"))
    if causal:
        return {"input_ids": source + target + end, "labels": [-100] * len(source) + target + end}
    return {"input_ids": source + end, "labels": target + end}


def _by_trainer(
    model: Any, ids: list[Any], collate: Any, clock: Clock, given: dict[str, Any], *, causal: bool
) -> list[Sequence[int]]:
    """Train with Hugging Face's Trainer and FSDP2; return the rows of each step."""
    os.environ |= RANK | {"MASTER_PORT": str(_free_port())}
    cuda = torch.cuda.is_available()
    settings: Any = TrainingArguments if causal else Seq2SeqTrainingArguments
    arguments = settings(
        output_dir=str(Path(given["folder"], "trainer")),
        per_device_train_batch_size=given["batch"],
        max_steps=given["task"]["steps"],
        learning_rate=RATE,
        bf16=cuda,
        use_cpu=not cuda,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        fsdp="full_shard auto_wrap",
        fsdp_config={"fsdp_version": 2, "transformer_layer_cls_to_wrap": [given["block"]]},
    )
    trainer: Any = Trainer if causal else Seq2SeqTrainer
    trained = trainer(model=model, args=arguments, train_dataset=ids, data_collator=collate, callbacks=[clock])
    sampled = list(trained._get_train_sampler(ids))
    trained.train()
    return [sampled[i : i + given["batch"]] for i in range(0, len(sampled), given["batch"])]


def _by_loop(model: Any, ids: list[Any], collate: Any, clock: Clock, given: dict[str, Any]) -> list[Sequence[int]]:
    """Train in a plain loop on FSDP2 with the ways, rows of similar length together; return the rows of each step."""
    from fullshard.program.speed import WAYS, Facts, apply_ways  # noqa: PLC0415

    os.environ |= RANK | {"MASTER_PORT": str(_free_port())}
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    torch.distributed.init_process_group("nccl" if cuda else "gloo")
    facts = Facts(device, torch.bfloat16, packing=False, longest=max(len(row["input_ids"]) for row in ids))
    ways = [name for name in given["task"]["ways"] if name in WAYS and WAYS[name].misfit(model, facts) is None]
    apply_ways(model, ways, facts)
    model.to(device).train()
    policy = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if cuda else {}
    for module in model.modules():
        if type(module).__name__ == given["block"]:
            fully_shard(module, **policy)
    fully_shard(model, **policy)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE, fused=cuda)
    by_length = sorted(range(len(ids)), key=lambda i: -len(ids[i]["input_ids"]))
    order = [by_length[i : i + given["batch"]] for i in range(0, len(ids), given["batch"])][: given["task"]["steps"]]
    for step in order:
        batch = {name: value.to(device) for name, value in collate([dict(ids[i]) for i in step]).items()}
        model(**batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.tick()
    torch.distributed.destroy_process_group()
    return order


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


if __name__ == "__main__":
    main()
