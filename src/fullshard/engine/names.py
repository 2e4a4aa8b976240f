"""What modules are called without the wrappers around them; for the engine's rooms, from where all may know it."""

from fullshard.layout.names import WRAPPERS as WRAPPERS
from fullshard.layout.names import plain_name as plain_name
