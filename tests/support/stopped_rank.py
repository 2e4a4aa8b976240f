"""The rank program, told to stop in a phase: ``python -m support.stopped_rank PHASE HOW CONFIG``.

In that phase rank 0 tells the launcher to stop, by the signal HOW or by making the file HOW, and goes on once the
request has come back to it. ``hang`` is a step that never ends.
"""

import os
import signal
import sys
from pathlib import Path

from fullshard.program.launch.programs import train as rank
from fullshard.program.train.evaluation import evaluate
from fullshard.program.train.run import loop

requests = []


class Told(rank.StopSignals):
    """The program's, within reach."""

    def __enter__(self):
        requests.append(self)
        return super().__enter__()


def tell():
    """Tell the launcher to stop and wait until this rank knows; before training that ends the process."""
    phase, how = sys.argv[1:3]
    if os.environ["RANK"] != "0":
        return
    if how.startswith("SIG"):
        os.kill(os.getppid(), signal.Signals[how])
    else:
        Path(how).touch()
    while not requests or not requests[0].requested or phase == "hang":
        signal.sigtimedwait([signal.SIGUSR2], 0.01)


def telling(real, when=lambda *_: True):
    """Return a function that tells before it does its work, the first time that ``when`` says so."""
    told = []

    def first_tell(*values, **named):
        if not told and when(*values):
            told.append(True)
            tell()
        return real(*values, **named)

    return first_tell


def main(arguments=None):
    phase = sys.argv[1]
    rank.StopSignals = Told
    if phase == "tokenizing":
        rank.prepare = telling(rank.prepare)
    elif phase == "loading":
        loop.assemble = telling(loop.assemble)
    elif phase == "first step":
        loop.issue_step = telling(loop.issue_step)
    elif phase == "hang":
        loop.issue_step = telling(loop.issue_step, lambda model, optimizer, batches, comm, spec, scaler: spec.step == 4)
    elif phase == "evaluation":
        loop.evaluate = telling(loop.evaluate)
    elif phase == "generation":
        evaluate.generate = telling(evaluate.generate)
    elif phase == "saving":
        loop.RunCheckpoints.save = telling(loop.RunCheckpoints.save)
    return rank.main(sys.argv[3:])


if __name__ == "__main__":
    sys.exit(main())
