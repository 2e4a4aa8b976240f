"""The behaviours of a sharded model, one function each, for any world of ranks.

``BEHAVIOURS`` is from name to function, in order. A function takes a :class:`Ranks`, is called by every rank at once,
and raises on a rank that sees the behaviour broken.
"""

from support.behaviours import passes, precision, state, units
from support.behaviours.running import Ranks as Ranks

_ROOMS = (units, passes, precision, state)
BEHAVIOURS = dict(
    sorted((name, one) for room in _ROOMS for name, one in vars(room).items() if name[0] == "b" and name[1:3].isdigit())
)
