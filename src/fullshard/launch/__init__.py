"""Starting ranks: the launcher of this machine, the programs its ranks run, and ``fullshard launch`` for scripts."""

from fullshard.launch.failure import Failure as Failure
from fullshard.launch.local import INTERRUPTED_EXIT_CODE as INTERRUPTED_EXIT_CODE
from fullshard.launch.local import STOPPED_EXIT_CODE as STOPPED_EXIT_CODE
from fullshard.launch.local import choose_nproc as choose_nproc
from fullshard.launch.local import launch as launch
from fullshard.launch.local import launched_elsewhere as launched_elsewhere
from fullshard.launch.local import rank_command as rank_command
