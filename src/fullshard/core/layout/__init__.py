"""Pure integer arithmetic of sharding: where every element of every parameter is stored. Imports no torch."""

from .boxes import Box as Box, boxes as boxes
from .lanes import LaneLayout as LaneLayout, Placement as Placement, UnitLayout as UnitLayout
from .plan import plan_unit as plan_unit
from .sharded import Claims as Claims, ShardMeta as ShardMeta
from .state import (
    StatePart as StatePart,
    along_rows as along_rows,
    by_block as by_block,
    elementwise as elementwise,
    on_all_owners as on_all_owners,
)
