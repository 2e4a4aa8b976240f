"""fullshard against torch's DDP, FSDP1, FSDP2 and the compute floor, in one run on this machine's CPU.

    python benchmarks/bench.py [--out PATH] [--only step,memory,lora,fake512] [--rounds N] [--small]

Two gloo ranks, a T5 of t5-small's shapes with random weights, fp32, AdamW. Each scenario is a process of its own that
forks its ranks. Without --only and --small the result goes to benchmarks/results/latest.json; with them, only where
--out says. Exits with 1 if any requested measurement is missing.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import report

HERE = Path(__file__).parent
LATEST = HERE / "results" / "latest.json"
SCENARIOS = ("step", "memory", "lora", "fake512")
TIMEOUT_S = {"step": 420, "memory": 420, "memory_mmap": 300, "lora": 300, "fake512": 240}
"""Limit for one scenario; an idle machine needs a third of it."""
MMAP_THRESHOLD = {"MALLOC_MMAP_THRESHOLD_": "262144"}


def main() -> int:
    """Run the requested scenarios, write the result and print the report."""
    args = _arguments()
    started = time.time()
    load = os.getloadavg()
    results, seconds = {}, {}
    for name in args.only:
        results[name], seconds[name] = _run(name, name, args, started)
        if name == "memory":
            results["memory_mmap"], seconds["memory_mmap"] = _run("memory_mmap", "memory", args, started)
    result = {
        "command": " ".join(["python", "benchmarks/bench.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine() | {"load_average_at_start": load},
        **report.figures(results),
        "seconds": seconds | {"total": round(time.time() - started, 1)},
        "raw": results,
    }
    out = args.out or (None if args.small or args.only != SCENARIOS else LATEST)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=2) + "\n")
    print(report.text(result))
    return 1 if report.failed(result) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help=f"where to write the result (default: {LATEST.relative_to(HERE)})")
    parser.add_argument("--only", type=_scenarios, default=SCENARIOS, help=f"some of {','.join(SCENARIOS)}")
    parser.add_argument("--rounds", type=int, default=8, help="timed rounds (default: 8)")
    parser.add_argument("--small", action="store_true", help="use a tiny model, for development only")
    return parser.parse_args()


def _scenarios(text: str) -> tuple[str, ...]:
    chosen = tuple(text.split(","))
    unknown = [name for name in chosen if name not in SCENARIOS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no scenario {', '.join(unknown)}; there are {', '.join(SCENARIOS)}")
    return chosen


def _run(name: str, script: str, args: argparse.Namespace, started: float) -> tuple[dict[str, Any], float]:
    """Return a scenario's result and its seconds; it runs in a process group of its own."""
    options = {
        "rounds": args.rounds,
        "small": args.small,
        "started": started,
        "timeout_s": TIMEOUT_S[name],
        "resident_only": name == "memory_mmap",
    }
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")} | {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",  # every contender on CPU, also where there are GPUs
        "GLOO_SOCKET_IFNAME": "lo",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    if name == "memory_mmap":
        environment |= MMAP_THRESHOLD
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "result.json"
        command = [sys.executable, str(HERE / f"{script}.py"), json.dumps(options), str(answer)]
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            code = process.wait(TIMEOUT_S[name])
            failure = f"{script}.py ended with exit code {code} and no result; its output says why"
        except subprocess.TimeoutExpired:
            failure = f"{script}.py did not finish within {TIMEOUT_S[name]} s"
        finally:
            _end(process)
        if answer.exists():
            result = json.loads(answer.read_text())
        else:
            result = {"contenders": {}, "failures": {report.EVERYONE: failure}}
    return result, round(time.monotonic() - began, 1)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the remaining processes of a scenario, including its ranks."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    versions = {}
    for package in ("torch", "transformers", "peft", "fullshard"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}, {' '.join(platform.libc_ver())}",
        "python": platform.python_version(),
        "versions": versions,
    }


if __name__ == "__main__":
    sys.exit(main())
