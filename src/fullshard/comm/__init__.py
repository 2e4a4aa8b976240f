"""The only room that touches ``torch.distributed``: collectives, process groups, device differences."""

from fullshard.comm.clock import Clock as Clock
from fullshard.comm.clock import clock_of as clock_of
from fullshard.comm.device import Device as Device
from fullshard.comm.device import device_of as device_of
from fullshard.comm.gloo import GlooComm as GlooComm
from fullshard.comm.machine_axes import machine_axes as machine_axes
from fullshard.comm.machine_axes import machines_of_world as machines_of_world
from fullshard.comm.memory import MemoryMeter as MemoryMeter
from fullshard.comm.memory import allocated_bytes as allocated_bytes
from fullshard.comm.memory import device_memory_bytes as device_memory_bytes
from fullshard.comm.mesh import Mesh as Mesh
from fullshard.comm.mesh import SoloComm as SoloComm
from fullshard.comm.mesh import as_mesh as as_mesh
from fullshard.comm.mesh import same_ranks as same_ranks
from fullshard.comm.process import FakeComm as FakeComm
from fullshard.comm.process import ProcessComm as ProcessComm
from fullshard.comm.process import init_from_env as init_from_env
from fullshard.comm.process import join_alone as join_alone
from fullshard.comm.process import shutdown as shutdown
from fullshard.comm.protocol import DONE as DONE
from fullshard.comm.protocol import Comm as Comm
from fullshard.comm.protocol import Work as Work
from fullshard.comm.protocol import settle as settle
from fullshard.comm.run_together import await_all as await_all
from fullshard.comm.run_together import together as together
from fullshard.comm.run_together import together_in_background as together_in_background
