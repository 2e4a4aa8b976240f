"""The engines under comparison on GPUs: fullshard, and torch's FSDP2 and FSDP1, with the same units and dtypes."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from contenders import Contender
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard as torch_fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fullshard
from fullshard.core.comm import Comm

BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Entry:
    """One engine with its options.

    Attributes:
        engine: ``"fullshard"``, ``"fsdp2"`` or ``"fsdp1"``.
        label: What the results call it; empty: the engine's name.
        bf16: Whether it computes in bf16; shards and the sums of gradients are fp32.
        prefetch: Whether backward gathers a unit ahead.
        offload: Whether shards and optimizer state are in host memory.
    """

    engine: str
    label: str = ""
    bf16: bool = True
    prefetch: bool = True
    offload: bool = False

    @property
    def name(self) -> str:
        """The label, or the engine's name."""
        return self.label or self.engine


ENTRIES = (Entry("fullshard"), Entry("fsdp2"), Entry("fsdp1"))


def _fullshard(model: nn.Module, comm: Any, entry: Entry, block: type[nn.Module]) -> nn.Module:
    prefetch = fullshard.BackwardPrefetch
    return fullshard.fully_shard(
        model,
        comm,
        wrap=fullshard.TransformerBlocks({block}),
        mp_policy=fullshard.MixedPrecision(param=BF16, reduce=FP32) if entry.bf16 else None,
        prefetch=prefetch.BACKWARD_PRE if entry.prefetch else prefetch.NONE,
        offload_policy=fullshard.CPUOffload() if entry.offload else None,
        device=comm.device,
    )


def _fsdp2(model: nn.Module, comm: Any, entry: Entry, block: type[nn.Module]) -> nn.Module:
    options: dict[str, Any] = {
        "mesh": init_device_mesh(comm.device.type, (torch.distributed.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(BF16, FP32) if entry.bf16 else MixedPrecisionPolicy(),
        "offload_policy": CPUOffloadPolicy(pin_memory=comm.device.type == "cuda") if entry.offload else OffloadPolicy(),
    }
    for module in model.modules():
        if isinstance(module, block):
            torch_fully_shard(module, **options)
    torch_fully_shard(model, **options)
    return model


def _fsdp1(model: nn.Module, comm: Any, entry: Entry, block: type[nn.Module]) -> nn.Module:
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({block}),
        mixed_precision=MixedPrecision(BF16, FP32) if entry.bf16 else None,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE if entry.prefetch else None,
        cpu_offload=CPUOffload(entry.offload),
        use_orig_params=True,
        device_id=comm.device,
    )


_ENGINES = {"fullshard": _fullshard, "fsdp2": _fsdp2, "fsdp1": _fsdp1}


class Racer(Contender):
    """A contender whose step never waits for the device: its loss stays there."""

    def __init__(
        self, entry: Entry, model: nn.Module, inputs: dict[str, torch.Tensor], comm: Comm, block: type[nn.Module]
    ) -> None:
        """Wrap ``model`` as ``entry`` says; ``block`` is the class of its units."""
        engine = partial(_ENGINES[entry.engine], entry=entry, block=block)
        on_device = comm.device.type == "cuda" and not entry.offload
        super().__init__(entry.name, model, inputs, comm, engine=engine, fused=True if on_device else None)

    def step(self) -> Any:
        """Run one training step and return this rank's loss, a tensor."""
        loss = self.forward()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()
