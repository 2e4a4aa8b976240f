"""The only room that touches ``torch.distributed``: collectives, process groups, differences between devices."""

from fullshard.core.comm.clock import Clock as Clock, clock_of as clock_of
from fullshard.core.comm.device import Device as Device, add_rows as add_rows, device_of as device_of
from fullshard.core.comm.gloo import GlooComm as GlooComm
from fullshard.core.comm.grid import (
    GridComm as GridComm,
    comm_of_axis as comm_of_axis,
    grid_of as grid_of,
    world_ranks as world_ranks,
)
from fullshard.core.comm.heartbeat import ENDINGS as ENDINGS
from fullshard.core.comm.labels import Labels as Labels, labelled as labelled
from fullshard.core.comm.memory import (
    MemoryMeter as MemoryMeter,
    allocated_bytes as allocated_bytes,
    demands as demands,
    device_memory_bytes as device_memory_bytes,
    free_memory as free_memory,
    lacking as lacking,
    logits_at_once as logits_at_once,
    on_gpu as on_gpu,
    planned_memory as planned_memory,
    whole_memory_bytes as whole_memory_bytes,
)
from fullshard.core.comm.mesh import (
    Mesh as Mesh,
    SoloComm as SoloComm,
    as_mesh as as_mesh,
    axes_of as axes_of,
    device_mesh_of as device_mesh_of,
    group_behind as group_behind,
    identity_of as identity_of,
    machine_axes as machine_axes,
    machines_of_world as machines_of_world,
    named_ranks as named_ranks,
    neighbours as neighbours,
    same_group as same_group,
    same_ranks as same_ranks,
)
from fullshard.core.comm.process import (
    FakeComm as FakeComm,
    ProcessComm as ProcessComm,
    TorchComm as TorchComm,
    init_from_env as init_from_env,
    join_alone as join_alone,
    shutdown as shutdown,
)
from fullshard.core.comm.protocol import (
    DONE as DONE,
    Comm as Comm,
    Work as Work,
    hides_messages as hides_messages,
    settle as settle,
)
from fullshard.core.comm.recording import LedgerEntry as LedgerEntry, RecordingComm as RecordingComm
from fullshard.core.comm.resplit import (
    Resplit as Resplit,
    Split as Split,
    even_split as even_split,
    sum_over as sum_over,
    take_part as take_part,
)
from fullshard.core.comm.run_together import (
    await_all as await_all,
    together as together,
    together_in_background as together_in_background,
)
from fullshard.core.comm.sharers import mark_shared as mark_shared, marked_sharers as marked_sharers
from fullshard.core.comm.watchdog import announce_failure as announce_failure
