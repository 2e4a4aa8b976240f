"""Stage ``headline``: what a user gets. One card, a process for each contender, the same rows, tokens and batches.

T5-large with rows of SciTLDR's lengths, and LoRA on a Llama-3-8B; random weights. The contenders: ``fullshard train``
without one option, the same with its ways set by hand, Hugging Face's Trainer with FSDP2 at its defaults, and a loop on
FSDP2 with the same ways. A contender's figures are tokens/s without padding over its steps after the first ones, memory
that torch's allocator reserved, and seconds from the start of its process to the end of its first step.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedTokenizerFast

from benchmarks.gpu import ROOT
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.record import Case, Lacking
from benchmarks.gpu.shapes import SHAPES, TINY, Shape, check_lora

WARM = 3
"""First steps, which are not timed."""
SHARE = 0.25
"""Of a row's longest length the standard deviation; SciTLDR's abstracts have 235 tokens on average, at most 512."""


@dataclass(frozen=True)
class Task:
    """A model, how it is trained, and for how many steps."""

    shape: str
    lora: bool
    steps: int
    ways: tuple[str, ...]  # by hand


TASKS = (Task("t5-large", False, 24, ("t5_attention", "compile")), Task("llama-3-8b", True, 10, ("compile",)))
CONTENDERS = ("fullshard train", "fullshard train, by hand", "Trainer, FSDP2", "FSDP2, the same ways")


def cases(machine: Machine) -> list[Case]:
    """Return a case for each task and contender; a task's first case makes its model and rows."""
    shapes = TINY if machine.dry else SHAPES
    folder = Path(tempfile.gettempdir(), f"fullshard-headline-{os.getuid()}-{'dry' if machine.dry else 'gpu'}")
    return [
        Case(f"{shapes[task.shape].name}, {'LoRA' if task.lora else 'full'}: {name}", work, limit_s=120.0)
        for task in TASKS
        for name in CONTENDERS
        for work in [partial(_measured, machine, task, shapes[task.shape], folder / task.shape, name)]
    ]


def _measured(machine: Machine, task: Task, shape: Shape, folder: Path, name: str, limit_s: float) -> dict[str, Any]:
    if task.lora:
        check_lora()
    if not (folder / "rows.jsonl").exists():
        machine.alone(_write, task, shape, folder, limit_s=limit_s)
    ways = [] if machine.dry else list(task.ways)
    if name.startswith("fullshard"):
        return _ours(task, shape, folder, ways if "by hand" in name else None, limit_s)
    given = {"contender": name, "folder": str(folder), "task": asdict(task) | {"ways": ways}, "batch": shape.batch}
    given["block"] = shape.block.__name__
    command = [sys.executable, "-m", "benchmarks.gpu.rivals", json.dumps(given)]
    started = time.time()
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=limit_s, check=False)
    lines = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        return {"failed": (done.stderr or done.stdout)[-800:]}
    found = json.loads(lines[-1])
    return found | {"first_step_s": round(found["first_step_at"] - started, 1)}


def _write(task: Task, shape: Shape, folder: Path) -> None:
    """Write the model, its tokenizer of one token a word, and rows."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = shape.bare(device).to(torch.bfloat16)
    model.config.pad_token_id, model.config.eos_token_id = 0, 1
    model.save_pretrained(folder)
    words = {"<pad>": 0, "</s>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, shape.config["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    fast.save_pretrained(folder)

    def text(longest: int, mean: float) -> str:
        drawn = torch.normal(mean * longest, SHARE * longest, (1,), generator=generator)
        length = int(drawn.clamp(2, longest - 1))
        return " ".join(f"w{i}" for i in torch.randint(3, len(words), (length,), generator=generator).tolist())

    # A causal model's rows are full, as packed or long ones are; an encoder-decoder's have SciTLDR's lengths.
    mean, target = (0.46, shape.target) if shape.target else (0.9, max(4, shape.source // 8))
    source = shape.source if shape.target else shape.source - target
    rows = ({"source": text(source, mean), "target": text(target, 0.4)} for _ in range(shape.batch * task.steps))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert AutoConfig.from_pretrained(folder).vocab_size == len(words)


def _ours(task: Task, shape: Shape, folder: Path, ways: Sequence[str] | None, limit_s: float) -> dict[str, Any]:
    """Run the program, and read its first step's time as soon as the run has written it."""
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch, "run")
        settings = {
            "model.path": folder,
            "data.train_file": folder / "rows.jsonl",
            "data.source_column": "source",
            "data.target_column": "target",
            "data.max_source_length": shape.source,
            "data.max_target_length": shape.target or shape.source,
            "data.cache_dir": Path(scratch, "cache"),
            "training.per_device_train_batch_size": shape.batch,
            "training.max_steps": task.steps,
            "training.eval_strategy": "no",
            "training.save_strategy": "no",
            "output_dir": output,
            **({} if shape.target else {"data.separator": "''"}),
            **({"model.adapter": "{type: lora, r: 16}"} if task.lora else {}),
            **({} if ways is None else {"speed.ways": f"[{', '.join(ways)}]"}),
        }
        run_file = Path(scratch, "run.yaml")
        run_file.write_text("{}\n")
        command = [sys.executable, "-m", "fullshard", "train", str(run_file)]
        command += [f"{key}={value}" for key, value in settings.items()]
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
        with Path(scratch, "output").open("w+") as printed:
            started = time.time()
            process = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT, env=environment)
            first = _first_line(output / "metrics.jsonl", process, started + limit_s)
            try:
                code = process.wait(max(1.0, started + limit_s - time.time()))
            except subprocess.TimeoutExpired:
                process.terminate()
                code = process.wait()
            printed.seek(0)
            text = printed.read()
        if code or first is None:
            if "No module named" in text:
                raise Lacking(text.strip().splitlines()[-1])
            return {"failed": text[-800:]}
        records = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
        steps = [one for one in records if one["kind"] == "step"][WARM:]
        chosen = json.loads((output / "run.json").read_text()).get("chosen", [])
    return {
        "tokens_per_s": round(sum(one["tokens"] for one in steps) / sum(one["seconds"] for one in steps), 1),
        "reserved_bytes": max(one.get("reserved_bytes", 0) for one in steps),
        "first_step_s": round(first - started, 1),
        "chosen": chosen,
    }


def _first_line(path: Path, process: subprocess.Popen[Any], end: float) -> float | None:
    """Return when a file had its first line; None if the process ended, or time did, before."""
    while time.time() < end:
        if path.exists() and b"\n" in path.read_bytes():
            return time.time()
        if process.poll() is not None:
            return None
        time.sleep(0.05)
    return None
