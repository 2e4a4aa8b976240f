"""How much more memory than its tensors take does torch's CUDA allocator reserve for a sharded step?

    python benchmarks/fragments.py [--out PATH] [--steps 200] [--only TEXT]

A step's allocations come from a plan: the real model, engine and optimizer run over tensors without memory, as rank 0
of 1 or 8. They are replayed through a model of torch's caching allocator (``c10/cuda/CUDACachingAllocator.cpp``: size
classes, best fit, splitting, and segments that are fixed or expandable). 200 steps take batches of four lengths in a
random order. No GPU is needed; kernels of CUDA have other temporaries than the CPU's, which the plan has.
"""

import argparse
import bisect
import json
import multiprocessing
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import peft
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from fullshard import MixedPrecision, fully_shard
from fullshard.planner import simulation
from fullshard.planner.memory_tracker import MemoryTracker
from fullshard.program.models.adapters import base_of
from fullshard.program.models.loss import fuse_head, model_loss

LATEST = Path(__file__).parent / "results" / "fragments.json"
MIB = 1 << 20
GRAIN, SMALL, SMALL_SEGMENT, LARGE_SEGMENT, LARGE, ROUND = 512, MIB, 2 * MIB, 20 * MIB, 10 * MIB, 2 * MIB
LIMIT_S = 3600.0


@dataclass(eq=False)
class Block:
    """A part of a segment; ``before`` and ``after`` are its neighbours there."""

    start: int
    size: int
    free: bool = True
    mapped: bool = True
    before: "Block | None" = None
    after: "Block | None" = None

    def cut(self, size: int) -> "Block":
        """Shorten this block to ``size``, and return the rest of it."""
        rest = Block(self.start + size, self.size - size, self.free, self.mapped, self, self.after)
        if rest.after is not None:
            rest.after.before = rest
        self.size, self.after = size, rest
        return rest

    def join(self) -> None:
        """Take over the block after this one."""
        assert self.after is not None
        self.size += self.after.size
        self.after = self.after.after
        if self.after is not None:
            self.after.before = self


class Pool:
    """Blocks of one size class: those below 1 MiB, or all others."""

    def __init__(self, *, small: bool, expandable: bool) -> None:
        """Start with no memory; an expandable pool has one segment, whose addresses do not end."""
        self.small, self.expandable = small, expandable
        self.page = SMALL_SEGMENT if small else LARGE_SEGMENT
        self.least = GRAIN if small or expandable else SMALL + 1  # what is worth splitting off
        self.free: list[tuple[int, int, Block]] = []  # mapped ones by size, then address
        self.unmapped = [Block(0, 1 << 50, mapped=False)] if expandable else []
        self.reserved = self._at = 0

    def take(self, size: int) -> Block:
        """Return a block of ``size``: the smallest free one that holds it, else one of new memory."""
        place = bisect.bisect_left(self.free, (size, -1))
        if place < len(self.free):
            block = self.free.pop(place)[2]
        else:
            block = self._mapped(size) if self.expandable else self._new(size)
        if block.size - size >= self.least:
            self._keep(block.cut(size))
        block.free = False
        return block

    def give(self, block: Block) -> None:
        """Free a block, merged with free neighbours."""
        block.free = True
        after, before = block.after, block.before
        if after is not None and after.free and after.mapped:
            self._drop(after)
            block.join()
        if before is not None and before.free and before.mapped:
            self._drop(before)
            before.join()
            block = before
        self._keep(block)

    def trim(self) -> None:
        """Return unused memory to the device, as ``empty_cache`` does: segments, or pages if expandable."""
        for _, _, block in list(self.free):
            if not self.expandable:
                if block.before is None and block.after is None:
                    self._drop(block)
                    self.reserved -= block.size
                continue
            low = -(-block.start // self.page) * self.page
            high = (block.start + block.size) // self.page * self.page
            if low < high:
                self._drop(block)
                self._unmap(block, low, high)

    def _unmap(self, block: Block, low: int, high: int) -> None:
        self.reserved -= high - low
        if high < block.start + block.size:
            self._keep(block.cut(high - block.start))
        if block.start < low:
            rest = block.cut(low - block.start)
            self._keep(block)
            block = rest
        block.mapped = False
        if block.after is not None and not block.after.mapped:
            self.unmapped.remove(block.after)
            block.join()
        if block.before is not None and not block.before.mapped:
            block.before.join()
        else:
            bisect.insort(self.unmapped, block, key=lambda one: one.start)

    def _new(self, size: int) -> Block:
        """Return a segment of its own."""
        segment = self.page if size < LARGE else -(-size // ROUND) * ROUND
        self.reserved += segment
        self._at += segment
        return Block(self._at - segment, segment)

    def _mapped(self, size: int) -> Block:
        """Map pages at the lowest addresses that hold ``size`` together with the free memory around them."""
        for hole in self.unmapped:
            first = hole.before if hole.before is not None and hole.before.free else hole
            room, last = 0, first
            while last is not None and last.free and room < size:
                room, last = room + last.size, last.after
            if room >= size:
                break
        block = first
        if block.mapped:
            self._drop(block)
        else:
            self._map(block, size)
        while block.size < size:
            after = block.after
            assert after is not None
            if after.mapped:
                self._drop(after)
            else:
                self._map(after, size - block.size)
            block.join()
        return block

    def _map(self, hole: Block, size: int) -> None:
        """Map the pages of ``hole`` that ``size`` bytes need."""
        size = min(hole.size, -(-size // self.page) * self.page)
        self.unmapped.remove(hole)
        if size < hole.size:
            bisect.insort(self.unmapped, hole.cut(size), key=lambda one: one.start)
        hole.mapped = True
        self.reserved += size

    def _keep(self, block: Block) -> None:
        bisect.insort(self.free, (block.size, block.start, block))

    def _drop(self, block: Block) -> None:
        del self.free[bisect.bisect_left(self.free, (block.size, block.start))]


class Allocator:
    """torch's caching allocator on one stream: what is allocated and reserved, in bytes."""

    def __init__(self, *, expandable: bool) -> None:
        """Start with nothing reserved."""
        self.pools = (Pool(small=False, expandable=expandable), Pool(small=True, expandable=expandable))
        self.blocks: dict[int, tuple[Pool, Block]] = {}
        self.allocated = self.most_allocated = self.most_reserved = 0

    def allocate(self, key: int, size: int) -> None:
        """Allocate ``size`` bytes under ``key``."""
        size = max(1, -(-size // GRAIN)) * GRAIN
        pool = self.pools[size <= SMALL]
        block = pool.take(size)
        self.blocks[key] = pool, block
        self.allocated += block.size
        self.most_allocated = max(self.most_allocated, self.allocated)
        self.most_reserved = max(self.most_reserved, self.reserved)

    def release(self, key: int) -> None:
        """Free what was allocated under ``key``."""
        pool, block = self.blocks.pop(key)
        self.allocated -= block.size
        pool.give(block)

    def empty_cache(self) -> None:
        """Return unused segments."""
        for pool in self.pools:
            pool.trim()

    def restart(self) -> None:
        """Forget the peaks."""
        self.most_allocated, self.most_reserved = self.allocated, self.reserved

    @property
    def reserved(self) -> int:
        """Bytes reserved now."""
        return sum(pool.reserved for pool in self.pools)


class Recording(MemoryTracker):
    """A plan's memory tracker that also lists what is allocated and freed, as ``(key, bytes)``, 0 bytes to free.

    Attributes:
        logs: The lists of building and of each step.
    """

    logs: ClassVar[list[list[tuple[int, int]]]] = []

    def __init__(self) -> None:
        """Start with nothing alive, in building."""
        super().__init__()
        self.logs[:] = [[]]
        self._keys: dict[int, int] = {}
        self._count = 0

    def see(self, tensor: torch.Tensor, *, fake: bool = False) -> None:
        """Note a storage that is new."""
        if tensor.layout is torch.strided and not tensor.is_meta:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._held:
                self._count += 1
                self._keys[storage._cdata] = self._count
                self._note(self._count, 0, storage.nbytes())
        super().see(tensor, fake=fake)

    def resized(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Note a storage that loses or gets its memory."""
        held = self._held.get(storage._cdata)
        if held is not None and held.nbytes != nbytes:
            self._note(self._keys[storage._cdata], held.nbytes, nbytes)
        super().resized(storage, nbytes)

    def touch(self, nbytes: int) -> None:
        """Note what an operator allocates and frees."""
        self._count += 1
        self._note(self._count, 0, nbytes)
        self._note(self._count, nbytes, 0)
        super().touch(nbytes)

    def _gone(self, key: int, ref: Any) -> None:
        held = self._held.get(key)
        if held is not None:
            self._note(self._keys[key], held.nbytes, 0)
        super()._gone(key, ref)

    def _note(self, key: int, before: int, after: int) -> None:
        self.logs[-1] += [(key, 0)] if before else []
        self.logs[-1] += [(key, after)] if after else []


def recorded(name: str, world: int) -> list[list[tuple[int, int]]]:
    """Return the allocations of building, of a first step, and of one step for each length."""
    simulation.MemoryTracker = Recording
    shape = SHAPES[name]
    lengths = iter([shape.lengths[0], *shape.lengths])

    def build(comm: Any) -> simulation.PlannedStep:
        model: Any = shape.make()
        if shape.fuses:
            fuse_head(base_of(model))
        bf16 = MixedPrecision(param="bfloat16", reduce="float32")
        model = fully_shard(model, comm, mp_policy=bf16)
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizer = torch.optim.AdamW(trained, fused=True)

        def step() -> None:
            batch = shape.batch(next(lengths))
            labels = batch.pop("labels") if shape.fuses else None
            Recording.logs.append([])
            loss = model(**batch).loss if labels is None else model_loss(model, lambda: model(**batch).logits, labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return simulation.PlannedStep(model, optimizer, step, steps=1 + len(shape.lengths))

    simulation.simulate(build, 0, world, reduces_behind=1, timed=False)
    return Recording.logs


def replayed(logs: list[list[tuple[int, int]]], steps: int, *, expandable: bool, trims: bool) -> dict[str, Any]:
    """Replay building, the first step, and ``steps`` of the others in a random order; return the figures.

    Args:
        trims: Whether unused segments are returned to the device once the model is built.
    """
    order = random.Random(0)
    allocator = Allocator(expandable=expandable)

    def play(log: list[tuple[int, int]]) -> None:
        for key, size in log:
            if size:
                allocator.allocate(key, size)
            elif key in allocator.blocks:
                allocator.release(key)

    play(logs[0])
    built = {"allocated": allocator.most_allocated, "reserved": allocator.most_reserved}
    if trims:
        allocator.empty_cache()
    play(logs[1])
    allocator.restart()
    for _ in range(steps):
        play(order.choice(logs[2:]))
    found = {"building": built, "allocated": allocator.most_allocated, "reserved": allocator.most_reserved}
    return found | {"ratio": round(allocator.most_reserved / allocator.most_allocated, 3)}


@dataclass(frozen=True)
class Shape:
    """A model, on the device from the start, and its batches."""

    make: Callable[[], nn.Module]
    rows: int
    lengths: tuple[int, ...]  # of the source
    target: int = 0  # of targets; 0: a causal model
    fuses: bool = False  # whether the head computes the loss

    def batch(self, length: int) -> dict[str, Any]:
        """Return token ids and labels."""
        ids = torch.ones((self.rows, length), dtype=torch.int64)
        return {"input_ids": ids, "labels": ids[:, : self.target].clone() if self.target else ids, "use_cache": False}


def _t5_3b(*, checkpointed: bool) -> nn.Module:
    shape = {"d_model": 1024, "d_kv": 128, "d_ff": 16384, "num_heads": 32, "num_layers": 24, "dropout_rate": 0.0}
    model = T5ForConditionalGeneration(T5Config(**shape, decoder_start_token_id=0))
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def _llama_8b(*, lora: bool) -> nn.Module:
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    model: Any = LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=8, vocab_size=128256))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if lora:
        model.enable_input_require_grads()
        targets = ["q_proj", "v_proj"]
        model = peft.get_peft_model(model, peft.LoraConfig(r=16, lora_alpha=32, target_modules=targets))
    return model.train()


_LLAMA_LENGTHS = (2048, 1920, 1664, 1280)

SHAPES = {
    "llama-3-8b, LoRA, checkpointed": Shape(partial(_llama_8b, lora=True), 4, _LLAMA_LENGTHS),
    "llama-3-8b, LoRA, checkpointed, fused loss": Shape(partial(_llama_8b, lora=True), 4, _LLAMA_LENGTHS, fuses=True),
    "llama-3-8b, full, checkpointed": Shape(partial(_llama_8b, lora=False), 4, _LLAMA_LENGTHS),
    "t5-3b, full, checkpointed": Shape(partial(_t5_3b, checkpointed=True), 32, (512, 480, 416, 320), 128),
    "t5-3b, full": Shape(partial(_t5_3b, checkpointed=False), 8, (512, 480, 416, 320), 128),
}


def measured(name: str, world: int, steps: int) -> dict[str, Any]:
    """Record one model, and replay it with both kinds of segments."""
    started = time.perf_counter()
    logs = recorded(name, world)
    row: dict[str, Any] = {"model": name, "world_size": world, "allocations": [len(log) for log in logs]}
    for expandable in (False, True):
        for trims in (False, True):
            key = ("expandable" if expandable else "fixed") + (", trimmed once built" if trims else "")
            row[key] = replayed(logs, steps, expandable=expandable, trims=trims)
    return row | {"seconds": round(time.perf_counter() - started, 1)}


def main() -> None:
    """Measure all of them and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", metavar="PATH", type=Path, default=LATEST)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    rows = []
    for name in SHAPES:
        for world in (1, 8):
            if options.only not in f"{name}, {world}":
                continue
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                rows.append(row := pool.apply_async(measured, (name, world, options.steps)).get(LIMIT_S))
            print(json.dumps(row), file=sys.stderr, flush=True)
    found = {"steps": options.steps, "torch": torch.__version__, "rows": rows}
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
