"""gloo ranks as forked processes: a scenario imports its modules once, and each pair of ranks starts clean."""

import json
import multiprocessing
import multiprocessing.connection
import os
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import fullshard

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support import staged_comm

SIZE = 2
GRACE_S = 15.0


class RankFailed(Exception):
    """A rank raised, died or did not finish in time; the message says which and why."""


def on_two_ranks(work: Callable[..., Any], *args: Any, timeout_s: float) -> list[Any]:
    """Call :func:`on_ranks` with two ranks."""
    return on_ranks(SIZE, work, *args, timeout_s=timeout_s)


def on_ranks(
    size: int,
    work: Callable[..., Any],
    *args: Any,
    timeout_s: float,
    start: str = "fork",
    join_timeout_s: float | None = 60.0,
) -> list[Any]:
    """Run ``work(comm, *args)`` on ``size`` ranks and return what each returned, in rank order.

    Args:
        size: Number of ranks.
        work: Called on each; of a module, if ``start`` is ``"spawn"``.
        args: Its other arguments.
        timeout_s: Seconds for all of it.
        start: How processes start.
        join_timeout_s: Seconds that a rank waits for another; None: there is no process group, and ``comm`` is None.

    Raises:
        RankFailed: A rank failed; none is left running.
    """
    context: Any = multiprocessing.get_context(start)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes, pipes = [], []
    for rank in range(size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(rank, size, port, join_timeout_s, sender, work, args))
        process.start()
        sender.close()
        processes.append(process)
        pipes.append(receiver)
    answers = []
    try:
        answers = _collect(pipes, timeout_s)
    finally:
        well = answers and all(ok for ok, _ in answers)
        for process in processes:
            process.join(GRACE_S if well else 1.0)
            if process.is_alive():
                process.kill()
                process.join()
    failures = {text: f"rank {rank}: {text}" for rank, (ok, text) in enumerate(answers) if not ok}
    if failures:
        codes = [process.exitcode for process in processes]
        raise RankFailed(f"{'; '.join(failures.values())} (exit codes {codes})")
    return [value for _, value in answers]


def _collect(pipes: list[Any], timeout_s: float) -> list[tuple[bool, Any]]:
    """Return one answer per rank. After a rank fails the others, which may be waiting for it, get little time."""
    deadline = time.monotonic() + timeout_s
    answers: dict[int, tuple[bool, Any]] = {}
    while len(answers) < len(pipes):
        waiting = [pipe for index, pipe in enumerate(pipes) if index not in answers]
        ready: list[Any] = multiprocessing.connection.wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            return [answers.get(index, (False, "did not finish in time")) for index in range(len(pipes))]
        for pipe in ready:
            try:
                answer = pipe.recv()
            except EOFError:
                answer = (False, "died")
            answers[pipes.index(pipe)] = answer
            if not answer[0]:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    return [answers[index] for index in range(len(pipes))]


def _rank(
    rank: int,
    size: int,
    port: int,
    join_timeout_s: float | None,
    sender: Any,
    work: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    quiet()
    for_all = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    os.environ.update(for_all, RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        comm = None if join_timeout_s is None else staged_comm.init(join_timeout_s)
        answer = (True, work(comm, *args))
    except Exception as error:
        traceback.print_exc()
        answer = (False, reason(error))
    sender.send(answer)
    sender.close()
    fullshard.shutdown()


def quiet() -> None:
    """Use one thread, and silence warnings of the compared libraries."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)


def reason(error: BaseException) -> str:
    """Return an exception as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


def teller(scenario: str, started: float, *, speaks: bool) -> Callable[[str], None]:
    """Return a function that prints progress and elapsed time on stderr, if ``speaks``."""

    def tell(text: str) -> None:
        if speaks:
            print(f"[{time.time() - started:6.1f} s] {scenario}: {text}", file=sys.stderr, flush=True)

    return tell


def scenario_main(run: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Run a scenario: options are JSON in the first argument, the result goes as JSON to the file in the second."""
    quiet()
    result = run(json.loads(sys.argv[1]))
    Path(sys.argv[2]).write_text(json.dumps(result))
