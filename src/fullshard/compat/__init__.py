"""Other libraries' names on fullshard's engine: a script only changes its imports.

- ``fullshard.compat.torch_fsdp``: the names of ``torch.distributed.fsdp``, version 1 and 2;
- ``fullshard.compat.accelerate``: Accelerate, with ``Accelerator`` and its plugin replaced;
- ``fullshard.compat.transformers``: Hugging Face's ``Trainer`` and ``Seq2SeqTrainer``, and ``install()`` for TRL's;
- ``fullshard.compat.accelerate_config``: Accelerate's configuration files;
- ``fullshard.compat.redirect()``: torch's FSDP names lead here, for libraries that import them themselves.

``docs/reference/compat/`` lists the differences.
"""

from fullshard.compat.redirection import redirect as redirect
