"""Other libraries' names on fullshard's engine: a script only changes its imports.

- ``fullshard.compat.torch_fsdp``: the names of ``torch.distributed.fsdp``, version 1 and 2;
- ``fullshard.compat.accelerate``: Accelerate, with ``Accelerator`` and its plugin replaced;
- ``fullshard.compat.transformers``: Hugging Face's ``Trainer`` and ``Seq2SeqTrainer``, and ``install()`` for TRL's;
- ``fullshard.compat.accelerate_config``: Accelerate's configuration files;
- ``fullshard.compat.redirect()``: torch's FSDP names lead here, for libraries that import them themselves.

``docs/reference/compat/`` lists the differences.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from contextlib import ExitStack
from types import ModuleType
from typing import Any

_OURS = "fullshard.compat.torch_fsdp"

_COUNTERPARTS = {
    "torch.distributed.fsdp": _OURS,
    "torch.distributed.fsdp.api": f"{_OURS}.api",
    "torch.distributed.fsdp.wrap": f"{_OURS}.wrap",
    "torch.distributed.fsdp.fully_sharded_data_parallel": f"{_OURS}.fully_sharded_data_parallel",
    "torch.distributed.fsdp.sharded_grad_scaler": f"{_OURS}.sharded_grad_scaler",
    "torch.distributed.fsdp._fully_shard": _OURS,
    "torch.distributed._composable.fsdp": _OURS,
    "torch.distributed._composable.fsdp.fully_shard": _OURS,
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper": f"{_OURS}.checkpointing",
    "torch.distributed.checkpoint.optimizer": _OURS,
}
"""torch's modules, and where the names in them are found here; names that are missing there keep torch's meaning."""


class Redirection(ExitStack):
    """Result of :func:`redirect`: names are fullshard's until :meth:`restore`, or the end of a ``with``."""

    def restore(self) -> None:
        """Give torch's modules the values they had before; a second call does nothing."""
        self.close()


def redirect() -> Redirection:
    """Point the public names of ``torch.distributed.fsdp`` and its modules at ``fullshard.compat.torch_fsdp``.

    For libraries that import torch's FSDP when they need it, such as Lightning's ``FSDPStrategy``. Every rank calls it,
    before the library wraps a model::

        fullshard.compat.redirect()              # until the process ends
        with fullshard.compat.redirect(): ...    # until the end of the block, also after an error

    Changed are the names in ``torch.distributed.fsdp``, in its modules ``api``, ``wrap``,
    ``fully_sharded_data_parallel`` and ``sharded_grad_scaler``, in ``torch.distributed._composable.fsdp`` and
    ``torch.distributed.algorithms._checkpoint.checkpoint_wrapper``, and ``load_sharded_optimizer_state_dict`` of
    ``torch.distributed.checkpoint.optimizer``. torch's own FSDP cannot be used meanwhile.

    A name that a module imported by value (``from torch.distributed.fsdp import ...`` at its top) before this call
    stays torch's there. A warning names such modules; call this before they are imported. A module first imported
    within a ``with`` block keeps fullshard's names after its end.

    Returns:
        The redirection, a context manager; outside of a ``with`` statement its ``restore()`` ends it.
    """
    # All before the first change: modules of torch import each other's names by value, and so do those that ours need.
    package = importlib.import_module(_OURS)
    for name in _COUNTERPARTS:
        importlib.import_module(name)
    originals: list[tuple[str, Any]] = []
    redirection = Redirection()
    for theirs, ours in _COUNTERPARTS.items():
        # From sys.modules: as an attribute, a function of its name hides the module _composable.fsdp.fully_shard.
        module, counterpart = sys.modules[theirs], importlib.import_module(ours)
        for name in {*package.__all__, "wrap"} & vars(module).keys():
            before, after = vars(module)[name], getattr(counterpart, name, getattr(package, name))
            if before is not after and not inspect.ismodule(before) and not inspect.ismodule(after):
                originals.append((name, before))
                redirection.callback(setattr, module, name, before)
                setattr(module, name, after)
    _warn_of_holders(originals)
    return redirection


def _warn_of_holders(originals: list[tuple[str, Any]]) -> None:
    """Log the imported modules outside of torch that have one of the original values."""
    theirs = {id(value): name for name, value in originals}
    held: dict[str, set[str]] = {}
    for place, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and place.partition(".")[0] not in ("torch", "fullshard"):
            # vars, because looking up the attributes of a lazy module would import what is behind them.
            names = {theirs[id(value)] for value in list(vars(module).values()) if id(value) in theirs}
            held |= {place: names} if names else {}
    if held:
        logging.getLogger("fullshard").warning(
            "fullshard.compat.redirect() came too late for modules that had imported torch's FSDP names already, and "
            "keep them: %s. Call it before they are imported.",
            "; ".join(f"{place} ({', '.join(sorted(names))})" for place, names in sorted(held.items())),
        )
