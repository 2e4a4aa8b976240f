"""LoRA over an nf4 base: bytes at rest, peak, bytes sent and step time, against a bf16 base and bitsandbytes unsharded.

``python benchmarks/qlora.py`` writes ``benchmarks/results/qlora.json``. Steps are timed against bitsandbytes' with both
``wo`` in bf16, as T5 cannot run with bitsandbytes' ``wo``; the other figures are of a base whose blocks are quantised.
With ``--loading`` only the time to load is measured: reading a bf16 file into memory against loading it by shards and
quantising it, and both parts of that, with the file in the page cache and with none of it there. Each takes new memory,
as a process does that has just started; ``read_again`` reads into memory that was written before.
"""

import ctypes
import gc
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
from measure import TensorMeter
from ranks import on_ranks, on_two_ranks, quiet
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

import fullshard
from fullshard.core.comm import Comm, RecordingComm
from fullshard.core.engine.setup.weights import CHUNK
from fullshard.core.quantized import QuantizedLinear, format_of
from fullshard.core.quantized.formats import bitsandbytes
from fullshard.core.shards import rows_of
from fullshard.program.models import AdapterSpec, AdapterWeights, add_adapter, enable_activation_checkpointing
from fullshard.state.saving import Pretrained

RESULT = Path(__file__).parent / "results" / "qlora.json"
SHAPE = {"d_model": 1024, "d_kv": 64, "num_heads": 16, "d_ff": 4096, "num_layers": 6, "vocab_size": 4096}
QUANTIZE = fullshard.Quantize("nf4", skip=("lm_head",))
AS_BITSANDBYTES = fullshard.Quantize("nf4", skip=("lm_head", "wo"))
STEPS = 5
TURNS = 12
LOADED = SHAPE | {"num_layers": 12}
LOADS = 5
VALUES = torch.randn(CHUNK, generator=torch.Generator().manual_seed(0)).bfloat16() * 0.02
TOKENS = 128


def config(shape: dict[str, int] = SHAPE) -> T5Config:
    """Return the benchmark's T5: blocks of T5-3B's kind, few rows of vocabulary."""
    return T5Config(**shape, dropout_rate=0.0, decoder_start_token_id=0)


def batch(rank: int) -> dict[str, torch.Tensor]:
    """Return a rank's row."""
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(2, SHAPE["vocab_size"], (1, TOKENS), generator=generator)
    return {"input_ids": tokens, "labels": tokens[:, : TOKENS // 4].contiguous()}


def sharded(comm: Comm, path: str, quantize: fullshard.Quantize | None) -> Any:
    """Return the sharded model in bfloat16, with LoRA of rank 8 on queries and values."""
    with torch.device("meta"):
        model = T5ForConditionalGeneration(config()).to(torch.bfloat16)
    model.tie_weights()
    adapted = add_adapter(model, AdapterSpec("lora", path), seed=0)
    enable_activation_checkpointing(adapted.model)
    weights = AdapterWeights(Pretrained(path, quantize=quantize), adapted.values)
    return fullshard.fully_shard(adapted.model, comm, weights=weights)


def unsharded(path: str) -> Any:
    """Return the same model of bitsandbytes' layers."""
    library = bitsandbytes()
    model = T5ForConditionalGeneration.from_pretrained(path, dtype=torch.bfloat16)
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and not name.endswith(AS_BITSANDBYTES.skip):
            kind = {"quant_type": "nf4", "compress_statistics": True}
            made = library.nn.Linear4bit(layer.in_features, layer.out_features, bias=False, **kind)
            made.weight = library.nn.Params4bit(layer.weight.data, requires_grad=False, module=made, **kind)
            model.set_submodule(name, made.to("cpu"))
    lora = peft.LoraConfig(task_type="SEQ_2_SEQ_LM", r=8, lora_alpha=16, target_modules=["q", "v"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(model, lora)
    enable_activation_checkpointing(adapted)
    return adapted.train()


def step(model: Any, optimizer: torch.optim.Optimizer, rows: dict[str, torch.Tensor]) -> None:
    """Take one step."""
    model(**rows).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def timed(model: Any, optimizer: torch.optim.Optimizer, comm: Comm, rows: dict[str, torch.Tensor]) -> float:
    """Return the median seconds of a step; ranks start each together."""
    seconds = []
    for _ in range(STEPS):
        comm.barrier()
        started = time.perf_counter()
        step(model, optimizer, rows)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def of_ours(comm: Comm, path: str, quantize: fullshard.Quantize | None) -> dict[str, float]:
    """Return one rank's figures of the sharded run."""
    ledger = RecordingComm(comm)
    with TensorMeter() as meter:
        model = sharded(ledger, path, quantize)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
        rows = batch(comm.rank)
        step(model, optimizer, rows)
        ledger.entries.clear()
        with meter.stretch("step"):
            step(model, optimizer, rows)
        sent = ledger.sent_bytes
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    format = format_of(QUANTIZE)
    return {
        "held_bytes": sum(rows_of(part).nbytes for layer in layers for part in layer.stored),
        "full_bytes": sum(
            format.code_bytes(layer.before.numel()) + format.scales_bytes(layer.shape) for layer in layers
        ),
        "weights": sum(layer.before.numel() for layer in layers),
        "peak_bytes": meter.stretches["step"]["peak"],
        "sent_bytes": sent,
        "seconds": timed(model, optimizer, comm, rows),
    }


def step_times(comm: Comm, path: str) -> dict[str, list[float]]:
    """Return the seconds of steps of the sharded model, and of bitsandbytes' on each rank alone, in turns."""
    models = {"sharded": sharded(comm, path, AS_BITSANDBYTES), "bitsandbytes": unsharded(path)}
    optimizers = {
        name: torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
        for name, model in models.items()
    }
    rows = batch(comm.rank)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for number in range(1 + TURNS):
        for name, model in models.items():
            comm.barrier()
            started = time.perf_counter()
            step(model, optimizers[name], rows)
            if number:  # the first makes the optimizer's state
                seconds[name].append(time.perf_counter() - started)
    return seconds


def least_and_median(ranks: list[dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    """Return the least and the median of each list, of the slower rank."""
    return {
        "least": {name: max(min(rank[name]) for rank in ranks) for name in ranks[0]},
        "median": {name: max(statistics.median(rank[name]) for rank in ranks) for name in ranks[0]},
    }


def read_all(path: str, into: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """Read the file into new memory, or into that of ``into``; ``load_file`` alone maps it and reads nothing."""
    mapped = load_file(Path(path) / "model.safetensors")
    if into is None:
        return {name: tensor.clone() for name, tensor in mapped.items()}
    return {name: into[name].copy_(tensor) for name, tensor in mapped.items()}


def start_afresh(path: str, *, cold: bool) -> None:
    """Give freed memory back, so that what follows takes new pages; ``cold``: drop the file from the page cache."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    if cold:
        file = os.open(Path(path) / "model.safetensors", os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def load(comm: Comm, path: str, quantize: fullshard.Quantize | None) -> Any:
    """Shard the frozen model with its weights from the file; with ``quantize``, quantised."""
    with torch.device("meta"):
        model = T5ForConditionalGeneration(config(LOADED)).to(torch.bfloat16)
    model.tie_weights()
    model.requires_grad_(requires_grad=False)
    return fullshard.fully_shard(model, comm, weights=Pretrained(path, quantize=quantize))


def quantise_again(model: nn.Module, size: int) -> None:
    """Quantise as many weights as a rank does, without reading them."""
    format = format_of(QUANTIZE)
    for layer in model.modules():
        if isinstance(layer, QuantizedLinear):
            numel = layer.before.numel() // size
            for low in range(0, numel, CHUNK):
                format.quantise(VALUES[: min(CHUNK, numel - low)], layer.shape)


def load_times(comm: Comm, path: str, cold: bool) -> dict[str, list[float]]:
    """Return the seconds of each way, in turns; ranks start each together."""
    seconds: dict[str, list[float]] = {"read": [], "quantise_and_shard": [], "shard": [], "quantise": []}
    model = load(comm, path, QUANTIZE)
    work: dict[str, Callable[[], object]] = {
        "read": lambda: read_all(path),
        "quantise_and_shard": lambda: load(comm, path, QUANTIZE),
        "shard": lambda: load(comm, path, None),
        "quantise": lambda: quantise_again(model, comm.size),
    }
    if not cold:
        seconds["read_again"], kept = [], read_all(path)
        work["read_again"] = lambda: read_all(path, kept)
    for _ in range(LOADS):
        for name, one in work.items():
            start_afresh(path, cold=cold)
            comm.barrier()
            started = time.perf_counter()
            made = one()
            comm.barrier()
            seconds[name].append(time.perf_counter() - started)
            del made  # freeing is not measured
    return seconds


def load_figures(size: int, path: str, *, cold: bool) -> dict[str, Any]:
    """Return the seconds of loading on so many ranks, and their ratio to reading the file."""
    ranks = on_ranks(size, load_times, path, cold, timeout_s=300)
    found = least_and_median(ranks)
    return {
        **{f"{kind}_seconds": seconds for kind, seconds in found.items()},
        "load_time_over_reading": {k: s["quantise_and_shard"] / s["read"] for k, s in found.items()},
    }


def measure_loading() -> dict[str, Any]:
    """Return the figures of loading on one and two ranks, with the file in the page cache and without."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as path:
        torch.manual_seed(0)
        with torch.device("meta"):
            empty = T5ForConditionalGeneration(config(LOADED)).to(torch.bfloat16)
        values = {
            name: VALUES.repeat(-(-p.numel() // CHUNK))[: p.numel()].view(p.shape)
            for name, p in empty.named_parameters()
        }
        save_file(values, Path(path) / "model.safetensors")
        os.sync()  # only pages that are on the disk leave the cache when told
        found["file_bytes"] = (Path(path) / "model.safetensors").stat().st_size
        del values
        for size in (1, 2):
            found[f"ranks_{size}"] = {
                cache: load_figures(size, path, cold=cache == "cold") for cache in ("warm", "cold")
            }
    return found


def main() -> None:
    """Measure, print and write."""
    quiet()
    if sys.argv[1:] == ["--loading"]:
        result = json.loads(RESULT.read_text()) | {"loading": measure_loading()}
        RESULT.write_text(json.dumps(result, indent=2) + "\n")
        print(json.dumps(result["loading"], indent=2))
        return
    with tempfile.TemporaryDirectory() as path:
        torch.manual_seed(0)
        T5ForConditionalGeneration(config()).to(torch.bfloat16).save_pretrained(path)
        nf4 = on_two_ranks(of_ours, path, QUANTIZE, timeout_s=240)
        bf16 = on_two_ranks(of_ours, path, None, timeout_s=240)
        steps = least_and_median(on_two_ranks(step_times, path, timeout_s=240))
    worst = {name: max(rank[name] for rank in nf4) for name in nf4[0]}
    base = {name: max(rank[name] for rank in bf16) for name in bf16[0]}
    ratios = {
        "base_bytes_over_codes_and_scales": worst["held_bytes"] / (worst["full_bytes"] / 2),
        "step_peak_over_bf16_base": worst["peak_bytes"] / base["peak_bytes"],
        "wire_over_bf16_base": worst["sent_bytes"] / base["sent_bytes"],
        "step_time_over_unsharded": {kind: one["sharded"] / one["bitsandbytes"] for kind, one in steps.items()},
    }
    loading = measure_loading()
    result = {"shape": SHAPE, "ratios": ratios, "loading": loading, "nf4": worst, "bf16": base, "step_seconds": steps}
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
