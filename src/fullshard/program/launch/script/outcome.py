"""How a script ended on this machine, for the user: the cause last, one message for one failure."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fullshard.program.launch.failure import Failure, brief, in_words
from fullshard.program.launch.output import Output

_NAMED = 3
"""Number of ranks that failed after the first and are reported by name."""


@dataclass
class Ended:
    """How the ranks of this machine ended."""

    ranks: list[int] = field(default_factory=list)  # their numbers in the last start
    failures: list[Failure] = field(default_factory=list)  # the cause first
    signal: signal.Signals | None = None  # that ended this launcher


@dataclass(frozen=True)
class Outcome:
    """How a script ended on this machine."""

    ranks: Sequence[int]  # the ranks of this machine
    exit_code: int  # exit code of the command
    duration_s: float  # seconds from start to end
    failure: Failure | None = None  # the failure that ended it, or None
    signal: str | None = None  # the signal that ended it, or None

    def as_dict(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        failure = None
        if self.failure is not None:
            failure = {"kind": self.failure.kind, "message": self.failure.message, "rank": self.failure.rank}
            failure["traceback"] = self.failure.trace
        return {
            "ranks": list(self.ranks),
            "exit_code": self.exit_code,
            "duration_s": round(self.duration_s, 3),
            "signal": self.signal,
            "failure": failure,
        }


def outcome_of(ended: Ended, duration_s: float) -> Outcome:
    """Return how the script ended on this machine, and the exit code of the command."""
    failure = ended.failures[0] if ended.failures else None
    if ended.signal is not None:
        saved = failure if failure is not None and failure.stopped is not None else None
        code = 128 + ended.signal if saved is None else saved.exit_code
        return Outcome(ended.ranks, code, duration_s, saved, signal=ended.signal.name)
    return Outcome(ended.ranks, 0 if failure is None else failure.exit_code, duration_s, failure)


def print_outcome(outcome: Outcome, failures: Sequence[Failure], output: Output) -> None:
    """Print why the run ended; the cause comes last, where a terminal shows it."""
    if outcome.signal is not None:
        for failed in filter(_is_exit_message, failures):
            _print_as_rank(failed, output)
        output.say(f"fullshard: stopped by {outcome.signal}; nothing is left running.")
    failure = outcome.failure
    if failure is None:
        return
    same = (failure.kind, failure.message) if _is_exit_message(failure) else None
    others = [other for other in failures if other.rank != failure.rank and (other.kind, other.message) != same]
    others = [other for other in others if other.stopped is None]
    for other in others[:_NAMED]:
        output.say(f"fullshard: then {brief(other)}")
    if len(others) > _NAMED:
        output.say(f"fullshard: then {len(others) - _NAMED} more ranks failed")
    if _is_exit_message(failure):
        _print_as_rank(failure, output)
    else:
        output.say(failure.text() if failure.trace is not None else f"fullshard: {in_words(failure)}")


def _is_exit_message(failure: Failure) -> bool:
    """Return whether the script ended with ``sys.exit("reason")``, which Python prints without a traceback."""
    return failure.kind == SystemExit.__name__ and not failure.message.startswith(f"rank {failure.rank} ended with ")


def _print_as_rank(failure: Failure, output: Output) -> None:
    output.feed(failure.rank or 0, "stderr", f"{failure.message}\n".encode(errors="replace"))
