"""Ways to run a model's own code faster: what each changes, where it applies, and whether it rounds differently."""

from fullshard.program.speed.bias import biased_layers as biased_layers
from fullshard.program.speed.compiled import Compiled as Compiled, watch_compiling as watch_compiling
from fullshard.program.speed.registry import WAYS as WAYS, apply_ways as apply_ways
from fullshard.program.speed.way import Facts as Facts, Way as Way
