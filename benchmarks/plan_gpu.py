"""Plans for a GPU, compared with what `make gpu` measured on one (benchmarks/results/gpu.json); runs on the CPU.

    PYTHONPATH=.:benchmarks python benchmarks/plan_gpu.py

Writes benchmarks/results/plan_gpu.json. The shares of data-sheet rates in planner/hardware.json were chosen by these
steps' times, so the times are a fit and no validation. Memory has no such shares.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fullshard
from benchmarks.gpu.shapes import SHAPES, Method, Shape

RESULTS = Path(__file__).parent / "results"
GPU = "h100"
RUNS = (
    ("t5-large", Method()),
    ("t5-3b", Method(checkpointing=True)),
    ("llama-3-8b", Method(lora=True, checkpointing=True)),
)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that the measurements step with."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)


def planned(shape: Shape, method: Method) -> fullshard.Plan:
    """Return the plan of one rank."""
    return fullshard.plan(
        partial(method.model, shape, torch.device("meta")),
        partial(shape.inputs, 0, torch.device("cpu")),
        world_size=1,
        gpu=GPU,
        optimizer_fn=adamw,
        wrap=fullshard.TransformerBlocks({shape.block}),
        mp_policy=fullshard.MixedPrecision(param=torch.bfloat16, reduce=torch.float32),
    )


def main() -> None:
    """Plan, compare and write the file."""
    measured: Any = json.loads((RESULTS / "gpu.json").read_text())
    rows = []
    for name, method in RUNS:
        case, plan = f"{name}, {method}, 1 rank", planned(SHAPES[name], method)
        assert plan.timing is not None
        assert plan.device is not None
        peak = measured["memory"][case]["figures"]["engines"]["fullshard"]["peak_bytes"]
        step_s = measured["step"][case]["figures"]["engines"]["fullshard"]["median_s"]
        inside = plan.peak_bytes + plan.device.workspace_bytes
        row = {"case": case, "predicted_bytes": inside, "measured_bytes": peak, "memory_error": inside / peak - 1}
        row |= {"predicted_s": plan.timing.step_s, "measured_s": step_s, "time_error": plan.timing.step_s / step_s - 1}
        rows.append({key: round(value, 6) if isinstance(value, float) else value for key, value in row.items()})
        print(json.dumps(rows[-1]), flush=True)
    device = measured["memory"][rows[0]["case"]]["device"]
    (RESULTS / "plan_gpu.json").write_text(json.dumps({"device": device, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
