"""Memory, bytes on the wire, copies and collectives of one step, each engine in a new pair of processes."""

from itertools import pairwise
from typing import Any

import torch.distributed as dist
from contenders import Contender, Task
from measure import OperatorCounter, TensorMeter, loopback_sent_bytes, reset_resident_peak, resident_peak_bytes
from ranks import RankFailed, on_two_ranks, scenario_main, teller

from fullshard.core.comm import Comm
from fullshard.core.testing import RecordingComm

NAMES = ("floor", "ddp", "fsdp1", "fsdp2", "fsdp2_no_reshard", "fullshard")
PHASES = ("forward", "backward", "optimizer")
TIMEOUT_S = 60.0


def run(options: dict[str, Any]) -> dict[str, Any]:
    """Return every contender's figures; with ``resident_only`` only its peak resident memory."""
    task = Task(batch=4, source=128, target=48, small=options["small"])
    tell = teller("resident" if options["resident_only"] else "memory", options["started"], speaks=True)
    parts = (_resident_and_wire,) if options["resident_only"] else (_resident_and_wire, _tensors_and_operators)
    contenders: dict[str, dict[str, Any]] = {}
    failures = {}
    for name in NAMES:
        tell(name)
        try:
            figures: dict[str, Any] = {}
            for part in parts:
                ranks = on_two_ranks(part, name, task, timeout_s=TIMEOUT_S)
                # Peaks are the larger rank's; the other figures are the same on both.
                figures |= {k: max(r[k] for r in ranks) if k.startswith("peak") else v for k, v in ranks[0].items()}
            contenders[name] = figures
        except RankFailed as error:
            failures[name] = str(error)
    return {"contenders": contenders, "failures": failures}


def _resident_and_wire(comm: Comm, name: str, task: Task) -> dict[str, Any]:
    """Measure resident memory over steps alone, so that only the engine allocates."""
    contender = Contender(name, task.model(), task.inputs(comm.rank), comm)
    contender.step()
    dist.barrier()
    reset_resident_peak()
    sent = [loopback_sent_bytes()]
    for _ in range(2):
        dist.barrier()  # no rank sends before every rank has read the counter
        contender.step()
        dist.barrier()
        sent.append(loopback_sent_bytes())
    each_step = [(after - before) // comm.size for before, after in pairwise(sent)]
    # Other traffic on the loopback device only adds: the smallest step is closest to the contender's own.
    return {
        "peak_resident_bytes": resident_peak_bytes(),
        "wire_bytes": min(each_step),
        "loopback_bytes": min(each_step),
        "wire_bytes_each_step": each_step,
    }


def _tensors_and_operators(comm: Comm, name: str, task: Task) -> dict[str, Any]:
    ledger = RecordingComm(comm)
    with TensorMeter() as meter:
        contender = Contender(name, task.model(), task.inputs(comm.rank), ledger)
        measured_step(contender, meter)
    ledger.entries.clear()
    with OperatorCounter() as counter:
        contender.step()
    step, forward = meter.stretches["step"], meter.stretches["forward"]
    figures = {
        "peak_tensor_bytes": step["peak"],
        "phase_peaks_tensor_bytes": {phase: meter.stretches[phase]["peak"] for phase in PHASES},
        "tensor_bytes_between_steps": step["start"],
        "tensor_bytes_left_behind_by_a_step": step["end"] - step["start"],
        "copied_bytes": counter.copied_bytes.total(),
        "copied_bytes_by_operator": dict(counter.copied_bytes),
        "c10d_calls": dict(counter.collectives),
        "collectives": counter.collectives.total(),
    }
    if name == "floor":
        figures["peak_activation_bytes"] = forward["peak"] - forward["start"]
        figures["activation_bytes_kept_for_backward"] = forward["end"] - forward["start"]
    if ledger.entries:
        figures["collectives"] = len(ledger.entries)
        figures["wire_bytes"] = ledger.sent_bytes
        figures["ledger_collectives"] = {n: ledger.names.count(n) for n in sorted(set(ledger.names))}
    return figures


def measured_step(contender: Contender, meter: TensorMeter) -> None:
    """Run two warm-up steps and one that ``meter`` reports as ``step`` and by phase."""
    for _ in range(2):
        contender.step()
    dist.barrier()
    step_by_phases(contender, meter)


def step_by_phases(contender: Contender, meter: TensorMeter) -> None:
    """Run a step that ``meter`` reports as ``step`` and by phase."""
    with meter.stretch("step"):
        with meter.stretch("forward"):
            loss = contender.forward()
        with meter.stretch("backward"):
            loss.backward()
        del loss
        with meter.stretch("optimizer"):
            contender.optimizer.step()
        contender.optimizer.zero_grad()


if __name__ == "__main__":
    scenario_main(run)
