"""A script's ranks on several machines: by torch's elastic agent, in this process, with torchrun's own options."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import DistError, run as torchrun  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError, RendezvousTimeoutError
from torch.distributed.launcher.api import elastic_launch

from fullshard.errors import ProcessGroupError
from fullshard.program.launch.failure import Failure
from fullshard.program.launch.messages import say
from fullshard.program.launch.ranks import heard_signals, silent_failure
from fullshard.program.launch.script.machines import STATIC, MachinePlan
from fullshard.program.launch.script.network import address_towards
from fullshard.program.launch.script.outcome import Ended
from fullshard.variables import ATTEMPT_VARIABLE

SAVE_SECONDS = 300
"""Time that ranks have to save after a signal to this launcher. Torch gives them 30 s after another one has ended."""


def run_elastic(
    plan: MachinePlan, command: Sequence[str], directory: Path, *, max_restarts: int, timeout_s: float
) -> Ended:
    """Run a script's ranks on this machine, together with the other machines; they inherit this process's variables.

    Args:
        plan: The machines.
        command: The script that each rank runs, and its arguments.
        directory: For the agent's files.
        max_restarts: How many times to restart all ranks after one has failed.
        timeout_s: Seconds to wait for all machines.

    Raises:
        ProcessGroupError: Not all machines came in time, or the connection to them was lost.
    """
    numbers, starts, ended = heard_signals(), _Starts(str(directory)), Ended()
    try:
        for number in numbers:  # torch's agent hears them once it has started ranks
            signal.signal(number, _stop)
        options = torchrun.parse_args([*_options(plan, directory, max_restarts, timeout_s), *command])
        config, program, arguments = torchrun.config_from_args(options)
        config.logs_specs = starts
        elastic_launch(config, program)(*arguments)
    except ChildFailedError as error:
        ended.failures = in_order(error.failures)
    except SignalException as error:
        ended.signal = signal.Signals(error.sigval)
        ended.failures = starts.failures()
    except (RendezvousError, DistError) as error:
        raise ProcessGroupError(_rendezvous_text(plan, error, timeout_s)) from error
    finally:
        for number in numbers:  # a request that comes now is too late, and would leave files behind
            signal.signal(number, signal.SIG_IGN)
    ended.ranks = starts.ranks
    return ended


def _stop(number: int, _frame: FrameType | None) -> None:
    raise SignalException(f"received signal {number}", signal.Signals(number))


def _options(plan: MachinePlan, directory: Path, max_restarts: int, timeout_s: float) -> Iterator[str]:
    """Yield torchrun's options."""
    seconds = max(1, int(timeout_s))
    conf: dict[str, object] = {"timeout": seconds}
    if plan.backend == STATIC:
        yield f"--node-rank={plan.node_rank}"
    else:
        # read_timeout is also how long a machine waits for the store of one that starts later.
        conf = {"join_timeout": seconds, "last_call_timeout": min(30, seconds), "read_timeout": seconds}
        if plan.node_rank is not None:  # otherwise torch looks whether the host's address is this machine's
            conf["is_host"] = int(plan.node_rank == 0)
        if (address := address_towards(plan.host, plan.port)) is not None:
            yield f"--local-addr={address}"
    yield f"--nnodes={plan.nnodes}"
    yield f"--nproc-per-node={plan.nproc}"
    yield f"--rdzv-backend={plan.backend}"
    yield f"--rdzv-endpoint={plan.place}"
    yield f"--rdzv-id={plan.run_id}"
    yield f"--rdzv-conf={','.join(f'{name}={value}' for name, value in conf.items())}"
    yield f"--max-restarts={max_restarts}"
    yield f"--log-dir={directory}"
    yield f"--shutdown-timeout={SAVE_SECONDS}"
    yield f"--signals-to-handle={','.join(number.name for number in heard_signals())}"


class _Starts(DefaultLogsSpecs):
    """Counts the starts of ranks, which torch does not count if another machine has failed, and says so.

    Attributes:
        ranks: Numbers of the ranks of the last start.
    """

    def __init__(self, directory: str) -> None:
        """Keep the ranks' error files in ``directory``."""
        super().__init__(log_dir=directory)
        self.ranks: list[int] = []
        self._count = 0
        self._files: Mapping[int, str] = {}

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the files of a start; the agent calls it before each."""
        if self._count:
            say("the ranks start again")
        for env in envs.values():
            env[ATTEMPT_VARIABLE] = str(self._count)
        self._count += 1
        self.ranks = sorted(int(env["RANK"]) for env in envs.values())
        found = super().reify(envs)
        self._files = {int(envs[local]["RANK"]): path for local, path in found.error_files.items()}
        return found

    def failures(self) -> list[Failure]:
        """Return what the ranks of the last start reported, the earliest first."""
        found = [Failure.read(Path(path), rank) for rank, path in self._files.items()]
        return sorted(filter(None, found), key=lambda failure: failure.time_s)


def in_order(failures: Mapping[int, ProcessFailure]) -> list[Failure]:
    """Return what torch's agent says of ranks, by rank, as failures: the cause first, and ranks that have saved last.

    The agent counts the ranks that it has ended by SIGTERM as failed, and their times are of whole seconds.
    """

    def place(pair: tuple[ProcessFailure, Failure]) -> tuple[bool, bool, float]:
        its, failure = pair
        ended_by_agent = its.exitcode == -signal.SIGTERM and its.error_file_data["message"] == "<NONE>"
        return ended_by_agent, failure.stopped is not None, failure.time_s

    found = [(its, _failure(rank, its.exitcode, its.error_file_data, its.timestamp)) for rank, its in failures.items()]
    return [failure for _, failure in sorted(found, key=place)]


def _failure(rank: int, code: int, content: Mapping[str, Any], ended_s: float) -> Failure:
    """Return the failure of a rank: what is in its error file, or what its exit code says."""
    own = content.get("fullshard")
    if own is not None:
        return Failure(**own)
    if content["message"] == "<NONE>":
        return silent_failure(rank, code, ended_s, reports=False)
    return Failure.recorded(content["message"], rank, code if code > 0 else 128 - code)


def _rendezvous_text(plan: MachinePlan, error: Exception, timeout_s: float) -> str:
    """Return torch's message, and how many machines came."""
    reason = next(iter(str(error.__cause__ or error).splitlines()), "torch's rendezvous timed out").rstrip(".")
    if isinstance(error, RendezvousClosedError):
        return f"The run {plan.run_id!r} at {plan.place} is over: start it again with another --rdzv_id."
    came = _came(error)
    count = "" if came is None else f" {came} of {plan.nnodes} machines were there after {timeout_s:.0f} s."
    return (
        f"The machines do not meet at {plan.place}: {reason}.{count} Start the same command on each, or wait longer "
        "with --rdzv_timeout."
    )


def _came(error: Exception) -> int | None:
    """Return the number of machines in torch's rendezvous that has timed out, which its message does not say."""
    if isinstance(error, RendezvousTimeoutError):
        for frame, _ in traceback.walk_tb(error.__traceback__):
            holder = getattr(frame.f_locals.get("self"), "_state_holder", None)
            if holder is not None:
                return 1 + len(holder.state.participants)  # this one has left before the error
    return None
