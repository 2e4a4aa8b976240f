"""Time and memory that it takes to plan large models over many ranks.

    python benchmarks/plan_scale.py [--out PATH]

Every plan runs in a process of its own: full training with fused AdamW, bf16, activation checkpointing, a batch of
1 x 4,096 tokens a rank (T5: 4 x 512, targets half as long), the fullest of three ranks. Models are made from their
configs on the meta device. Seconds are those of ``fullshard.plan``, bytes the largest resident memory of the process,
torch included.
"""

import argparse
import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

import fullshard
from fullshard import MixedPrecision

LATEST = Path(__file__).parent / "results" / "plan_scale.json"
WORLDS = (8, 64, 512, 4096)


def t5_11b() -> PreTrainedModel:
    """Return a T5-11B."""
    shape = {"d_model": 1024, "d_kv": 128, "d_ff": 65536, "num_heads": 128, "num_layers": 24}
    return T5ForConditionalGeneration(T5Config(**shape, decoder_start_token_id=0))


def llama_70b() -> PreTrainedModel:
    """Return a Llama-3-70B."""
    shape = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    return LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=8, vocab_size=128256))


def llama_405b() -> PreTrainedModel:
    """Return a Llama-3.1-405B."""
    shape = {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128}
    return LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=8, vocab_size=128256))


def mixture_1t() -> PreTrainedModel:
    """Return a mixture of 384 experts with 1.04 trillion parameters."""
    shape = {"hidden_size": 7168, "intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 64}
    experts = {"num_local_experts": 384, "num_experts_per_tok": 8}
    return MixtralForCausalLM(MixtralConfig(**shape, **experts, num_key_value_heads=8, vocab_size=163840))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "T5-11B": t5_11b,
    "Llama-70B": llama_70b,
    "Llama-405B": llama_405b,
    "mixture of experts, 1T": mixture_1t,
}


def planned(name: str, world_size: int) -> dict[str, Any]:
    """Plan one model, and return the figures."""

    def make() -> PreTrainedModel:
        with torch.device("meta"):
            model = MODELS[name]()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model.train()

    def batch() -> dict[str, Any]:
        ids = torch.ones((4, 512) if name.startswith("T5") else (1, 4096), dtype=torch.int64)
        labels = ids[:, :256].clone() if name.startswith("T5") else ids
        return {"input_ids": ids, "labels": labels, "use_cache": False}

    started = time.perf_counter()
    precision = MixedPrecision(param="bfloat16", reduce="float32")
    plan = fullshard.plan(make, batch, world_size=world_size, mp_policy=precision)
    seconds = time.perf_counter() - started
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in MODELS[name]().parameters())
    return {
        "model": name,
        "parameters": parameters,
        "world_size": world_size,
        "rank": plan.rank,
        "peak_bytes": plan.peak_bytes,
        "parts": dict(plan.parts),
        "seconds": round(seconds, 1),
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    """Plan all of them and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", metavar="PATH", type=Path, default=LATEST)
    options = parser.parse_args()
    rows = []
    for name in MODELS:
        for world_size in WORLDS:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                rows.append(row := pool.apply(planned, (name, world_size)))
            gigabytes = f"{row['peak_bytes'] / 1e9:.1f} GB a rank, resident {row['resident_bytes'] / 1e9:.2f} GB"
            print(f"{name} over {world_size}: {row['seconds']} s, {gigabytes}", file=sys.stderr, flush=True)
    most = {key: max(row[key] for row in rows) for key in ("seconds", "resident_bytes")}
    options.out.write_text(json.dumps({"summary": most, "torch": torch.__version__, "rows": rows}, indent=1) + "\n")
    print(json.dumps(most))


if __name__ == "__main__":
    main()
