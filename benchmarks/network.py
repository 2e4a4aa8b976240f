"""A step over a network: what it costs to send a table, and what it saves to send tokens.

    sudo python benchmarks/network.py [--rates 2gbit,1gbit,10gbit,2gbit_4] [--rounds 8] [--out PATH] [--small]

Times steps of two CPU ranks in network and process namespaces of their own, joined by a link of each rate (Linux, root,
``ip`` and ``tc``; without them it says so and measures no time); ``2gbit_4`` is four ranks, two in each. Then counts
memory and bytes of a step of the same T5 and of a Llama with 128,256 rows, two ranks on this machine, each engine in
processes of its own. ``fullshard_home`` is ``fully_shard(model, tables="auto")`` with the loss computed in the head,
and ``fullshard_zero2_home`` the same with SHARD_GRAD_OP; the others compute the model's own. Nothing
else should run meanwhile.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench import machine
from contenders import Contender, LargeVocabulary, Task
from measure import TensorMeter, interleaved, loopback_sent_bytes, slowest, summary
from memory import step_by_phases
from namespaces import on_two_machines
from ranks import on_two_ranks, quiet, teller
from step import entered

from fullshard.core.comm import Comm, init_from_env, shutdown
from fullshard.core.engine import record as recorded
from fullshard.core.testing import RecordingComm

LATEST = Path(__file__).parent / "results" / "network.json"
TIMED = ("floor", "ddp", "fsdp2", "fullshard", "fullshard_home", "fullshard_zero2_home")
COUNTED = ("floor", "fsdp2", "fullshard", "fullshard_home", "fullshard_zero2_home")
TIMEOUT_S = 300.0


def task(small: bool) -> Task:
    return Task(batch=4, source=128, target=48, small=small)


def llama(small: bool) -> Task:
    return LargeVocabulary(batch=1, source=512, target=0, small=small)


def time_steps(out: Path, rounds: int, *, small: bool) -> None:
    """Time the steps of every contender in turn; as one of the ranks."""
    comm = init_from_env()
    tell = teller(out.stem, time.time(), speaks=comm.rank == 0)
    chosen = task(small)
    contenders, _, failures = entered(
        TIMED, lambda name: Contender(name, chosen.model(), chosen.inputs(comm.rank), comm), comm, tell
    )
    spent: dict[str, list[float]] = {one.name: [] for one in contenders}

    def step(contender: Contender) -> float:
        before = time.process_time()
        loss = contender.step()
        spent[contender.name].append(time.process_time() - before)
        return loss

    record = interleaved(
        contenders, rounds, work=step, tidy=lambda contender: None, barrier=dist.barrier, progress=tell
    )
    waits = {one.name: _waits(one) for one in contenders if one.name.startswith("fullshard")}
    records = comm.all_gather_object(record)
    if comm.rank == 0:
        times = {name: summary(slowest(one[name]["seconds"] for one in records)) for name in record}
        losses = {name: record[name]["losses"] for name in record}
        # of all threads of rank 0, those that serve the network too
        cpu = {name: round(statistics.median(seconds[-rounds:]), 4) for name, seconds in spent.items()}
        written = {"contenders": times, "cpu_s_rank0": cpu, "waits_s_rank0": waits}
        written |= {"losses_rank0": losses, "failures": failures}
        out.write_text(json.dumps(written))
    comm.barrier()
    shutdown()


def _waits(contender: Contender) -> dict[str, float]:
    """Return how long the computing thread waits in a step, by what for and in which pass; medians of four steps."""
    steps: list[dict[str, float]] = []
    for _ in range(4):
        dist.barrier()
        with recorded(contender.model) as trace:
            contender.step()
        turn = min(event.start_s for event in trace.events if event.kind == "backward")
        waits = [event for event in trace.events if event.kind.endswith("_wait")]
        names = {event: f"{event.kind}_{'forward' if event.start_s < turn else 'backward'}" for event in waits}
        steps.append({k: sum(e.end_s - e.start_s for e in waits if names[e] == k) for k in set(names.values())})
    kinds = sorted({kind for one in steps for kind in one})
    return {kind: round(statistics.median(one.get(kind, 0.0) for one in steps), 4) for kind in kinds}


def counted_step(comm: Comm, name: str, chosen: Task) -> dict[str, int]:
    """Return what a contender's second step holds and sends on this rank."""
    ledger = RecordingComm(comm)
    with TensorMeter() as meter:
        contender = Contender(name, chosen.model(), chosen.inputs(comm.rank), ledger)
        contender.step()
        dist.barrier()
        ledger.entries.clear()
        sent = loopback_sent_bytes()
        dist.barrier()  # no rank sends before every rank has read the counter
        step_by_phases(contender, meter)
        dist.barrier()
        sent = (loopback_sent_bytes() - sent) // comm.size
    step, forward = meter.stretches["step"], meter.stretches["forward"]
    return {
        "peak_tensor_bytes": step["peak"],
        "peak_activation_bytes": forward["peak"] - forward["start"],
        "wire_bytes": ledger.sent_bytes if ledger.entries else sent,  # ranks of one host need not send over loopback
    }


def count(chosen: Task) -> dict[str, dict[str, Any]]:
    """Return memory and bytes of each contender's step."""
    figures: dict[str, dict[str, Any]] = {}
    for name in COUNTED:
        print(f"{type(chosen).__name__}: {name}", file=sys.stderr, flush=True)
        ranks = on_two_ranks(counted_step, name, chosen, timeout_s=TIMEOUT_S)
        figures[name] = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
    for one in figures.values():
        one["engine_memory_bytes"] = one["peak_tensor_bytes"] - figures["floor"]["peak_activation_bytes"]
    return figures


def ratios(result: dict[str, Any]) -> dict[str, float]:
    """Return what the page of benchmarks shows."""
    found: dict[str, float] = {}
    for rate, timed in result["time"].items():
        medians = {name: one["median_s"] for name, one in timed["contenders"].items()}
        for peer, word in (("floor", "floor"), ("ddp", "ddp"), ("fsdp2", "fully_shard"), ("fullshard", "gathered")):
            if {peer, "fullshard_home"} <= set(medians):
                found[f"step_over_{word}_{rate}"] = round(medians["fullshard_home"] / medians[peer], 3)
    for prefix, key in (("", "t5"), ("llama_", "llama")):
        ours, theirs = result[key]["fullshard_home"], result[key]["fsdp2"]
        found[f"{prefix}engine_memory_over_fully_shard"] = round(
            ours["engine_memory_bytes"] / theirs["engine_memory_bytes"], 3
        )
        found[f"{prefix}wire_bytes_over_fully_shard"] = round(ours["wire_bytes"] / theirs["wire_bytes"], 3)
    return found


def main() -> None:
    """Measure, or be one of the ranks."""
    parser = argparse.ArgumentParser(description="Measure steps over a network.")
    parser.add_argument(
        "--rates", default="2gbit,1gbit,10gbit,2gbit_4", help="as tc writes them, separated by commas; _4: four ranks"
    )
    parser.add_argument("--rounds", type=int, default=8, help="timed rounds (default: 8)")
    parser.add_argument("--out", metavar="PATH", type=Path, default=LATEST)
    parser.add_argument("--small", action="store_true", help="use tiny models, for development only")
    options = parser.parse_args()
    quiet()
    partial = options.out.with_suffix(".part")
    if "RANK" in os.environ:
        return time_steps(partial, options.rounds, small=options.small)
    result: dict[str, Any] = {"machine": machine(), "torch": torch.__version__, "time": {}}
    for rate in options.rates.split(","):
        try:
            speed, _, ranks = rate.partition("_")
            codes = on_two_machines(speed, int(ranks or 2) // 2)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"no time is measured: namespaces cannot be made here ({error})", file=sys.stderr)
            break
        if any(codes):
            sys.exit(f"a rank failed: exit codes {codes}")
        result["time"][rate] = json.loads(partial.read_text())
        partial.unlink()
    result |= {"t5": count(task(options.small)), "llama": count(llama(options.small))}
    result["ratios"] = ratios(result)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    return print(json.dumps(result["ratios"], indent=1))


if __name__ == "__main__":
    main()
