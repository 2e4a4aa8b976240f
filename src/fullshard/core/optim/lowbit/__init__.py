"""AdamW with moments in 8 bits or bfloat16.

``adamw_8bit`` and ``adamw_bf16`` are the optimizers, ``narrow`` their common step, ``blockwise`` the 8-bit codes,
``rounding`` stochastic rounding to bfloat16.
"""

from fullshard.core.optim.lowbit.adamw_8bit import AdamW8bit as AdamW8bit
from fullshard.core.optim.lowbit.adamw_bf16 import AdamWBF16 as AdamWBF16
