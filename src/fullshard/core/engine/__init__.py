"""The engine: shards a model, runs its training steps and returns full parameters."""

from fullshard.core.engine.controls import (
    check_wrapped as check_wrapped,
    has_tables_at_home as has_tables_at_home,
    memory_summary as memory_summary,
    mesh_of as mesh_of,
    no_all_reduce as no_all_reduce,
    no_sync as no_sync,
    record as record,
    reset as reset,
    units as units,
    unreduced as unreduced,
)
from fullshard.core.engine.full.model_class import (
    on_state_dict as on_state_dict,
    plain_class as plain_class,
    register_forward_method as register_forward_method,
    wrap_forward_method as wrap_forward_method,
)
from fullshard.core.engine.full.state import (
    LocalTensor as LocalTensor,
    divided_by as divided_by,
    local_tensors as local_tensors,
    persistent_buffers as persistent_buffers,
    require_one_state as require_one_state,
    require_undivided as require_undivided,
)
from fullshard.core.engine.full.stream import (
    RUNS_BYTES as RUNS_BYTES,
    Run as Run,
    SavedTensor as SavedTensor,
    average_ignored_gradients as average_ignored_gradients,
    broadcast_buffers as broadcast_buffers,
    full_runs as full_runs,
    full_state_dict as full_state_dict,
    full_tensors as full_tensors,
    saved_tensors as saved_tensors,
)
from fullshard.core.engine.full.summon import (
    StateEntry as StateEntry,
    gathered as gathered,
    state_entries as state_entries,
    summoned_parameters as summoned_parameters,
)
from fullshard.core.engine.full.table import UnitRow as UnitRow, UnitTable as UnitTable
from fullshard.core.engine.full.unsharded import (
    reshard as reshard,
    root_unsharded as root_unsharded,
    unshard as unshard,
    unsharded as unsharded,
)
from fullshard.core.engine.registry import sharded_roots as sharded_roots
from fullshard.core.engine.setup.api import fully_shard as fully_shard
from fullshard.core.engine.setup.initial import FirstValues as FirstValues
from fullshard.core.engine.setup.weights import (
    WantedTensor as WantedTensor,
    WeightReader as WeightReader,
    WeightSource as WeightSource,
    load_weights as load_weights,
    wanted_tensors as wanted_tensors,
)
from fullshard.core.engine.step.lane import LaneState as LaneState
from fullshard.core.engine.step.unit import Keep as Keep, Unit as Unit, UnitOptions as UnitOptions
from fullshard.core.engine.tables.loss import vocab_parallel_loss as vocab_parallel_loss
from fullshard.core.engine.timeline import MemorySample as MemorySample, Recorder as Recorder, TraceEvent as TraceEvent
from fullshard.core.layout.names import plain_name as plain_name
