"""Plans of a step's memory and bytes on the wire, compared with the same steps on real CPU ranks.

    python benchmarks/plan.py [--fresh] [--only WORD] [--every N] [--out PATH]

Every configuration is planned first: ``fullshard.plan`` for a module, ``fullshard plan`` for a run file (``run ...``),
one process, no memory. Then it is trained for three steps on gloo processes, with ``core.comm.MemoryMeter`` from
before the model is built: the allocator's own record, with temporaries inside operators. A run with packing or a budget
of tokens takes the steps of its own first epoch, twice: the largest batch may come before the optimizer has a state.
Compared are the peak of the steps (that of the rank with most), the bytes sent and the number of collectives of the
last step, and the engine's own buffers. Errors are signed shares of the measured figure: below
zero, the plan was too small. A *false fit* is a plan that calls a memory one byte smaller than the measured peak
large enough; ``Plan.fits`` asks for 1 % more than the plan's peak.

Rows that the file has already are kept, so that a run that was stopped goes on; --fresh measures those that are chosen
once more, unless that was done on the same day. A row has the day of its measurement since November 2026.
"""

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import silenced
from peft import LoraConfig, get_peft_model
from plan_runs import EVALUATION, LORA, Mark, Run
from ranks import on_ranks, quiet
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import fullshard
from fullshard import MixedPrecision, ShardingStrategy, optim
from fullshard.core.comm import Comm, MemoryMeter, RecordingComm
from fullshard.core.comm.mesh import axes_of
from fullshard.planner.plan import MARGIN
from fullshard.program.models import fuse_head, model_loss

LATEST = Path(__file__).parent / "results" / "plan.json"
TIMEOUT_S = 120.0
STEPS = 3


def t5(scale: int = 1, dropout: float = 0.1) -> PreTrainedModel:
    """Return a T5, 5 million parameters times ``scale`` squared."""
    shape = {"d_model": 192 * scale, "d_kv": 48, "d_ff": 512 * scale, "num_heads": 4 * scale, "dropout_rate": dropout}
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


def qwen() -> PreTrainedModel:
    """Return a Qwen3, which has norms of queries and keys, with a tied head."""
    shape = {"hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 6, "num_key_value_heads": 2}
    config = Qwen3Config(**shape, head_dim=32, num_hidden_layers=4, vocab_size=4000, tie_word_embeddings=True)
    return Qwen3ForCausalLM(config)


def mixtral() -> PreTrainedModel:
    """Return a Mixtral of four experts; transformers computes them by grouped products, whatever their routing."""
    shape = {"hidden_size": 192, "intermediate_size": 384, "num_attention_heads": 6, "num_key_value_heads": 2}
    return MixtralForCausalLM(MixtralConfig(**shape, num_hidden_layers=3, vocab_size=4000, num_local_experts=4))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "t5": t5,
    "t5-large": partial(t5, 2),
    "t5-no-dropout": partial(t5, dropout=0.0),
    "bart": bart,
    "gpt2": gpt2,
    "llama": llama,
    "qwen": qwen,
    "mixtral": mixtral,
}
SEQ2SEQ = ("t5", "t5-large", "t5-no-dropout", "bart")
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(_trainable(model), lr=1e-4, fused=True),
    "adamw_8bit": lambda model: optim.AdamW8bit(_trainable(model), lr=1e-4),
    "adamw_bf16": lambda model: optim.AdamWBF16(_trainable(model), lr=1e-4),
    "adafactor": lambda model: optim.Adafactor(_trainable(model)),
    "muon": lambda model: optim.Muon(optim.muon_groups(model), lr=1e-3),
}


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@dataclass(frozen=True)
class Configuration:
    """One planned and measured model."""

    model: str
    ranks: int = 2
    strategy: str = "FULL_SHARD"
    checkpointing: bool = False
    precision: str = "fp32"
    optimizer: str = "adamw"
    batch: tuple[int, int] = (4, 64)  # rows and tokens a row; an encoder-decoder's targets have half as many
    padded: bool = False  # the last row is a quarter shorter, so that there is a mask
    ranks_each: int | None = None
    reentrant: bool = False  # checkpointing of the older kind
    frozen: str | None = None  # with LoRA: how the frozen model is kept; None: no adapter
    tables: str = "gather"  # else the loss is computed in the head, where tokens may travel to it
    name: str = field(init=False)

    def __post_init__(self) -> None:
        """Set the name."""
        parts = [self.model, f"{self.ranks}r", self.strategy.lower(), self.precision, self.optimizer]
        parts += [f"{self.batch[0]}x{self.batch[1]}", *(["checkpointing"] if self.checkpointing else [])]
        parts += [*(["padded"] if self.padded else [])]
        parts += [*(["reentrant"] if self.reentrant else []), *([f"lora {self.frozen}"] if self.frozen else [])]
        parts += [] if self.tables == "gather" else [f"tables {self.tables}"]
        object.__setattr__(self, "name", " ".join(parts))

    def make(self) -> PreTrainedModel:
        """Return the model, unsharded, the same on every rank."""
        torch.manual_seed(0)
        model = MODELS[self.model]()
        if self.tables != "gather":
            fuse_head(model)
        if self.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": self.reentrant})
        if self.reentrant:
            model.enable_input_require_grads()
        if self.frozen is not None:
            task = "SEQ_2_SEQ_LM" if self.model in SEQ2SEQ else "CAUSAL_LM"
            model = get_peft_model(model, LoraConfig(task_type=task, r=LORA["r"]))
        return model.train()

    def inputs(self) -> dict[str, Any]:
        """Return a batch."""
        rows, tokens = self.batch
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(3, 4000, (rows, tokens), generator=generator)
        labels = ids[:, : tokens // 2].clone() if self.model in SEQ2SEQ else ids
        mask = torch.ones_like(ids)
        if self.padded:
            mask[-1, -(tokens // 4) :] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": labels, "use_cache": False}

    @property
    def options(self) -> dict[str, Any]:
        """The options of ``fully_shard``."""
        precision = MixedPrecision(param="bfloat16", reduce="float32") if self.precision == "bf16" else None
        return {
            "strategy": ShardingStrategy[self.strategy],
            "mp_policy": precision,
            "tables": self.tables,
            **({} if self.frozen is None else {"frozen": self.frozen}),
        }

    @property
    def settings(self) -> dict[str, Any]:
        """The settings, as they go into the results."""
        return {key: value for key, value in asdict(self).items() if key != "name"}

    def predict(self) -> dict[str, Any]:
        """Plan it."""
        return fullshard.plan(
            self.make,
            self.inputs,
            world_size=self.ranks,
            ranks_each=self.ranks_each,
            optimizer_fn=OPTIMIZERS[self.optimizer],
            loss_fn=self._loss,
            **self.options,
        ).as_dict()

    def build(self, axes: Sequence[Comm]) -> tuple[Any, list[Callable[[Mark], None]]]:
        """Return the sharded model and its steps."""
        ranks: Any = axes[0] if self.ranks_each is None else tuple(axes)
        model: Any = fullshard.fully_shard(self.make(), ranks, **self.options)
        optimizer = OPTIMIZERS[self.optimizer](model)
        batch = self.inputs()

        def step(mark: Mark) -> None:
            mark("forward")
            optimizer.zero_grad()
            loss = self._loss(model, batch)
            mark("backward")
            loss.backward()
            del loss
            mark("optimizer")
            optimizer.step()

        return model, [step] * STEPS

    def _loss(self, model: Any, batch: dict[str, Any]) -> torch.Tensor:
        """Return the loss of a batch, the model's own or the one that its head computes."""
        if self.tables == "gather":
            return model(**batch).loss
        inputs = {**batch, "decoder_input_ids": batch["labels"]} if self.model in SEQ2SEQ else dict(batch)
        labels = inputs.pop("labels")
        return model_loss(model, lambda: model(**inputs).logits, labels) / labels.numel()


def configurations() -> list[Configuration | Run]:
    """Return the configurations, without repetitions."""
    return list(dict.fromkeys([*_models(), *_adapted(), *_runs()]))


def _models() -> list[Configuration]:
    strategies = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
    small = ("t5", "bart", "gpt2", "llama", "qwen", "mixtral")
    found = [Configuration(model, strategy=strategy) for model in small for strategy in strategies]
    found += [Configuration(model, precision="bf16", checkpointing=on) for model in small for on in (False, True)]
    found += [Configuration(model, checkpointing=True) for model in small]
    found += [Configuration(model, checkpointing=True, reentrant=True) for model in small]
    found += [Configuration(model, optimizer=name) for model in small for name in OPTIMIZERS]
    found += [Configuration(model, ranks=ranks) for model in small for ranks in (1, 3, 4)]
    found += [Configuration(model, batch=shape) for model in small for shape in ((1, 32), (8, 96), (2, 200))]
    for shape, models in (((2, 200), (*small, "t5-no-dropout")), ((2, 704), ("t5", "t5-no-dropout", "llama"))):
        found += [Configuration(m, batch=shape, padded=True, precision=p) for m in models for p in ("fp32", "bf16")]
    found += [Configuration("t5-large", checkpointing=on, optimizer=o) for on in (False, True) for o in OPTIMIZERS]
    found += [Configuration(model, ranks=3, optimizer="muon", precision="bf16") for model in ("t5", "llama")]
    found += [Configuration("t5-large", ranks=ranks, tables="home") for ranks in (1, 2, 3)]
    found += [Configuration("t5-large", tables="home", precision="bf16"), Configuration("t5-large", tables="auto")]
    hybrid = ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
    return found + [Configuration(m, ranks=4, strategy=s, ranks_each=2) for m in ("t5", "llama") for s in hybrid]


def _adapted() -> list[Configuration]:
    found = [Configuration(model, frozen=kept) for model in ("t5", "bart", "gpt2", "llama") for kept in KEPT]
    found += [Configuration(model, frozen="shard", checkpointing=True) for model in ("t5", "llama")]
    return found + [Configuration(model, frozen="shard", precision="bf16") for model in ("t5", "gpt2", "llama")]


def _runs() -> list[Run]:
    fused, packed, bf16 = ("fused_cross_entropy", True), ("packing", True), ("precision", "bf16")
    saved, budget = ("gradient_checkpointing", True), ("per_device_train_batch_tokens", 400)
    each = [(), (fused,), (packed,), (budget,), (packed, budget), (fused, packed, saved), (fused, bf16)]
    found = [(model, {"training": one}) for model in ("t5", "llama", "qwen") for one in each]
    found += [(model, {"training": one}) for model in ("bart", "gpt2", "mixtral") for one in ((), (fused,), (budget,))]
    found += [(model, {"adapter": (("type", kind),)}) for model in ("t5", "llama") for kind in ADAPTERS]
    found += [("t5", {"training": (("optimizer", name),)}) for name in OPTIMIZERS if name != "adamw"]
    found += [("t5", {"adapter": (*LORA.items(),), "sharding": (("frozen", kept),)}) for kept in KEPT]
    found += [("llama", {"adapter": (*LORA.items(),), "training": (fused, packed, saved, bf16)})]
    found += [("gpt2", {"training": (("precision", "fp16"),), "ranks": ranks}) for ranks in (1, 2)]
    found += [("llama", {"training": (("precision", "fp16"), fused)})]
    found += [("t5", {"training": (("gradient_accumulation_steps", 2), packed), "ranks": 3})]
    found += [(model, {"training": (("z_loss", 1e-4), ("label_smoothing_factor", 0.1))}) for model in ("t5", "llama")]
    found += [("mixtral", {"options": (("output_router_logits", True),)})]
    found += [(model, {"evaluates": True}) for model in ("t5", "llama")]
    return [Run(model, MODELS[model], **options) for model, options in found]


KEPT = ("shard", "replicate", "auto")
ADAPTERS = ("dora", "ia3", "prompt", "prefix")


def predict(one: Configuration | Run) -> dict[str, Any]:
    """Plan a configuration."""
    started = time.perf_counter()
    return {**one.predict(), "seconds": round(time.perf_counter() - started, 2)}


def measure(one: Configuration | Run) -> dict[str, Any]:
    """Train a configuration on real ranks; peaks are those of the rank with most, the rest is the planned rank's."""
    ranks = on_ranks(one.ranks, _measured, one, timeout_s=TIMEOUT_S)
    highest = max(range(one.ranks), key=lambda rank: ranks[rank]["peak_bytes"])
    return {**ranks[highest], "rank": highest}


def _measured(comm: Comm, one: Configuration | Run) -> dict[str, Any]:
    axes = [comm] if one.ranks_each is None else list(axes_of(comm, one.ranks_each))
    recorded = [RecordingComm(axis) for axis in axes]
    marks: list[tuple[str, float]] = []

    def mark(phase: str) -> None:
        marks.append((phase, time.perf_counter()))

    with silenced(), MemoryMeter(torch.device("cpu")) as meter:
        mark("before_first_step")
        model, steps = one.build(recorded)
        entries: list[Any] = []
        for step in steps:
            for axis in recorded:
                axis.entries.clear()
            step(mark)
            if marks[-1][0] != EVALUATION:
                entries = [entry for axis in recorded if axis.size > 1 for entry in axis.entries]
    tracker = model._fullshard_runtime.tracker
    kinds = sorted({entry.collective for entry in entries})
    peaks = _peaks(meter, marks)
    return {
        "peak_bytes": max(peak for phase, peak in peaks.items() if phase not in ("before_first_step", EVALUATION)),
        "phase_peaks": peaks,
        "account": {**tracker.peak, "total": tracker.peak_total},
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


def compared(one: Configuration | Run, predicted: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """Return a row of the table."""
    error = predicted["peak_bytes"] / measured["peak_bytes"] - 1
    exact = {key: predicted[key] == measured[key] for key in ("collectives", "sent_bytes", "account")}
    planned, found = (figures["phase_peaks"].get(EVALUATION) for figures in (predicted, measured))
    return {
        **({} if found is None else {"evaluation_error": round(planned / found - 1, 6)}),
        "name": one.name,
        "settings": one.settings,
        "predicted": predicted,
        "measured": measured,
        "memory_error": round(error, 6),
        "false_fit": predicted["peak_bytes"] * (1 + MARGIN) <= measured["peak_bytes"] - 1,
        "exact": exact,
        "day": date.today().isoformat(),
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures over all rows."""
    errors = [row["memory_error"] for row in rows]
    return {
        "configurations": len(rows),
        "measured_by_day": dict(Counter(row.get("day", "earlier") for row in rows)),
        "memory_median_error": round(statistics.median(map(abs, errors)), 6),
        "memory_worst_error": max(map(abs, errors)),
        "false_fits": sum(row["false_fit"] for row in rows),
        "exact": {key: sum(row["exact"][key] for row in rows) for key in ("collectives", "sent_bytes", "account")},
    }


def main() -> None:
    """Plan, measure and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fresh", action="store_true", help="measure rows again")
    parser.add_argument("--only", metavar="WORD", default="", help="configurations whose name contains WORD")
    parser.add_argument("--every", metavar="N", type=int, default=1, help="take every Nth configuration")
    parser.add_argument("--out", metavar="PATH", type=Path, default=LATEST)
    options = parser.parse_args()
    quiet()
    kept = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    rows = {row["name"]: row for row in kept}
    today = date.today().isoformat()
    chosen = [one for one in configurations() if options.only in one.name][:: options.every]
    due = [one for one in chosen if one.name not in rows or (options.fresh and rows[one.name].get("day", "") != today)]
    for number, one in enumerate(due, 1):
        row = compared(one, predict(one), measure(one))
        apart = [key for key, same in row["exact"].items() if not same]
        text = f"[{number}/{len(due)}] {row['memory_error']:+.3%} {one.name} {' '.join(apart)}"
        print(text, file=sys.stderr, flush=True)
        rows[one.name] = row
        found = list(rows.values())
        written = {"summary": summary(found), "torch": torch.__version__, "rows": found}
        options.out.write_text(json.dumps(written, indent=1) + "\n")
    print(json.dumps(summary(list(rows.values())), indent=1))


if __name__ == "__main__":
    main()
