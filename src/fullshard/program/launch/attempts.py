"""Attempts of a run: what a failure means for the next one, and the directory that outlives them.

The ranks of one attempt end together. State for the next one is in a directory in memory (:data:`SCRATCH_VARIABLE`):
rank 0 records its progress there, which the launcher reports after a failure.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fullshard.program.launch.failure import Failure, brief, first_sentence
from fullshard.program.launch.messages import say
from fullshard.variables import ATTEMPT_VARIABLE, SCRATCH_LOCK_NAME, SCRATCH_VARIABLE

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryKills:
    """Number of processes killed for memory since the system, or the control group, began."""

    count: int
    of_group: bool  # in this process's control group; False: on the entire machine, whose processes are anyone's


def memory_kills() -> MemoryKills | None:
    """Return how many processes were killed for memory: of this process's control group, otherwise of the machine.

    None if the system does not say, as all but Linux.
    """
    machine = _PROC / "vmstat"
    for file in (*_groups(), machine):
        try:
            lines = [line.split() for line in file.read_text().splitlines()]
        except OSError:
            continue
        found = [int(count) for name, count in (line for line in lines if len(line) == 2) if name == "oom_kill"]
        if found:
            return MemoryKills(found[0], of_group=file != machine)
    return None


def _groups() -> list[Path]:
    """Return the files that may count for the control group, in version 2 and 1."""
    files = []
    try:
        for line in (_PROC / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                files.append(_GROUPS / path.lstrip("/") / "memory.events")
            elif "memory" in controllers.split(","):
                files.append(_GROUPS / "memory" / path.lstrip("/") / "memory.oom_control")
    except OSError:
        return []
    return files


_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "fullshard-keep-"
_REACHED_NAME, _PLAN_NAME = "reached.json", "plan.txt"
_LOST_NAME, _STARTED_NAME = "lost", "started"  # files whose modification times are the moments

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Seconds until the ranks restart if an attempt made no progress beyond earlier ones: the first value, doubled for
each further one up to the second. After progress there is no pause."""


@dataclass(frozen=True)
class Reached:
    """The progress of an attempt."""

    attempt: int
    step: int | None = None  # steps taken; None: no rank trained yet
    saved: int = 0  # step of the checkpoint from which the next attempt continues; 0: from the start
    path: str | None = None  # the newest checkpoint that this command saved
    finished: bool = False  # whether the model is published
    told: bool = False  # whether the summary of --json is printed
    began: int | None = None  # steps taken when the attempt began to train


@dataclass(frozen=True)
class Recovery:
    """The time without steps after a rank was lost, in seconds by the clock of one machine."""

    ended_s: float  # from the loss until the launcher started the ranks again
    start_s: float  # until rank 0 ran its first line: Python and its imports
    state_s: float  # until its state was restored: data, model, snapshot or checkpoint
    step_s: float  # until its first step was done

    def text(self) -> str:
        """Describe the sum, the sum without starting processes, and its parts."""
        rest = self.ended_s + self.state_s + self.step_s
        return (
            f"{rest + self.start_s:.1f} s after the loss, {rest:.1f} s without starting processes (ending ranks "
            f"{self.ended_s:.1f} s, state {self.state_s:.1f} s, step {self.step_s:.1f} s)"
        )


def mark_lost(directory: str | Path) -> None:
    """Record that a rank is lost now; the launcher calls it."""
    with contextlib.suppress(OSError):  # a full disk costs the report of the time
        Path(directory, _LOST_NAME).touch()


def mark_started(directory: str | Path) -> None:
    """Record that the ranks are started now; the launcher calls it."""
    with contextlib.suppress(OSError):
        Path(directory, _STARTED_NAME).touch()


def recovery(began_s: float, restored_s: float) -> Recovery | None:
    """Return the time without steps once the first step is done; None if the launcher recorded no loss.

    Args:
        began_s: Unix time of rank 0's first line in this attempt.
        restored_s: Unix time when its state was restored.
    """
    directory = os.environ.get(SCRATCH_VARIABLE, "")
    try:
        lost, started = (Path(directory, name).stat().st_mtime for name in (_LOST_NAME, _STARTED_NAME))
    except FileNotFoundError:
        return None
    return Recovery(started - lost, began_s - started, restored_s - began_s, time.time() - restored_s)


def attempt_number() -> int:
    """Return how often the launcher has started the ranks of this run before; 0 without a launcher."""
    return int(os.environ.get(ATTEMPT_VARIABLE, "0"))


def note(reached: Reached) -> None:
    """Record the run's progress for the launcher and the next attempt; rank 0, after each step."""
    directory = os.environ.get(SCRATCH_VARIABLE)
    if directory is not None:
        path = Path(directory, _REACHED_NAME)
        temporary = path.with_suffix(".tmp")
        with contextlib.suppress(OSError):  # the launcher has ended, and its directory is gone
            temporary.write_text(json.dumps(asdict(reached)))
            os.replace(temporary, path)


def note_plan(line: str) -> None:
    """Record a line about the run's planned memory, for the message of a rank that is killed; rank 0."""
    directory = os.environ.get(SCRATCH_VARIABLE)
    if directory is not None:
        with contextlib.suppress(OSError), Path(directory, _PLAN_NAME).open("a") as file:
            file.write(f"{line}\n")


def _noted_plan(directory: Path) -> str:
    """Return what rank 0 recorded about the run's planned memory in any attempt."""
    try:
        return "; ".join(Path(directory, _PLAN_NAME).read_text().splitlines())
    except FileNotFoundError:
        return "its memory was not planned"


def last_note(directory: str | Path | None) -> Reached | None:
    """Return the last progress that rank 0 recorded in any attempt, from the directory that outlives them; or None."""
    if directory is None:
        return None
    try:
        return Reached(**json.loads(Path(directory, _REACHED_NAME).read_text()))
    except FileNotFoundError:
        return None


def in_memory(directory: str | Path) -> int:
    """Return the step of the newest snapshot that every rank of this machine has; 0 if there is none.

    Its bytes are not verified here: the ranks do that, and report the step from which they continue.
    """
    ranks = [{path.name for path in rank.glob("step-*")} for rank in Path(directory).glob("*/rank-*")]
    names = set.intersection(*ranks) if ranks else set()
    # One that is being written or deleted has another ending.
    return max((int(name.removeprefix("step-")) for name in names if not name.endswith((".tmp", ".old"))), default=0)


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """Yield a new directory for :data:`SCRATCH_VARIABLE`, in memory if there is /dev/shm; it is removed at the end.

    First removes directories of launchers that were killed, because they hold memory.
    """
    root = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    for left in root.glob(f"{_PREFIX}*"):
        # Of a launcher that has ended; another user's cannot be opened.
        with contextlib.suppress(OSError), (left / SCRATCH_LOCK_NAME).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))  # only this user may enter it
    # Locked as long as this process lives, however it ends. The name appears only then, so nobody finds it unlocked.
    with (directory / "new").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(directory / "new", directory / SCRATCH_LOCK_NAME)
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


class Restarts:
    """Decides, after each failed attempt, whether and when the ranks start again; one for each launcher.

    Attributes:
        done: Number of restarts so far.
        most: Number of restarts allowed.
        directory: Where rank 0 records its progress.
    """

    def __init__(self, most: int, directory: Path, *, records: bool = True) -> None:
        """Allow ``most`` restarts; rank 0 records its progress in ``directory``, which a script need not do."""
        self.done = 0
        self._records = records
        self.most = most
        self.directory = directory
        self._kills = memory_kills()
        self._stepped = False  # whether any attempt took a step
        self._before: tuple[int | None, Failure] | None = None  # the last failure, and the steps taken until then
        self._farthest = -1
        self._in_vain = 0  # attempts in a row without progress beyond earlier ones, and the one before

    def after(self, failure: Failure) -> float | Failure:
        """Report a failure and decide what follows.

        The ranks do not restart after an error that would recur, after ``most`` restarts, if the same rank fails in
        the same way after the same number of steps as in the previous attempt, or if memory ran out before any attempt
        took a step.

        Returns:
            Seconds to wait before the ranks restart; or, if they do not, the failure to report, which is the first one
            if the same happened twice.
        """
        noted = last_note(self.directory)
        if noted is None and not self._records:
            return self._restart(brief(failure), "", None) if failure.may_pass and self.done < self.most else failure
        reached = noted or Reached(self.done)
        step = reached.step if reached.attempt == self.done else None
        self._stepped |= step is not None and step != reached.began
        ran_out, note = self._ran_out(failure)
        if ran_out is not False:
            failure = replace(
                failure, message=f"{failure.message}{note} The run's plan: {_noted_plan(self.directory)}."
            )
        if self.most == 0 or not failure.may_pass:
            return failure
        what = f"{first_sentence(failure)}, {f'after step {step:,}' if step else 'before the first step'}"
        if ran_out and not self._stepped:
            say(f"{what}: memory ran out and would again, so the ranks are not started again")
            return failure
        comparable = step is not None or ran_out is None  # a rank that is killed twice while it starts
        if self._before is not None and comparable and _same((step, failure), self._before):
            say(f"{what}, as in the attempt before: the ranks are not started again")
            return self._before[1]
        if self.done >= self.most:
            say(f"{what}: the ranks are not started again, {self.most} restarts are used up (--max-restarts)")
            return failure
        self._before = step, failure
        # A later checkpoint may be complete without a record here; the ranks report from which they resume.
        return self._restart(what, f", from step {max(reached.saved, in_memory(self.directory)):,} or later", step)

    def _restart(self, what: str, origin: str, step: int | None) -> float:
        """Count and report a restart after ``step``, from ``origin``; return the seconds to wait before it."""
        self._in_vain = 1 if step is not None and step > self._farthest else self._in_vain + 1
        self._farthest = max(self._farthest, -1 if step is None else step)
        self.done += 1
        seconds = pause_s(self._in_vain)
        when = f"in {seconds:g} s" if seconds else "now"
        say(f"{what}; restart {self.done} of {self.most} {when}{origin}")
        return seconds

    def _ran_out(self, failure: Failure) -> tuple[bool | None, str]:
        """Return whether the kernel killed a rank because memory ran out, None if that is not known; and a note."""
        # Looked at after each failure: what was killed during earlier attempts says nothing about this one.
        before, self._kills = self._kills, memory_kills()
        if failure.exit_code != 128 + signal.SIGKILL:
            return False, ""
        if before is None or self._kills is None or before.of_group != self._kills.of_group:
            return None, ""
        rise = self._kills.count - before.count
        if self._kills.of_group or not rise:
            return rise > 0, ""
        count = "1 process" if rise == 1 else f"{rise:,} processes"
        return None, (
            f" Meanwhile the kernel killed {count} of this machine because memory ran out; the rank may be among "
            "them, or another program's process (`dmesg` says which)."
        )


def pause_s(failures: int) -> float:
    """Return the seconds to wait before a restart, after this many failures in a row without progress."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (failures - 2)) if failures > 1 else 0.0


def _same(one: tuple[int | None, Failure], other: tuple[int | None, Failure]) -> bool:
    """Return whether two attempts ended after the same step, by the same rank, in the same way."""
    keys = [(step, failure.rank, failure.kind, failure.exit_code) for step, failure in (one, other)]
    return keys[0] == keys[1]
