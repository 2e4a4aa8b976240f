"""Two machines that fail during a run: how long until the launchers say so, and until the next step is trained?

    python benchmarks/machines.py [--cuts 20] [--out PATH]

The machines are namespaces of this one, with networks, processes and memory of their own, so it needs root, ``unshare``
and ``ip``. Each runs one CPU rank of a tiny T5 under ``fullshard launch --max_restarts 3``; nothing is saved on disk.

Then ``--cuts`` cuts of the link between them, at random moments and of random lengths, below and above the 20 s after
which a machine counts as lost; five in a run, each of which is compared with an undisturbed one. What is recorded
already is not measured again.
"""

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.machine_runs import ELASTIC, Run  # noqa: E402

LATEST = Path(__file__).parent / "results" / "machines.json"
LONG = {"training__num_train_epochs": 60}
CUTS_PER_RUN = 5
LONGEST_CUT_S = 30.0
RESUMED = re.compile(r"resuming after step ([\d,]+)")
RESTARTED = re.compile(r"restart (\d+) of")


def rank_killed(run):
    os.kill(run.machines.processes(1)[0], signal.SIGKILL)


def machine_lost(run, number):
    run.machines.lose(number)
    run.start(number)


def machine_gone(run):
    run.machines.lose(1)
    run.count = 1


def link_cut(run):
    run.machines.cut(1)
    run.until(lambda: all("restart 1 of 3" in run.machines.said(number) for number in (0, 1)))
    run.machines.mend(1)


FAULTS = {
    "a rank is killed": ((), rank_killed),
    "machine 1 is lost and started again": ((), lambda run: machine_lost(run, 1)),
    "machine 0 is lost and started again": ((), lambda run: machine_lost(run, 0)),
    "machine 1 is lost for good": (ELASTIC, machine_gone),
    "the link is cut until both have noticed": ((), link_cut),
}


def measure(directory, options, strike):
    """Seconds from a fault to the first launcher's line, and to the first step after it."""
    with Run(directory, 2, options, **LONG) as run:
        run.trains_past(6)
        began = time.time()
        strike(run)
        run.until(lambda: any("restart 1 of 3" in run.machines.said(number) for number in (0, 1)))
        noticed = time.time() - began
        run.until(lambda: RESUMED.search(run.machines.said(0)))
        run.trains_past(int(RESUMED.findall(run.machines.said(0))[-1].replace(",", "")))
        trained = time.time() - began
        run.finish()
    return {"noticed_s": round(noticed, 1), "next_step_s": round(trained, 1)}


def cut_often(directory, calm, count, draw):
    """A run whose link is cut ``count`` times: how long each time, how many attempts it took, and what is other."""
    options = ("--nnodes", "2", "--max_restarts", str(2 * count))
    with Run(directory, 2, options, **LONG) as run:
        lengths = []
        for _ in range(count):
            run.trains_past(len(run.steps()))
            time.sleep(draw.uniform(0.0, 2.0))
            lengths.append(round(draw.uniform(0.2, LONGEST_CUT_S), 1))
            victim = draw.randrange(2)
            run.machines.cut(victim)
            time.sleep(lengths[-1])
            run.machines.mend(victim)
        said = run.finish()
        steps, weights = run.facts()
    right, right_weights = calm
    wrong = sum(one != other for one, other in zip(steps, right, strict=False)) + abs(len(steps) - len(right))
    restarts = max(int(number) for text in said for number in RESTARTED.findall(text) or ["0"])
    return {"cuts_s": lengths, "restarts": restarts, "steps_differ": wrong, "weights_differ": weights != right_weights}


def undisturbed(directory):
    """The steps and the weights of a run that nothing happens to."""
    with Run(directory, 2, **LONG) as run:
        run.finish()
        return run.facts()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cuts", type=int, default=20)
    parser.add_argument("--out", type=Path, default=LATEST)
    options = parser.parse_args()
    record = json.loads(options.out.read_text()) if options.out.exists() else {}

    def keep(name, part):
        record[name] = part
        print(name, json.dumps(part), flush=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n")

    with tempfile.TemporaryDirectory(prefix="fullshard-machines-") as scratch:
        for number, (fault, (of_launch, strike)) in enumerate(FAULTS.items()):
            if fault not in record:
                keep(fault, measure(Path(scratch, str(number)), of_launch, strike))
        runs = record.get("cuts", [])
        calm = undisturbed(Path(scratch, "calm"))
        while (left := options.cuts - sum(len(run["cuts_s"]) for run in runs)) > 0:
            place = Path(scratch, f"cuts{len(runs)}")
            runs = [*runs, cut_often(place, calm, min(left, CUTS_PER_RUN), random.Random(len(runs)))]
            keep("cuts", runs)


if __name__ == "__main__":
    main()
