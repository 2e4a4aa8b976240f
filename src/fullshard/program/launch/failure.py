"""The failure a rank reports to its launcher, so that the user reads one message instead of one per rank.

A rank writes it to the file that torch's elastic agent asks for, in the format of
``torch.distributed.elastic.multiprocessing.errors.record``, whoever started the rank: torchrun's summary shows it, and
fullshard's launcher shows what a script with ``@record`` has written.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fullshard.errors import FullshardError, RunStopped, UserError

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Path of the file for a rank's failure, of torch's elastic agent too. Without it a rank prints its failure itself."""

_OWN = "fullshard"
"""Key of the file, beside torch's, with all fields of a failure."""


def error_file() -> Path | None:
    """Return the file for this rank's failure, if its launcher reads one."""
    path = os.environ.get(ERROR_FILE_VARIABLE)
    return Path(path) if path else None


def is_forgotten() -> bool:
    """Return True if this rank's launcher will not show a failure: torch's agent shows only that of the last start."""
    starts, most = (int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return error_file() is None or ("TORCHELASTIC_USE_AGENT_STORE" in os.environ and starts < most)


def saving_path(failure_path: Path) -> Path:
    """Return the file by which a rank with this failure file reports that it saves because of a request to stop."""
    return failure_path.with_suffix(".saving")


def report_saving() -> None:
    """Tell fullshard's launcher, if there is one, that this rank saves before it ends; any rank."""
    path = error_file()
    if path is not None:
        with contextlib.suppress(OSError):  # the launcher has ended, and its directory is gone
            saving_path(path).touch()


def say_ending(failure_path: Path) -> None:
    """Tell ranks of this machine that the next signal is not a request to save, because one of them has failed."""
    with contextlib.suppress(OSError):  # a full disk: ranks that train may save once more
        failure_path.with_name("ending").touch()


def is_ending() -> bool:
    """Return True if fullshard's launcher is ending the ranks because one has failed; any rank."""
    path = error_file()
    return path is not None and path.with_name("ending").exists()


@dataclass(frozen=True)
class Failure:
    """The reason why a rank, or the command itself, did not finish."""

    rank: int | None  # the rank, or None if no rank was running
    kind: str  # name of the exception's class
    message: str  # text of the exception
    # the traceback as Python prints it; None for a :class:`UserError`, whose message has the remedy, and for a run that
    # was stopped
    trace: str | None
    exit_code: int  # exit code of the process
    time_s: float  # unix time of the failure; the earliest failure caused the others
    # for a run that was stopped, the step and checkpoint printed by ``--json``; None if it failed
    stopped: Mapping[str, Any] | None = None
    # whether the same run may succeed when restarted; None: unknown, because it ended without a report
    transient: bool | None = None

    @property
    def may_pass(self) -> bool:
        """True if the ranks may be restarted: not after an error that would recur, nor after a stop."""
        return self.transient is not False and self.stopped is None

    @classmethod
    def of(cls, error: BaseException, rank: int | None = None) -> Failure:
        """Return the failure for an exception raised on ``rank``, or before ranks ran (None)."""
        stopped, trace = None, None
        if isinstance(error, RunStopped):
            stopped = {"stopped": True, "step": error.step, "checkpoint": error.checkpoint}
        elif not isinstance(error, UserError):
            trace = "".join(traceback.format_exception(error)).rstrip()
        exit_code = error.exit_code if isinstance(error, FullshardError) else 1
        if isinstance(error, FullshardError):
            transient = error.transient
        else:
            transient = isinstance(error, ConnectionError | TimeoutError) or type(error).__name__ in _TRANSIENT
        return cls(rank, type(error).__name__, str(error), trace, exit_code, time.time(), stopped, transient)

    @classmethod
    def read(cls, path: Path, rank: int) -> Failure | None:
        """Read the failure that ``rank`` wrote to ``path``; None if it wrote none, or not all of it yet."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):  # torch's own writer is not atomic
            return None
        return cls(**content[_OWN]) if _OWN in content else cls.recorded(content["message"], rank)

    @classmethod
    def recorded(cls, message: Any, rank: int, exit_code: int = 1) -> Failure:
        """Return the failure that torch's ``@record`` has written: a text, or an object with a traceback."""
        content = message if isinstance(message, dict) else {"message": message}
        more = content.get("extraInfo", {})
        kind, _, text = content["message"].partition(": ")
        time_s = float(more.get("timestamp", time.time()))
        return cls(rank, kind, text, (more.get("py_callstack") or "").rstrip() or None, exit_code, time_s)

    def write(self, path: Path) -> None:
        """Write the failure atomically: the launcher may read it at any moment."""
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self._content()), encoding="utf-8")
        os.replace(temporary, path)

    def _content(self) -> dict[str, object]:
        # torch's summary prints the call stack in place of the message.
        more = {"py_callstack": self.trace or self.text(), "timestamp": str(int(self.time_s))}
        message = {"message": f"{self.kind}: {self.message}", "errorCode": self.exit_code, "extraInfo": more}
        return {"message": message, _OWN: asdict(self)}

    def text(self) -> str:
        """Return the text for the user: the message of a user error or a stop, otherwise the rank and its traceback."""
        if self.stopped is not None:
            return self.message
        if self.trace is None:
            return f"{self.kind}: {self.message}"
        where = "" if self.rank is None else f"Rank {self.rank} failed first:\n"
        return f"{where}{self.trace}"

    def as_dict(self) -> dict[str, object]:
        """Return the object that ``--json`` prints."""
        if self.stopped is not None:
            return {**self.stopped, "exit_code": self.exit_code}
        return {"error": {"kind": self.kind, "message": self.message, "rank": self.rank, "exit_code": self.exit_code}}


_TRANSIENT = ("AcceleratorError", "DistBackendError", "DistNetworkError", "DistStoreError")
"""Names of torch's exceptions for a failed GPU or connection; compared by name, so that torch is not imported."""


def in_words(failure: Failure) -> str:
    """Return a failure's rank and message, without its traceback."""
    if failure.rank is None or failure.stopped is not None or failure.message.startswith(f"rank {failure.rank} "):
        return failure.message or failure.kind
    return f"rank {failure.rank}: {failure.kind}" + (f": {failure.message}" if failure.message else "")


def brief(failure: Failure) -> str:
    """Return a failure on one line."""
    line = in_words(failure).splitlines()[0]
    return line if len(line) <= 200 else f"{line[:200]}…"


def first_sentence(failure: Failure) -> str:
    """Return the first sentence of a failure, for a line that contains more."""
    return brief(failure).split(". ")[0].rstrip(".")
