"""How much less a rank holds if ranks share rows of 8,192 tokens, and what it sends and takes for that.

    python benchmarks/long.py [--tokens 8192] [--out PATH]

*Memory and bytes.* One row on 1, 2 and 4 gloo ranks that share it, in fp32 with AdamW, with and without padding. Peaks
count every tensor of a rank in the second step; ``activations`` is the peak of the step above what the rank holds
between steps, so with gathered units and gradients. ``planned`` is the same figure of a plan in one process. Bytes are
those of the ledger for attention, beside what the shapes say they must be; the loss is that of one rank.

*Time.* Steps of two ranks in turns, by slowest rank: one row that both share, beside a row each with fullshard and
with torch's FSDP2. torch's ``context_parallel`` is tried beside them; where it raises, the result has its error.

Without --out: benchmarks/results/long.json.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from contenders import ENGINES
from measure import TensorMeter, interleaved, slowest, summary
from ranks import RankFailed, on_ranks, quiet
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from fullshard import fully_shard, sequence_parallel
from fullshard.core.comm import Comm
from fullshard.core.testing import RecordingComm
from fullshard.planner.simulation import PlannedStep, simulate

LATEST = Path(__file__).parent / "results" / "long.json"
WIDTH, HEADS, TARGET, PADDING, WORDS = 256, 4, 1024, 100, 4096
LAYERS = {"llama": 4, "t5": 2}
ROUNDS = 3
TIMEOUT_S = 900.0


def made(kind: str, tokens: int, *, padded: bool) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a model with random weights and a batch of one row, the same on every rank."""
    torch.manual_seed(0)
    ids = torch.randint(3, WORDS, (1, tokens))
    batch = {"input_ids": ids, "labels": ids}
    if padded:
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][:, -PADDING:] = 0
    sizes = {"vocab_size": WORDS, "hidden_size": WIDTH, "num_attention_heads": HEADS}
    if kind == "llama":
        model: Any = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=688, num_hidden_layers=LAYERS[kind]))
    else:
        sizes = {"vocab_size": WORDS, "d_model": WIDTH, "d_kv": WIDTH // HEADS, "num_heads": HEADS, "d_ff": 512}
        model = T5ForConditionalGeneration(
            T5Config(**sizes, num_layers=LAYERS[kind], dropout_rate=0.0, decoder_start_token_id=0)
        )
        batch["labels"] = ids[:, :TARGET]
    model.config.use_cache = False
    return model.train(), batch


def sent_for_attention(kind: str, tokens: int, ranks: int) -> int:
    """Return the bytes that one of ``ranks`` sends: queries, keys, values and outputs but its own part, and back."""
    states = 4 * tokens if kind == "llama" else 4 * tokens + 4 * TARGET + 2 * TARGET + 2 * tokens
    return LAYERS[kind] * states * (ranks - 1) * WIDTH * 4 * 2 // ranks**2


def shared(comm: Comm, kind: str, tokens: int, *, padded: bool) -> PlannedStep:
    """Return the step of a row that all ranks of ``comm`` share; of one rank, of the plain model."""
    model, batch = made(kind, tokens, padded=padded)
    model = fully_shard(sequence_parallel(model, comm) if comm.size > 1 else model, comm)
    return step_of(model, batch)


def step_of(model: Any, batch: dict[str, torch.Tensor]) -> PlannedStep:
    """Return a step of a sharded model, which returns the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return PlannedStep(model, optimizer, step)


def on_rank(comm: Comm, kind: str, tokens: int, padded: bool) -> dict[str, Any]:
    """Return one rank's peak, bytes and loss in the second step of a shared row."""
    ledger = RecordingComm(comm)
    with TensorMeter() as meter:
        made = shared(ledger, kind, tokens, padded=padded)
        made.step()
        ledger.entries.clear()
        with meter.stretch("step"):
            loss: Any = made.step()
    step = meter.stretches["step"]
    sent = sum(entry.sent_bytes for entry in ledger.entries if entry.collective == "exchange")
    return {"activations": step["peak"] - step["start"], "exchanged": sent, "loss": loss.item()}


def figures(kind: str, tokens: int, *, padded: bool, ranks: int) -> dict[str, Any]:
    """Return the figures of a row that ``ranks`` share: the most of a rank, measured and planned."""
    found = on_ranks(ranks, on_rank, kind, tokens, padded, timeout_s=TIMEOUT_S)
    plan = simulate(lambda comm: shared(comm, kind, tokens, padded=padded), 0, ranks, timed=False)
    peak = max(size for phase, size in plan.peaks.items() if phase != "before_first_step")
    between = plan.parts["shards"] + plan.parts["optimizer_state"] + plan.parts["buffers_and_batch"]
    return {
        "activations": max(one["activations"] for one in found),
        "planned": peak - between,
        "exchanged": found[0]["exchanged"],
        "arithmetic": sent_for_attention(kind, tokens, ranks),
        "loss": found[0]["loss"],
    }


class Racer:
    """A step under comparison."""

    def __init__(self, name: str, made: PlannedStep) -> None:
        """Name a step."""
        self.name, self.step = name, made.step


def race(comm: Comm, kind: str, tokens: int) -> dict[str, list[float]]:
    """Return the seconds of each contender's steps on this rank."""

    def alone(engine: str) -> PlannedStep:
        model, batch = made(kind, tokens, padded=False)
        return step_of(ENGINES[engine](model, comm), batch)

    racers: Any = [
        Racer("fullshard, a row for both", shared(comm, kind, tokens, padded=False)),
        Racer("fullshard, a row each", alone("fullshard")),
        Racer("FSDP2, a row each", alone("fsdp2")),
    ]
    measures = {"work": lambda one: one.step().item(), "tidy": lambda _: None, "barrier": comm.barrier}
    found = interleaved(racers, ROUNDS, **measures, progress=lambda _: None)
    return {name: one["seconds"] for name, one in found.items()}


def by_torch(comm: Comm, tokens: int) -> float:
    """Return the seconds of a Llama's step with FSDP2 and torch's context_parallel."""
    model, batch = made("llama", tokens, padded=False)
    model = ENGINES["fsdp2"](model, comm)
    ids, labels = batch["input_ids"], torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    places = torch.arange(tokens)[None]
    mesh = init_device_mesh("cpu", (comm.size,))
    with context_parallel(mesh, buffers=[ids, labels, places], buffer_seq_dims=[1, 1, 1]):
        started = time.perf_counter()
        logits = model(input_ids=ids, position_ids=places).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        return time.perf_counter() - started


def timed(tokens: int) -> dict[str, Any]:
    """Return the step times of two ranks, and context_parallel's or its error."""
    found: dict[str, Any] = {}
    for kind, length in (("llama", tokens), ("t5", tokens // 4)):
        ranks = on_ranks(2, race, kind, length, timeout_s=TIMEOUT_S)
        times = {name: summary(slowest(one[name] for one in ranks)) for name in ranks[0]}
        found[kind] = {"tokens": length, **times}
    try:
        found["context_parallel"] = max(on_ranks(2, by_torch, tokens, timeout_s=TIMEOUT_S))
    except RankFailed as error:
        found["context_parallel"] = str(error)
    return found


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a row (of T5: of its source)")
    parser.add_argument("--out", type=Path, default=LATEST, help="file for the result")
    options = parser.parse_args()
    quiet()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    result: dict[str, Any] = {"tokens": options.tokens, "versions": versions, "memory": {}}
    for kind in LAYERS:
        for padded in (False, True):
            alone = None
            for ranks in (1, 2, 4):
                found = figures(kind, options.tokens, padded=padded, ranks=ranks)
                alone = alone or found["activations"]
                found["of_one_rank"] = round(found["activations"] / alone, 3)
                name = f"{kind}{', padded' if padded else ''}, {ranks} ranks"
                result["memory"][name] = found
                print(name, found, flush=True)
    result["seconds_of_two_ranks"] = timed(options.tokens)
    print(json.dumps(result["seconds_of_two_ranks"], indent=2))
    options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
