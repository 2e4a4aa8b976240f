"""Two machines that fail during a run: how long until the launchers say so, and until the next step is trained?

    python benchmarks/machines.py [--out PATH]

The machines are namespaces of this one, with networks, processes and memory of their own, so it needs root, ``unshare``
and ``ip``. Each runs one CPU rank of a tiny T5 under ``fullshard launch --max_restarts 3``; nothing is saved on disk.
"""

import argparse
import json
import os
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
RESUMED = re.compile(r"resuming after step ([\d,]+)")


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


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=LATEST)
    options = parser.parse_args()
    record = {}
    with tempfile.TemporaryDirectory(prefix="fullshard-machines-") as scratch:
        for number, (fault, (of_launch, strike)) in enumerate(FAULTS.items()):
            record[fault] = measure(Path(scratch, str(number)), of_launch, strike)
            print(fault, json.dumps(record[fault]), flush=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
