"""Pure integer arithmetic of sharding: where every element of every parameter is stored. Imports no torch."""

from .sharded import (
    Block as Block,
    Box as Box,
    Fingerprint as Fingerprint,
    Order as Order,
    ShardMeta as ShardMeta,
    StatePart as StatePart,
    along_rows as along_rows,
    boxes as boxes,
    boxes_in as boxes_in,
    boxes_in_order as boxes_in_order,
    by_block as by_block,
    common as common,
    elementwise as elementwise,
    interleaved as interleaved,
    on_all_owners as on_all_owners,
    place_in_order as place_in_order,
)
from .unit_layout import (
    LaneLayout as LaneLayout,
    Placement as Placement,
    UnitLayout as UnitLayout,
    plan_unit as plan_unit,
)
