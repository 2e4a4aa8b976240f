"""Behaviours 10 to 21: which passes and which parameters backward sees, and when their gradients are reduced."""

from contextlib import nullcontext

import torch
from torch import nn

from fullshard import Named, ShardingStrategy, no_all_reduce, no_sync, units
from support.behaviours.ranks import Ledger
from support.behaviours.running import (
    BLOCK_NAMES,
    HYBRID,
    LAYERS,
    UNITS,
    compare,
    data_for,
    expect,
    finish_step,
    is_sharded,
    lm,
    lm_step,
    plain_step,
    runtime,
    shard,
)
from support.tiny_lm import VOCAB, Block, TinyLM, lm_loss, two_forwards_loss

NESTED_NAMES = (*BLOCK_NAMES, *(f"{block}.up" for block in BLOCK_NAMES))
MICRO = 3  # micro-batches of a step that accumulates


def b10_tied_parameters_with_and_without_checkpointing(ranks):
    for reentrant in (None, False, True):
        model = compare(ranks, lambda reentrant=reentrant: lm(reentrant), lm_step)
        assert model.head.weight is model.embed.weight, "the tie is gone"
        expect(model.embed.weight.shard_meta.aliases, ("head.weight",))
        expect(sum(p is model.embed.weight for p in model.parameters()), 1, "registered once")


def counted(ranks, loss_of, names=UNITS):
    """A step that asserts, from the second one on, that each unit is reduced exactly once; and its ledger."""
    ledger = ranks.ledger()

    def step(model, optimizer, tokens, number):
        ledger.clear()
        loss = loss_of(model, tokens)
        loss.backward()
        if is_sharded(model) and number:
            expect(sorted(ledger.of("RS")), sorted(f"RS {name}" for name in names), f"reduces of step {number}")
        return finish_step(model, optimizer, loss)

    return step, ledger


def b11_double_forward_one_backward(ranks):
    step, ledger = counted(ranks, two_forwards_loss)
    compare(ranks, lm, step, mesh=ledger)


def b12_double_forward_one_backward_with_checkpointing_and_nested_units(ranks):
    for reentrant in (False, True):
        # of the reentrant kind, each recomputation has a backward of its own
        step, ledger = counted(ranks, two_forwards_loss, ["(root)", *NESTED_NAMES * (2 if reentrant else 1)])
        model = compare(ranks, lambda reentrant=reentrant: lm(reentrant), step, mesh=ledger, wrap=Named(*NESTED_NAMES))
        expect(len(units(model).rows), 1 + 2 * LAYERS, "nested units")


class Thrice(nn.Module):
    """Runs one block three times, first without a graph."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 12)
        self.blocks = nn.ModuleList(Block(12, 20) for _ in range(2))
        self.head = nn.Linear(12, VOCAB)

    def forward(self, tokens):
        shared, other = self.blocks
        x = self.embed(tokens)
        with torch.no_grad():
            hint = shared(x)
        assert not hint.requires_grad
        return self.head(shared(other(shared(x + hint))))


def b13_a_module_used_three_times_some_under_no_grad(ranks):
    step, ledger = counted(ranks, lm_loss, ["(root)", "blocks.0", "blocks.1"])
    compare(ranks, Thrice, step, mesh=ledger)


def partly_frozen():
    """The first block frozen, and a part of the others."""
    model = lm()
    for block in model.blocks:
        block.up.weight.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    return model


def b14_mixed_requires_grad_reduced_numel_is_trainable_only(ranks):
    ledger = ranks.ledger()
    plain = ranks.alike(partly_frozen)
    trainable = sum(p.numel() for p in plain.parameters() if p.requires_grad)
    model = compare(ranks, partly_frozen, lm_step, mesh=ledger)
    ledger.clear()
    lm_loss(model, ranks.rows(data_for(ranks, 1)[0])).backward()
    sent = sum(entry.sent_bytes for entry in ledger.entries if entry.collective == "reduce_scatter")
    reduced = sent // (ranks.size - 1) * ranks.size // 4  # of S * (N - 1) float32 each rank sends
    padding = sum(lane.layout.padding_numel for unit in runtime(model).units for lane in unit.lanes if lane.trainable)
    expect(reduced - padding, trainable, "elements reduced")
    expect(ledger.of("RS"), ["RS blocks.2", "RS blocks.1", "RS (root)"], "reduces")
    for name, p in model.named_parameters():
        assert p.requires_grad or p.grad is None, f"{name} is frozen and has a gradient"
    before = {name: p for name, p in plain.named_parameters() if not p.requires_grad}
    for name, p in model.named_parameters():
        if name in before:
            first, last = p.shard_meta.row_range
            assert torch.equal(p, before[name][first:last]), f"{name} is frozen and changed"


def reduces_of_each_step(ranks, make, change, at):
    """Train with ``change(model)`` before step ``at``; which units were reduced in each step but the first."""
    ledger = ranks.ledger()
    reduced = []

    def step(model, optimizer, tokens, number):
        if number == at:
            change(model)
        ledger.clear()
        figures = lm_step(model, optimizer, tokens, number)
        if is_sharded(model):
            reduced.append(set(ledger.of("RS")))
        return figures

    compare(ranks, make, step, mesh=ledger)
    return reduced[1:]


def b15_freeze_after_init(ranks):
    every = {f"RS {name}" for name in UNITS}
    for at in (0, ranks.steps // 2 + 1):
        reduced = reduces_of_each_step(ranks, lm, lambda model: model.blocks[1].requires_grad_(False), at)
        fewer = every - {"RS blocks.1"}
        expect(reduced, [every if number < at else fewer for number in range(1, ranks.steps)], f"frozen at step {at}")


def b16_unfreeze_midway(ranks):
    every = {f"RS {name}" for name in UNITS}
    at = ranks.steps // 2 + 1
    reduced = reduces_of_each_step(ranks, partly_frozen, lambda model: model.blocks.requires_grad_(True), at)
    expect(reduced, [every if number >= at else every - {"RS blocks.0"} for number in range(1, ranks.steps)])


def b17_reduce_runs_in_autograd_not_in_the_sweep(ranks):
    ledger = ranks.ledger()
    model = shard(ranks, ranks.alike(lm), mesh=ledger)
    seen = {}

    def watch(name):
        def reached(_gradient):
            seen[name] = ledger.of("RS")

        def after_forward(_module, _args, output):
            output.register_hook(reached)

        return after_forward

    for name in ("embed", *BLOCK_NAMES):
        model.get_submodule(name).register_forward_hook(watch(name))
    for tokens in data_for(ranks, 2):
        ledger.clear()
        lm_loss(model, ranks.rows(tokens)).backward()
        model.zero_grad()
    # when backward comes to the output of a block, every block behind it has gone out
    late = ["RS blocks.2", "RS blocks.1", "RS blocks.0"]
    expect(seen, {"blocks.2": [], "blocks.1": late[:1], "blocks.0": late[:2], "embed": late})


class Picky(TinyLM):
    """Leaves the output of its last block out where ``skip`` says so."""

    skip = False

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks[:-1]:
            x = block(x)
        last = self.blocks[-1](x)
        return self.head(x if self.skip else last)


def b18_unused_parameters_same_on_all_ranks(ranks):
    def step(model, optimizer, tokens, number):
        model.skip = True
        loss = lm_loss(model, tokens)
        loss.backward()
        without = {name for name, p in model.named_parameters() if p.grad is None}
        unused = {name for name, p in model.named_parameters() if name.startswith(("unused", "blocks.2"))}
        expect(without, unused, f"without a gradient in step {number}")
        return finish_step(model, optimizer, loss)

    # AdamW's weight decay would move weights that got a gradient of zeros
    compare(ranks, lambda: lm(cls=Picky), step)


def b19_unused_on_one_rank_only(ranks):
    def loss_on(rank, model, tokens):
        model.skip = rank == ranks.size - 1
        return lm_loss(model, tokens)

    def everyone(model, tokens):
        parts = tokens.chunk(ranks.size)
        return sum(loss_on(rank, model, part) for rank, part in enumerate(parts)) / ranks.size

    step = plain_step(lambda model, tokens: loss_on(ranks.rank, model, tokens))
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD, HYBRID):
        compare(ranks, lambda: lm(cls=Picky), step, reference_step=plain_step(everyone), strategy=strategy)


def accumulating(context, count):
    """A step of ``MICRO`` micro-batches, all but the last inside ``context(model)``; ``count()`` notes each one."""

    def step(model, optimizer, tokens, number):
        total = 0.0
        for micro, part in enumerate(tokens.chunk(MICRO)):
            last = micro == MICRO - 1
            with nullcontext() if last or not is_sharded(model) else context(model):
                loss = lm_loss(model, part) / MICRO
                loss.backward()
            if is_sharded(model):
                count(number, micro)
            total = total + loss.detach()
        return finish_step(model, optimizer, total)

    return step


def b20_accumulation_with_and_without_sync(ranks):
    for context, each in ((lambda _: nullcontext(), (4, 4, 4)), (no_sync, (0, 0, 4))):
        ledger = ranks.ledger()

        def count(number, micro, ledger=ledger, each=each):
            expect(len(ledger.of("RS")), each[micro], f"reduces of step {number}, micro-batch {micro}")
            ledger.clear()

        compare(ranks, lm, accumulating(context, count), data=data_for(ranks, rows=2 * MICRO), mesh=ledger)


def b21_accumulation_with_hybrid_all_reduce_deferred(ranks):
    for context, across in ((lambda _: nullcontext(), (4, 4, 4)), (no_all_reduce, (0, 0, 4))):
        replicate, inside = (Ledger(axis) for axis in ranks.axes)

        def count(number, micro, replicate=replicate, inside=inside, across=across):
            if number:  # the first pass compares the ranks with all-reduces
                of_units = [event for event in replicate.of("AR") if event != "AR"]
                expect(len(of_units), across[micro], f"all-reduces across replicas in micro-batch {micro}")
                expect(len(inside.of("RS")), 4 if inside.size > 1 else 0, f"reduce-scatters in micro-batch {micro}")
            replicate.clear()
            inside.clear()

        step, data = accumulating(context, count), data_for(ranks, rows=2 * MICRO)
        compare(ranks, lm, step, data=data, strategy=HYBRID, mesh=(replicate, inside))
