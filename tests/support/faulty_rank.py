"""The rank program with a fault in rank 1's third step: ``python -m support.faulty_rank KIND CONFIG``.

KIND is ``raise``, ``kill``, ``allocate``, or, in the first attempt only: ``kill_once``, ``crash_once``,
``lose_once``.
"""

import ctypes
import os
import signal
import sys

import torch

from fullshard.program.launch.programs import train as rank
from fullshard.program.train.run import loop

real_step = loop.issue_step


def faulty_step(model, optimizer, micro_batches, comm, spec, scaler, *, late):
    """Two good steps, then rank 1 is gone while rank 0 waits for it in a collective."""
    kind = sys.argv[1]
    first = os.environ.get("FULLSHARD_ATTEMPT", "0") == "0"
    if comm.rank == 1 and spec.step == 3 and (first or not kind.endswith("_once")):
        if kind.startswith("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "crash_once":
            ctypes.string_at(0)  # as a fault in native code
        if kind == "lose_once":
            raise ConnectionResetError("the line of rank 1")
        if kind == "allocate":
            torch.empty(1 << 60, dtype=torch.uint8)  # torch's own error: no system has that much
        raise RuntimeError("the fault of rank 1")
    return real_step(model, optimizer, micro_batches, comm, spec, scaler, late=late)


def main(arguments=None):
    loop.issue_step = faulty_step
    return rank.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
