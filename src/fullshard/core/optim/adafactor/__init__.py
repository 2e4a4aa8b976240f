"""Adafactor for sharded models, in transformers' and in torch's convention.

``adafactor`` has the two optimizers, ``factored`` their common step over shards, ``matrices`` a rank's view of a
parameter's rows and columns.
"""

from fullshard.core.optim.adafactor.adafactor import Adafactor as Adafactor, TorchAdafactor as TorchAdafactor
