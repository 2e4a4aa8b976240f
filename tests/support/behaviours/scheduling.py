"""Behaviours 30 to 34: when units are gathered ahead, what that costs at most, and shards in host memory."""

import torch
from torch import nn

from fullshard import BackwardPrefetch, CPUOffload, MixedPrecision, Prefetch, ShardingStrategy
from fullshard.core.comm import device_of
from support.behaviours.running import (
    HYBRID,
    compare,
    data_for,
    expect,
    finish_step,
    lm,
    lm_step,
    runtime,
    shard,
    weights_of,
)
from support.parity import optimizer_for
from support.tiny_lm import VOCAB, Block, lm_loss


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
    account = runtime(model).account
    root, *blocks = (bytes_of(unit) for unit in runtime(model).units)
    expect(len(set(blocks)), 1, "sizes of blocks")
    for tokens in data_for(ranks, 3):
        account.peak.update(account.live)
        expect(account.live["gradients"], 0, "gradients before forward")
        loss = loss_of(model, ranks.rows(tokens))
        between = account.live["gathered"]
        forward = account.peak["gathered"]
        expect(account.peak["gradients"], 0, "gradients in forward")
        account.peak.update(account.live)
        loss.backward()
        backward = account.peak["gathered"], account.peak["gradients"]
        expect((account.live["gathered"], account.live["gradients"]), (0, 0), "after backward")
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
