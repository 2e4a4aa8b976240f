"""What snapshots cost while nothing fails, and how many steps are left of the time when a rank dies every minute.

    python benchmarks/goodput.py [--minutes 5] [--every 60] [--steps 240] [--out PATH]

Two CPU ranks train a T5 of t5-small's shapes with ``Checkpoints(in_memory="auto")``. First without a failure: blocks of
20 steps with snapshots and without take turns. Then one rank is killed every ``--every`` seconds under
``fullshard launch --max_restarts``. The time in which processes start and build the model is told apart. Nothing else
should run meanwhile.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import T5Config, T5ForConditionalGeneration

import fullshard

LATEST = Path(__file__).parent / "results" / "goodput.json"
BLOCK = 20
CONFIG = T5Config(decoder_start_token_id=0, pad_token_id=0, dropout_rate=0.1)


def rank(mode: str, directory: Path, steps: int) -> None:
    """Train as one rank, and write what happens when."""
    born = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + _started_s()
    fullshard.init()
    number, attempt = int(os.environ["RANK"]), int(os.environ.get("FULLSHARD_ATTEMPT", "0"))
    (directory / f"pid{number}").write_text(str(os.getpid()))
    torch.manual_seed(0)
    model = fullshard.fully_shard(T5ForConditionalGeneration(CONFIG))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(number)
    tokens = torch.randint(4, 30_000, (4, 96), generator=draw)
    labels = tokens[:, :48].contiguous()
    with (directory / f"rank{number}.jsonl").open("a") as log:

        def tell(**what):
            log.write(json.dumps({"attempt": attempt, "time": time.time(), **what}) + "\n")
            log.flush()

        with fullshard.Checkpoints(directory / "checkpoints", in_memory="auto") as checkpoints:
            tell(event="built", born=born)
            restored = checkpoints.load(model, optimizer)
            tell(event="loaded", step=restored.step if restored else 0)
            for step in range(restored.step + 1 if restored else 1, steps + 1):
                started = time.perf_counter()
                model(input_ids=tokens, labels=labels).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                seconds = time.perf_counter() - started
                if mode == "kills" or (step // BLOCK) % 2 == 0:
                    checkpoints.snapshot(model, optimizer, step=step)
                elif checkpoints.in_memory is not None:
                    checkpoints.in_memory.wait()
                tell(event="step", step=step, seconds=seconds, whole=time.perf_counter() - started)
            every = checkpoints.in_memory.every
        nbytes = sum(path.stat().st_size for path in Path(os.environ["FULLSHARD_KEEP_DIR"]).rglob("state.bin"))
        tell(event="end", every=every, kept_bytes=nbytes)
    fullshard.shutdown()


def _started_s() -> float:
    """When this process started, in seconds since the machine did."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def launched(mode: str, directory: Path, steps: int) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    script = [str(Path(__file__)), "--rank", mode, "--directory", str(directory), "--steps", str(steps)]
    launch = ["-m", "fullshard.cli.main", "launch", "--nproc_per_node", "2", "--max_restarts", "100"]
    return subprocess.Popen([sys.executable, *launch, *script], env=environment)


def told(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "rank0.jsonl").read_text().splitlines()]


def overhead(directory: Path, steps: int) -> dict:
    """Seconds of steps in blocks with snapshots over those in blocks without, less what the first ones take."""
    if launched("calm", directory, steps).wait() != 0:
        raise SystemExit("the run without failures failed")
    lines = told(directory)
    taken = [line for line in lines if line["event"] == "step" and line["step"] >= BLOCK]
    on = [line["whole"] for line in taken if (line["step"] // BLOCK) % 2 == 0]
    off = [line["whole"] for line in taken if (line["step"] // BLOCK) % 2]
    end = lines[-1]
    return {
        "steps": len(taken),
        "step_s": round(statistics.median(off), 4),
        "overhead": round(statistics.mean(on) / statistics.mean(off) - 1, 4),
        "steps_between_snapshots": end["every"],
        "kept_bytes": end["kept_bytes"],
    }


def goodput(directory: Path, minutes: float, every: float) -> dict:
    """Steps kept times the time of one, over the time in which ranks were there; kills of a random rank."""
    draw, ends = random.Random(0), time.time() + 60 * minutes
    run = launched("kills", directory, 1_000_000)
    kills = []
    while time.time() + every < ends:
        time.sleep(every)
        pid = int((directory / f"pid{draw.randrange(2)}").read_text())
        kills.append(time.time())
        os.kill(pid, signal.SIGKILL)
    time.sleep(max(0.0, ends - time.time()))
    run.send_signal(signal.SIGTERM)
    run.wait(60)
    lines = told(directory)
    step_s = statistics.median(line["seconds"] for line in lines if line["event"] == "step")
    attempts = sorted({line["attempt"] for line in lines})
    there = starts = 0.0
    recoveries = []
    for number in attempts:
        mine = [line for line in lines if line["attempt"] == number]
        built, last = mine[0], mine[-1]
        starts += built["time"] - built["born"]
        there += last["time"] - built["time"]
        first = next((line for line in mine if line["event"] == "step"), None)
        if number and first is not None:
            recoveries.append(first["time"] - first["seconds"] - built["time"])
    reached = max(line["step"] for line in lines if line["event"] == "step")
    return {
        "kills": len(kills),
        "step_s": round(step_s, 4),
        "steps": reached,
        "steps_taken_twice": sum(line["event"] == "step" for line in lines) - reached,
        "goodput": round(reached * step_s / there, 4),
        "start_seconds_median": round(starts / len(attempts), 2),
        "load_seconds_median": round(statistics.median(recoveries), 3) if recoveries else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--every", type=float, default=60.0)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--out", type=Path, default=LATEST)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.rank, options.directory, options.steps)
        return
    with tempfile.TemporaryDirectory() as calm, tempfile.TemporaryDirectory() as killed:
        record = {"undisturbed": overhead(Path(calm), options.steps)} if options.steps else {}
        record |= {"killed": goodput(Path(killed), options.minutes, options.every)} if options.minutes else {}
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
