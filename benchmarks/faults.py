"""Ranks and machines that die at random moments of a run: does it end, with the same bits, and what does that cost?

    python benchmarks/faults.py [--kills 220] [--machines 50] [--terms 100] [--stops 50] [--minutes 60]

Each run is ``fullshard train --max-restarts`` of a tiny T5 with dropout, two CPU ranks, evaluations and background
saves. Faults come at random moments, also while processes start: SIGKILL of one rank; the end of the machine (launcher,
ranks and what they keep in memory), after which the same command is given again; SIGTERM of the launcher, then the same
command; SIGSTOP of a rank for up to 5 s. At the end metrics, predictions and weights are compared with an undisturbed
run's. Every finished run is recorded at once (``--out``), and the next call continues after it.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from goodput import RECOVERED  # noqa: E402

from fullshard.state.storage import survey  # noqa: E402
from support.tiny_run import MODEL, read_jsonl, write_run_file  # noqa: E402

LATEST = Path(__file__).parent / "results" / "faults.json"
GOODPUT = LATEST.with_name("goodput.json")
"""What benchmarks/goodput.py measured."""

COUNTS = {"kill": 220, "machine": 50, "term": 100, "stop": 50}
PER_RUN = 12
LONGEST_S = 300.0
STOPPED, INTERRUPTED = 75, 130
CHANGES = {
    "model": {"config": MODEL | {"num_layers": 1, "num_decoder_layers": 1}, "tokenizer": {"vocab_size": 60}},
    "sharding__wrap": ["T5Block"],
    "training__per_device_train_batch_size": 1,
    "training__num_train_epochs": 40,
    "training__save_strategy": "steps",
    "training__save_steps": 40,
    "training__eval_strategy": "steps",
    "training__eval_steps": 100,
    "evaluation__max_new_tokens": 2,
}


class Run:
    """One run in a directory of its own, given as often as it takes to end."""

    def __init__(self, directory):
        self.directory = directory
        directory.mkdir(parents=True)
        self.file = write_run_file(directory, **CHANGES)
        self.said = directory / "said.txt"
        self.process = None

    def start(self):
        env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT / "src")}
        command = [sys.executable, "-m", "fullshard.cli.main", "train", str(self.file), "--no-plan"]
        with self.said.open("a") as said:
            arguments = [*command, "--max-restarts", "1000"]
            self.process = subprocess.Popen(arguments, env=env, stdout=said, stderr=said)

    def processes(self):
        """The ids of the ranks' processes."""
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            return [int(child) for child in children]
        return []

    def kept(self):
        """The launcher's directory in memory, from the environment of a process that it started."""
        for rank in self.processes():
            with contextlib.suppress(OSError):
                for entry in Path(f"/proc/{rank}/environ").read_text().split("\0"):
                    if entry.startswith("FULLSHARD_KEEP_DIR="):
                        return Path(entry.partition("=")[2])
        return None

    def steps(self):
        """How many steps are recorded, and when the last was."""
        path = self.directory / "out" / "metrics.jsonl"
        with contextlib.suppress(OSError):
            return path.read_bytes().count(b'"kind": "step"'), path.stat().st_mtime
        return 0, 0.0

    def finished(self):
        """Whether the model is published: what comes after that harms nothing."""
        return (self.directory / "out" / "checkpoints" / "finished.json").exists()

    def step_after(self, since, until):
        """Seconds from ``since`` to the first step recorded after it; None if the run or the time ends before."""
        while self.process.poll() is None and time.time() < until:
            if self.steps()[1] > since + 1e-3:
                return self.steps()[1] - since
            time.sleep(0.01)
        return None


def strike(run, kind, draw):
    """Do harm of a kind; True if there was anything to harm."""
    ranks = run.processes()
    if not ranks or run.process.poll() is not None:
        return False
    with contextlib.suppress(ProcessLookupError):
        if kind == "kill":
            os.kill(draw.choice(ranks), signal.SIGKILL)
        elif kind == "machine":
            kept = run.kept()
            for pid in (run.process.pid, *ranks):
                os.kill(pid, signal.SIGKILL)
            run.process.wait()
            time.sleep(0.2)  # the kernel ends ranks a moment later, which write until then
            if kept is not None:
                shutil.rmtree(kept, ignore_errors=True)
        elif kind == "term":
            run.process.terminate()
        else:
            rank = draw.choice(ranks)
            os.kill(rank, signal.SIGSTOP)
            time.sleep(draw.uniform(0.2, 5.0))
            os.kill(rank, signal.SIGCONT)
        return True
    return False


def again(run, kind):
    """Give the same command again after a fault that ended it before the run was finished."""
    if kind in ("machine", "term"):
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.process.wait(60)
        code = run.process.poll()
        if run.finished():
            return
        if code in (STOPPED, INTERRUPTED) or (kind == "machine" and code is not None):
            run.start()


def disturbed(directory, kinds, draw, seconds):
    """Run with faults of these kinds, one for each attempt's time; what happened."""
    run, done, recoveries = Run(directory), [], []
    run.start()
    struck = started = time.time()
    for kind in kinds:
        ends = time.time() + draw.uniform(0.0, seconds / 4)
        found = run.step_after(struck, ends)
        if found is not None and done and done[-1] == "kill":
            recoveries.append(found)
        while time.time() < ends and run.process.poll() is None:
            time.sleep(0.01)
        struck = time.time()
        harmed = False
        while not harmed and run.process.poll() is None:  # of a launcher that has just begun there are no ranks yet
            harmed = strike(run, kind, draw)
            time.sleep(0.01)
        if not harmed:
            break
        done.append(kind)
        again(run, kind)
    with contextlib.suppress(subprocess.TimeoutExpired):
        run.process.wait(LONGEST_S)
    ended = run.process.poll()
    if ended is None:
        run.process.kill()
    elif run.finished():
        ended = 0
    said = [[float(one) for one in found] for found in RECOVERED.findall(run.said.read_text())]
    told = {"recoveries_told_s": [whole for whole, _ in said], "recoveries_without_start_s": [rest for _, rest in said]}
    return done, {"exit_code": ended, "wall_s": time.time() - started, "recoveries_s": recoveries, **told}


def facts(out):
    """Everything that two equal runs have in common: steps with losses and tokens, predictions, weights."""
    lines = read_jsonl(out / "metrics.jsonl")
    steps = [[line[key] for key in ("step", "loss", "grad_norm", "tokens")] for line in lines if line["kind"] == "step"]
    return steps, (out / "model.safetensors").read_bytes(), (out / "predictions.jsonl").read_bytes()


def judge(out, reference):
    """How a finished run differs from the undisturbed one."""
    (steps, *rest), (right, *rest_right) = facts(out), facts(reference)
    wrong = sum(one != other for one, other in zip(steps, right, strict=False)) + abs(len(steps) - len(right))
    torn = len(survey(out / "checkpoints").damaged)
    return {"weights_differ": rest != rest_right, "steps_differ": wrong, "torn_checkpoints": torn}


def summary(record):
    """What the page shows, from all runs so far."""
    runs, calm = record["runs"], record["undisturbed"]
    faults = {kind: sum(run["faults"].count(kind) for run in runs) for kind in COUNTS}
    recoveries = [seconds for run in runs for seconds in run["recoveries_s"]]
    rests = [seconds for run in runs for seconds in run.get("recoveries_without_start_s", [])]
    ended = [run for run in runs if run["exit_code"] == 0]
    costs = json.loads(GOODPUT.read_text()) if GOODPUT.exists() else {}
    return {
        "faults": faults,
        "runs": len(runs),
        "runs_not_ended": len(runs) - len(ended),
        "weights_differ": sum(run["weights_differ"] for run in ended),
        "samples_lost_or_doubled": sum(run["steps_differ"] for run in ended),
        "torn_checkpoints": sum(run["torn_checkpoints"] for run in ended),
        "recovery_seconds_median": round(statistics.median(recoveries), 2) if recoveries else None,
        "recovery_without_start_seconds_median": round(statistics.median(rests), 2) if rests else None,
        "start_seconds": round(calm["first_step_s"], 2),
        "goodput": costs.get("summary", {}).get("goodput"),
        "overhead": costs.get("overhead", {}).get("overhead"),
    }


def undisturbed(directory):
    """Run without a fault; its seconds in all, and until the first step."""
    run = Run(directory)
    run.start()
    started = time.time()
    first = run.step_after(started, started + LONGEST_S)
    if run.process.wait(LONGEST_S) != 0:
        raise SystemExit(f"the undisturbed run failed:\n{run.said.read_text()}")
    return {"wall_s": time.time() - started, "first_step_s": first, "steps": run.steps()[0]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for kind, count in COUNTS.items():
        parser.add_argument(f"--{kind}s", type=int, default=count)
    parser.add_argument("--minutes", type=float, default=60.0, help="start no further run after this time")
    parser.add_argument("--out", type=Path, default=LATEST)
    options = parser.parse_args()
    ends = time.monotonic() + 60 * options.minutes
    record = json.loads(options.out.read_text()) if options.out.exists() else {"runs": []}
    with tempfile.TemporaryDirectory(prefix="fullshard-faults-") as scratch:
        calm = Path(scratch, "undisturbed")
        record["undisturbed"] = undisturbed(calm)
        seconds = record["undisturbed"]["wall_s"]
        while time.monotonic() < ends:
            had = summary(record)["faults"]
            left = [kind for kind in COUNTS for _ in range(getattr(options, f"{kind}s") - had[kind])]
            if not left:
                break
            draw = random.Random(len(record["runs"]))
            directory = Path(scratch, f"run{len(record['runs'])}")
            done, run = disturbed(directory, draw.sample(left, min(PER_RUN, len(left))), draw, seconds)
            verdict = judge(directory / "out", calm / "out") if run["exit_code"] == 0 else {}
            record["runs"].append({"faults": done, **run, **verdict})
            if any(verdict.values()) or run["exit_code"] != 0:
                shutil.copytree(
                    directory, Path(tempfile.gettempdir(), f"fullshard-fault-{os.getpid()}-{len(record['runs'])}")
                )
            shutil.rmtree(directory)
            record["summary"] = summary(record)
            options.out.write_text(json.dumps(record, indent=1) + "\n")
            print(json.dumps(record["summary"]), flush=True)


if __name__ == "__main__":
    main()
