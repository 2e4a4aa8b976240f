"""One of two ranks on two machines between which the network is cut: ``cut_link_main.py RANK``.

It says what it does on standard output and goes on when it reads a line.
"""

import datetime
import logging
import os
import sys

import torch
import torch.distributed as dist

from fullshard.core.comm import GlooComm
from fullshard.errors import UserError

PATIENT_S, IMPATIENT_S = 60.0, 8.0


def say(line):
    print(line, flush=True)


class Said(logging.Handler):
    def emit(self, record):
        say(f"logged {record.getMessage()}")


def add(comm):
    say("ready")
    sys.stdin.readline()
    total = torch.ones(2)
    comm.all_reduce(total).wait()
    say(f"sum {total[0].item():.0f}")


def main(rank):
    os.environ |= {"RANK": rank, "WORLD_SIZE": "2"}
    logging.getLogger("fullshard").addHandler(Said())
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=PATIENT_S))
    patient = GlooComm(dist.group.WORLD)
    impatient = GlooComm(dist.new_group(timeout=datetime.timedelta(seconds=IMPATIENT_S)))
    for comm in (patient, impatient):
        comm.hides_messages()  # a collective
    add(patient)
    try:
        add(impatient)
    except UserError as error:
        say(f"{type(error).__name__}: {error}")
    sys.stdin.readline()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
