"""Every collective of a group, and what it must give."""

import torch

from fullshard.core.comm import settle

PIECE = 1000  # elements that a test's host buffers hold


def finish(work):
    """Wait until the result is here, and what was sent may be dropped."""
    work.wait()
    settle(work)


def run_collectives(comm, numel=2):
    """Every collective, with parts of ``numel`` elements; returns its results."""
    device = comm.device
    shard = torch.full((numel,), float(comm.rank), device=device)
    full = torch.empty(numel * comm.size, device=device)
    finish(comm.all_gather(full, shard))
    in_place = torch.zeros(comm.size * numel, device=device)
    mine = in_place.view(comm.size, -1)[comm.rank]
    mine.fill_(comm.rank + 1)
    finish(comm.all_gather(in_place, mine))
    reduced = torch.empty(numel, device=device)
    terms = torch.arange(comm.size, device=device).repeat_interleave(numel) + float(comm.rank)
    finish(comm.reduce_scatter(reduced, terms))
    wide = torch.empty(numel, device=device)
    finish(comm.reduce_scatter(wide, terms.bfloat16()))
    total = torch.full((numel,), comm.rank, device=device)
    largest, told = total.clone(), total.clone()
    finish(comm.all_reduce(total))
    finish(comm.all_reduce(largest, "max"))
    finish(comm.broadcast(told, source=comm.size - 1))
    gathered = torch.empty(numel * comm.size, device=device) if comm.rank == 0 else None
    finish(comm.gather(shard, gathered))
    # Rank r gives r times as much of its own number to each rank before it, once to itself, nothing to those after it.
    sent = [torch.full((comm.rank * numel if r < comm.rank else 0,), float(comm.rank)) for r in range(comm.size)]
    sent[comm.rank] = torch.full((numel,), float(comm.rank))
    received = [torch.empty(r * numel if comm.rank < r else 0, device=device) for r in range(comm.size)]
    received[comm.rank] = torch.empty(numel, device=device)
    finish(comm.exchange(received, [part.to(device) for part in sent]))
    comm.barrier()
    return {
        "full": full, "in_place": in_place, "reduced": reduced, "wide": wide, "total": total, "largest": largest,
        "told": told, "gathered": gathered, "received": received, "objects": comm.all_gather_object((comm.rank,)),
    }  # fmt: skip


def check_collectives(comm):
    """Small ones, and ones of several pieces; of both, the last piece is not full."""
    for numel in (1, 2, PIECE, 2 * PIECE + 1, 20_003):
        got = run_collectives(comm, numel)
        size, numbers = comm.size, torch.arange(comm.size, device=comm.device)
        each = numbers.repeat_interleave(numel).float()
        assert torch.equal(got["full"], each), numel
        assert torch.equal(got["in_place"], each + 1), numel
        assert got["reduced"].eq(size * comm.rank + sum(range(size))).all(), numel
        assert torch.equal(got["wide"], got["reduced"]), numel
        assert got["total"].eq(sum(range(size))).all(), numel
        assert got["largest"].eq(size - 1).all(), numel
        assert got["told"].eq(size - 1).all(), numel
        assert (got["gathered"] is None) == (comm.rank > 0)
        assert comm.rank > 0 or torch.equal(got["gathered"], each), numel
        for rank, part in enumerate(got["received"]):
            assert part.eq(rank).all(), (numel, rank)
        assert got["objects"] == [(rank,) for rank in range(size)]
