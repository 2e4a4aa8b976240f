"""Behaviours 10 to 21 and 30 to 38: what passes gather and reduce, how early and at what cost; and other calls."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fullshard import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    Named,
    Prefetch,
    ShardingStrategy,
    no_all_reduce,
    no_sync,
    register_forward_method,
    step_in_backward,
    units,
)
from fullshard.core.comm import device_of
from support.behaviours.running import (
    BLOCK_NAMES,
    HYBRID,
    LAYERS,
    UNITS,
    Ledger,
    compare,
    data_for,
    expect,
    finish_step,
    gathered,
    is_sharded,
    lm,
    lm_step,
    plain_step,
    runtime,
    shard,
    weights_of,
)
from support.parity import optimizer_for
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


def four_blocks(reentrant=None):
    return lm(reentrant, layers=4)


def traced(ranks, steps, reentrant=None, **options):
    """For each step, what forward and what backward did in order, as one text each; and the trained model.

    ``AG 1`` and ``RS 1`` are collectives of a block, ``F 1`` is its computing.
    """
    ledger = ranks.ledger()
    model = shard(ranks, ranks.alike(lambda: four_blocks(reentrant)), mesh=ledger, **options)
    optimizer = optimizer_for(model)
    for number, block in enumerate(model.blocks):
        block.norm.register_forward_pre_hook(lambda *_, number=number: ledger.events.append(f"F {number}"))
    trace = []
    for tokens in data_for(ranks, steps):
        ledger.clear()
        loss = lm_loss(model, ranks.rows(tokens))
        forward = len(ledger.events)
        loss.backward()
        events = [event.replace("blocks.", "") for event in ledger.events]
        trace.append((", ".join(events[:forward]), ", ".join(events[forward:])))
        finish_step(model, optimizer, loss)
    return trace, model


ONE_AHEAD = "AG (root), AG 0, AG 1, F 0, AG 2, F 1, AG 3, F 2, F 3"
TWO_AHEAD = "AG (root), AG 0, AG 1, AG 2, F 0, AG 3, F 1, F 2, F 3"
AS_NEEDED = "AG (root), AG 0, F 0, AG 1, F 1, AG 2, F 2, AG 3, F 3"
BACK_ONE_AHEAD = "AG 3, AG 2, RS 3, AG 1, RS 2, AG 0, RS 1, RS 0, RS (root), AR"
BACK_TWO_AHEAD = "AG 3, AG 2, AG 1, RS 3, AG 0, RS 2, RS 1, RS 0, RS (root), AR"
BACK_AS_NEEDED = "AG 3, RS 3, AG 2, RS 2, AG 1, RS 1, AG 0, RS 0, RS (root), AR"
BACK_THREE_AHEAD = "AG 3, AG 2, AG 1, AG 0, RS 3, RS 2, RS 1, RS 0, RS (root), AR"


def b30_prefetch_order_one_and_two_ahead(ranks):
    for prefetch, wanted in (
        (Prefetch(ahead=1), (ONE_AHEAD, BACK_ONE_AHEAD)),
        (Prefetch(ahead=2), (TWO_AHEAD, BACK_TWO_AHEAD)),
        (Prefetch(forward=False), (AS_NEEDED, BACK_ONE_AHEAD)),
        (Prefetch(backward=BackwardPrefetch.BACKWARD_POST), (ONE_AHEAD, BACK_AS_NEEDED)),
        (Prefetch(backward=BackwardPrefetch.NONE), (ONE_AHEAD, BACK_AS_NEEDED)),
        (
            Prefetch(forward=False, forward_lists={"blocks.0": ["blocks.2", "blocks.1"]}),
            ("AG (root), AG 0, AG 2, AG 1, F 0, F 1, F 2, AG 3, F 3", BACK_ONE_AHEAD),
        ),
        (
            Prefetch(backward_lists={"blocks.3": ["blocks.1", "blocks.2"]}),
            (ONE_AHEAD, "AG 3, AG 1, AG 2, RS 3, RS 2, AG 0, RS 1, RS 0, RS (root), AR"),
        ),
    ):
        # what follows what is known from the second step on; the first one compares the ranks
        trace, _ = traced(ranks, 3, prefetch=prefetch)
        expect(trace[1:], [wanted] * 2, f"{prefetch}: forward and backward")


def b31_prefetch_inside_checkpointing(ranks):
    _, model = traced(ranks, 3, prefetch=Prefetch(forward=False))
    wanted = weights_of(model)
    for ahead, forward, backward in (
        (1, ONE_AHEAD, "AG 3, AG 2, F 3, RS 3, AG 1, F 2, RS 2, AG 0, F 1, RS 1, F 0, RS 0, RS (root), AR"),
        (2, TWO_AHEAD, "AG 3, AG 2, AG 1, F 3, RS 3, AG 0, F 2, RS 2, F 1, RS 1, F 0, RS 0, RS (root), AR"),
    ):
        trace, model = traced(ranks, 3, reentrant=False, prefetch=Prefetch(ahead=ahead))
        expect(trace[1:], [(forward, backward)] * 2, f"{ahead} ahead")
        assert_same(weights_of(model), wanted)
        trace, model = traced(ranks, 3, reentrant=True, prefetch=Prefetch(ahead=ahead))
        for got, again in trace[1:]:
            expect(got, forward, f"reentrant, {ahead} ahead")
            # recomputation gathers each unit once, before it computes, and no unit for forward's sake
            expect([event for event in again.split(", ") if event[:2] == "AG"], ["AG 3", "AG 2", "AG 1", "AG 0"])
            for number in range(4):
                assert again.index(f"AG {number}") < again.index(f"F {number}") < again.index(f"RS {number}"), again
        assert_same(weights_of(model), wanted)


def assert_same(ours, wanted):
    for name, value in ours.items():
        assert torch.equal(value, wanted[name]), f"{name} is not the same bit for bit"


def b32_in_flight_cap_changes_scheduling_only(ranks):
    capped = {cap: traced(ranks, 4, prefetch=Prefetch(ahead=3, max_in_flight=cap)) for cap in (None, 3, 2, 1)}
    wanted = weights_of(capped[None][1])
    expect(capped[None][0][1], ("AG (root), AG 0, AG 1, AG 2, AG 3, F 0, F 1, F 2, F 3", BACK_THREE_AHEAD))
    expect(capped[3][0][1], (TWO_AHEAD, BACK_TWO_AHEAD), "3 in flight")
    expect(capped[2][0][1], (ONE_AHEAD, BACK_ONE_AHEAD), "2 in flight")
    expect(capped[1][0][1], (AS_NEEDED, BACK_AS_NEEDED), "1 in flight")
    for _, model in capped.values():
        assert_same(weights_of(model), wanted)


def bytes_of(unit):
    """Gathered bytes of a unit, and those of its unsharded gradient."""
    gathered = sum(lane.numel * lane.dtypes.compute.itemsize for lane in unit.lanes)
    return gathered, sum(lane.numel * lane.dtypes.reduce.itemsize for lane in unit.lanes if lane.trainable)


class Tower(nn.Module):
    """Equal blocks behind an embedding: the root's gradients come last, when the blocks' have gone out."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 12)
        self.blocks = nn.ModuleList(Block(12, 20) for _ in range(5))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x


def tower_loss(model, tokens):
    return model(tokens).float().square().mean()


def peaks(ranks, make, loss_of, **options):
    """Peaks of gathered bytes in forward, and of gathered bytes and gradients in backward, in units of the model.

    Returns:
        Those three, gathered bytes after forward and after backward; and bytes of the root and of a block.
    """
    model = shard(ranks, ranks.alike(make), **options)
    tracker = runtime(model).tracker
    root, *blocks = (bytes_of(unit) for unit in runtime(model).units)
    expect(len(set(blocks)), 1, "sizes of blocks")
    for tokens in data_for(ranks, 3):
        tracker.peak.update(tracker.live)
        expect(tracker.live["gradients"], 0, "gradients before forward")
        loss = loss_of(model, ranks.rows(tokens))
        between = tracker.live["gathered"]
        forward = tracker.peak["gathered"]
        expect(tracker.peak["gradients"], 0, "gradients in forward")
        tracker.peak.update(tracker.live)
        loss.backward()
        backward = tracker.peak["gathered"], tracker.peak["gradients"]
        expect((tracker.live["gathered"], tracker.live["gradients"]), (0, 0), "after backward")
        model.zero_grad()
    return (forward, between, *backward), root, blocks[0]


def b33_peak_memory_bound_per_phase(ranks):
    """Forward: the root and two units. Backward: the same, and the gradients of one unit, on CUDA of two."""
    behind = device_of(ranks.device).reduces_behind

    def gradients(root, unit):
        return max(root[1] + behind * unit[1], (1 + behind) * unit[1])

    for precision in (MixedPrecision(), MixedPrecision(param=torch.bfloat16, reduce=torch.float32)):
        got, root, unit = peaks(ranks, Tower, tower_loss, mp_policy=precision)
        two = root[0] + 2 * unit[0]
        expect(got, (two, root[0], two, gradients(root, unit)), "FULL_SHARD")
        everything = root[0] + 5 * unit[0]
        got, _, _ = peaks(ranks, Tower, tower_loss, mp_policy=precision, strategy=ShardingStrategy.SHARD_GRAD_OP)
        expect(got, (everything, everything, everything, gradients(root, unit)), "SHARD_GRAD_OP")
    # a tied head's gradients wait for the embedding's
    got, root, unit = peaks(ranks, lm, lm_loss)
    two = root[0] + 2 * unit[0]
    expect(got, (two, root[0], two, unit[1] * (1 + behind) + root[1]), "tied head")
    got, root, unit = peaks(ranks, Tower, tower_loss, strategy=ShardingStrategy.NO_SHARD)
    expect(got, (0, 0, 0, gradients(root, unit)), "NO_SHARD")
    got, root, unit = peaks(ranks, Tower, tower_loss, prefetch=Prefetch(BackwardPrefetch.NONE, forward=False))
    one = root[0] + unit[0]
    expect(got, (one, root[0], one, gradients(root, unit)), "no prefetch")


def b34_cpu_offload_parity(ranks):
    # on CPU the shards are in host memory as it is: the run must be the same bit for bit
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, HYBRID):
        weights = []
        for offload in (CPUOffload(), None):
            model = compare(ranks, lm, lm_step, strategy=strategy, offload_policy=offload)
            wanted = "cpu" if offload else ranks.device.type
            expect({p.device.type for p in model.parameters()}, {wanted}, "devices of shards")
            weights.append(weights_of(model))
        if ranks.exact:  # elsewhere the optimizer steps on the host in one run and on the device in the other
            assert_same(*weights)


AdamW = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)


def b35_optimizer_in_backward(ranks):
    def reference_step(model, optimizer, tokens, _number):
        loss = lm_loss(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return (loss.item(),)

    def step(model, _optimizer, tokens, number):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        loss = lm_loss(model, tokens)
        loss.backward()
        assert all(p.grad is None for p in model.parameters()), f"gradients are left after step {number}"
        moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
        held = {name for name, p in model.named_parameters() if not name.startswith("unused")}
        expect(moved, held, f"what step {number} moved")
        return (loss.item(),)

    def sharded(model):
        model = shard(ranks, model)
        step_in_backward(model, AdamW)
        return model

    compare(ranks, lm, step, reference_step=reference_step, sharded=sharded)


class Breaks(torch.autograd.Function):
    """Identity whose backward fails."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ZeroDivisionError


def b36_exception_then_recovery(ranks):
    def fail(model, tokens, hook):
        handle = model.blocks[1].register_forward_hook(hook)
        with pytest.raises(ZeroDivisionError):
            lm_loss(model, tokens).backward()
        handle.remove()
        model.zero_grad()

    def step(model, optimizer, tokens, number):
        if number in (0, 3, 6):
            fail(model, tokens, lambda *_: 1 / 0)
        if number in (3, 5, 8):
            fail(model, tokens, lambda _module, _args, output: Breaks.apply(output))
        figures = lm_step(model, optimizer, tokens, number)
        if is_sharded(model):
            live = runtime(model).tracker.live
            expect((live["gathered"], live["gradients"]), (0, 0), f"bytes left after step {number}")
        return figures

    compare(ranks, lm, step)


def b37_inference_then_train(ranks):
    def step(model, optimizer, tokens, _number):
        seen = []
        model.eval()
        with torch.inference_mode():
            seen.append(lm_loss(model, tokens).item())
        with torch.no_grad():
            seen.append(lm_loss(model, tokens).item())
        if is_sharded(model):
            expect(gathered(model), set(), "in memory after inference")
            assert not any(p.is_inference() for p in model.parameters()), "shards were made in inference mode"
        loss = lm_loss(model.train(), tokens)
        loss.backward()
        # With a graph that nothing uses: what it gathered is old when the optimizer has stepped.
        seen.append(lm_loss(model, tokens).item())
        expect(seen, [loss.item()] * 3, "losses of inference")
        return finish_step(model, optimizer, loss)

    compare(ranks, lm, step)


class TwoTower(nn.Module):
    """Methods beside ``forward`` that use parameters themselves: the root's, and a block's."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6) / 6**0.5)

        def forward(self, x):
            return x + (x @ self.weight).tanh()

        def backwards(self, x):
            return x + (x @ self.weight.T).tanh()

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(TwoTower.Block() for _ in range(3))
        self.table = nn.Parameter(torch.randn(5, 6) / 6**0.5)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.table)

    def score(self, x, y):
        for block in self.blocks:
            x, y = block(x), block.backwards(y)
        return (F.linear(x, self.table) * F.linear(y, self.table)).sum(-1)


def b38_custom_forward_method(ranks):
    generator = torch.Generator().manual_seed(3)
    data = [torch.randn(2 * ranks.size, 6, generator=generator).to(ranks.device) for _ in range(ranks.steps)]

    def loss_of(model, x):
        return model.score(x, -x).square().mean() + model(x).square().mean()

    def sharded(model):
        model = shard(ranks, model)
        register_forward_method(model, "score")
        for number in range(3):
            register_forward_method(model, f"blocks.{number}.backwards")
        return model

    compare(ranks, TwoTower, plain_step(loss_of), data=data, sharded=sharded)
    model = sharded(ranks.alike(TwoTower))
    with torch.no_grad():
        model.score(data[0], data[0])
    expect(gathered(model), set(), "in memory after the method")
