"""Memory of a T5 with and without LoRA: unsharded, and through ``fullshard.compat.accelerate`` on two gloo ranks.

    python benchmarks/accelerate_lora.py [--out PATH] [--small]

The model has t5-small's shapes and random weights; each rank trains on 8 rows of 64 tokens in fp32 with AdamW. LoRA
(r 8) uses PEFT's wrap policy, full training makes a unit of each T5Block. Reported are a rank's tensor bytes after
three steps, and the peak of the third, counted by the allocator. On the CPU, offloaded shards are in the same memory as
the rest; on a GPU the device would hold the peak less parameters, gradients and optimizer state. Without --small and
--out the result is written to benchmarks/results/accelerate_lora.json.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, TaskType, get_peft_model
from peft.utils.other import fsdp_auto_wrap_policy
from ranks import on_two_ranks, quiet
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

from fullshard.compat.accelerate import Accelerator, FullyShardedDataParallelPlugin
from fullshard.core.comm import MemoryMeter

LATEST = Path(__file__).parent / "results" / "accelerate_lora.json"
SHAPES = {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8, "vocab_size": 32128}
SMALL = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 1000}
TIMEOUT_S = 500.0


def make_model(shapes: dict[str, int], *, lora: bool) -> nn.Module:
    """Return a T5 with these shapes, with a LoRA adapter if ``lora``."""
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(**shapes, decoder_start_token_id=0))
    if not lora:
        return model
    return get_peft_model(model, LoraConfig(task_type=TaskType.SEQ_2_SEQ_LM, r=8, lora_alpha=32, lora_dropout=0.1))


def measured(model: nn.Module, optimizer: Any) -> dict[str, int]:
    """Run three steps; return the bytes held after them and the peak of the third."""
    inner = getattr(optimizer, "optimizer", optimizer)
    tokens = torch.arange(8 * 64).view(8, 64) % 900 + 3

    def step() -> None:
        labels = tokens[:, :4].contiguous()
        model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    with MemoryMeter(torch.device("cpu")) as meter:
        step()
    trainable = [param for param in model.parameters() if param.requires_grad]
    return {
        "parameters": sum(param.nbytes for param in model.parameters()),
        "gradients": sum(param.nbytes for param in trainable),
        "optimizer": sum(value.nbytes for state in inner.state.values() for value in state.values()),
        "step_peak": meter.peak_bytes,
    }


def unsharded(_comm: Any, shapes: dict[str, int], lora: bool) -> dict[str, int]:
    """Run the steps without sharding, as each of the two ranks would alone."""
    model = make_model(shapes, lora=lora)
    return measured(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3))


def sharded(_comm: Any, shapes: dict[str, int], lora: bool, offload: bool) -> dict[str, int]:
    """Run the steps on a model and an optimizer that ``Accelerator.prepare`` shards."""
    accelerator = Accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(
            auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["T5Block"], cpu_offload=offload
        )
    )
    model = make_model(shapes, lora=lora)
    if lora:
        accelerator.state.fsdp_plugin.auto_wrap_policy = fsdp_auto_wrap_policy(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    return measured(*accelerator.prepare(model, optimizer))


def main() -> None:
    """Measure the six combinations, print a table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    quiet()
    shapes = SMALL if options.small else SHAPES
    found = {}
    for lora in (True, False):
        name = "LoRA" if lora else "full"
        found[f"{name}, unsharded"] = on_two_ranks(unsharded, shapes, lora, timeout_s=TIMEOUT_S)[0]
        for offload in (False, True):
            ranks = on_two_ranks(sharded, shapes, lora, offload, timeout_s=TIMEOUT_S)
            label = f"{name}, 2 ranks{', CPU offload' if offload else ''}"
            found[label] = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
    for label, figures in found.items():
        print(f"{label:28}", *(f"{key} {value / 1e6:8.1f} MB" for key, value in figures.items()), sep="  ")
    out = options.out or (None if options.small else LATEST)
    if out is not None:
        out.write_text(json.dumps({"torch": torch.__version__, "shapes": shapes, "bytes": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
