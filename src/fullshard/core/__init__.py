"""The library: a model's parameters, gradients and optimizer state sharded over ranks. It imports no other wing.

Rooms, in reading order: ``layout`` (who holds which elements; pure), ``policy`` (what a user chooses), ``comm``
(collectives, and what happens when one does not return), ``shards`` (the tensors that users see), ``quantized`` (frozen
weights in 4 and 8 bits), ``engine`` (gathers, frees and reduces in each step), ``optim`` (optimizers that know shards),
``testing`` (ranks as threads).

Start with ``engine/step``: ``schedule`` decides, ``runtime`` performs, ``unit`` and ``lane`` hold. Each rule of
docs/concepts/architecture.md has a test that holds it: change what you like while those pass.
"""
