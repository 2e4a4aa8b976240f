"""Forward and backward as rank 0 of 512 in one process: torch's fake process group, whose collectives send nothing.

What remains is an engine's cost apart from the network: hooks, copies, casts, and one local copy per gather.
"""

from typing import Any

import torch
import torch.distributed as dist
from contenders import Contender, Task
from measure import interleaved, summary
from ranks import reason, scenario_main, teller
from torch.testing._internal.distributed.fake_pg import FakeStore

NAMES = ("floor", "fsdp1", "fsdp2", "fullshard")
WORLD_SIZE = 512


def run(options: dict[str, Any]) -> dict[str, Any]:
    """Return the forward and backward times of every contender."""
    # A fake gather repeats this rank's shard, so the weights and the losses are meaningless.
    torch.set_flush_denormal(True)
    task = Task(batch=4, source=128, target=48, small=options["small"])
    tell = teller("fake512", options["started"], speaks=True)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    contenders, failures = [], {}
    for name in NAMES:
        tell(f"first step of {name}")
        try:
            contender = Contender(name, task.model(), task.inputs(0), None)
            contender.forward_backward()
            _clear(contender)
            contenders.append(contender)
        except Exception as error:
            failures[name] = reason(error)
    record = interleaved(
        contenders, options["rounds"], work=Contender.forward_backward, tidy=_clear, barrier=_nothing, progress=tell
    )
    dist.destroy_process_group()
    return {"contenders": {name: summary(r["seconds"]) for name, r in record.items()}, "failures": failures}


def _clear(contender: Contender) -> None:
    contender.optimizer.zero_grad()


def _nothing() -> None:
    """Do nothing: there is no other rank to wait for."""


if __name__ == "__main__":
    scenario_main(run)
