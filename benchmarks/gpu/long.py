"""Stage ``long``: steps of one long row on one GPU, alone and shared by two ranks, beside what a plan says of memory.

Two ranks share the GPU, and their messages travel through host memory: memory is that of two GPUs, time is not.
"""

import statistics
import time
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

import fullshard
from benchmarks.gpu.engines import BF16, FP32
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.races import prepare, settled
from benchmarks.gpu.record import Case
from fullshard.core.comm import Comm
from fullshard.planner.simulation import PlannedStep, simulate

TOKENS, TARGET = 16_384, 1_024
DRY_TOKENS, DRY_TARGET = 64, 16
WARM, TIMED = 2, 4
LIMIT_S = 100.0
SHARERS = (1, 2)


def cases(machine: Machine) -> list[Case]:
    """Return a case for each model and number of ranks that share its row."""
    tokens = DRY_TOKENS if machine.dry else TOKENS
    return [
        Case(f"{kind}, 1 row of {tokens:,} tokens, {ranks} rank{'s' if ranks > 1 else ''}", work, limit_s=LIMIT_S)
        for kind in ("llama", "t5")
        for ranks in SHARERS
        for work in [partial(_measured, machine, kind, ranks)]
    ]


def _measured(machine: Machine, kind: str, ranks: int, limit_s: float) -> dict[str, Any]:
    """Return the slower rank's step, the most memory of a rank and the plan's, and the losses."""
    given = kind, machine.dry, machine.facts["devices"], limit_s
    found = machine.together(ranks, _on_rank, *given, limit_s=limit_s)
    planned = machine.alone(_planned, kind, machine.dry, ranks, limit_s=limit_s)
    return {
        "step_s": max(one["step_s"] for one in found),
        "peak_bytes": max(one["peak_bytes"] for one in found),
        "planned_bytes": planned,
        "losses": found[0]["losses"],
    }


def _on_rank(comm: Comm, kind: str, dry: bool, devices: int, limit_s: float) -> dict[str, Any]:
    device = comm.device
    prepare(device, comm.size, devices, limit_s)
    made = _step(kind, comm, dry=dry)
    seconds, losses = [], []
    for number in range(WARM + TIMED):
        settled(comm)
        if device.type == "cuda" and number == WARM:
            torch.cuda.reset_peak_memory_stats(device)
        began = time.perf_counter()
        losses.append(float(made.step()))  # type: ignore[arg-type]
        settled(comm)
        seconds.append(time.perf_counter() - began)
    return {
        "step_s": round(statistics.median(seconds[WARM:]), 6),
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
        "losses": [round(loss, 5) for loss in losses],
    }


def _planned(kind: str, dry: bool, ranks: int) -> int:
    """Return the most bytes of rank 0 in a step, by its simulation with the CPU's operators."""
    found = simulate(partial(_step, kind, dry=dry), 0, ranks, reduces_behind=1, timed=False)
    return max(size for phase, size in found.peaks.items() if phase != "before_first_step")


def _step(kind: str, comm: Comm, *, dry: bool) -> PlannedStep:
    """Return a step of a small model in bf16 with recomputed blocks, and the loss that it returns."""
    torch.manual_seed(0)
    device = comm.device
    model, inputs = (_llama if kind == "llama" else _t5)(dry=dry)
    batch = {name: value.to(device) for name, value in inputs.items()}
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if comm.size > 1:
        fullshard.sequence_parallel(model, comm)
    policy = fullshard.MixedPrecision(param=BF16, reduce=FP32)
    sharded = fullshard.fully_shard(model.train(), comm, mp_policy=policy, device=device)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-4, fused=True)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sharded(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return PlannedStep(sharded, optimizer, step)


def _llama(*, dry: bool) -> tuple[Any, dict[str, torch.Tensor]]:
    width, layers, tokens = (64, 2, DRY_TOKENS) if dry else (1024, 8, TOKENS)
    config = LlamaConfig(
        vocab_size=512 if dry else 32_000,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 16 if dry else width // 64,
        num_key_value_heads=2,
        max_position_embeddings=tokens,
    )
    ids = torch.arange(tokens)[None] % 500 + 3
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def _t5(*, dry: bool) -> tuple[Any, dict[str, torch.Tensor]]:
    width, layers, tokens, target = (64, 2, DRY_TOKENS, DRY_TARGET) if dry else (512, 6, TOKENS, TARGET)
    config = T5Config(
        vocab_size=512 if dry else 32_128,
        d_model=width,
        d_kv=width // 8,
        d_ff=4 * width,
        num_layers=layers,
        num_heads=8,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    ids, labels = (torch.arange(length)[None] % 500 + 3 for length in (tokens, target))
    return T5ForConditionalGeneration(config), {"input_ids": ids, "labels": labels}
