"""What every program that runs as a rank does around its work: it ends with its launcher, and says why it fails."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from transformers.utils import logging

from fullshard.errors import RunStopped
from fullshard.launch.failure import FAILURE_FILE_VARIABLE, Failure
from fullshard.launch.local import INTERRUPTED_EXIT_CODE, end_with_launcher


def run_as_rank(work: Callable[[bool], None], *, as_json: bool) -> int:
    """Do a rank's work in this process.

    Args:
        work: Told whether this is rank 0, which speaks to the user.
        as_json: Whether results are JSON on standard output.

    Returns:
        Exit code 0, or ``STOPPED_EXIT_CODE`` when a run was told to stop and has saved. A failure ends the process
        here, with the exit code of its kind: leaving the process group in order would wait for ranks that will never
        come.
    """
    end_with_launcher()
    rank = int(os.environ["RANK"])
    if rank != 0:
        # What transformers says is the same on every rank.
        logging.disable_progress_bar()
        logging.set_verbosity_error()
    try:
        work(rank == 0)
    except RunStopped as stopped:
        return _say_stopped(Failure.of(stopped, rank), as_json=as_json)
    except KeyboardInterrupt:
        os._exit(INTERRUPTED_EXIT_CODE)
    except BrokenPipeError:  # as after | head: nobody reads any more
        os._exit(INTERRUPTED_EXIT_CODE)
    except BaseException as error:
        _report(Failure.of(error, rank))
    return 0


def _say_stopped(stop: Failure, *, as_json: bool) -> int:
    """Tell the launcher, or the user when somebody else launched us, that the run has saved and left."""
    path = os.environ.get(FAILURE_FILE_VARIABLE)
    if path is not None:
        stop.write(Path(path))
    elif stop.rank == 0:
        print(stop.text(), file=sys.stderr, flush=True)
        if as_json:
            print(json.dumps(stop.as_dict()), flush=True)
    return stop.exit_code


def _report(failure: Failure) -> None:
    """Tell the launcher, or the user when somebody else launched us, why this rank fails; and end."""
    with contextlib.suppress(OSError):  # a closed standard output may be why it fails
        sys.stdout.flush()
    path = os.environ.get(FAILURE_FILE_VARIABLE)
    if path is not None:
        failure.write(Path(path))
    else:
        print(f"[rank {failure.rank}] {failure.text()}", file=sys.stderr, flush=True)
    os._exit(failure.exit_code)
