"""The behaviours on gloo processes.

The ranks tell each other how each behaviour went in a group that nothing else uses: so they stay in step. Where one
failed the next ones get a new group, because one in which ranks may have parted is of no use.
"""

import datetime
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

import fullshard
from fullshard.core.comm import GlooComm
from support.behaviours import BEHAVIOURS, Ranks
from support.rank_script import parse, print_result, traceback_of

ALONE_S = 15.0  # how long a rank waits for one that failed


def group():
    return GlooComm(dist.new_group(timeout=datetime.timedelta(seconds=ALONE_S)))


def main():
    options = parse(BEHAVIOURS, __doc__)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=r"\d+ of ignored_params are trainable")
    everyone = fullshard.init(timeout_s=100)
    comm, spare = group(), group()
    outcomes = {}
    for name in options.only:
        text = traceback_of(BEHAVIOURS[name], Ranks.as_processes(comm, spare))
        outcomes[name] = everyone.all_gather_object(text)
        if any(outcomes[name]):
            comm = group()
    print_result(outcomes)
    fullshard.shutdown()


if __name__ == "__main__":
    main()
