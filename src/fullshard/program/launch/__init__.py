"""Starting ranks: the launcher of this machine, the programs its ranks run, and ``fullshard launch`` for scripts."""

from fullshard.program.launch.failure import Failure as Failure
from fullshard.program.launch.local import (
    NO_NOTICE as NO_NOTICE,
    UNREAD_EXIT_CODE as UNREAD_EXIT_CODE,
    Notice as Notice,
    choose_nproc as choose_nproc,
    gpu_count as gpu_count,
    launch as launch,
    launched_elsewhere as launched_elsewhere,
    rank_command as rank_command,
)
from fullshard.program.launch.processes import INTERRUPTED_EXIT_CODE as INTERRUPTED_EXIT_CODE
from fullshard.program.launch.ranks import STOPPED_EXIT_CODE as STOPPED_EXIT_CODE
