"""Planned step times, compared with the same steps on real CPU ranks.

    python benchmarks/plan_time.py [--fresh] [--only WORD] [--out PATH]

Of the configurations of ``plan.py`` those of one and two ranks. For each: the ranks measure the machine's rates, as
``fullshard bench`` does (:func:`fullshard.planner.measure_rates`: steps without the other ranks' values, collectives
apart); the plan is made in this process; then real steps are timed on new ranks, and their median is compared. Errors
are signed shares of the measured time: below zero, the plan was too fast. Nothing else should run meanwhile.

Rows that the file has already are kept; --fresh starts over.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from measure import silenced
from plan import Configuration, configurations
from plan_runs import Run
from ranks import on_ranks, quiet

from fullshard.comm import Comm
from fullshard.planner import Rates, Timing

LATEST = Path(__file__).parent / "results" / "plan_time.json"
TIMEOUT_S = 300.0
WARM_UP = 3
STEPS = 15


def rates(comm: Comm, one: Configuration | Run) -> Rates:
    """Measure the machine; every rank."""
    with silenced():
        return one.rates(comm)


def measured(comm: Comm, one: Configuration | Run) -> list[float]:
    """Return the seconds of real steps; every rank."""
    with silenced():
        step = one.mean_step(comm)
        for _ in range(WARM_UP):
            step()
        seconds = []
        for _ in range(STEPS):
            comm.barrier()
            started = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - started)
    return seconds


def compared(one: Configuration | Run) -> dict[str, Any]:
    """Measure rates, plan and measure steps; return a row of the table."""
    one.prepare()
    found = on_ranks(one.ranks, rates, one, timeout_s=TIMEOUT_S)[0]
    return row(one, one.timing(found), on_ranks(one.ranks, measured, one, timeout_s=TIMEOUT_S))


def row(one: Configuration | Run, timing: Timing, ranks: list[list[float]]) -> dict[str, Any]:
    """Return a row of the table, of a plan and each rank's steps."""
    steps = list(map(max, zip(*ranks, strict=True)))
    step_s = statistics.median(steps)
    return {
        "name": one.name,
        "predicted_s": round(timing.step_s, 6),
        "exposed_s": round(timing.exposed_s, 6),
        "optimizer_s": round(timing.optimizer_s, 6),
        "measured_s": round(step_s, 6),
        "measured_least_s": round(min(steps), 6),
        "time_error": round(timing.step_s / step_s - 1, 4),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures over all rows."""
    errors = [row["time_error"] for row in rows]
    return {
        "configurations": len(rows),
        "time_median_error": round(statistics.median(map(abs, errors)), 4),
        "time_worst_error": max(map(abs, errors)),
        "median_signed_error": round(statistics.median(errors), 4),
        "above_15_percent": sum(abs(error) > 0.15 for error in errors),
    }


def main() -> None:
    """Compare and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fresh", action="store_true", help="measure all rows again")
    parser.add_argument("--only", metavar="WORD", default="", help="configurations whose name contains WORD")
    parser.add_argument("--every", metavar="N", type=int, default=1, help="take every Nth configuration")
    parser.add_argument("--out", metavar="PATH", type=Path, default=LATEST)
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    chosen = [one for one in configurations() if one.ranks <= 2 and options.only in one.name][:: options.every]
    kept = {} if options.fresh or not options.out.exists() else json.loads(options.out.read_text())["rows"]
    rows = {row["name"]: row for row in kept or ()}
    for number, one in enumerate(chosen, 1):
        if one.name in rows:
            continue
        rows[one.name] = new = compared(one)
        text = f"[{number}/{len(chosen)}] {new['time_error']:+.1%} of {1e3 * new['measured_s']:.0f} ms {one.name}"
        print(text, file=sys.stderr, flush=True)
        found = list(rows.values())
        written = {"summary": summary(found), "torch": torch.__version__, "rows": found}
        options.out.write_text(json.dumps(written, indent=1) + "\n")
    print(json.dumps(summary(list(rows.values())), indent=1))


if __name__ == "__main__":
    main()
