"""Hugging Face's ``Trainer`` and ``Seq2SeqTrainer`` with models sharded by fullshard.

A script changes one import: ``from fullshard.compat.transformers import Trainer``. For trainers that a library derives
from Hugging Face's (TRL's SFTTrainer, DPOTrainer, …), call :func:`install` once before they are created.

A trainer creates its ``Accelerator`` and saves and loads by functions that ``transformers`` imported from Accelerate.
Those names are pointed at ``fullshard.compat.accelerate``; everything else is Hugging Face's code.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import accelerate
import transformers
from torch import nn
from transformers import modeling_utils, trainer

from fullshard.compat.accelerate import Accelerator, FullyShardedDataParallelPlugin, replaced
from fullshard.compat.accelerate.prepare import plain_tree, unwrapped
from fullshard.compat.accelerate.private import prepared_by
from fullshard.compat.torch_fsdp.api import StateDictType
from fullshard.core.engine.setup.wrap import refuse_distributed
from fullshard.core.transformers_private import TRAINER_METHODS
from fullshard.errors import private_name
from fullshard.version import untested

__all__ = ["Seq2SeqTrainer", "Trainer", "install"]

if (_line := untested("transformers")) is not None:
    warnings.warn(_line, stacklevel=2)

_FILES = ("save_fsdp_model", "load_fsdp_model", "save_fsdp_optimizer", "load_fsdp_optimizer")
_BY_CLASS = 'TrainingArguments(fsdp=True, fsdp_config={"transformer_layer_cls_to_wrap": ["Class"]})'
"""How a script for a trainer names the classes of units."""
# Taken before any install().
_library = {name: private_name(transformers.Trainer, name, "transformers") for name in TRAINER_METHODS}


@contextmanager
def _with_plain_model(self: Any) -> Iterator[None]:
    """Give a trainer its model without wrappers, also inside of it, for a context."""
    with plain_tree(self.model) as plain, _set_for_a_while(self, "model", plain):
        yield


@contextmanager
def _set_for_a_while(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute for a context, then restore it: other trainers of this process may be the library's."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _replace(module: Any, name: str, ours: Callable[..., Any]) -> None:
    """Replace a function ``(…, accelerator, …)`` of ``module``: ``ours`` is called for fullshard's accelerators."""
    theirs = getattr(module, name)
    if hasattr(theirs, "of_fullshard"):
        return

    @functools.wraps(theirs)
    def call(first: Any, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = ours if isinstance(accelerator, Accelerator) else theirs
        return chosen(first, accelerator, *args, **kwargs)

    vars(call)["of_fullshard"] = True
    setattr(module, name, call)


def _prepare_reference(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Shard a model that only runs forward, such as DPO's reference; every rank calls it."""
    sharded = accelerator.prepare_model(model.requires_grad_(requires_grad=False))
    # Otherwise the trainer would not prepare its own model for evaluation.
    prepared_by(accelerator).models.remove(sharded)
    return sharded.eval()


def _refuse_distributed(model: nn.Module | None) -> None:
    """Refuse a model that torch has divided over ranks: Hugging Face's would train it without fullshard."""
    if model is not None:
        refuse_distributed(model.named_parameters())


class Trainer(transformers.Trainer):
    """Hugging Face's ``Trainer``, whose model is always sharded by fullshard.

    ``TrainingArguments(fsdp=True, fsdp_config={…})`` sets how, with ``"version": 1`` or ``2``; without ``fsdp`` the
    ``FSDP_*`` variables that ``accelerate launch`` and ``fullshard launch`` set, or else the plugin's defaults. Every
    rank creates it and calls its methods; without a GPU the ranks are CPU ranks. Raises what
    :class:`fullshard.compat.accelerate.Accelerator` raises, a ``ConfigError`` of settings that it refuses, and a
    ``WrapError`` of a model that ``from_pretrained(distributed_config=…)`` has divided over ranks.
    """

    def create_accelerator_and_postprocess(self) -> None:
        """Create fullshard's ``Accelerator`` in place of Accelerate's; every rank calls it."""
        _refuse_distributed(self.model)
        for name in _FILES:
            _replace(trainer, name, getattr(replaced, name))
        for module in {sys.modules[cls.__module__] for cls in type(self).__mro__}:
            if hasattr(module, "prepare_fsdp"):  # TRL's, for a reference model; without this it uses torch's FSDP
                _replace(module, "prepare_fsdp", _prepare_reference)
        setattr(modeling_utils, "extract_model_from_parallel", replaced.extract_model_from_parallel)  # noqa: B010
        with (
            _set_for_a_while(trainer, "Accelerator", Accelerator),
            _set_for_a_while(accelerate.utils, "FullyShardedDataParallelPlugin", FullyShardedDataParallelPlugin),
            warnings.catch_warnings(),
        ):
            # Every trainer passes them, not the user.
            warnings.filterwarnings("ignore", "DistributedDataParallelKwargs")
            _library["create_accelerator_and_postprocess"](self)
        vars(self.accelerator)["_by_class"] = _BY_CLASS

    def _wrap_model(self: Any, model: nn.Module, training: bool = True, *args: Any, **kwargs: Any) -> nn.Module:  # noqa: FBT001, FBT002
        """Return the model, in the wrapper that an earlier call of ``train`` or ``evaluate`` put around it.

        Hugging Face's forgets the wrapper of ``evaluate``, so that ``train`` after it fails under version 1. For
        training, the optimizer is created first; ``prepare`` then points it at the shards. Under version 1 Hugging
        Face's creates it of the wrapped model, whose modules' names have the wrappers in them: no parameter would
        decay.
        """
        if not isinstance(self.accelerator, Accelerator):
            return _library["_wrap_model"](self, model, training, *args, **kwargs)
        _refuse_distributed(model)  # also one of model_init
        if training and self.optimizer is None:
            with _with_plain_model(self):
                self.create_optimizer()
        return self.model if unwrapped(self.model) is unwrapped(model) else model

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write the card of the model itself, whose class decides its task, not of the wrapper around it."""
        with _with_plain_model(self):
            _library["create_model_card"](self, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:  # noqa: FBT001, FBT002
        """Write the model for ``from_pretrained``; every rank calls it.

        With SHARDED_STATE_DICT too, for which Hugging Face's writes nothing; only its checkpoints are sharded.
        """
        with ExitStack() as stack:
            if isinstance(self.accelerator, Accelerator) and not _internal_call:
                plugin = self.accelerator.state.fsdp_plugin
                stack.enter_context(_set_for_a_while(plugin, "state_dict_type", StateDictType.FULL_STATE_DICT))
            _library["save_model"](self, output_dir, _internal_call)


class Seq2SeqTrainer(Trainer, transformers.Seq2SeqTrainer):
    """Hugging Face's ``Seq2SeqTrainer``, whose model is always sharded by fullshard; see :class:`Trainer`."""


def install() -> None:
    """Make every trainer created from now on in this process shard by fullshard, also those of TRL.

    Trainers that exist already are unchanged.
    """
    for name in TRAINER_METHODS:
        setattr(transformers.Trainer, name, vars(Trainer)[name])
