"""Every private name of transformers that fullshard uses, in one place, and what breaks when it is gone.

Marks that a model may or may not have are read with a default; without a name that must exist, its function raises a
ConfigError with the version. transformers is not imported here.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from fullshard.errors import private_name

TRAINER_METHODS = ("create_accelerator_and_postprocess", "_wrap_model", "save_model", "create_model_card")
"""Methods of ``Trainer`` that are replaced. Without one, ``fullshard.compat.transformers`` cannot be imported."""

one_at_a_time = threading.Lock()
"""Held while a model is built or loaded: transformers patches its classes and torch's initializers in the meantime, and
two threads would leave them patched."""

_SKIPS = "_ignore_bidirectional_mask_sdpa"
_FINDS = "find_packed_sequence_indices"
_apart: ContextVar[bool] = ContextVar("apart", default=False)  # of each thread

_ATTENTION = {
    "sdpa": "_supports_sdpa",
    "flash_attention_2": "_supports_flash_attn",
    "flex_attention": "_supports_flex_attn",
}


def class_of(auto_class: Any, hf_config: Any) -> Any:
    """Return the class that an auto class builds of a config. Gone: a given attention cannot be checked."""
    return private_name(auto_class, "_model_mapping", "transformers")[type(hf_config)]


def lm_classes(hf_config: Any) -> list[Any]:
    """Return the auto classes of language models that know a config: of decoders, of encoder-decoders, or none."""
    package: Any = importlib.import_module("transformers")
    autos = (package.AutoModelForCausalLM, package.AutoModelForSeq2SeqLM)
    return [auto for auto in autos if type(hf_config) in private_name(auto, "_model_mapping", "transformers")]


def declared_ties(module: Any) -> dict[str, str]:
    """Return the parameters of a model that its configuration ties, each with the one that it is, by names in it.

    Those of the models inside are not among them. Gone (public in transformers 5): ties are not known.
    """
    expand = getattr(module, "get_expanded_tied_weights_keys", None)
    return {} if expand is None else expand(all_submodels=False)


def attentions(cls: Any) -> list[str]:
    """Return the attention implementations that a model's class supports. Gone: only eager can be chosen."""
    return ["eager", *(name for name, flag in _ATTENTION.items() if getattr(cls, flag, False))]


def attention_of(hf_config: Any) -> str:
    """Return the attention implementation of a built model. Gone: packing cannot be used."""
    return private_name(hf_config, "_attn_implementation", "transformers")


def register_attention(name: str, attend: Callable[..., Any], *, like: str) -> None:
    """Register an attention by ``name``, with the masks of ``like``. Both registries are public; so are their names."""
    package: Any = importlib.import_module("transformers")
    package.AttentionInterface.register(name, attend)
    package.AttentionMaskInterface.register(name, package.AttentionMaskInterface()[like])


def set_attention(model: Any, name: str) -> None:
    """Set the attention of a model and of the stacks in it, in place; ``name`` is registered or one of transformers'.

    Stacks of T5's family have copies of the config, and transformers 5.17 does not set theirs with the model's. Names
    are public.
    """
    for part in model.modules():
        if hasattr(part, "set_attn_implementation"):
            part.set_attn_implementation(name)


def attention_function(name: str, module: Any) -> Callable[..., Any]:
    """Return a registered attention; ``eager`` is in the file of an attention module. Gone: an error says so."""
    if name != "eager":
        return sys.modules["transformers"].AttentionInterface()[name]
    return private_name(sys.modules[type(module).__module__], "eager_attention_forward", "transformers")


def t5_bucket() -> Callable[..., Any]:
    """Return T5's function from distances to buckets of its bias. Gone: the way t5_attention cannot be used."""
    package: Any = importlib.import_module("transformers.models.t5.modeling_t5")
    return private_name(package.T5Attention, "_relative_position_bucket", "transformers")


@contextmanager
def without_bar() -> Iterator[None]:
    """Disable transformers' progress bars inside the context: they would disturb the program's output. All public."""
    hub: Any = importlib.import_module("huggingface_hub.utils")
    logging: Any = importlib.import_module("transformers.utils.logging")
    hub_draws = not hub.are_progress_bars_disabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if hub_draws:
            logging.enable_progress_bar()


def own_loss(model: Any) -> Callable[..., Any] | None:
    """Return the loss that was set on a model in place of its type's, or None. Gone: such a loss is not noticed."""
    return getattr(model, "_loss_function", None)


def layers_of(model: Any) -> list[Any]:
    """Return the outermost transformer blocks, in the order of the module tree. Gone: an import error says so."""
    kind: Any = importlib.import_module("transformers.modeling_layers").GradientCheckpointingLayer
    found: list[Any] = []
    for child in model.children():
        found += [child] if isinstance(child, kind) else layers_of(child)
    return found


def around_checkpoint(block: Any, before: Callable[[], object], after: Callable[[], object]) -> bool:
    """Call functions around a block's checkpoint, if a module's hooks would run inside of it; return whether they are.

    Layers of transformers 5.17 checkpoint ``__call__``, and those of newer ones ``forward``, which hooks are outside
    of. Gone: an error says so.
    """
    kind: Any = importlib.import_module("transformers.modeling_layers").GradientCheckpointingLayer
    if "__call__" not in vars(kind) or not isinstance(block, kind) or not block.gradient_checkpointing:
        return False
    checkpoint = private_name(block, "_gradient_checkpointing_func", "transformers")

    def checkpoint_between(*args: Any, **kwargs: Any) -> Any:
        before()
        try:
            return checkpoint(*args, **kwargs)
        finally:
            after()

    block._gradient_checkpointing_func = checkpoint_between
    return True


def initializer(model: Any) -> Callable[[Any], object] | None:
    """Return what initializes one module of a model. Gone: modules use torch's ``reset_parameters``."""
    return getattr(model, "_init_weights", None)


def may_be_missing(model: Any) -> list[str]:
    """Return patterns of buffers that files need not have. Gone: such files are refused, with the names."""
    return list(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())


def may_be_left_over(model: Any) -> list[str]:
    """Return patterns of tensors that files may have in addition. Gone: such files are refused, with the names."""
    return list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())


def always_mask() -> None:
    """Let encoders always compute with the padding mask they are given, in this process; values stay the same.

    transformers leaves out a mask that hides nothing, which it reads on the CPU, and then a compiled block needs a
    second graph. Gone: it does.
    """
    masks: Any = importlib.import_module("transformers.masking_utils")
    skips = getattr(masks, _SKIPS, None)
    if skips is None or getattr(skips, "__wrapped__", None) is not None:
        return

    @functools.wraps(skips)
    def skips_only_no_mask(padding_mask: Any, *args: Any, **kwargs: Any) -> bool:
        return padding_mask is None and skips(padding_mask, *args, **kwargs)

    setattr(masks, _SKIPS, skips_only_no_mask)


@contextmanager
def rows_apart() -> Iterator[None]:
    """Let causal models know that each row of a batch without a mask is one sequence, inside the context.

    transformers reads on the CPU, for each of a forward's masks, whether positions begin anew within a row. Gone: it
    does, and the CPU waits for everything issued to the device.
    """
    masks: Any = importlib.import_module("transformers.masking_utils")
    finds = getattr(masks, _FINDS, None)
    if finds is not None and getattr(finds, "__wrapped__", None) is None:

        @functools.wraps(finds)
        def finds_unless_apart(position_ids: Any) -> Any:
            return None if _apart.get() else finds(position_ids)

        setattr(masks, _FINDS, finds_unless_apart)
    before = _apart.set(True)
    try:
        yield
    finally:
        _apart.reset(before)


def block_classes(model: Any) -> set[str]:
    """Return the names of a model's layer classes. Gone: units are the repeated blocks that fullshard finds."""
    return {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}


def generate_together(model: Any) -> None:
    """Make ``generate`` go on until all ranks have finished. Gone: a rank that ends early leaves the others waiting."""
    for module in model.modules():
        if hasattr(type(module), "generate"):
            module._is_fsdp_managed_module = True
