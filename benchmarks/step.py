"""Time of one training step: every engine and the compute floor take turns in one pair of processes."""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from contenders import Contender, Task
from measure import interleaved, slowest, summary
from ranks import on_two_ranks, reason, scenario_main, teller
from torch import nn

from fullshard.core.comm import Comm

NAMES = ("floor", "ddp", "fsdp1", "fsdp2", "fsdp2_no_reshard", "fullshard")
JUDGED_ROUNDS = 2
UNSYNCHRONISED = "floor"


def run(options: dict[str, Any]) -> dict[str, Any]:
    """Return the step times of every contender and the largest difference of their losses."""
    task = Task(batch=4, source=128, target=48, small=options["small"])
    return race(NAMES, task.model, task, options, "step")


def race(
    names: tuple[str, ...], model: Callable[[], nn.Module], task: Task, options: dict[str, Any], scenario: str
) -> dict[str, Any]:
    """Time the contenders against each other on two ranks."""
    ranks = on_two_ranks(_work, names, model, task, options, scenario, timeout_s=options["timeout_s"])
    records = [rank["record"] for rank in ranks]
    contenders = {
        name: summary(slowest(record[name]["seconds"] for record in records))
        | {"first_loss_rank0": ranks[0]["first"][name], "losses_rank0": records[0][name]["losses"]}
        for name in records[0]
    }
    return {
        "contenders": contenders,
        "losses_apart_at_most": max(_apart(record) for record in records),
        "first_losses_apart_at_most": max(max(r["first"].values()) - min(r["first"].values()) for r in ranks),
        "failures": ranks[0]["failures"],
    }


def _apart(record: dict[str, dict[str, list[float]]]) -> float:
    """Return the largest difference of two contenders' losses, without the floor: it trains on one rank's data alone.

    Only the first rounds count: later AdamW turns differences in rounding (the order of sums) into different runs,
    also of FSDP1 and FSDP2.
    """
    rounds = zip(*(r["losses"][:JUDGED_ROUNDS] for name, r in record.items() if name != UNSYNCHRONISED), strict=True)
    return max(max(losses) - min(losses) for losses in rounds)


def _work(
    comm: Comm,
    names: tuple[str, ...],
    model: Callable[[], nn.Module],
    task: Task,
    options: dict[str, Any],
    scenario: str,
) -> dict[str, Any]:
    tell = teller(scenario, options["started"], speaks=comm.rank == 0)
    contenders, first, failures = entered(
        names, lambda name: Contender(name, model(), task.inputs(comm.rank), comm), comm, tell
    )
    record = interleaved(
        contenders, options["rounds"], work=Contender.step, tidy=_nothing, barrier=dist.barrier, progress=tell
    )
    return {"record": record, "first": first, "failures": failures}


def entered(
    names: Sequence[str], make: Callable[[str], Contender], comm: Comm, tell: Callable[[str], None]
) -> tuple[list[Contender], dict[str, Any], dict[str, str]]:
    """Build the contenders and take a step of each.

    Returns:
        Those that did on all ranks, each one's loss here, and why the others did not.
    """
    contenders, first, failures = [], {}, {}
    for name in names:
        tell(f"first step of {name}")
        error = None
        try:
            contender = make(name)
            first[name] = contender.step()
            contenders.append(contender)
        except Exception as caught:
            error = reason(caught)
        errors = [e for e in comm.all_gather_object(error) if e is not None]
        if errors:
            failures[name] = errors[0]
            contenders = [c for c in contenders if c.name != name]
            first.pop(name, None)
    return contenders, first, failures


def _nothing(contender: Contender) -> None:
    """Do nothing: a step leaves nothing to clean up."""


if __name__ == "__main__":
    scenario_main(run)
