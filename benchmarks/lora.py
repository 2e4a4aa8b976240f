"""LoRA, with most weights frozen: interleaved step times, then peak tensor memory in separate processes."""

from collections.abc import Callable
from typing import Any

from contenders import Contender, Task
from measure import TensorMeter
from memory import measured_step
from peft import LoraConfig, get_peft_model
from ranks import RankFailed, on_two_ranks, scenario_main, teller
from step import race
from torch import nn

from fullshard.core.comm import Comm

NAMES = ("ddp", "fsdp2", "fullshard_replicated", "fullshard_sharded")


def run(options: dict[str, Any]) -> dict[str, Any]:
    """Return the step time and peak tensor bytes of every contender."""
    task = Task(batch=1, source=64, target=24, small=options["small"])
    tell = teller("lora", options["started"], speaks=True)

    def model() -> nn.Module:
        """Return the task's T5 with LoRA of rank 8 on queries and values, the same on every rank."""
        base = task.model()
        config = LoraConfig(r=8, lora_alpha=32, lora_dropout=0.0, target_modules=["q", "v"], task_type="SEQ_2_SEQ_LM")
        return get_peft_model(base, config)

    result = race(NAMES, model, task, options, "lora")
    for name, figures in result["contenders"].items():
        tell(f"peak of {name}")
        try:
            figures["peak_tensor_bytes"] = max(on_two_ranks(_peak, name, model, task, timeout_s=60.0))
        except RankFailed as error:
            result["failures"][name] = str(error)
    return result


def _peak(comm: Comm, name: str, model: Callable[[], nn.Module], task: Task) -> int:
    with TensorMeter() as meter:
        measured_step(Contender(name, model(), task.inputs(comm.rank), comm), meter)
    return meter.stretches["step"]["peak"]


if __name__ == "__main__":
    scenario_main(run)
