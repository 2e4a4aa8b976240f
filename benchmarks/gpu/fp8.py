"""Stage ``fp8``: steps of large models with compiled blocks in bf16 and in fp8, and what a plan says of their memory.

Each case is alone in a new process. Llama is rank 0 of eight over a simulated link; see ``wire.py``. fp8 needs torchao,
from a folder of its own, as ``make`` installs it: ``pip install --no-deps --target .venv/torchao torchao``.
"""

import importlib.util
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fullshard
from benchmarks.gpu import ROOT
from benchmarks.gpu.engines import BF16, FP32, Entry, Racer
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.overlap import cycles_per_s
from benchmarks.gpu.races import Contest, flops_of, prepare, rates, settled
from benchmarks.gpu.record import Case, Lacking
from benchmarks.gpu.shapes import SHAPES, TINY, Method, Shape
from benchmarks.gpu.wire import LINKS, TimedComm, Wire, join
from fullshard.core.comm import Comm, shutdown
from fullshard.core.engine.extension.float8 import precompute_float8_scales
from fullshard.program.models.float8 import compute_in_float8

WARM, TIMED = 2, 4
LIMIT_S = 100.0
PLAN_S = 30.0
"""A plan is made if so much of a case's time is left: it needs no GPU, and can be made elsewhere later."""
FOLDERS = (Path(sys.prefix) / "torchao", ROOT / ".venv/torchao")
"""Where torchao is looked for, beside the packages: beside them, transformers would import it in every process."""
RUNS = (("llama-3-8b", 8), ("t5-3b", 1))
DRY = (("llama-3-8b", 8), ("t5-large", 1))


def cases(machine: Machine) -> list[Case]:
    """Return a case for each model and precision."""
    shapes = TINY if machine.dry else SHAPES
    method = Method(checkpointing=True, backend="aot_eager" if machine.dry else "inductor")
    found = []
    for name, world in DRY if machine.dry else RUNS:
        where = f"rank 0 of {world}" if world > 1 else "1 rank"
        for precision in ("bf16", "fp8"):
            contest = Contest(shapes[name], method, 1)
            work = partial(_measured, machine, contest, world, precision)
            found.append(Case(f"{shapes[name].name}, {method}, {where}: {precision}", work, limit_s=LIMIT_S))
    return found


def _measured(machine: Machine, contest: Contest, world: int, precision: str, limit_s: float) -> dict[str, Any]:
    """Return the figures of one case.

    Raises:
        Lacking: There is no torchao, the GPU has no fp8, or the model does not fit.
    """
    given = contest, precision, world, machine.facts["devices"], limit_s
    if world > 1:
        return machine.alone(_as_rank_0, *given, limit_s=limit_s)
    contest.here(machine)
    return machine.together(1, _on_rank, *given, limit_s=limit_s)[0]


def _as_rank_0(contest: Contest, precision: str, world: int, devices: int, limit_s: float) -> dict[str, Any]:
    device = torch.device("cuda", 0) if devices else torch.device("cpu")
    wire = Wire(device, world, cycles_per_s(device))
    join(wire)
    wire.link = LINKS[0]
    try:
        return _on_rank(TimedComm(wire), contest, precision, world, devices, limit_s)
    finally:
        shutdown()


def _on_rank(
    comm: Comm | TimedComm, contest: Contest, precision: str, world: int, devices: int, limit_s: float
) -> dict[str, Any]:
    """Return the time of a step, tokens a second, peak memory and the plan's, and how long compiling took.

    Raises:
        Lacking: There is no torchao, or the GPU has no fp8.
    """
    device, shape, end = comm.device, contest.shape, time.monotonic() + limit_s
    prepare(device, 1, devices, limit_s)
    if precision == "fp8":
        _require_float8(device)
    model = _model(contest.method, shape, precision, world, device, emulate=device.type == "cpu")
    flops = flops_of(model, comm, devices)
    racer = Racer(Entry("fullshard"), model, shape.inputs(0, device), comm, shape.block)
    precompute_float8_scales(racer.model)  # torchao's own first scales need a process group that reduces
    cuda = device.type == "cuda"
    seconds, losses = [], []
    for number in range(WARM + TIMED):
        settled(comm)
        if cuda and number == WARM:
            torch.cuda.reset_peak_memory_stats(device)
        began = time.perf_counter()
        losses.append(racer.step())
        precompute_float8_scales(racer.model)
        settled(comm)
        seconds.append(time.perf_counter() - began)
    step_s = statistics.median(seconds[WARM:])
    found = {
        "step_s": round(step_s, 6),
        "least_s": round(min(seconds[WARM:]), 6),
        "compile_s": round(max(sum(seconds[:WARM]) - WARM * step_s, 0.0), 1),
        "peak_bytes": torch.cuda.max_memory_allocated(device) if cuda else 0,
        "losses": [round(float(loss), 5) for loss in losses],
        **rates(contest, step_s, flops),
    }
    del racer, model
    plans = end - time.monotonic() > PLAN_S
    return found | {"planned_bytes": _planned(contest.method, shape, precision, world) if plans else None}


def _require_float8(device: torch.device) -> None:
    if importlib.util.find_spec("torchao") is None:
        sys.path += [str(folder) for folder in FOLDERS if folder.is_dir()]
        importlib.invalidate_caches()
    if importlib.util.find_spec("torchao") is None:
        raise Lacking(f"there is no torchao, neither installed nor in {' or '.join(map(str, FOLDERS))}")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise Lacking(f"{torch.cuda.get_device_name(device)} has no fp8, which needs compute capability 8.9")


def _model(
    method: Method, shape: Shape, precision: str, world: int, device: torch.device, *, emulate: bool
) -> torch.nn.Module:
    """Return the model before it is sharded; Method.model compiles its blocks, which read their layers later."""
    model = method.model(shape, device)
    if precision == "fp8":
        compute_in_float8(model, scales="tensorwise", emulate=emulate, ranks=world)
    return model


def _planned(method: Method, shape: Shape, precision: str, world: int) -> int:
    """Return a plan's peak of a step, of uncompiled blocks: an upper bound of compiled ones."""
    plain = Method(method.lora, method.checkpointing)
    plan = fullshard.plan(
        partial(_model, plain, shape, precision, world, torch.device("meta"), emulate=False),
        partial(shape.inputs, 0, torch.device("cpu")),
        world_size=world,
        gpu="h100",
        optimizer_fn=lambda model: torch.optim.AdamW(model.parameters(), fused=True),
        wrap=fullshard.TransformerBlocks({shape.block}),
        mp_policy=fullshard.MixedPrecision(param=BF16, reduce=FP32),
    )
    assert plan.device is not None, "a GPU was named"
    return plan.peak_bytes + plan.device.workspace_bytes
