"""Muon for sharded models: momentum on the shards, each matrix orthogonalised in full on one rank.

``muon`` is the optimizer, ``muon_groups`` chooses its parameters, ``matrix`` one matrix in a step, ``balance`` plans
which rank orthogonalises it, ``rounds`` moves the pieces, ``newton_schulz`` is the iteration.
"""

from fullshard.core.optim.muon.muon import Muon as Muon
from fullshard.core.optim.muon.muon_groups import muon_groups as muon_groups
