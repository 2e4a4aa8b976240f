"""Optimizers for sharded models, and their companions: clipping, loss scaling, steps in backward, averages."""

from fullshard.core.optim.adafactor import Adafactor as Adafactor, TorchAdafactor as TorchAdafactor
from fullshard.core.optim.average import ExponentialMovingAverage as ExponentialMovingAverage
from fullshard.core.optim.clip import clip_grad_norm_ as clip_grad_norm_
from fullshard.core.optim.groups import decay_groups as decay_groups
from fullshard.core.optim.guard import trust as trust
from fullshard.core.optim.in_backward import StepInBackward as StepInBackward, step_in_backward as step_in_backward
from fullshard.core.optim.lowbit import AdamW8bit as AdamW8bit, AdamWBF16 as AdamWBF16
from fullshard.core.optim.muon import Muon as Muon, muon_groups as muon_groups
from fullshard.core.optim.repoint import Places as Places, repoint as repoint
from fullshard.core.optim.scaler import ShardedGradScaler as ShardedGradScaler
from fullshard.core.optim.walk import (
    load_parameter_states as load_parameter_states,
    parameter_states as parameter_states,
)

# The public names; others are internal. Without __all__, help(fullshard.optim) lists no class.
__all__ = [
    "Adafactor",
    "AdamW8bit",
    "AdamWBF16",
    "ExponentialMovingAverage",
    "Muon",
    "Places",
    "ShardedGradScaler",
    "StepInBackward",
    "TorchAdafactor",
    "clip_grad_norm_",
    "decay_groups",
    "muon_groups",
    "repoint",
    "step_in_backward",
    "trust",
]
