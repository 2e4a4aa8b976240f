"""Loading and saving compared with torch and Transformers, in one run on this machine's CPU and disk.

    python benchmarks/checkpoints.py [--out PATH] [--rounds N] [--small]

Two gloo ranks, a T5 of t5-base's shapes with random weights, fp32; sharded checkpoints with AdamW's state. Every
contender does every task in a fresh pair of processes, round by round in turn. Without --small and --out the result
goes to benchmarks/results/checkpoints.json. Exits with 1 if a contender failed.
"""

import argparse
import datetime
import gc
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from measure import reset_resident_peak, resident_peak_bytes
from ranks import RankFailed, on_two_ranks, quiet
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Block

import fullshard
from fullshard.core.comm import Comm

LATEST = Path(__file__).parent / "results" / "checkpoints.json"
TIMEOUT_S = 240.0
SHAPES = {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "vocab_size": 32128}
SMALL = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 1000}
BATCH, LENGTH = 2, 32

DEFINITIONS = {
    "extra peak": "Growth of one rank's resident memory (VmHWM, reset before) over what was resident before the task; "
    "the larger rank's. Loading: before the model exists on that rank, after the imports and the process group.",
    "seconds": "From a barrier to a barrier, files on the disk (fsync) where one is written; the page cache is warm.",
    "stall": "How long the call that saves in the background keeps the training thread; the second call, with the "
    "buffers of the first. On the larger rank.",
    "step during save": "One training step (batch 2x32) while the background save is written, over one without.",
}


class Watch:
    """Seconds and growth of resident memory of a block of code."""

    def __enter__(self) -> "Watch":
        gc.collect()
        dist.barrier()
        reset_resident_peak()
        self.before = resident_peak_bytes()
        self.began = time.perf_counter()
        return self

    def __exit__(self, *error: Any) -> None:
        self.peak_bytes = resident_peak_bytes() - self.before
        if not any(error):
            dist.barrier()
        self.seconds = time.perf_counter() - self.began

    def figures(self, name: str) -> dict[str, float]:
        """Return the figures as JSON values."""
        return {f"{name}_s": self.seconds, f"{name}_extra_peak_bytes": self.peak_bytes}


def meta_model(folder: Path) -> T5ForConditionalGeneration:
    """Return the model on the meta device."""
    with torch.device("meta"):
        return T5ForConditionalGeneration(T5Config.from_pretrained(folder / "model"))


def write_model(folder: Path, small: bool) -> None:
    """Write a model directory to load from."""
    fixed: dict[str, Any] = {"dropout_rate": 0.0, "decoder_start_token_id": 0, "tie_word_embeddings": True}
    with torch.device("meta"):
        model = T5ForConditionalGeneration(T5Config(**(SMALL if small else SHAPES), **fixed))
    model.to_empty(device="cpu")
    model.tie_weights()
    torch.manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0) if param.ndim == 1 else param.uniform_(-0.05, 0.05)
    model.save_pretrained(folder / "model")


def torch_sharded(model: torch.nn.Module) -> torch.nn.Module:
    """Apply FSDP2 as its documentation shows: blocks first, then the root."""
    for module in model.modules():
        if isinstance(module, T5Block):
            torch_fully_shard(module)
    return torch_fully_shard(model)


def held_bytes(model: torch.nn.Module) -> int:
    """Return this rank's shards."""
    parts = [getattr(p, "_local_tensor", p) for p in model.parameters()]
    return sum(part.nbytes for part in parts)


def load_fullshard(folder: Path) -> torch.nn.Module:
    """Load with each rank reading its own element ranges."""
    return fullshard.fully_shard(meta_model(folder), weights=fullshard.Pretrained(folder / "model"))


def load_everywhere(folder: Path) -> torch.nn.Module:
    """Call ``from_pretrained`` on every rank, then shard with FSDP2."""
    return torch_sharded(T5ForConditionalGeneration.from_pretrained(folder / "model", dtype=torch.float32))


def load_broadcast(folder: Path) -> torch.nn.Module:
    """Call ``from_pretrained`` on rank 0 and broadcast tensor by tensor into FSDP2's shards."""
    state = {}
    if dist.get_rank() == 0:
        state = T5ForConditionalGeneration.from_pretrained(folder / "model", dtype=torch.float32).state_dict()
    model = torch_sharded(meta_model(folder))
    model.to_empty(device="cpu")
    model.tie_weights()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(model, state, options=options)
    return model


LOADERS = {"fullshard": load_fullshard, "from_pretrained": load_everywhere, "broadcast": load_broadcast}


def load(comm: Comm, name: str, folder: Path) -> dict[str, float]:
    """Measure loading pretrained weights into shards."""
    quiet()
    with Watch() as watch:
        model = LOADERS[name](folder)
    return watch.figures("load") | {"shard_bytes": held_bytes(model)}


def ready(name: str, folder: Path) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a sharded model and its optimizer after a step."""
    model = load_fullshard(folder) if name == "fullshard" else load_everywhere(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    step(model, optimizer)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Run one training step and return its seconds."""
    dist.barrier()
    began = time.perf_counter()
    words = torch.randint(2, 900, (BATCH, LENGTH), generator=torch.Generator().manual_seed(dist.get_rank()))
    model(input_ids=words, labels=words).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - began


def full(comm: Comm, name: str, folder: Path) -> dict[str, float]:
    """Measure saving the full model in Hugging Face's layout."""
    quiet()
    target = folder / "full"
    model = load_fullshard(folder) if name == "fullshard" else load_everywhere(folder)
    with Watch() as watch:
        if name == "fullshard":
            fullshard.save(model, target)
        else:
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            state = get_model_state_dict(model, options=options)
            if comm.rank == 0:
                target.mkdir()
                write_full(state, target / "model.safetensors", every_name=name.endswith("all_names"))
    written = (target / "model.safetensors").stat().st_size
    dist.barrier()
    return watch.figures("full") | {"written_bytes": written}


def write_full(state: dict[str, torch.Tensor], path: Path, *, every_name: bool) -> None:
    """Write a state dict of torch's, which has a tied tensor under each name: under one name, or ``every_name``."""
    names = (
        list(state) if every_name else [n for n in state if not n.endswith(("embed_tokens.weight", "lm_head.weight"))]
    )
    save_file({name: state[name] for name in names}, path, metadata={"format": "pt"})
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sharded(comm: Comm, name: str, folder: Path) -> dict[str, float]:
    """Measure saving the training state from all ranks, synchronously and in the background."""
    quiet()
    model, optimizer = ready(name, folder)
    saver = _Ours(model, optimizer, folder) if name == "fullshard" else _Torchs(model, optimizer, folder)
    figures = {}
    with Watch() as watch:
        saver.save(1)
    figures |= watch.figures("sharded")
    figures["alone_step_s"] = min(step(model, optimizer) for _ in range(3))
    for number in (2, 3):  # the first allocates the buffers, the second is like all later ones
        with Watch() as watch:
            began = time.perf_counter()
            saver.start(number)
            stall = time.perf_counter() - began
        during = step(model, optimizer)
        saver.wait()
        figures |= {f"stall_{number - 1}_s": stall, f"during_{number - 1}_step_s": during}
        figures |= {f"background_{number - 1}_extra_peak_bytes": watch.peak_bytes}
    saver.close()
    for number, key in ((1, "written_bytes"), (3, "background_written_bytes")):
        files = [path for path in saver.path(number).rglob("*") if path.is_file()]
        figures[key] = sum(path.stat().st_size for path in files)
    return figures


def reload(comm: Comm, name: str, folder: Path) -> dict[str, float]:
    """Measure loading what :func:`sharded` wrote into a new training state."""
    quiet()
    model, optimizer = ready(name, folder)
    saver = _Ours(model, optimizer, folder) if name == "fullshard" else _Torchs(model, optimizer, folder)
    with Watch() as watch:
        saver.load(3)
    saver.close()
    return watch.figures("reload")


class _Ours:
    """fullshard's checkpoints."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        self.state = model, optimizer
        self.checkpoints = fullshard.Checkpoints(folder / "ours", keep_last=None)

    def path(self, number: int) -> Path:
        return self.checkpoints.directory / f"step-{number:08d}"

    def save(self, number: int) -> None:
        self.checkpoints.save(*self.state, step=number)

    def start(self, number: int) -> None:
        self.checkpoints.save(*self.state, step=number, background=True)

    def wait(self) -> None:
        self.checkpoints.wait()

    def load(self, number: int) -> None:
        assert self.checkpoints.load(*self.state)

    def close(self) -> None:
        self.checkpoints.close()


class _Torchs:
    """torch.distributed.checkpoint."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        self.model, self.optimizer, self.folder = model, optimizer, folder
        self.future: Any = None
        self.group = dist.new_group(backend="gloo")

    def path(self, number: int) -> Path:
        return self.folder / f"theirs-{number:06d}"

    def state(self) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self.model),
            "optim": get_optimizer_state_dict(self.model, self.optimizer),
        }

    def save(self, number: int) -> None:
        dcp.save(self.state(), checkpoint_id=self.path(number))

    def start(self, number: int) -> None:
        self.future = dcp.async_save(self.state(), checkpoint_id=self.path(number), process_group=self.group)

    def wait(self) -> None:
        self.future.result()

    def load(self, number: int) -> None:
        dcp.load(self.state(), checkpoint_id=self.path(number))

    def close(self) -> None:
        pass


TASKS: dict[str, tuple[Callable[..., dict[str, float]], tuple[str, ...]]] = {
    "load": (load, ("fullshard", "from_pretrained", "broadcast")),
    "full": (full, ("fullshard", "torch")),
    "sharded": (sharded, ("fullshard", "torch")),
    "reload": (reload, ("fullshard", "torch")),
}


def main() -> int:
    """Measure, write the result and print the tables."""
    args = _arguments()
    quiet()
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    raw: dict[str, dict[str, list[dict[str, float]]]] = {task: {name: [] for name in TASKS[task][1]} for task in TASKS}
    failures: dict[str, str] = {}
    load = os.getloadavg()
    for number in range(args.rounds):
        with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
            folder = Path(scratch)
            # In a separate process: memory that it frees would count as resident before each task.
            writer = multiprocessing.get_context("fork").Process(target=write_model, args=(folder, args.small))
            writer.start()
            writer.join()
            for task, (work, names) in TASKS.items():
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    print(f"round {number + 1}, {task}, {name}", file=sys.stderr, flush=True)
                    try:
                        ranks = on_two_ranks(work, name, folder, timeout_s=TIMEOUT_S)
                        raw[task][name].append({key: max(rank[key] for rank in ranks) for key in ranks[0]})
                    except RankFailed as error:
                        failures[f"{task} {name}"] = str(error)
                    shutil.rmtree(folder / "full", ignore_errors=True)
    result = {
        "command": " ".join(["python", "benchmarks/checkpoints.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": bench.machine() | {"load_average_at_start": load},
        "definitions": DEFINITIONS,
        "medians": medians(raw),
        "failures": failures,
        "raw": raw,
    }
    out = args.out or (None if args.small else LATEST)
    if out:
        out.write_text(json.dumps(result, indent=2) + "\n")
    print(table(result["medians"], raw))
    for name, why in failures.items():
        print(f"{name} failed: {why}")
    return 1 if failures else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help=f"where to write the result (default: {LATEST.name})")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument("--scratch", type=Path, help="directory for the files, on the disk to be measured")
    parser.add_argument("--small", action="store_true", help="use a tiny model, for development only")
    return parser.parse_args()


def medians(raw: dict[str, dict[str, list[dict[str, float]]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the median of every figure over the rounds; the result keeps each round under ``raw``."""
    return {
        task: {
            name: {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
            for name, rounds in names.items()
            if rounds
        }
        for task, names in raw.items()
    }


ROWS = (
    ("load: extra peak of a rank", "load", "load_extra_peak_bytes", 1e-6, "MB"),
    ("load: time", "load", "load_s", 1.0, "s"),
    ("full save: extra peak of rank 0", "full", "full_extra_peak_bytes", 1e-6, "MB"),
    ("full save: time", "full", "full_s", 1.0, "s"),
    ("full save: bytes written", "full", "written_bytes", 1e-6, "MB"),
    ("sharded save: extra peak of a rank", "sharded", "sharded_extra_peak_bytes", 1e-6, "MB"),
    ("sharded save: time", "sharded", "sharded_s", 1.0, "s"),
    ("sharded save: bytes written", "sharded", "written_bytes", 1e-6, "MB"),
    ("sharded save in the background: stall", "sharded", "stall_2_s", 1.0, "s"),
    ("sharded load: extra peak of a rank", "reload", "reload_extra_peak_bytes", 1e-6, "MB"),
    ("sharded load: time", "reload", "reload_s", 1.0, "s"),
)


def table(medians: dict[str, dict[str, dict[str, float]]], raw: dict[str, dict[str, list[dict[str, float]]]]) -> str:
    """Return the medians as a Markdown table; ratios are medians of each round's ratio."""
    lines = ["| | fullshard | torch or Transformers | ratio |", "|---|---|---|---|"]
    for title, task, key, scale, unit in ROWS:
        ours = medians[task].get("fullshard")
        for name, theirs in medians[task].items():
            if name != "fullshard" and ours:
                pairs = zip(raw[task]["fullshard"], raw[task][name], strict=False)
                ratio = statistics.median(one[key] / max(1e-9, other[key]) for one, other in pairs)
                cells = (f"{figures[key] * scale:,.{0 if unit == 'MB' else 2}f} {unit}" for figures in (ours, theirs))
                lines.append(f"| {title} ({name}) | {' | '.join(cells)} | {ratio:.2f} |")
    stalls = [one["stall_2_s"] / one["sharded_s"] for one in raw["sharded"]["fullshard"]]
    slowed = [one["during_2_step_s"] / one["alone_step_s"] for one in raw["sharded"]["fullshard"]]
    if stalls:
        lines.append(f"\nstall over the synchronous save: {statistics.median(stalls):.3f}")
        lines.append(f"step during the save over one without: {statistics.median(slowed):.2f}")
        shard = medians["load"]["fullshard"]["shard_bytes"]
        lines.append(
            f"extra peak at load over the shard: {medians['load']['fullshard']['load_extra_peak_bytes'] / shard:.3f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
