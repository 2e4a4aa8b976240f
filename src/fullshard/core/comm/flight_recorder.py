"""Recorder of the collectives that a rank issued on a group, and the message that locates diverged ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from fullshard.core.comm.store_posts import Post

HISTORY = 64
"""Collectives in a post. Ranks are never far apart: only sending, as in a gather, needs no answer of other ranks."""


class Collective(NamedTuple):
    """One collective as this rank issued it.

    Attributes:
        seq: Its number on this rank and group, from 1.
        kind: Name of the collective.
        numel: Number of elements; 0 if that has no meaning.
        dtype: Their dtype.
        announced: Its purpose, passed to :meth:`~fullshard.core.comm.protocol.Comm.announce`; may be empty.
        bound: True if ranks that announced different purposes are in different collectives.
    """

    seq: int
    kind: str
    numel: int
    dtype: torch.dtype
    announced: str
    bound: bool

    def text(self) -> str:
        """Return the description for messages."""
        return self._with(self.announced)

    def name(self) -> str:
        """Return the text that is equal on all ranks in the same collective."""
        return self._with(self.announced if self.bound else "")

    def _with(self, purpose: str) -> str:
        size = f" of {self.numel} {str(self.dtype).removeprefix('torch.')}" if self.numel else ""
        return f"{self.kind}{size}" + (f" ({purpose})" if purpose else "")


class FlightRecorder:
    """Records the last collectives that this rank issued on one group, and the one that it waits in.

    Attributes:
        rank: This rank's number in the group.
        issued: The last collectives, oldest first.
        waiting: The collective that the program waits in now. Setting it is all that a wait costs.
    """

    def __init__(self, rank: int) -> None:
        """Record the collectives of ``rank``."""
        self.rank = rank
        self.issued: deque[Collective] = deque(maxlen=HISTORY)
        self.waiting: Collective | None = None
        self._seq = 0

    @property
    def last(self) -> int:
        """Number of the last collective issued; 0 before the first."""
        return self._seq

    def issue(self, kind: str, numel: int, dtype: torch.dtype, announced: str, *, bound: bool) -> Collective:
        """Number and record the next collective; the arguments are those of :class:`Collective`."""
        self._seq += 1
        call = Collective(self._seq, kind, numel, dtype, announced, bound)
        self.issued.append(call)
        return call


def divergence(posts: Mapping[int, Post]) -> int | None:
    """Return the number of the first collective in which two ranks' posts differ; None if all agree."""
    first: dict[int, str] = {}
    published = [(seq, name) for post in posts.values() for seq, (name, _) in post.calls.items()]
    return min((seq for seq, name in published if first.setdefault(seq, name) != name), default=None)


def divergence_text(seq: int, posts: Mapping[int, Post], ranks: Sequence[int]) -> str:
    """Return the error for ranks that diverged at collective ``seq``: where each is, and the remedy.

    Args:
        seq: The collective.
        posts: The posts, by rank in the group.
        ranks: The group's ranks, numbered as in the default group.
    """
    ranks_by_place: dict[str, list[int]] = {}
    for number, rank in enumerate(ranks):
        ranks_by_place.setdefault(_place(seq, posts.get(number)), []).append(rank)
    places = "; ".join(f"{named(there)}: {place}" for place, there in ranks_by_place.items())
    return (
        f"Ranks are in different collectives, from number {seq} of their group on: {places}. Every rank must call the "
        "same modules in the same order; check code that depends on the rank or the data."
    )


def _place(seq: int, post: Post | None) -> str:
    if post is None:
        return "not waiting in any collective of this group"
    _, there = post.calls.get(seq, ("", "not issued so far"))
    if post.waits is None:
        return f"{there}, {f'at {post.place}' if post.place else 'not waiting'}"
    called = f" in {post.place}" if post.place else ""
    return f"{there if post.waits == seq else f'{there}, waiting in {post.calls[post.waits][1]}'}{called}"


def named(ranks: Iterable[int]) -> str:
    """Return ranks in the form of a sentence: ``ranks 0, 2``."""
    names = [str(rank) for rank in ranks]
    return f"rank{'s' if len(names) > 1 else ''} {', '.join(names)}" if names else "no rank"
