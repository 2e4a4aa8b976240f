"""Plans of a step's memory and bytes on the wire, compared with the same steps on real CPU ranks.

    python benchmarks/plan.py [--fresh] [--only WORD] [--out PATH]

Every configuration is planned first: ``fullshard.plan``, one process, no memory. Then it is trained for three steps on
gloo processes, with ``fullshard.comm.MemoryMeter`` from before the model is built: the allocator's own record, with
temporaries inside operators. Compared are the peak of the three steps (that of the rank with most), the bytes sent and
the number of collectives in the third step, and the engine's own account. Errors are signed shares of the measured
figure: below zero, the plan was too small. A *false fit* is a plan that calls a memory one byte smaller than the
measured peak large enough; ``Plan.fits`` asks for 1 % more than the plan's peak.

Rows that the file has already are kept, so that a run that was stopped goes on; --fresh starts over.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import silenced
from ranks import on_ranks, quiet
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

import fullshard
from fullshard import MixedPrecision, ShardingStrategy, optim
from fullshard.comm import Comm, MemoryMeter, RecordingComm
from fullshard.comm.machine_axes import axes_of
from fullshard.planner.plan import MARGIN

LATEST = Path(__file__).parent / "results" / "plan.json"
TIMEOUT_S = 120.0
STEPS = 3


def t5(scale: int = 1) -> PreTrainedModel:
    """Return a T5, 5 million parameters times ``scale`` squared."""
    shape = {"d_model": 192 * scale, "d_kv": 48, "d_ff": 512 * scale, "num_heads": 4 * scale}
    return T5ForConditionalGeneration(T5Config(**shape, num_layers=3, vocab_size=4000, decoder_start_token_id=0))


def bart() -> PreTrainedModel:
    """Return a BART."""
    shape = {"d_model": 256, "encoder_ffn_dim": 768, "decoder_ffn_dim": 768}
    layers = {"encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    return BartForConditionalGeneration(BartConfig(**shape, **layers, vocab_size=4000, max_position_embeddings=256))


def gpt2() -> PreTrainedModel:
    """Return a GPT-2."""
    return GPT2LMHeadModel(GPT2Config(n_embd=256, n_layer=5, n_head=4, n_positions=256, vocab_size=4000))


def llama() -> PreTrainedModel:
    """Return a Llama with grouped queries and an untied head."""
    shape = {"hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 8, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=5, vocab_size=4000))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "t5": t5,
    "t5-large": partial(t5, 2),
    "bart": bart,
    "gpt2": gpt2,
    "llama": llama,
}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
    "adafactor": lambda model: optim.Adafactor(model.parameters()),
    "muon": lambda model: optim.Muon(optim.muon_groups(model), lr=1e-3),
}


@dataclass(frozen=True)
class Configuration:
    """One planned and measured run."""

    model: str
    ranks: int = 2
    strategy: str = "FULL_SHARD"
    checkpointing: bool = False
    precision: str = "fp32"
    optimizer: str = "adamw"
    batch: tuple[int, int] = (4, 64)  # rows and tokens a row; an encoder-decoder's targets have half as many
    ranks_each: int | None = None
    name: str = field(init=False)

    def __post_init__(self) -> None:
        """Set the name."""
        parts = [self.model, f"{self.ranks}r", self.strategy.lower(), self.precision, self.optimizer]
        parts += [f"{self.batch[0]}x{self.batch[1]}", *(["checkpointing"] if self.checkpointing else [])]
        object.__setattr__(self, "name", " ".join(parts))

    def make(self) -> PreTrainedModel:
        """Return the model, unsharded, the same on every rank."""
        torch.manual_seed(0)
        model = MODELS[self.model]()
        if self.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model.train()

    def inputs(self) -> dict[str, Any]:
        """Return a batch."""
        rows, tokens = self.batch
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(3, 4000, (rows, tokens), generator=generator)
        labels = ids if self.model in ("gpt2", "llama") else ids[:, : tokens // 2].clone()
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels, "use_cache": False}

    @property
    def options(self) -> dict[str, Any]:
        """The options of ``fully_shard``."""
        precision = MixedPrecision(param="bfloat16", reduce="float32") if self.precision == "bf16" else None
        return {"strategy": ShardingStrategy[self.strategy], "mp_policy": precision}


def configurations() -> list[Configuration]:
    """Return the configurations, without repetitions."""
    strategies = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
    small = ("t5", "bart", "gpt2", "llama")
    found = [Configuration(model, strategy=strategy) for model in small for strategy in strategies]
    found += [Configuration(model, precision="bf16", checkpointing=on) for model in small for on in (False, True)]
    found += [Configuration(model, checkpointing=True) for model in small]
    found += [Configuration(model, optimizer=name) for model in small for name in ("adafactor", "muon")]
    found += [Configuration(model, ranks=ranks) for model in small for ranks in (1, 3)]
    found += [Configuration(model, batch=shape) for model in small for shape in ((1, 32), (8, 96))]
    found += [Configuration("t5-large", checkpointing=on, optimizer=o) for on in (False, True) for o in OPTIMIZERS]
    found += [Configuration(model, ranks=3, optimizer="muon", precision="bf16") for model in ("t5", "llama")]
    hybrid = ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
    found += [Configuration("t5", ranks=4, strategy=strategy, ranks_each=2) for strategy in hybrid]
    return list(dict.fromkeys(found))


def predict(one: Configuration) -> dict[str, Any]:
    """Plan a configuration."""
    started = time.perf_counter()
    plan = fullshard.plan(
        one.make,
        one.inputs,
        world_size=one.ranks,
        ranks_each=one.ranks_each,
        optimizer_fn=OPTIMIZERS[one.optimizer],
        **one.options,
    )
    return {**plan.as_dict(), "seconds": round(time.perf_counter() - started, 2)}


def measure(one: Configuration) -> dict[str, Any]:
    """Train a configuration on real ranks; peaks are those of the rank with most, the rest is the planned rank's."""
    ranks = on_ranks(one.ranks, _measured, one, timeout_s=TIMEOUT_S)
    highest = max(range(one.ranks), key=lambda rank: ranks[rank]["peak_bytes"])
    return {**ranks[highest], "rank": highest}


def _measured(comm: Comm, one: Configuration) -> dict[str, Any]:
    axes = [comm] if one.ranks_each is None else list(axes_of(comm, one.ranks_each))
    recorded = [RecordingComm(axis) for axis in axes]
    marks: list[tuple[str, float]] = []

    def mark(phase: str) -> None:
        marks.append((phase, time.perf_counter()))

    with silenced(), MemoryMeter(torch.device("cpu")) as meter:
        mark("before_first_step")
        ranks: Any = recorded[0] if one.ranks_each is None else tuple(recorded)
        model: Any = fullshard.fully_shard(one.make(), ranks, **one.options)
        optimizer = OPTIMIZERS[one.optimizer](model)
        batch = one.inputs()
        for _ in range(STEPS):
            for axis in recorded:
                axis.entries.clear()
            mark("forward")
            optimizer.zero_grad()
            loss = model(**batch).loss
            mark("backward")
            loss.backward()
            del loss
            mark("optimizer")
            optimizer.step()
    account = model._fullshard_runtime.account
    entries = [entry for axis in recorded if axis.size > 1 for entry in axis.entries]
    kinds = sorted({entry.collective for entry in entries})
    peaks = _peaks(meter, marks)
    return {
        "peak_bytes": max(peak for phase, peak in peaks.items() if phase != "before_first_step"),
        "phase_peaks": peaks,
        "account": {**account.peak, "total": account.peak_total},
        "collectives": {kind: sum(e.collective == kind for e in entries) for kind in kinds},
        "sent_bytes": {kind: sum(e.sent_bytes for e in entries if e.collective == kind) for kind in kinds},
    }


def _peaks(meter: MemoryMeter, marks: Sequence[tuple[str, float]]) -> dict[str, int]:
    """Return the highest count of each phase, above what was there before the model was built."""
    peaks: dict[str, int] = {}
    ends = [at for _, at in marks[1:]] + [float("inf")]
    changes = iter(meter.timeline)
    at, count = next(changes)
    live = 0
    for (phase, _), end in zip(marks, ends, strict=True):
        peaks[phase] = max(peaks.get(phase, 0), live)
        while at < end:
            live = count - meter.start_bytes
            peaks[phase] = max(peaks[phase], live)
            at, count = next(changes, (float("inf"), 0))
            if at == float("inf"):
                break
    return peaks


def compared(one: Configuration, predicted: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """Return a row of the table."""
    error = predicted["peak_bytes"] / measured["peak_bytes"] - 1
    exact = {key: predicted[key] == measured[key] for key in ("collectives", "sent_bytes", "account")}
    settings = {key: value for key, value in asdict(one).items() if key != "name"}
    return {
        "name": one.name,
        "settings": settings,
        "predicted": predicted,
        "measured": measured,
        "memory_error": round(error, 6),
        "false_fit": predicted["peak_bytes"] * (1 + MARGIN) <= measured["peak_bytes"] - 1,
        "exact": exact,
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures over all rows."""
    errors = [row["memory_error"] for row in rows]
    return {
        "configurations": len(rows),
        "memory_median_error": round(statistics.median(map(abs, errors)), 6),
        "memory_worst_error": max(map(abs, errors)),
        "false_fits": sum(row["false_fit"] for row in rows),
        "exact": {key: sum(row["exact"][key] for row in rows) for key in ("collectives", "sent_bytes", "account")},
    }


def main() -> None:
    """Plan, measure and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fresh", action="store_true", help="measure all rows again")
    parser.add_argument("--only", metavar="WORD", default="", help="configurations whose name contains WORD")
    parser.add_argument("--out", metavar="PATH", type=Path, default=LATEST)
    options = parser.parse_args()
    quiet()
    chosen = [one for one in configurations() if options.only in one.name]
    kept = {} if options.fresh or not options.out.exists() else json.loads(options.out.read_text())["rows"]
    rows = {row["name"]: row for row in kept or ()}
    plans = {}
    for number, one in enumerate(chosen, 1):
        if one.name not in rows:
            print(f"[{number}/{len(chosen)}] planning {one.name}", file=sys.stderr, flush=True)
            plans[one.name] = predict(one)
    for number, one in enumerate(chosen, 1):
        if one.name not in rows:
            rows[one.name] = row = compared(one, plans[one.name], measure(one))
            apart = [key for key, same in row["exact"].items() if not same]
            text = f"[{number}/{len(chosen)}] {row['memory_error']:+.3%} {one.name} {' '.join(apart)}"
            print(text, file=sys.stderr, flush=True)
            found = list(rows.values())
            written = {"summary": summary(found), "torch": torch.__version__, "rows": found}
            options.out.write_text(json.dumps(written, indent=1) + "\n")
    print(json.dumps(summary(list(rows.values())), indent=1))


if __name__ == "__main__":
    main()
