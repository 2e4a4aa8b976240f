"""Optimizers under sharding, compared with torch's FSDP1, FSDP2 and DDP: errors of the result and cost of a step.

    python benchmarks/optimizers.py [--out PATH] [--small]

*Errors.* A model with parameters of every layout (tests/support/optimizers.py) is trained for 20 steps in fp32 on 2, 3
and 4 gloo ranks with a separate batch per rank, and unsharded on the joint batch with the same optimizer. The relative
update error of a parameter is its largest difference from the unsharded run, divided by that run's largest update of
it; the worst parameter is reported. *By parts*, the unsharded run sums the gradients of the ranks' parts of the batch,
so that gradients are equal to the last bit: with rounded states, one bit can move a state to the next number. fullshard
shards the model as one unit (most matrices on a single rank) and with one unit per layer (all matrices split); the
larger error is reported.

*Costs.* A T5 of 9 million parameters on 2 ranks. Time is that of ``optimizer.step()``, from barrier to barrier; the
contenders take turns in one pair of processes. Bytes are those sent on the loopback device during a step, divided by
the number of ranks, the smallest of all rounds, minus the barriers' own. For fullshard the ledger's bytes are added.

A contender that raises is listed with its error. Without --small and --out: benchmarks/results/optimizers.json.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from contenders import ENGINES, Task
from measure import loopback_sent_bytes, summary
from ranks import RankFailed, on_ranks, quiet, reason
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard as torch_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import fullshard
from fullshard import optim
from fullshard.core.comm import Comm
from fullshard.core.testing import RecordingComm

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support import optimizers as zoo

LATEST = Path(__file__).parent / "results" / "optimizers.json"
SHAPES = {"d_model": 256, "d_kv": 64, "d_ff": 1024, "num_layers": 4, "num_heads": 4, "vocab_size": 8000}
TIMEOUT_S = 240.0
PEERS = ("ddp", "fsdp1", "fsdp2")


class Both:
    """Several optimizers as one, because torch's Muon takes matrices only."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        """Combine ``parts``."""
        self.parts = parts

    def step(self) -> None:
        """Step all of them."""
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        """Clear all gradients."""
        for part in self.parts:
            part.zero_grad()


def torch_muon(model: nn.Module) -> Both:
    """Return torch's Muon for matrices and AdamW for the other parameters."""
    params = list(model.parameters())
    matrices = [param for param in params if param.ndim == 2]
    rest = [param for param in params if param.ndim != 2]
    return Both(torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2, weight_decay=0.1))


@dataclass(frozen=True)
class Case:
    """One optimizer.

    Attributes:
        peer: Made of the parameters of a model under a peer, and of the unsharded one.
        ours: Made of a model under fullshard.
        engines: The peers that it is tried with.
    """

    peer: Callable[[nn.Module], Any]
    ours: Callable[[nn.Module], Any]
    engines: Iterable[str] = PEERS


def _alike(make: Callable[[Any], Any]) -> Case:
    return Case(lambda model: make(model.parameters()), lambda model: make(model.parameters()))


def _muon(model: nn.Module, dtype: torch.dtype) -> Any:
    return optim.Muon(model.parameters(), lr=1e-2, ns_dtype=dtype)


CASES = {
    "AdamW": _alike(lambda params: torch.optim.AdamW(params, lr=1e-3)),
    "AdamW, fused": _alike(lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True)),
    "SGD, momentum": _alike(lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9)),
    "Adafactor, Hugging Face's": Case(
        lambda model: transformers.Adafactor(model.parameters()), lambda model: optim.Adafactor(model.parameters())
    ),
    "Adafactor, torch's": Case(
        lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2),
        lambda model: optim.TorchAdafactor(model.parameters(), lr=1e-2),
    ),
    "Muon, bf16": Case(torch_muon, lambda model: _muon(model, torch.bfloat16)),
    "Muon, fp32": Case(
        lambda model: _muon(model, torch.float32), lambda model: _muon(model, torch.float32), engines=("ddp",)
    ),
    "AdamW, 8 bit": Case(
        lambda model: optim.AdamW8bit(model.parameters(), lr=1e-3),
        lambda model: optim.AdamW8bit(model.parameters(), lr=1e-3),
        engines=("ddp",),
    ),
    "AdamW, bf16 states": Case(
        lambda model: optim.AdamWBF16(model.parameters(), lr=1e-3),
        lambda model: optim.AdamWBF16(model.parameters(), lr=1e-3),
        engines=("ddp",),
    ),
}


def plain_zoo() -> nn.Module:
    """Return the model without its 0-d parameter, which FSDP2 rejects."""
    model = zoo.zoo()
    del model.scale
    model.register_buffer("scale", torch.tensor(1.0))
    return model


def wrapped(engine: str, model: nn.Module, comm: Comm, layout: str) -> nn.Module:
    """Return the model sharded by an engine."""
    if engine == "fullshard":
        return fullshard.fully_shard(model, comm, **zoo.LAYOUTS[layout])
    if engine == "ddp":
        return DistributedDataParallel(model)
    if engine == "fsdp1":
        policy = ModuleWrapPolicy(set(zoo.UNITS))
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
        )
    mesh = init_device_mesh("cpu", (comm.size,))
    for module in model.modules():
        if isinstance(module, zoo.UNITS):
            torch_fully_shard(module, mesh=mesh)
    torch_fully_shard(model, mesh=mesh)
    return model


def whole(engine: str, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the full parameters by name."""
    if engine == "fullshard":
        return zoo.whole(model)
    if engine == "fsdp1":
        with FullyShardedDataParallel.summon_full_params(model):
            return {
                name.replace("_fsdp_wrapped_module.", ""): param.detach().clone()
                for name, param in model.named_parameters()
            }
    if engine == "fsdp2":
        return {name: param.full_tensor().detach() for name, param in model.named_parameters()}  # type: ignore[attr-defined]
    return {name.removeprefix("module."): param.detach() for name, param in model.named_parameters()}


def trained(comm: Comm, engine: str, case: str, layout: str, steps: int) -> dict[str, dict[str, float]] | None:
    """Return each parameter's error after ``steps``, for each kind of reference; None except on rank 0."""
    model = wrapped(engine, plain_zoo(), comm, layout)
    make = CASES[case].ours if engine == "fullshard" else CASES[case].peer
    data = zoo.batches(steps, comm.size)
    zoo.train(model, make(model), [zoo.of_rank(batch, comm.rank) for batch in data])
    ours = whole(engine, model)
    if comm.rank > 0:
        return None
    found = {}
    for kind, train in (("error", zoo.train), ("error_by_parts", partial(zoo.train_by_parts, ranks=comm.size))):
        reference = plain_zoo()
        train(reference, CASES[case].peer(reference), data)
        found[kind] = zoo.update_errors(ours, {name: param.detach() for name, param in reference.named_parameters()})
    return found


def errors(size: int, steps: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Return the worst parameter's error, or the exception, for each optimizer and contender."""
    table: dict[str, Any] = {}
    for case in CASES:
        for engine in (*CASES[case].engines, "fullshard"):
            tell(f"{case} under {engine} on {size} ranks")
            layouts = list(zoo.LAYOUTS) if engine == "fullshard" else [""]
            try:
                found = [on_ranks(size, trained, engine, case, one, steps, timeout_s=TIMEOUT_S)[0] for one in layouts]
            except RankFailed as error:
                table.setdefault(case, {})[engine] = {"raised": str(error)}
                continue
            table.setdefault(case, {})[engine] = {
                kind: max(value for of_layout in found for value in of_layout[kind].values())
                for kind in ("error", "error_by_parts")
            }
    return table


@dataclass
class Timed:
    """A contender that holds gradients, so that it can step repeatedly."""

    optimizer: Any
    model: nn.Module
    ledger: RecordingComm | None


def ready(engine: str, case: str, comm: Comm, small: bool) -> Timed:
    """Train one step to create the states, and keep the gradients."""
    task = Task(batch=1, source=16, target=8, small=small)
    model = t5(small)
    ledger = RecordingComm(comm) if engine == "fullshard" else None
    model = ENGINES[engine](model, ledger)
    case_ = CASES[case]
    optimizer = (case_.ours if engine == "fullshard" else case_.peer)(model)
    inputs = {name: value % (1000 if small else SHAPES["vocab_size"]) for name, value in task.inputs(comm.rank).items()}
    model(**inputs).loss.backward()
    optimizer.step()
    return Timed(optimizer, model, ledger)


def t5(small: bool) -> nn.Module:
    """Return a T5 with random weights, the same on every rank."""
    if small:
        return Task(1, 16, 8, small=True).model()
    torch.manual_seed(0)
    config = transformers.T5Config(**SHAPES, dropout_rate=0.0, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def timed(comm: Comm, case: str, rounds: int, small: bool) -> dict[str, Any]:
    """Return the seconds and bytes of each contender's step; contenders take turns."""
    contenders, failed = {}, {}
    for engine in ("floor", *CASES[case].engines, "fullshard"):
        problem = ""
        try:
            contenders[engine] = ready(engine, case, comm, small)
        except Exception as error:
            problem = reason(error)
        problems = [text for text in comm.all_gather_object(problem) if text]
        if problems:
            failed[engine] = problems[0]
            contenders.pop(engine, None)
    record: dict[str, dict[str, list[float]]] = {name: {"seconds": [], "wire": [], "ledger": []} for name in contenders}
    gc.disable()
    for number in range(rounds + 1):
        names = list(contenders)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            one = measure_step(contenders[name], comm)
            if number > 0:
                for key, value in one.items():
                    record[name][key].append(value)
        gc.collect()
    return {"record": record, "failed": failed}


def measure_step(one: Timed, comm: Comm) -> dict[str, float]:
    """Run a step from barrier to barrier; return its seconds and the bytes sent, minus those of a barrier."""
    if one.ledger is not None:
        one.ledger.entries.clear()
    comm.barrier()
    before = loopback_sent_bytes()
    comm.barrier()
    barrier = loopback_sent_bytes() - before
    comm.barrier()
    before, start = loopback_sent_bytes(), time.perf_counter()
    one.optimizer.step()
    comm.barrier()
    seconds = time.perf_counter() - start
    wire = max(0, loopback_sent_bytes() - before - barrier)
    ledger = 0 if one.ledger is None else one.ledger.sent_bytes
    return {"seconds": seconds, "wire": wire / comm.size, "ledger": ledger}


def costs(rounds: int, small: bool, tell: Callable[[str], None]) -> dict[str, Any]:
    """Return the seconds and bytes of a step on 2 ranks for each optimizer and contender."""
    table: dict[str, Any] = {}
    for case in CASES:
        tell(f"seconds of {case}")
        ranks = on_ranks(2, timed, case, rounds, small, timeout_s=TIMEOUT_S)
        table[case] = {engine: {"raised": text} for engine, text in ranks[0]["failed"].items()}
        for engine in ranks[0]["record"]:
            of_ranks = [rank["record"][engine] for rank in ranks]
            slowest = [max(pair) for pair in zip(*(one["seconds"] for one in of_ranks), strict=True)]
            table[case][engine] = {
                **summary(slowest),
                "wire_bytes": min(statistics.mean(pair) for pair in zip(*(o["wire"] for o in of_ranks), strict=True)),
                "ledger_bytes": max(max(one["ledger"]) for one in of_ranks),
            }
    return table


def error_table(errors: dict[str, Any]) -> str:
    """Return a Markdown table of optimizers by contenders; each figure is the worst over world sizes."""
    engines = (*PEERS, "fullshard")

    def worst(case: str, engine: str, kind: str) -> str:
        found = [of_size[case].get(engine) for of_size in errors.values()]
        if None in found:
            return "not run"
        raised = [one["raised"] for one in found if "raised" in one]
        return raised[0].split(": ")[1] if raised else f"{max(one[kind] for one in found):.1e}"

    rows = [["optimizer", *engines, "fullshard, by parts"], ["---"] * 6]
    for case in CASES:
        rows.append(
            [case, *(worst(case, engine, "error") for engine in engines), worst(case, "fullshard", "error_by_parts")]
        )
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def cost_table(costs: dict[str, Any]) -> str:
    """Return a Markdown table of median milliseconds per step and bytes sent per rank."""
    engines = ("floor", *PEERS, "fullshard")

    def cost(one: dict[str, Any] | None) -> str:
        if one is None:
            return "not run"
        if "raised" in one:
            return one["raised"].split(": ")[0]
        return f"{1000 * one['median_s']:.0f} ms, {max(one['ledger_bytes'], one['wire_bytes']) / 1e3:,.0f} kB"

    rows = [["optimizer", *engines], ["---"] * 6]
    rows += [[case, *(cost(of_case.get(engine)) for engine in engines)] for case, of_case in costs.items()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main() -> None:
    """Measure, write the result and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--small", action="store_true", help="two ranks, few steps and rounds, for development only")
    options = parser.parse_args()
    quiet()
    started = time.time()

    def tell(text: str) -> None:
        print(f"[{time.time() - started:6.1f} s] {text}", file=sys.stderr, flush=True)

    sizes, steps, rounds = ((2,), 3, 2) if options.small else ((2, 3, 4), 20, 9)
    result = {
        "command": "python benchmarks/optimizers.py" + (" --small" if options.small else ""),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "steps": steps,
        "errors": {str(size): errors(size, steps, tell) for size in sizes},
        "costs": costs(rounds, options.small, tell),
    }
    text = json.dumps(result, indent=1)
    out = options.out or (None if options.small else LATEST)
    if out is not None:
        out.write_text(text + "\n")
    print(error_table(result["errors"]), cost_table(result["costs"]), sep="\n")


if __name__ == "__main__":
    main()
