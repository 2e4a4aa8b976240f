"""Planned step times, compared with the same steps on real CPU ranks.

    python benchmarks/plan_time.py [--fresh] [--only WORD] [--every N] [--out PATH]

Of the configurations of ``plan.py`` those of one and two ranks. For each the ranks measure the machine's rates, as
``fullshard bench`` does (:func:`fullshard.planner.measure_rates`: steps without time for the other ranks' values,
collectives apart), from which this process plans. Real steps of the sharded model take turns with the measured ones,
since the machine gets faster and slower by the minute, and their median is compared. Errors are signed shares of the
measured time: below zero, the plan was too fast. Nothing else should run meanwhile.

Figures go into the rows of ``plan.py``'s results. Those that are there already are kept; --fresh starts over.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from measure import silenced
from plan import LATEST, Configuration, configurations, summary
from plan_runs import Run
from ranks import on_ranks, quiet

from fullshard.core.comm import Comm
from fullshard.planner import Rates, Timing

TIMEOUT_S = 300.0
WARM_UP = 3


def measured(comm: Comm, one: Configuration | Run) -> tuple[Rates, list[float]]:
    """Measure the machine's rates, and the seconds of real steps between the measured ones; every rank."""
    seconds: list[float] = []

    def real_step(done: int, _total: int) -> None:
        if done % 2:  # one for each pair of measured steps
            return
        comm.barrier()
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)

    with silenced():
        step = one.mean_step(comm)
        for _ in range(WARM_UP):
            step()
        return one.rates(comm, real_step), seconds


def compared(one: Configuration | Run) -> dict[str, float]:
    """Measure rates and steps, and plan; return what was planned and measured."""
    one.prepare()
    ranks = on_ranks(one.ranks, measured, one, timeout_s=TIMEOUT_S)
    return figures(one.timing(ranks[0][0]), [seconds for _, seconds in ranks])


def figures(timing: Timing, ranks: list[list[float]]) -> dict[str, float]:
    """Return what was planned and measured, of a plan and each rank's steps."""
    steps = list(map(max, zip(*ranks, strict=True)))
    step_s = statistics.median(steps)
    return {
        "predicted_s": round(timing.step_s, 6),
        "exposed_s": round(timing.exposed_s, 6),
        "optimizer_s": round(timing.optimizer_s, 6),
        "measured_s": round(step_s, 6),
        "measured_least_s": round(min(steps), 6),
        "error": round(timing.step_s / step_s - 1, 4),
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
    written = json.loads(options.out.read_text())
    rows = {row["name"]: row for row in written["rows"]}
    for number, one in enumerate(chosen, 1):
        if "time" in rows[one.name] and not options.fresh:
            continue
        rows[one.name]["time"] = new = compared(one)
        text = f"[{number}/{len(chosen)}] {new['error']:+.1%} of {1e3 * new['measured_s']:.0f} ms {one.name}"
        print(text, file=sys.stderr, flush=True)
        options.out.write_text(json.dumps({**written, "summary": summary(written["rows"])}, indent=1) + "\n")
    print(json.dumps(summary(written["rows"]), indent=1))


if __name__ == "__main__":
    main()
