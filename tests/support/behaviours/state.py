"""Behaviours 39 and 40: state that moves between worlds, and ranks that part."""

import time
from dataclasses import dataclass

import pytest
import torch

from fullshard import full_tensors
from fullshard.core.layout import UnitLayout
from fullshard.core.testing import run_ranks
from fullshard.errors import MismatchError
from support.behaviours.running import Ranks, assert_weights, expect, lm, lm_step, runtime, shard, weights_of
from support.parity import optimizer_for
from support.tiny_lm import batches, lm_loss

ROWS = 12  # of a joint batch: for worlds of 1, 2, 3 and 4 ranks
SOON_S = 20.0  # a collective that hangs would wait for its group's timeout


def full_state(comm, model):
    """The streamed model, on every rank."""
    mine = {
        name: None if t is None else t.cpu().clone()
        for _, tensors in full_tensors(model)
        for name, t in tensors.items()
    }
    first, *others = comm.all_gather_object(mine)
    assert all(value is None for other in others for value in other.values()), "tensors on other ranks than the first"
    return first


def layouts_of(model):
    """The layout of each unit."""
    lanes = [[state.layout for state in unit.lanes] for unit in runtime(model).units]
    return [UnitLayout(tuple(unit), unit[0].world_size) for unit in lanes]


def shards_of(model):
    """This rank's shard of each lane of each unit."""
    return [[lane.shard.cpu().clone() for lane in unit.lanes] for unit in runtime(model).units]


def resharded(old, by_rank, new, rank):
    """Shards of ``rank`` under the layouts ``new``, from those of every rank under the layouts ``old``."""
    made = []
    for number, (source, target) in enumerate(zip(old, new, strict=True)):
        full = {}
        for place, lane in enumerate(source.lanes):
            flat = torch.cat([shards[number][place] for shards in by_rank])
            full |= {p.index: flat[p.start : p.start + p.numel] for p in lane.placements}
        lanes = []
        for lane in target.lanes:
            flat = torch.zeros(lane.world_size * lane.shard_numel)
            for p in lane.placements:
                flat[p.start : p.start + p.numel] = full[p.index]
            low, high = lane.shard_bounds(rank)
            lanes.append(flat[low:high])
        made.append(lanes)
    return made


def assert_shards(ours, wanted):
    for number, lanes in enumerate(zip(ours, wanted, strict=True)):
        for one, other in zip(*lanes, strict=True):
            assert torch.equal(one, other), f"shards of unit {number} differ"


def optimizer_rows(model, optimizer):
    """AdamW's state of this rank's rows, by name, with the first row."""
    by_name = {}
    for p in model.parameters():
        if p in optimizer.state:
            moments = {key: value.cpu().clone() for key, value in optimizer.state[p].items()}
            by_name[p.shard_meta.name] = p.shard_meta.row_range[0], moments
    return by_name


def load_optimizer(model, optimizer, by_rank):
    """Give AdamW this rank's rows of what the ranks of another world had."""
    for p in model.parameters():
        meta = p.shard_meta
        pieces = sorted((rank[meta.name] for rank in by_rank if meta.name in rank), key=lambda piece: piece[0])
        if pieces and p.nbytes:
            first, last = meta.row_range
            optimizer.state[p] = {
                key: torch.cat([moments[key] for _, moments in pieces])[first:last] if value.dim() else value.clone()
                for key, value in pieces[0][1].items()
            }


def blank():
    """The model with other values than any that is loaded."""
    model = lm()
    for p in model.parameters():
        torch.nn.init.constant_(p, 7.0)
    return model


@dataclass
class Saved:
    """A model in the middle of training, by everything that could be written about it.

    Attributes:
        whole: The full state.
        layouts: Of each unit.
        shards: What :func:`shards_of` gives, by rank.
        moments: What :func:`optimizer_rows` gives, by rank.
    """

    whole: dict
    layouts: list
    shards: list
    moments: list


def check_states(world, saved):
    """Load the full state and the sharded one in another world and get both out again; the model of the latter."""
    from_full, from_shards = (shard(world, world.alike(blank)) for _ in range(2))
    expect(tuple(from_full.load_state_dict(saved.whole)), ([], []), "names that do not fit")
    new = layouts_of(from_shards)
    mine = resharded(saved.layouts, saved.shards, new, world.rank)
    for unit, lanes in zip(runtime(from_shards).units, mine, strict=True):
        for lane, values in zip(unit.lanes, lanes, strict=True):
            lane.shard.copy_(values)
    for model in (from_full, from_shards):
        again = full_state(world.comm, model)
        expect(again.keys(), saved.whole.keys(), "names")
        for name, value in again.items():
            assert torch.equal(value, saved.whole[name]), f"{name} changed on the way"
        shards = world.comm.all_gather_object(shards_of(model))
        for rank, wanted in enumerate(saved.shards):
            assert_shards(resharded(new, shards, saved.layouts, rank), wanted)
    return from_shards


def b39_full_and_sharded_state_round_trip_across_world_sizes(ranks):
    data = batches(ranks.steps, ROWS, length=7)
    half = len(data) // 2
    reference, model = ranks.alike(lm), shard(ranks, ranks.alike(lm))
    plain, optimizer = optimizer_for(reference), optimizer_for(model)
    for tokens in data:
        lm_step(reference, plain, tokens.to(ranks.device), 0)
    for tokens in data[:half]:
        lm_step(model, optimizer, ranks.rows(tokens), 0)
    mine = shards_of(model), optimizer_rows(model, optimizer)
    whole = full_state(ranks.comm, model)
    saved = Saved(whole, layouts_of(model), *zip(*ranks.comm.all_gather_object(mine), strict=True))
    expect(whole.keys(), dict(reference.named_parameters()).keys(), "names of the full state")

    def resume(comm):
        world = Ranks.as_threads(comm)
        model = check_states(world, saved)
        optimizer = optimizer_for(model)
        load_optimizer(model, optimizer, saved.moments)
        for tokens in data[half:]:
            lm_step(model, optimizer, world.rows(tokens), 0)
        assert_weights(weights_of(model), reference)

    for size in (1, 2, 3, 4):
        if size % ranks.size == ranks.rank:  # each rank plays some of the other worlds
            run_ranks(size, resume)


def told(model, tokens):
    """What a training step raises, and after how many seconds."""
    started = time.monotonic()
    with pytest.raises(MismatchError) as caught:
        lm_loss(model, tokens).backward()
    return str(caught.value), time.monotonic() - started


def b40_order_mismatch_is_detected_not_hung(ranks):
    tokens = batches(1, 2)[0].to(ranks.device)
    for passes_before in (0, 1):
        model = shard(ranks, ranks.alike(lm), mesh=ranks.comm if passes_before == 0 else ranks.spare)
        for _ in range(passes_before):
            lm_loss(model, tokens).backward()
        if ranks.rank == ranks.size - 1:
            model.blocks = torch.nn.ModuleList(reversed(model.blocks))
        text, seconds = told(model, tokens)
        assert seconds < SOON_S, f"told after {seconds:.0f} s"
        # in the first pass before anything is exchanged, later by who meets whom
        start = "Ranks are in different collectives" if passes_before else "Ranks run different units"
        assert text.startswith(start), text
        for unit in ("blocks.0", "blocks.2"):
            assert f"all-gather of unit {unit}" in text, f"{unit} is not named: {text}"
