"""Muon for sharded models."""

from fullshard.optim.muon.muon import Muon as Muon
from fullshard.optim.muon.muon_groups import muon_groups as muon_groups
