"""Shards that know that they are this rank's rows of a larger tensor.

Between passes a sharded model's parameters and gradients are of the class :class:`Shard`. A function of torch that is
called with one follows one of three rules (``rules`` has the tables):

- **local**: computed element by element on the rows here; the result is a shard again (``elementwise``, ``views``).
- **global**: computed over all ranks; the result is a plain tensor, the same bits on every rank (``reductions``).
- **refused**: anything else, by name, with the line to write instead.
"""

from fullshard.core.shards import rules as _rules  # noqa: F401 (sets the rules of the class)
from fullshard.core.shards.guarded import (
    FreedParameter as FreedParameter,
    FullParameter as FullParameter,
    GuardedShard as GuardedShard,
    WatchedParameter as WatchedParameter,
    reads_metadata as reads_metadata,
    table_of as table_of,
)
from fullshard.core.shards.shard import (
    STATE_ON_ALL_RANKS as STATE_ON_ALL_RANKS,
    RowSplit as RowSplit,
    Shard as Shard,
    ShardParameter as ShardParameter,
    as_shard as as_shard,
    gather_blocks as gather_blocks,
    gather_full as gather_full,
    on_rows as on_rows,
    parameter_class as parameter_class,
    restore as restore,
    restore_all as restore_all,
    row_split_of as row_split_of,
    rows_of as rows_of,
    run_of as run_of,
    some_ranks_only as some_ranks_only,
    strip as strip,
    untraced as untraced,
)
