"""Other libraries' names on fullshard's engine: a script only changes its imports.

- ``fullshard.compat.torch_fsdp``: the names of ``torch.distributed.fsdp``, version 1 and 2;
- ``fullshard.compat.accelerate``: ``Accelerator`` and its plugin;
- ``fullshard.compat.accelerate_config``: Accelerate's configuration files.

``docs/reference/compat/`` lists the differences.
"""
