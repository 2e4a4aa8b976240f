"""Pure integer maths of sharding: where every element of every parameter lives. Imports no torch."""

from .boxes import Box as Box
from .boxes import boxes as boxes
from .lanes import Lane as Lane
from .lanes import Placement as Placement
from .lanes import UnitLayout as UnitLayout
from .plan import plan_unit as plan_unit
from .reshard import Copy as Copy
from .reshard import copy_list as copy_list
from .sharded import ShardMeta as ShardMeta
