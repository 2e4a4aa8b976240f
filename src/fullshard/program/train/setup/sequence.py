"""Rows that ranks share (``sharding.sequence_parallel``): which ranks read the same, and the model that splits them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fullshard.core.comm import Comm, neighbours
from fullshard.core.sequence import sequence_parallel, sharers_of
from fullshard.errors import ConfigError, ModelError
from fullshard.program.config import RunConfig
from fullshard.program.data import TokenizedSet
from fullshard.program.metrics import needs_text


@dataclass(frozen=True)
class Readers:
    """The groups of ranks that read the same rows; without ``sequence_parallel`` each rank is one."""

    count: int  # number of groups
    index: int  # number of this rank's group
    first: bool  # whether this rank counts the group's rows

    @classmethod
    def of(cls, model: Any, comm: Comm) -> Readers:
        """Return those of a sharded model on its ranks."""
        sharers = sharers_of(model)
        if sharers is None:
            return cls(comm.size, comm.rank, first=True)
        return cls(comm.size // sharers.size, comm.rank // sharers.size, first=sharers.rank == 0)


def readers(config: RunConfig, world_size: int) -> int:
    """Return how many groups of ranks read rows of their own; any process.

    Raises:
        ConfigError: The ranks cannot be divided into groups.
    """
    each = config.sharding.sequence_parallel
    if world_size % each:
        raise ConfigError(
            f"sharding.sequence_parallel: {each} lets groups of {each} ranks share rows, and {world_size} ranks are no "
            f"such groups. Use {each * -(-world_size // each)} ranks, or another multiple of {each}."
        )
    return world_size // each


def share_rows(model: Any, config: RunConfig, comm: Comm) -> None:
    """Let ranks share the rows of a model that is not sharded yet, in place, if the run does; every rank calls it.

    Raises:
        ConfigError, ModelError: It is not a model whose rows can be split over so many ranks.
    """
    each = config.sharding.sequence_parallel
    if each == 1:
        return
    readers(config, comm.size)
    try:
        sequence_parallel(model, neighbours(comm, each))
    except (ConfigError, ModelError) as error:
        raise type(error)(f"sharding.sequence_parallel: {each} cannot be used. {error}") from error


def sharing_notes(config: RunConfig, world_size: int, held_out: TokenizedSet | None) -> tuple[str, ...]:
    """Return lines for users about shared rows; any rank."""
    each = config.sharding.sequence_parallel
    if each == 1:
        return ()
    groups = readers(config, world_size)
    line = (
        f"sharding.sequence_parallel: {each} ranks share each row; {groups} group{'s' if groups > 1 else ''} of them "
        f"read{'' if groups > 1 else 's'} rows, and each rank draws its own tokens' dropout"
    )
    if held_out is None or not needs_text(config.evaluation.every_metric):
        return (line,)
    longest = min(held_out.source_stats.longest, held_out.source_stats.limit)
    return (
        line,
        f"evaluations split rows for the loss, but write texts without splitting: each rank holds caches of its full "
        f"prompts, the longest of which has {longest:,} tokens",
    )
