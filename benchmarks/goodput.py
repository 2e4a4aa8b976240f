"""What snapshots cost while nothing fails, and how many steps are left of the time when a rank dies every minute.

    python benchmarks/goodput.py [--minutes 7] [--every 60] [--kills 10] [--steps 168] [--calm 60] [--out PATH]

Two CPU ranks train a T5 of t5-small's shapes. Two parts, each recorded when it is done; a call takes at most about
``--minutes``, and the next one continues after it. Nothing else should run meanwhile.

1. overhead: a script with ``Checkpoints(in_memory="auto")``; blocks of 12 steps with snapshots and without take turns.
   ``overhead`` is the median over pairs of neighbours: what slows one block for a while spoils one pair.
2. killed: ``fullshard train``, undisturbed for ``--calm`` seconds, then with a rank killed ``--every`` seconds after it
   was back; a session takes what the call has left.

``goodput`` is the steps that are left over those that the undisturbed time makes of it, without the time in which
Python and imports start (``fullshard train`` prints how long a run was without steps, and how long without that);
``goodput_with_starts`` has that time too.

``step_s`` is a step of the undisturbed time with what is around it, snapshots included. What else runs on the machine
changes meanwhile, so ``own_step_s`` is what steps took themselves in the mean: in that time, and between kills from the
sixth step after a recovery on. Steps after the first kill are held against ``step_s`` and the difference of the two.
The copy of a snapshot is not in them, but the thread that adds it up slows the step after: with t5-small's shapes 13 ms
of a core, so that the difference has up to 0.5 % of a step too much where kills make snapshots more frequent.
"""

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import yaml
from transformers import T5Config, T5ForConditionalGeneration

import fullshard

LATEST = Path(__file__).parent / "results" / "goodput.json"
BLOCK = 12
WARM_STEPS, SETTLING_STEPS = 10, 5
LEAST_S, TAIL_S = 150.0, 30.0
"""Shortest session with kills, and from its last kill to its end."""

SHAPES = {"model_type": "t5", "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8}
CONFIG = SHAPES | {"vocab_size": 32128, "dropout_rate": 0.1, "decoder_start_token_id": 0, "pad_token_id": 0}
ROWS, SOURCE, TARGET = 4, 96, 48

RECOVERED = re.compile(r"step [\d,]+ was done ([\d.]+) s after the loss, ([\d.]+) s without starting processes")


def rank(directory: Path, steps: int) -> None:
    """Train as one rank of the script, and write what happens when."""
    fullshard.init()
    number = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = fullshard.fully_shard(T5ForConditionalGeneration(T5Config(**CONFIG)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(number)
    tokens = torch.randint(4, 30_000, (ROWS, SOURCE), generator=draw)
    labels = tokens[:, :TARGET].contiguous()
    lines = []
    with fullshard.Checkpoints(directory / "checkpoints", in_memory="auto") as checkpoints:
        for step in range(1, steps + 1):
            started = time.perf_counter()
            model(input_ids=tokens, labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if (step // BLOCK) % 2 == 0:
                checkpoints.snapshot(model, optimizer, step=step)
            else:
                checkpoints.in_memory.tick()
                checkpoints.in_memory.wait()
            lines.append(time.perf_counter() - started)
        checkpoints.in_memory.wait()
        kept = [path.stat().st_size for path in Path(os.environ["FULLSHARD_KEEP_DIR"]).rglob("*.safetensors")]
        end = {"every": checkpoints.in_memory.every, "kept_bytes": sum(kept), "seconds": lines}
        end["costs_s"] = checkpoints.in_memory.costs
    (directory / f"rank{number}.json").write_text(json.dumps(end))
    fullshard.shutdown()


def environment() -> dict[str, str]:
    source = str(Path(__file__).parents[1] / "src")
    return os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": source}


def overhead(directory: Path, steps: int) -> dict:
    """Seconds of a block of steps with snapshots over those of the one without that follows."""
    script = [str(Path(__file__)), "--rank", str(directory), "--steps", str(steps)]
    launch = ["-m", "fullshard.cli.main", "launch", "--nproc_per_node", "2", "--max_restarts", "1"]
    subprocess.run([sys.executable, *launch, *script], env=environment(), check=True)
    end = json.loads((directory / "rank0.json").read_text())
    # Blocks begin at multiples of their length. The first two have new memory, and the last may not be complete.
    blocks = [end["seconds"][start - 1 :][:BLOCK] for start in range(2 * BLOCK, steps - BLOCK + 2, BLOCK)]
    pairs = [sum(on) / sum(off) - 1 for on, off in zip(blocks[::2], blocks[1::2], strict=False)]
    return {
        "steps": BLOCK * 2 * len(pairs),
        "step_s": round(statistics.median(second for off in blocks[1::2] for second in off), 4),
        "overhead": round(statistics.median(pairs), 4),
        "overheads": [round(one, 4) for one in pairs],
        "steps_between_snapshots": end["every"],
        "snapshot_cost_s": round(statistics.median(end["costs_s"][2:]), 4),
        "kept_bytes": end["kept_bytes"],
    }


class Run:
    """``fullshard train`` in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        text = " ".join(f"word{number % 10}" for number in range(SOURCE))
        (directory / "rows.csv").write_text("".join(["text,label\n", *(f"{text},{text}\n" for _ in range(64))]))
        training = {"per_device_train_batch_size": ROWS, "num_train_epochs": 10_000, "logging_steps": 1}
        settings = {
            "output_dir": str(directory / "out"),
            "nproc": 2,
            "model": {"config": CONFIG, "tokenizer": {"vocab_size": 60}},
            "data": {"train_file": str(directory / "rows.csv"), "source_column": "text", "target_column": "label"},
            "training": {**training, "eval_strategy": "no", "save_strategy": "no"},
        }
        settings["data"] |= {"cache_dir": str(directory / "cache")}
        settings["data"] |= {"max_source_length": SOURCE, "max_target_length": TARGET}
        (directory / "run.yaml").write_text(yaml.safe_dump(settings))
        self.metrics, self.said = directory / "out" / "metrics.jsonl", directory / "said.txt"
        command = [sys.executable, "-m", "fullshard.cli.main", "train", str(directory / "run.yaml")]
        with self.said.open("w") as said:
            self.process = subprocess.Popen(
                [*command, "--max-restarts", "1000"], env=environment(), stdout=said, stderr=said
            )

    def steps(self) -> list[dict]:
        try:
            lines = self.metrics.read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        return [one for line in lines if line.endswith("\n") and (one := json.loads(line))["kind"] == "step"]

    def wait_for(self, step: int) -> float:
        """Return when a step is recorded, and the time of that."""
        while self.process.poll() is None:
            if len(self.steps()) >= step:
                return self.metrics.stat().st_mtime
            time.sleep(0.02)
        raise SystemExit(f"the run ended before step {step}:\n{self.said.read_text()}")

    def ranks(self) -> list[int]:
        """The ids of the ranks' processes: the launcher's children."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in children]

    def stop(self) -> tuple[int, float]:
        """Stop the run after the step that it is in; the steps before, and when the last of them was recorded."""
        reached, when = len(self.steps()), self.metrics.stat().st_mtime
        self.process.terminate()
        self.process.wait(120)
        return reached, when


def killed(directory: Path, seconds: float, calm: float, every: float, draw: random.Random) -> dict:
    """Steps kept in a time with kills of a random rank, from the tenth step on to the last one before the end."""
    run = Run(directory)
    began = run.wait_for(WARM_STEPS)
    ends = time.time() + seconds
    time.sleep(calm)
    calm_steps = run.steps()[WARM_STEPS:]
    undisturbed, settled, between = len(calm_steps), len(calm_steps) + WARM_STEPS, []
    step_s = (run.metrics.stat().st_mtime - began) / undisturbed
    kills = twice = 0
    while time.time() + TAIL_S < ends:
        steps = run.steps()
        before, between = len(steps), between + steps[settled:]
        os.kill(draw.choice(run.ranks()), signal.SIGKILL)
        kills += 1
        while len(RECOVERED.findall(run.said.read_text())) != kills:
            if run.process.poll() is not None:
                raise SystemExit(f"the run ended after a kill:\n{run.said.read_text()}")
            time.sleep(0.05)
        settled = len(run.steps()) + SETTLING_STEPS
        twice += before + 1 + SETTLING_STEPS - settled
        time.sleep(max(0.0, min(every, ends - time.time())))
    reached, ended = run.stop()
    own = [statistics.mean(one["seconds"] for one in part) for part in (calm_steps, between + run.steps()[settled:])]
    recoveries = [[float(one) for one in found] for found in RECOVERED.findall(run.said.read_text())]
    return {
        "kills": kills,
        "undisturbed_steps": undisturbed,
        "step_s": round(step_s, 4),
        "own_step_s": [round(one, 4) for one in own],
        "steps": reached - WARM_STEPS,
        "seconds": round(ended - began, 2),
        "steps_taken_twice": twice,
        "recoveries_s": [whole for whole, _ in recoveries],
        "recoveries_without_start_s": [rest for _, rest in recoveries],
    }


def summary(record: dict) -> dict:
    """The figures of the page, from all sessions so far."""
    sessions = record.get("killed", [])
    wholes = [seconds for one in sessions for seconds in one["recoveries_s"]]
    rests = [seconds for one in sessions for seconds in one["recoveries_without_start_s"]]
    found = {
        "overhead": record["overhead"]["overhead"],
        "kept_bytes": record["overhead"]["kept_bytes"],
        "kills": len(wholes),
    }
    if not wholes:
        return found
    kept_s = sum(one["steps"] * one["step_s"] + _slower_s(one) for one in sessions)
    seconds = sum(one["seconds"] for one in sessions)
    starts = sum(wholes) - sum(rests)
    return found | {
        "goodput": round(kept_s / (seconds - starts), 4),
        "goodput_with_starts": round(kept_s / seconds, 4),
        "recovery_seconds_median": round(statistics.median(wholes), 2),
        "recovery_without_start_seconds_median": round(statistics.median(rests), 2),
        "steps_taken_twice_per_kill": round(sum(one["steps_taken_twice"] for one in sessions) / len(wholes), 2),
    }


def _slower_s(session: dict) -> float:
    """Seconds that a session's steps after the first kill would have taken longer than before it without kills too."""
    calm, between = session["own_step_s"]
    return (session["steps"] - session["undisturbed_steps"]) * (between - calm)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=7.0, help="start no part that would take longer")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between a recovery and the next kill")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=168)
    parser.add_argument("--calm", type=float, default=60.0, help="seconds before the first kill of a session")
    parser.add_argument("--out", type=Path, default=LATEST)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.rank, options.steps)
        return
    ends = time.monotonic() + 60 * options.minutes
    record = json.loads(options.out.read_text()) if options.out.exists() else {}

    def keep(name: str, part: object) -> None:
        record[name] = part
        record["summary"] = summary(record)
        options.out.write_text(json.dumps(record, indent=1) + "\n")
        print(json.dumps(part), flush=True)

    with tempfile.TemporaryDirectory(prefix="fullshard-goodput-") as scratch:
        if "overhead" not in record:
            keep("overhead", overhead(Path(scratch), options.steps))
    with tempfile.TemporaryDirectory(prefix="fullshard-goodput-") as scratch:
        done = record.get("killed", [])
        left = ends - time.monotonic() - 30.0  # starting and stopping
        wanted = options.kills - sum(one["kills"] for one in done)
        if wanted > 0 and left >= LEAST_S:
            seconds = min(left, options.calm + wanted * (options.every + 10.0))
            draw = random.Random(len(done))
            keep("killed", [*done, killed(Path(scratch), seconds, options.calm, options.every, draw)])
    print(json.dumps(record.get("summary"), indent=1))


if __name__ == "__main__":
    main()
