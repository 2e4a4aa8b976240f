"""Ways for tests of tuning, under names that a run file may have; ``replace_ways`` puts them in place of the real ones.

``flash`` does not apply, ``flex`` computes wrong values, ``bias_sdpa`` is slower, ``varlen`` runs out of memory on rank
1 unless blocks are recomputed, and ``liger`` changes nothing.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch

from fullshard.program.models import blocks_of
from fullshard.program.speed import WAYS


def _nothing(model):
    pass


def _slower(model):
    def work(module, arguments):
        size = torch.ones(400, 400)
        for _ in range(8):
            size = size @ size.clamp(max=1.0)

    for block in blocks_of(model):
        block.register_forward_pre_hook(work)


def _wrong(model):
    def change(module, arguments, output):
        return (output[0] + 0.1, *output[1:]) if isinstance(output, tuple) else output + 0.1

    blocks_of(model)[0].register_forward_hook(change)


def _too_large(model):
    def fail(module, arguments):
        if os.environ.get("RANK") == "1" and not module.gradient_checkpointing:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    blocks_of(model)[-1].register_forward_pre_hook(fail)


@dataclass(frozen=True)
class FakeWay:
    name: str
    change: Any = _nothing
    why_not: str | None = None
    part: str = "attention"
    purpose: str = "for tests"
    exact: bool = True

    def misfit(self, model, facts):
        return self.why_not

    def apply(self, model, facts):
        self.change(model)


FAKES = (
    FakeWay("flash", why_not="the device is a CPU"),
    FakeWay("flex", _wrong),
    FakeWay("bias_sdpa", _slower),
    FakeWay("varlen", _too_large),
    FakeWay("liger", part="kernels"),
)


def replace_ways(*names):
    """Have only these ways, in this process; returns the ones before."""
    before = dict(WAYS)
    WAYS.clear()
    WAYS.update({way.name: way for way in FAKES if way.name in names})
    return before
