"""What an optimizer needs under sharding, and the optimizers that see whole matrices or keep narrow states."""

from fullshard.optim.adafactor.adafactor import Adafactor as Adafactor
from fullshard.optim.adafactor.adafactor import TorchAdafactor as TorchAdafactor
from fullshard.optim.average import ExponentialMovingAverage as ExponentialMovingAverage
from fullshard.optim.clip import clip_grad_norm_ as clip_grad_norm_
from fullshard.optim.groups import decay_groups as decay_groups
from fullshard.optim.in_backward import StepInBackward as StepInBackward
from fullshard.optim.in_backward import step_in_backward as step_in_backward
from fullshard.optim.lane.lane_optimizer import LaneOptimizer as LaneOptimizer
from fullshard.optim.lowbit.adamw_8bit import AdamW8bit as AdamW8bit
from fullshard.optim.lowbit.adamw_bf16 import AdamWBF16 as AdamWBF16
from fullshard.optim.muon.muon import Muon as Muon
from fullshard.optim.muon.muon_groups import muon_groups as muon_groups
from fullshard.optim.repoint import Places as Places
from fullshard.optim.repoint import repoint as repoint
from fullshard.optim.scaler import ShardedGradScaler as ShardedGradScaler
from fullshard.optim.walk import load_parameter_states as load_parameter_states
from fullshard.optim.walk import parameter_states as parameter_states

# What users make and call; the others serve the rooms above. Without it help(fullshard.optim) would show no class.
__all__ = [
    "Adafactor",
    "AdamW8bit",
    "AdamWBF16",
    "ExponentialMovingAverage",
    "LaneOptimizer",
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
]
