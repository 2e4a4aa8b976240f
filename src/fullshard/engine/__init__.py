"""A parameter's life: wrap, unit, gather, hooks, schedule, reduce."""

from fullshard.engine.api import check_wrapped as check_wrapped
from fullshard.engine.api import fully_shard as fully_shard
from fullshard.engine.api import memory_summary as memory_summary
from fullshard.engine.api import mesh_of as mesh_of
from fullshard.engine.api import no_all_reduce as no_all_reduce
from fullshard.engine.api import no_sync as no_sync
from fullshard.engine.api import reset as reset
from fullshard.engine.api import units as units
from fullshard.engine.model_class import register_forward_method as register_forward_method
from fullshard.engine.state import LocalTensor as LocalTensor
from fullshard.engine.state import full_tensors as full_tensors
from fullshard.engine.state import local_tensors as local_tensors
from fullshard.engine.state import persistent_buffers as persistent_buffers
from fullshard.engine.state import unsharded as unsharded
from fullshard.engine.table import UnitRow as UnitRow
from fullshard.engine.table import UnitTable as UnitTable
