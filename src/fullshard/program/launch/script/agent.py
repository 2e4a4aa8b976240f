"""The rounds of a script's run: machines meet, each starts its ranks, and all start again after one has failed.

Torch's elastic agent does the same for one kind of worker. Here a missing machine is named, and a machine ends with a
reason if another one fails or is lost.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from pathlib import Path

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)

from fullshard.errors import ProcessGroupError
from fullshard.program.launch.attempts import last_note, pause_s
from fullshard.program.launch.failure import Failure, brief
from fullshard.program.launch.output import Output
from fullshard.program.launch.ranks import Ranks, StopAsked
from fullshard.program.launch.script.machines import MachinePlan
from fullshard.program.launch.script.peers import DOUBT_SECONDS, MachineEnded, PeerMonitor, RunFailure, lost_connection
from fullshard.program.launch.script.rendezvous import (
    STORE_TIME,
    DynamicRendezvous,
    Round,
    StaticRendezvous,
    first_line,
    make_rendezvous,
)
from fullshard.variables import ATTEMPT_VARIABLE, RESTARTS_VARIABLE

_LOOK_SECONDS = 0.1


class Agent:
    """Runs a script's ranks on this machine.

    Attributes:
        failed: The failure that ended a run of several machines, on another machine or on this one; None: none has.
        signal: The signal that ended this launcher, or None.
    """

    def __init__(
        self, plan: MachinePlan, ranks: Ranks, output: Output, scratch: Path, *, max_restarts: int, timeout_s: float
    ) -> None:
        """Prepare; nothing is started yet.

        Args:
            plan: The machines.
            ranks: The ranks.
            output: Prints the launcher's messages.
            scratch: The scratch directory, where rank 0 notes what it has saved.
            max_restarts: How many times to restart all ranks after one has failed.
            timeout_s: Seconds to wait for all machines.
        """
        self.failed: RunFailure | None = None
        self.signal: signal.Signals | None = None
        self._plan = plan
        self._ranks = ranks
        self._output = output
        self._scratch = scratch
        self._most = max_restarts
        self._timeout_s = timeout_s
        self._failed_times = 0
        self._starts = 0
        self._rendezvous: StaticRendezvous | DynamicRendezvous | None = None
        self._monitor: PeerMonitor | None = None
        self._rank_store: TCPStore | None = None

    def run(self) -> None:
        """Run the ranks until they end.

        Raises:
            ProcessGroupError: Not all machines arrived, or the connection to their store was lost.
        """
        try:
            self._rendezvous = make_rendezvous(self._plan, self._timeout_s, self._saved)
            self._run_to_end()
            self._leave()
            self._rendezvous.close()
        except MachineEnded as ended:
            self.failed = ended.failed
            self._leave()
        except StopAsked as asked:
            self.signal = asked.number
            self._ranks.ask(asked.number)
            self._ranks.stop()
            self._post_stop(asked.number)
            self._leave()
        except (RendezvousError, DistError) as error:
            raise ProcessGroupError(self._rendezvous_error(error)) from error
        finally:
            self._ranks.stop()

    def _run_to_end(self) -> None:
        try:
            self._begin()
            while not self._is_over():
                self._ranks.wait(_LOOK_SECONDS)
        except RendezvousGracefulExitError:
            pass
        finally:
            if not self._ranks.asked:  # otherwise they may save
                self._ranks.stop()

    def _begin(self) -> None:
        """Meet the other machines and start the ranks."""
        assert self._rendezvous is not None
        while True:
            try:
                self._start(self._rendezvous.next_round(), hosts=self._rendezvous.hosts)
                return
            except DistError as error:  # a machine was lost after all had met
                if self._failed_times >= self._most:
                    raise
                self._count_restart(Failure.of(error))

    def _start(self, meeting: Round, *, hosts: bool) -> None:
        store, machine, machines = meeting.store, meeting.machine, len(meeting.names)
        # A machine that was itself started again learns from the others how often ranks were started before.
        store.set(f"machine/{machine}", json.dumps([self._starts, self._plan.nproc]))
        told = [json.loads(store.get(f"machine/{number}")) for number in range(machines)]
        attempt = max(starts for starts, _ in told)
        self._starts = attempt + 1
        counts = [count for _, count in told]
        common = {
            "GROUP_RANK": machine,
            "GROUP_WORLD_SIZE": machines,
            "LOCAL_WORLD_SIZE": self._plan.nproc,
            "WORLD_SIZE": sum(counts),
            "ROLE_NAME": "default",
            "ROLE_WORLD_SIZE": sum(counts),
            "MASTER_ADDR": meeting.address,
            "MASTER_PORT": self._port(meeting, attempt),
            "TORCHELASTIC_RESTART_COUNT": attempt,
            "TORCHELASTIC_MAX_RESTARTS": self._most,
            "TORCHELASTIC_RUN_ID": self._plan.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": meeting.shares_store,
            ATTEMPT_VARIABLE: attempt,
        }
        if machines == 1:  # of several, each counts the restarts after failures of its own
            common[RESTARTS_VARIABLE] = self._most - self._failed_times
        environments = []
        for local_rank in range(self._plan.nproc):
            rank = sum(counts[:machine]) + local_rank
            numbers = {"RANK": rank, "ROLE_RANK": rank, "LOCAL_RANK": local_rank}
            environments.append({name: str(value) for name, value in {**common, **numbers}.items()})
        if machines > 1:
            self._monitor = PeerMonitor(store, machine, meeting.names, hosts=hosts)
        self._ranks.start(environments)

    def _port(self, meeting: Round, attempt: int) -> int:
        """Return the port of the ranks' store; a new one after a restart, since the old store has stale entries."""
        if attempt == 0:
            return meeting.port
        if meeting.machine == 0:
            # The old store stays, because the machines still use it.
            self._rank_store = TCPStore("127.0.0.1", 0, is_master=True, timeout=STORE_TIME, wait_for_workers=False)
            meeting.store.set("port", str(self._rank_store.port))
        return int(meeting.store.get("port"))

    def _restart(self) -> None:
        self._ranks.stop()
        if self._monitor is not None:
            self._monitor.stop()
            self._monitor = None
        time.sleep(pause_s(self._failed_times))  # machines whose ranks have not failed wait for this one
        self._begin()

    def _is_over(self) -> bool:
        """Look for what has happened, and restart the ranks if necessary; return True if the run has ended."""
        assert self._rendezvous is not None
        if self._ranks.any_failed():
            return self._ends_after_failure()
        monitor = self._monitor
        if self._ranks.all_ended():
            if monitor is None or monitor.over:
                return True
            monitor.done()  # keep running: the ranks' store may be on this machine, and others still need it
        failed = None if monitor is None else monitor.failure()
        if failed is not None:
            # Ranks restart if the other machine was only lost.
            if failed.failure.rank is not None or self._failed_times >= self._most:
                raise MachineEnded(failed)
            self._count_restart(failed.failure)
            self._restart()
        elif (monitor is not None and monitor.restart_requested) or self._rendezvous.waiting():
            self._restart()
        return False

    def _ends_after_failure(self) -> bool:
        """End the other ranks after one of this machine failed; if there is no restart, the other machines too.

        A rank that was stopped and has saved ends the run: whoever stopped it wants the machine. So does an error of
        fullshard's programs that would come again.
        """
        self._ranks.stop()
        failure = self._ranks.failures()[0]
        if failure.may_pass and self._failed_times < self._most:
            self._count_restart(failure)
            self._restart()
            return False
        if self._monitor is not None:
            self.failed = self._post(self._monitor, failure)
        return True

    def _count_restart(self, failure: Failure) -> None:
        self._failed_times += 1
        self._output.say(f"fullshard: {brief(failure)}; restart {self._failed_times} of {self._most}")

    def _post(self, monitor: PeerMonitor, failure: Failure) -> RunFailure:
        """Report a failure to the other machines, unless one of them was first and this rank only lost it."""
        deadline = time.monotonic() + (2 * DOUBT_SECONDS if lost_connection(failure) else 0.0)
        while time.monotonic() < deadline:
            failed = monitor.failure(DOUBT_SECONDS)
            if failed is not None:
                return failed
            time.sleep(_LOOK_SECONDS)
        return monitor.post(RunFailure(failure, monitor.here))

    def _post_stop(self, number: signal.Signals) -> None:
        """Report to the other machines that a signal ended this one, or that its ranks have saved and stopped."""
        if self._monitor is not None:
            here = self._monitor.here
            message = f"{here} was stopped by {number.name}."
            failure = Failure(None, "Interrupted", message, None, 128 + number, time.time())
            saved = [one for one in self._ranks.failures()[:1] if one.stopped is not None]
            self._monitor.post(RunFailure(saved[0] if saved else failure, here))

    def _leave(self) -> None:
        """Let the other machines read how the run ended; a request to stop comes too late now."""
        self._ranks.asked = True
        if self._monitor is not None:
            self._monitor.leave()

    def _saved(self) -> int | None:
        """Return the step of the newest checkpoint that rank 0 recorded on this machine; None if there is no record."""
        noted = last_note(self._scratch)
        return None if noted is None else noted.saved

    def _rendezvous_error(self, error: Exception) -> str:
        """Return the message for a rendezvous that failed, or whose store was lost."""
        plan = self._plan
        if isinstance(error, RendezvousTimeoutError) and self._rendezvous is not None:
            with contextlib.suppress(RuntimeError):
                return (
                    f"{self._rendezvous.joined()} of {plan.nnodes} machines arrived at {plan.place} within "
                    f"{self._timeout_s:.0f} s. Start `fullshard launch` on the others with the same --rdzv_endpoint "
                    "and --rdzv_id, or wait longer with --rdzv_timeout."
                )
        if isinstance(error, RendezvousClosedError):
            return f"The run {plan.run_id!r} at {plan.place} is over: start it again with another --rdzv_id."
        reason = first_line(error)
        return f"{plan.place}, where the machines meet, no longer answers ({reason}). See that machine's output."
