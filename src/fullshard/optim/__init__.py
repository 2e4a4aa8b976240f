"""What an optimizer needs under sharding."""

from fullshard.optim.clip import clip_grad_norm_ as clip_grad_norm_
