"""Stage ``kernels``: what the device computes in a step, by kind of kernel; attention and loss alone.

Kernels are sorted by words in their names. Attention and loss are measured without an engine, forward and backward, so
that their figures hold for every engine.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from measure import summary
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.doctor import seconds_of
from benchmarks.gpu.engines import Entry, Racer
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.races import prepare, settled
from benchmarks.gpu.record import Case
from benchmarks.gpu.shapes import SHAPES, TINY, Method, Shape
from fullshard.core.comm import Comm
from fullshard.core.comm.memory import LOGITS_AT_ONCE
from fullshard.program.models import loss as losses

KINDS = {
    "attention": ("flash", "fmha", "attn", "attention", "softmax"),
    "matmul": ("gemm", "nvjet", "cutlass", "sm90_x", "cublas"),
    "optimizer": ("multi_tensor", "fused_adam", "adam"),
    "copy": ("memcpy", "memset", "copy", "cat", "fill"),
    "communication": ("nccl",),
    "reduce": ("reduce", "norm", "sum"),
    "embedding": ("embedding", "index", "gather", "scatter"),
    "triton": ("triton",),
    "elementwise": ("elementwise", "vectorized"),
}
"""Words by which a kernel belongs to a kind; the first kind with a word in its name counts it."""
TOP = 12
CHUNKS = (23, 25, 26, 27, 29)
"""Logits in a chunk of the fused loss that are tried, as powers of two."""


def cases(machine: Machine) -> list[Case]:
    """Return steps first, then attention and loss."""
    shapes = TINY if machine.dry else SHAPES
    steps = [(shapes["t5-large"], Method()), (shapes["llama-3-8b"], Method(lora=True, checkpointing=True))]
    found = [Case(f"{shape.name}, {method}", partial(_step, machine, shape, method)) for shape, method in steps]
    found.append(Case("attention with a trained bias", partial(_alone, machine, _attention)))
    return [*found, Case("loss of a large vocabulary", partial(_alone, machine, _losses))]


def kind_of(name: str) -> str:
    """Return the kind of a kernel; ``"other"`` if no word fits."""
    low = name.lower()
    return next((kind for kind, words in KINDS.items() if any(word in low for word in words)), "other")


def _step(machine: Machine, shape: Shape, method: Method, limit_s: float) -> dict[str, Any]:
    return machine.together(1, _profiled, shape, method, machine.facts["devices"], limit_s, limit_s=limit_s)[0]


def _profiled(comm: Comm, shape: Shape, method: Method, devices: int, limit_s: float) -> dict[str, Any]:
    """Return the milliseconds and number of a step's kernels by kind, and the longest."""
    prepare(comm.device, comm.size, devices, limit_s)
    model = method.model(shape, comm.device)
    racer = Racer(Entry("fullshard"), model, shape.inputs(comm.rank, comm.device), comm, shape.block)
    for _ in range(2):
        racer.step()
    settled(comm)
    cuda = comm.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda) as profiled:
        racer.step()
        settled(comm)
    results: Any = profiled.profiler
    events = results.kineto_results.events()
    names = {event.name() for event in events if event.device_type() == torch.autograd.DeviceType.CPU}
    # What record_function names is on the device's timeline too, under the name that it has on the CPU.
    where = torch.autograd.DeviceType.CUDA
    kernels = [e for e in events if e.device_type() == where and e.name() not in names] if cuda else []
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    longest: Counter[str] = Counter()
    for kernel in kernels:
        kind, milliseconds = kind_of(kernel.name()), kernel.duration_ns() / 1e6
        times[kind] += milliseconds
        counts[kind] += 1
        longest[kernel.name()[:90]] += milliseconds
    return {
        "kernel_ms": {kind: round(value, 2) for kind, value in times.most_common()},
        "kernels": dict(counts),
        "longest_ms": {name: round(value, 2) for name, value in longest.most_common(TOP)},
        "operators": sum(event.name().startswith("aten::") for event in events),
    }


def _alone(machine: Machine, work: Callable[..., dict[str, Any]], limit_s: float) -> dict[str, Any]:
    return machine.alone(work, machine.dry, machine.facts["devices"], limit_s=limit_s)


def _timed(step: Callable[[], None], *, cuda: bool) -> dict[str, Any]:
    """Return a step's time and its peak; or why it failed, since not every variant runs on every device."""
    try:
        step()
        seconds = [seconds_of(step, cuda=cuda, repeat=3) for _ in range(3)]
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            step()
            torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() if cuda else 0
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]}
    return summary(seconds) | {"peak_bytes": peak}


def _attention(dry: bool, devices: int) -> dict[str, Any]:
    """Time attention with a bias that is trained, as a T5's, in bf16."""
    batch, heads, length, width = (2, 2, 32, 16) if dry else (32, 16, 512, 64)
    device = torch.device("cuda" if devices else "cpu")
    made = partial(torch.randn, device=device, dtype=torch.bfloat16, requires_grad=True)
    query, key, value = (made(batch, heads, length, width) for _ in range(3))
    bias, arriving = made(1, heads, length, length), made(batch, heads, length, width).detach()
    attend = partial(functional.scaled_dot_product_attention, query, key, value, scale=1.0)

    def plain() -> torch.Tensor:
        return torch.softmax((query @ key.transpose(2, 3) + bias).float(), -1).to(value.dtype) @ value

    def by(backend: SDPBackend, expand: bool) -> torch.Tensor:
        with sdpa_kernel(backend):
            return attend(attn_mask=bias.expand(batch, -1, -1, -1) if expand else bias)

    flex: Any = torch.compile(flex_attention, dynamic=False)
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "eager": plain,
        "sdpa": lambda: attend(attn_mask=bias),
        "sdpa without bias": attend,
    }
    if devices:  # it has no backward on the CPU
        ways["flex"] = lambda: flex(query, key, value, score_mod=lambda s, b, h, i, j: s + bias[0, h, i, j], scale=1.0)
    for backend in (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION) if devices else ():
        for expand in (False, True):
            name = f"sdpa {backend.name.lower()}{', expanded bias' if expand else ''}"
            ways[name] = partial(by, backend, expand)

    def step(way: Callable[[], torch.Tensor]) -> None:
        for tensor in (query, key, value, bias):
            tensor.grad = None
        way().backward(arriving)

    return {"ways": {name: _timed(partial(step, way), cuda=bool(devices)) for name, way in ways.items()}}


def _losses(dry: bool, devices: int) -> dict[str, Any]:
    """Time the loss from the last hidden states, in bf16, with chunks of several sizes."""
    words, width, count = (512, 32, 64) if dry else (128_256, 4096, 8192)
    device = torch.device("cuda" if devices else "cpu")
    rows = torch.randn(count, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    head = torch.nn.Linear(width, words, bias=False, device=device, dtype=torch.bfloat16)
    labels = torch.randint(0, words, (count,), device=device)
    fused = losses.FusedHead(head)

    def logits() -> torch.Tensor:
        return losses.summed_loss(head(rows)[None], labels[None])

    def in_chunks() -> torch.Tensor:
        with fused.loss_context(labels[None], losses.PLAIN, targets=count):
            return fused(rows[None])

    def step(way: Callable[[], torch.Tensor]) -> None:
        rows.grad = head.weight.grad = None
        way().backward()

    found = {"all logits": _timed(partial(step, logits), cuda=bool(devices))}
    usual = LOGITS_AT_ONCE["cuda"]
    for power in CHUNKS:
        LOGITS_AT_ONCE["cuda"] = 1 << power
        found[f"fused, 2^{power} logits"] = _timed(partial(step, in_chunks), cuda=bool(devices))
    LOGITS_AT_ONCE["cuda"] = usual
    return {"ways": found}
