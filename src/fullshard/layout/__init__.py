"""Pure integer arithmetic of sharding: where every element of every parameter is stored. Imports no torch."""

from .boxes import Box as Box
from .boxes import boxes as boxes
from .lanes import LaneLayout as LaneLayout
from .lanes import Placement as Placement
from .lanes import UnitLayout as UnitLayout
from .plan import plan_unit as plan_unit
from .sharded import Claims as Claims
from .sharded import ShardMeta as ShardMeta
from .state import StatePart as StatePart
from .state import along_rows as along_rows
from .state import by_block as by_block
from .state import elementwise as elementwise
from .state import on_all_owners as on_all_owners
