"""Run the stages, or turn their results into the page and benchmarks/results/gpu.json.

    PYTHONPATH=src python3 -m benchmarks.gpu [--stage NAME,...] [--out DIR] [--seconds N] [--only TEXT] [--again]
    PYTHONPATH=src python3 -m benchmarks.gpu --dry              # every stage on the CPU, with tiny shapes
    PYTHONPATH=src python3 -m benchmarks.gpu --report           # from DIR/*.json

A stage writes DIR/NAME.json after every case and skips the cases that are in it. ``--stage first`` takes the cases that
decide most from several stages, within one budget. Exits with 1 if a case failed.
"""

import argparse
import importlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from benchmarks.gpu import ROOT, report
from benchmarks.gpu.record import Case, Record, run_cases

STAGES = (
    *("doctor", "headline", "kernels", "step", "memory", "tests", "switches", "overlap", "speed", "fp8", "long"),
    "plan",
)
FIRST = "first"
FIRST_CASES = (
    ("tests", ("test_t5_attention_gpu", "test_engine_gpu", "test_staged_gpu", "test_speed_gpu")),  # failed, or new
    ("kernels", ("attention", "")),
    ("headline", ("",)),
)
"""Stages of ``first`` in their order, and parts of names of cases: those with the first part, then the second, …"""
BUDGET_S = 450.0
OUT, DRY_OUT = Path("runs/gpu"), Path("runs/gpu-dry")


def main() -> int:
    """Run what the arguments name; return the exit code."""
    args = _arguments()
    folder = args.out or (DRY_OUT if args.dry else OUT)
    if args.report:
        report.write(folder, ROOT / "benchmarks/results/gpu.json", ROOT / "docs/evidence/gpu.md")
        return 0
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "KINETO_LOG_LEVEL": "99"}
    if args.dry:
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    started, failed = time.time(), []
    machine = importlib.import_module("benchmarks.gpu.machine").Machine(dry=args.dry)
    print(f"[{time.time() - started:6.1f} s] {machine.facts}, ranks start by {machine.start}", flush=True)
    if not args.dry and not machine.cuda:
        print("There is no CUDA device: use --dry.", file=sys.stderr)
        return 2
    together = args.stage == (FIRST,)
    end = time.monotonic() + args.seconds
    for stage, parts in _first(dry=args.dry) if together else [(stage, ("",)) for stage in args.stage]:

        def tell(text: str, stage: str = stage) -> None:
            print(f"[{time.time() - started:6.1f} s] {stage}: {text}", flush=True)

        record = Record(folder, stage, dry=args.dry, machine=machine.facts)
        module: ModuleType = importlib.import_module(f"benchmarks.gpu.{stage}")
        cases: list[Case] = [case for case in module.cases(machine) if args.only in case.name]
        chosen = list(dict.fromkeys(case for part in parts for case in cases if part in case.name))
        budget_s = end - time.monotonic() if together else args.seconds
        run_cases(record, chosen, budget_s=budget_s, again=args.again, tell=tell)
        failed += [f"{stage}: {case.name}" for case in chosen if record.status(case.name) == "failed"]
        tell(f"{record.path} is written")
    if failed:
        print(f"FAILED {len(failed)}:", *failed, sep="\n  ")
    return 1 if failed else 0


def _first(*, dry: bool) -> Sequence[tuple[str, tuple[str, ...]]]:
    """Return the stages of ``first`` and parts of names of cases; in a dry run all cases, whose names are others."""
    return [(stage, ("",) if dry else parts) for stage, parts in FIRST_CASES]


def _arguments() -> argparse.Namespace:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=lines[0], epilog=lines[-1])
    named = f"{FIRST}, or some of {','.join(STAGES)} (default: all)"
    parser.add_argument("--stage", type=_stages, default=STAGES, help=named)
    parser.add_argument("--out", type=Path, help=f"folder of the results (default: {OUT}, dry: {DRY_OUT})")
    parser.add_argument("--dry", action="store_true", help="tiny shapes on the CPU: does every line run?")
    parser.add_argument("--again", action="store_true", help="repeat finished cases")
    parser.add_argument("--only", default="", help="only cases whose name contains this text")
    parser.add_argument(
        "--seconds", type=float, default=BUDGET_S, help="budget of a stage, or of all of first (default: %(default)s)"
    )
    parser.add_argument("--report", action="store_true", help="write benchmarks/results/gpu.json and the page")
    return parser.parse_args()


def _stages(text: str) -> tuple[str, ...]:
    chosen = tuple(text.split(","))
    unknown = [name for name in chosen if name not in STAGES and chosen != (FIRST,)]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no stage {', '.join(unknown)}; there are {', '.join(STAGES)}, or {FIRST} alone"
        )
    return chosen


if __name__ == "__main__":
    sys.exit(main())
