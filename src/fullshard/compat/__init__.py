"""Other libraries' names in front of fullshard's engine: a script changes an import line and runs as it is.

- ``fullshard.compat.torch_fsdp``: the names of ``torch.distributed.fsdp``, version 1 and 2;
- ``fullshard.compat.accelerate``: ``Accelerator`` and its plugin.

What behaves differently, on purpose, is listed in ``docs/reference/compat/``.
"""
