"""What an optimizer needs under sharding."""

from fullshard.optim.clip import clip_grad_norm_ as clip_grad_norm_
from fullshard.optim.in_backward import StepInBackward as StepInBackward
from fullshard.optim.in_backward import step_in_backward as step_in_backward
from fullshard.optim.scaler import ShardedGradScaler as ShardedGradScaler
from fullshard.optim.walk import load_parameter_states as load_parameter_states
from fullshard.optim.walk import local_state_key_is_elementwise as local_state_key_is_elementwise
from fullshard.optim.walk import parameter_states as parameter_states
