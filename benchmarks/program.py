"""fullshard's program, Hugging Face's Trainer and a loop on torch's fully_shard, in one run on this machine's CPU.

    python benchmarks/program.py SCITLDR_DIRECTORY [--out PATH] [--steps N] [--small] [--rate RATE] [--only NAMES]
                                 [--ways LISTS]

SciTLDR's abstracts and summaries (train.jsonl and dev.jsonl of SciTLDR-A), a T5 of t5-small's shapes with the same
random weights and token ids for all, two gloo ranks, fp32, 8 rows a rank and step, AdamW at one constant learning rate,
no clipping (the Trainer multiplies T5's loss by the number of ranks, so clipping would differ). Each contender runs in
its own thread on each rank; the threads take turns, one step each, so that all see the same noise. With ``--rate``
(as root) the ranks are in namespaces of their own, joined by a link that lets through so much each way. Each list of
``--ways``, such as ``compile,bias_sdpa+compile``, is a further contender: fullshard with these ``speed.ways``, left out
by name where one does not apply. Without --small, --ways and --out the result goes to benchmarks/results/program.json.
Exits with 1 if one failed.
"""

import argparse
import ctypes
import datetime
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import bench
import torch
import torch.distributed as dist
from namespaces import on_two_machines
from ranks import RankFailed, on_two_ranks, quiet
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler
from transformers import (
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
)
from transformers.models.t5.modeling_t5 import T5Block

from fullshard.core.comm import Comm, init_from_env, shutdown
from fullshard.program.config import RunConfig
from fullshard.program.models import train_tokenizer
from fullshard.program.speed import WAYS
from fullshard.program.train import train
from fullshard.program.train.setup.model import speed_facts
from fullshard.program.train.setup.prepare import Prepared, prepare

LATEST = Path(__file__).parent / "results" / "program.json"
TIMEOUT_S = 3000.0
SHAPES = {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8, "vocab_size": 32128}
SMALL = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 8000}
VOCABULARY = 6000
"""Size of the tokenizer: abstracts have about as many tokens as with T5's own, 235. The model keeps T5's 32,128."""
ROWS = 8
SOURCE, TARGET = 512, 150
"""Longest source and target: every contender truncates to them, the fully_shard loop also pads to them."""
RATE = 5e-4
HELD_OUT = 32
EVALUATIONS = 4
WARM_STEPS = 2
OURS = "fullshard"
M_ARENA_MAX = -8
"""Of glibc's malloc.h."""

DEFINITIONS = {
    "tokens/s": "Source and target tokens without padding that both ranks trained on, over the time of the steps: from "
    "the end of one step to the end of the next, batches included. Of all timed steps together. Left out is the "
    "one step of a run that fullshard records for its report; on the CPU it takes several times as long.",
    "computed/real": "Positions that went through the model over tokens.",
    "held-out loss": f"Mean per target token on {HELD_OUT} rows of dev.jsonl, after each quarter of the steps.",
    "fullshard": "fullshard train in its defaults for what is not named above: batches grouped by length.",
    "fullshard, WAYS": "The same with speed.ways. The first steps, which compile, are not timed.",
    "trainer": "Seq2SeqTrainer in its defaults: DDP, rows drawn at random, padded to the batch's longest.",
    "tutorial": "T5Block by T5Block under torch's fully_shard, every row padded to 512 and 150.",
}


class Contender(threading.Thread):
    """A training loop in a thread that runs one turn at a time."""

    def __init__(self, name: str, work: Callable[["Contender"], None]) -> None:
        super().__init__(name=name, daemon=True)
        self._work, self._go, self._paused = work, threading.Semaphore(0), threading.Semaphore(0)
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.held_out: list[float] = []
        self.recorded: int | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Wait for the first turn, then run the loop to its end."""
        torch.set_num_threads(1)
        self._go.acquire()
        try:
            self._work(self)
        except BaseException as error:
            self.error = error
        self._paused.release()

    def pause(self) -> None:
        """End this turn and wait for the next; the loop calls it after each step."""
        self._paused.release()
        self._go.acquire()

    def turn(self) -> float:
        """Run the loop until it pauses or ends; return the seconds."""
        began = time.perf_counter()
        self._go.release()
        self._paused.acquire()
        if self.error is not None:
            raise self.error
        return time.perf_counter() - began

    def count(self, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor, pad: int) -> None:
        """Record the tokens and positions of a batch; labels of padding are -100 or the padding id."""
        real = int(mask.sum()) + int(((labels != -100) & (labels != pad)).sum())
        self.tokens.append(real)
        self.positions.append(ids.numel() + labels.numel())


def ours(config: RunConfig, comm: Comm, prepared: Prepared, mine: Contender) -> None:
    """Train with fullshard's program."""

    class Turns:
        """A sink that waits for the next turn after each step."""

        def step(self, report: Any) -> None:
            mine.pause()

        def trace(self, trace: Any) -> None:
            mine.recorded = trace.step

        def evaluation(self, report: Any, *, is_best: bool) -> None:
            mine.held_out.append(report.loss)
            mine.pause()

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *args, **kwargs: None

    # Counts the tensors that the model is called with.
    def watch(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if model.training:
            ids, shifted = kwargs["input_ids"], kwargs["decoder_input_ids"]
            # Shifted by one, each row's last token is left out and a padding id comes first.
            targets = int((shifted != prepared.tokenizer.pad_token_id).sum()) + len(shifted)
            mine.tokens.append(int(kwargs["attention_mask"].sum()) + targets)
            mine.positions.append(ids.numel() + shifted.numel())

    original = T5ForConditionalGeneration.__init__

    def hooked(model: Any, *args: Any, **kwargs: Any) -> None:
        T5ForConditionalGeneration.__init__ = original  # only the first model built is ours
        original(model, *args, **kwargs)
        model.register_forward_pre_hook(watch, with_kwargs=True)

    T5ForConditionalGeneration.__init__ = hooked
    train(config, comm, [Turns()], prepared=prepared)


def _with_ways(config: RunConfig, name: str) -> RunConfig:
    """Return the settings of fullshard's contender of this name, which writes to a directory of its own."""
    ways = tuple(name.removeprefix(OURS).strip(", ").split("+")) if name != OURS else ()
    speed = config.speed.model_copy(update={"ways": ways})
    return config.model_copy(update={"speed": speed, "output_dir": f"{config.output_dir}-{'-'.join(ways)}"})


def fitting(lists: list[str], config: RunConfig, directory: Path) -> list[str]:
    """Return the names of the contenders with these ways, and say which are left out, and why."""
    names, model = [], T5ForConditionalGeneration.from_pretrained(directory)
    for ways in lists:
        reasons = [WAYS[way].misfit(model, speed_facts(config, torch.device("cpu"))) for way in ways.split("+")]
        for reason in filter(None, reasons):
            print(f"without {ways}: {reason}", file=sys.stderr)
        names += [] if any(reasons) else [f"{OURS}, {ways}"]
    return names


def trainer(options: dict[str, Any], prepared: Prepared, mine: Contender) -> None:
    """Train with Hugging Face's Trainer as run_summarization.py sets it up."""
    directory = Path(options["directory"])
    model = T5ForConditionalGeneration.from_pretrained(directory)
    rows = _rows(prepared.train_set)

    class Turns(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            mine.pause()
            if state.global_step % options["eval_steps"] == 0:
                mine.held_out.append(_held_out_loss(model, prepared))
                mine.pause()

    arguments = Seq2SeqTrainingArguments(
        output_dir=str(directory / "trainer"),
        per_device_train_batch_size=ROWS,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        max_steps=options["steps"],
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
        seed=1,
    )
    collator = DataCollatorForSeq2Seq(prepared.tokenizer, model=model)
    _watch(model, mine, prepared.tokenizer.pad_token_id)
    Seq2SeqTrainer(model=model, args=arguments, train_dataset=rows, data_collator=collator, callbacks=[Turns()]).train()


def tutorial(options: dict[str, Any], prepared: Prepared, mine: Contender) -> None:
    """Train in a plain loop on torch's fully_shard, every row padded to the longest length."""
    model = T5ForConditionalGeneration.from_pretrained(options["directory"])
    model.train()
    for module in model.modules():
        if isinstance(module, T5Block):
            torch_fully_shard(module)
    torch_fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    _watch(model, mine, prepared.tokenizer.pad_token_id)
    rows = _rows(prepared.train_set)
    sampler = DistributedSampler(rows, seed=1)  # type: ignore[arg-type]
    pad = prepared.tokenizer.pad_token_id

    def collate(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        sources = [row["input_ids"] + [pad] * (SOURCE - len(row["input_ids"])) for row in batch]
        targets = [row["labels"] + [-100] * (TARGET - len(row["labels"])) for row in batch]
        ids = torch.tensor(sources)
        return {"input_ids": ids, "attention_mask": (ids != pad).long(), "labels": torch.tensor(targets)}

    loader = DataLoader(rows, ROWS, sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]
    for step, batch in enumerate(loader, start=1):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        mine.pause()
        if step % options["eval_steps"] == 0:
            mine.held_out.append(_held_out_loss(model, prepared))
            mine.pause()
        if step == options["steps"]:
            break


def _rows(tokenized: Any) -> list[dict[str, list[int]]]:
    pairs = ((tokenized.source_ids[i], tokenized.target_ids[i]) for i in range(len(tokenized)))
    return [
        {"input_ids": [int(t) for t in s], "attention_mask": [1] * len(s), "labels": [int(t) for t in t_]}
        for s, t_ in pairs
    ]


def _watch(model: nn.Module, mine: Contender, pad: int) -> None:
    def watch(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if module.training:
            mine.count(kwargs["input_ids"], kwargs["attention_mask"], kwargs["labels"], pad)

    model.register_forward_pre_hook(watch, with_kwargs=True)


@torch.no_grad()
def _held_out_loss(model: Any, prepared: Prepared) -> float:
    """Return the mean loss per target token of the held-out rows; every rank computes all of them."""
    was_training = model.training
    model.eval()
    total, tokens = 0.0, 0
    for row in _rows(prepared.held_out_set):
        labels = torch.tensor([row["labels"]])
        logits = model(input_ids=torch.tensor([row["input_ids"]]), labels=labels).logits
        total += float(cross_entropy(logits[0], labels[0], reduction="sum"))
        tokens += labels.numel()
    model.train(was_training)
    return total / tokens


def work(comm: Comm, options: dict[str, Any]) -> dict[str, Any]:
    """Run the contenders on one rank, one step each in turn, and return their figures."""
    # All threads allocate from one arena, so memory freed by one contender is reused by the next.
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    steps = options["steps"]
    config = RunConfig.model_validate(options["config"])
    prepared = prepare(config)
    loops: dict[str, Callable[[Contender], None]] = {
        **{name: partial(ours, _with_ways(config, name), comm, prepared) for name in options["only"] if OURS in name},
        "trainer": lambda mine: trainer(options, prepared, mine),
        "tutorial": lambda mine: tutorial(options, prepared, mine),
    }
    contenders = [Contender(name, loops[name]) for name in options["only"]]
    seconds: dict[str, dict[int, float]] = {one.name: {} for one in contenders}
    for one in contenders:
        one.start()
    for number in range(1, steps + 1):
        for one in contenders:
            dist.barrier()
            took = one.turn()
            if number > WARM_STEPS and number != one.recorded:
                seconds[one.name][number] = took
            if comm.rank == 0:
                print(f"step {number}: {one.name} {took:.1f} s", file=sys.stderr, flush=True)
        if number % options["eval_steps"] == 0:
            _let_all_go(contenders)
    _let_all_go(contenders)
    return {
        one.name: {
            "seconds": list(seconds[one.name].values()),
            "tokens": sum(one.tokens[number - 1] for number in seconds[one.name]),
            "positions": sum(one.positions[number - 1] for number in seconds[one.name]),
            "held_out": one.held_out,
        }
        for one in contenders
    }


def _let_all_go(contenders: list[Contender]) -> None:
    """Give every contender a turn that is not timed: an evaluation, or the end."""
    for one in contenders:
        dist.barrier()
        one.turn()


def figures(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of both ranks combined."""
    table = {}
    for name in ranks[0]:
        both = [rank[name] for rank in ranks]
        seconds = [max(pair) for pair in zip(*(one["seconds"] for one in both), strict=True)]
        tokens = sum(one["tokens"] for one in both)
        table[name] = {
            "tokens_per_second": tokens / sum(seconds),
            "seconds_per_step_median": statistics.median(seconds),
            "seconds_per_step_least": min(seconds),
            "computed_over_real": sum(one["positions"] for one in both) / tokens,
            "held_out_loss": both[0]["held_out"],
        }
    speeds = {name: one["tokens_per_second"] for name, one in table.items()}
    ratios = {
        f"{ours.removeprefix(OURS).strip(', ')} over {name}".strip().replace(" ", "_"): speed / speeds[name]
        for ours, speed in speeds.items()
        for name in speeds
        if OURS in ours and name != ours and (OURS not in name or name == OURS)
    }
    return {"contenders": table, "ratios": ratios}


def settings(data: Path, directory: Path, steps: int) -> dict[str, Any]:
    """Return the settings of fullshard's run."""
    return {
        "output_dir": str(directory / "ours"),
        "resume": "never",
        "model": {"path": str(directory)},
        "data": {
            "train_file": str(data / "train.jsonl"),
            "validation_file": str(data / "dev.jsonl"),
            "source_column": "source",
            "target_column": "target",
            "max_source_length": SOURCE,
            "max_target_length": TARGET,
            "max_eval_samples": HELD_OUT,
            "cache_dir": str(directory / "cache"),
        },
        "training": {
            "per_device_train_batch_size": ROWS,
            "learning_rate": RATE,
            "lr_scheduler_type": "constant",
            "max_grad_norm": None,
            "max_steps": steps,
            "eval_strategy": "steps",
            "eval_steps": steps // EVALUATIONS,
            "save_strategy": "no",
        },
        "evaluation": {"metric": "perplexity"},
    }


def main() -> int:
    """Write the model, run the ranks, write and print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path, help="directory of SciTLDR-A: train.jsonl and dev.jsonl")
    parser.add_argument("--out", type=Path, help=f"where to write the result (default: {LATEST.name})")
    parser.add_argument(
        "--steps", type=int, default=12, help=f"steps of each contender, {WARM_STEPS} of them untimed (default: 12)"
    )
    parser.add_argument("--small", action="store_true", help="use a tiny model, for development only")
    parser.add_argument("--rate", help="run the ranks in namespaces joined by a link of this rate, as tc writes it")
    parser.add_argument("--ways", default="", help="lists of speed.ways, separated by commas; inside of a list by +")
    parser.add_argument("--only", default="fullshard,trainer,tutorial", help="contenders, separated by commas")
    args = parser.parse_args()
    quiet()
    os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    if "RANK" in os.environ:
        return _rank(Path(os.environ["PROGRAM_OPTIONS"]))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    load = os.getloadavg()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        _make_model(args.data, directory, SMALL if args.small else SHAPES)
        config = settings(args.data, directory, args.steps)
        options = {"directory": folder, "steps": args.steps, "config": config, "eval_steps": args.steps // EVALUATIONS}
        options["only"] = args.only.split(",")
        options["only"] += fitting(
            list(filter(None, args.ways.split(","))), RunConfig.model_validate(config), directory
        )
        try:
            ranks = _over_a_link(options, args.rate) if args.rate else on_two_ranks(work, options, timeout_s=TIMEOUT_S)
        except RankFailed as error:
            print(error, file=sys.stderr)
            return 1
    result = {
        "command": " ".join(["python benchmarks/program.py SCITLDR_DIRECTORY", *sys.argv[2:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": bench.machine() | {"load_average_at_start": load},
        "definitions": DEFINITIONS,
        **figures(ranks),
    }
    out = args.out or (None if args.small or args.ways else LATEST)
    if out:
        out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({key: result[key] for key in ("contenders", "ratios")}, indent=2))
    return 0


def _over_a_link(options: dict[str, Any], rate: str) -> list[dict[str, Any]]:
    """Run this program again as the ranks of two machines; return what each found.

    Raises:
        RankFailed: One ended with an error.
    """
    path = Path(options["directory"]) / "options.json"
    path.write_text(json.dumps(options))
    os.environ["PROGRAM_OPTIONS"] = str(path)
    codes = on_two_machines(rate)
    if any(codes):
        raise RankFailed(f"exit codes {codes}")
    return json.loads(path.with_suffix(".found").read_text())


def _rank(path: Path) -> int:
    """Be one of the ranks of :func:`_over_a_link`."""
    comm = init_from_env()
    found = comm.all_gather_object(work(comm, json.loads(path.read_text())))
    if comm.rank == 0:
        path.with_suffix(".found").write_text(json.dumps(found))
    comm.barrier()
    shutdown()
    return 0


def _make_model(data: Path, directory: Path, shapes: dict[str, int]) -> None:
    """Write a tokenizer of the training texts and a model with random weights as a Hugging Face directory."""
    texts = []
    for line in (data / "train.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        texts += [" ".join(row["source"]), *row["target"]]
    tokenizer = train_tokenizer(texts, VOCABULARY)
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = T5Config(**shapes, decoder_start_token_id=0, pad_token_id=tokenizer.pad_token_id)
    T5ForConditionalGeneration(config).save_pretrained(directory)


if __name__ == "__main__":
    sys.exit(main())
