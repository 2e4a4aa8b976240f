"""The only room that touches ``torch.distributed``: collectives, process groups, device differences."""

from fullshard.comm.ledger import Entry as Entry
from fullshard.comm.ledger import RecordingComm as RecordingComm
from fullshard.comm.memory import MemoryMeter as MemoryMeter
from fullshard.comm.mesh import Mesh as Mesh
from fullshard.comm.mesh import SoloComm as SoloComm
from fullshard.comm.mesh import as_mesh as as_mesh
from fullshard.comm.process import GlooComm as GlooComm
from fullshard.comm.process import ProcessComm as ProcessComm
from fullshard.comm.process import init_from_env as init_from_env
from fullshard.comm.process import shutdown as shutdown
from fullshard.comm.protocol import Comm as Comm
from fullshard.comm.protocol import Work as Work
from fullshard.comm.threads import ThreadComm as ThreadComm
from fullshard.comm.threads import run_ranks as run_ranks
