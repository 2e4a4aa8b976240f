"""What one gloo process of the behaviours' test runs: ``behaviours_main.py NAME[,NAME...]``; prints one JSON line.

The ranks tell each other how each behaviour went in a group that nothing else uses: so they stay in step. Where one
failed the next ones get a new group, because one in which ranks may have parted is of no use.
"""

import datetime
import json
import sys
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

import fullshard
from fullshard.comm import GlooComm
from support.behaviours import BEHAVIOURS, Ranks

ALONE_S = 15.0  # how long a rank waits for one that failed


def group():
    return GlooComm(dist.new_group(timeout=datetime.timedelta(seconds=ALONE_S)))


def outcome(name, comm, spare):
    """The traceback of a behaviour on this rank, empty if it holds."""
    try:
        BEHAVIOURS[name](Ranks.as_processes(comm, spare))
    except Exception:
        return traceback.format_exc()
    return ""


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    everyone = fullshard.init(timeout_s=100)
    names = sys.argv[1].split(",")
    comm, spare = group(), group()
    outcomes = {}
    for name in names:
        outcomes[name] = everyone.all_gather_object(outcome(name, comm, spare))
        if any(outcomes[name]):
            comm = group()
    if everyone.rank == 0:
        print("RESULT " + json.dumps(outcomes))
    fullshard.shutdown()


if __name__ == "__main__":
    main()
