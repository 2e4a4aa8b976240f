"""Sequence parallel: a Hugging Face model whose ranks share rows, as ``sequence_parallel`` changes it."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fullshard.core.comm import (
    Comm,
    Resplit,
    SoloComm,
    as_mesh,
    even_split,
    mark_shared,
    marked_sharers,
    sum_over,
    take_part,
)
from fullshard.core.policy import ShardingStrategy
from fullshard.core.sequence.attention import attention_for, is_registered, own_bias, plain_attentions
from fullshard.core.sequence.checks import refuse_arguments, require_same_batch, require_tokens, tokens_of
from fullshard.core.sequence.rows import KEY, TOKENS, SharedRows
from fullshard.core.shards import untraced
from fullshard.core.transformers_private import attention_of, class_of, layers_of, lm_classes, set_attention
from fullshard.errors import ConfigError, ModelError, ProcessGroupError, ShardingError

DECODERS = (
    *("cohere", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "granite", "granitemoe", "llama", "mistral"),
    *("mixtral", "olmo", "olmo2", "olmo3", "olmoe", "opt", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    *("smollm3", "starcoder2"),
)
"""Decoder-only types; a test compares each with the unsharded model."""

ENCODER_DECODERS = ("bart", "marian", "mbart", "mt5", "pegasus", "plbart", "t5")
"""Encoder-decoder types; a test compares each with the unsharded model."""

_IGNORED = -100

_SHAPED_AGAIN = {"gpt2": "ln_f"}
"""Types that give the last hidden states the shape of the inputs, and the module before."""

_rows: ContextVar[SharedRows | None] = ContextVar("rows", default=None)
_splits: ContextVar[bool] = ContextVar("splits", default=False)


def sequence_parallel(model: Any, group: Any = None) -> Any:
    """Let the ranks of ``group`` share each row of a batch, in place: each computes a part of its tokens.

    Every rank calls it, before ``fully_shard``, which shards parameters over all ranks as always. Training code stays
    as it is: every rank of the group passes the same batch of full rows, with ``labels``, and gets the loss.

    - Calls with ``labels``: the model splits the rows itself. Ranks get parts that differ by at most one token. In
      attention each computes some heads of full rows, for which the group exchanges tokens. ``loss``, 0-d, fp32, is
      that of the full rows, the mean over their labels (or their sum divided by ``num_items_in_batch``), and the same
      on each rank. Its gradient, averaged over the group's ranks by ``fully_shard``, is that of the full rows.
      ``logits``, (B, own tokens, V), are those of this rank's tokens.
    - Calls without ``labels``, such as those of ``generate()``, are not split: each rank computes full rows. In
      training they are refused.

    Args:
        model: A decoder or encoder-decoder of transformers with its language modelling head, on any device, with an
            adapter of peft or without. Its attention is ``sdpa`` or ``eager``.
        group: The ranks that share rows: None (all), a ``ProcessGroup``, a 1-D ``DeviceMesh``, such as one axis of a
            2-D mesh, or a ``Comm``. Not more than the model has attention heads. Each rank is in one group, and all
            groups have as many ranks; ``fully_shard`` compares them.

    Returns:
        The same object.

    Raises:
        ModelError: The model's type or attention is not supported.
        ConfigError: The group has more ranks than the model has heads, or the model's configuration asks for what
            cannot be split.
        ShardingError: The model is sharded, or shares its rows already.
        ProcessGroupError: There is no process group, or ``group`` has two axes.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    mesh = as_mesh(group, ShardingStrategy.FULL_SHARD, None)
    _check(base, mesh.shard_group.size)
    if not isinstance(mesh.replica_group, SoloComm):
        raise ProcessGroupError(
            "sequence_parallel takes the ranks that share rows, one axis of a mesh; this mesh has two."
        )
    set_attention(base, attention_for(attention_of(base.config)))
    _hook_blocks(base)
    _replace_forward(base, mesh.shard_group)
    mark_shared(base, mesh.shard_group)
    return model


@contextmanager
def rows_split() -> Iterator[None]:
    """Split rows of calls without ``labels`` too, inside the context, for a caller with a loss of its own; any rank.

    Such a call has no loss, and its logits are those of this rank's tokens, :func:`own_tokens` of what belongs to them.
    A rank computes the terms of its own tokens: the loss of full rows, and its gradient, is their sum over the group.
    Nothing compares whether the group's ranks were given the same rows.
    """
    before = _splits.set(True)
    try:
        yield
    finally:
        _splits.reset(before)


def sharers_of(model: Any) -> Comm | None:
    """Return the ranks that share this rank's rows of ``model``, with an adapter or without; None if none do."""
    return marked_sharers(model.get_base_model() if hasattr(model, "get_base_model") else model)


def own_places(sharers: Comm, length: int) -> tuple[int, int]:
    """Return the first of this rank's tokens in a row of so many, and the one after the last."""
    return even_split(TOKENS, length, sharers.size).ranges[sharers.rank]


def own_tokens(sharers: Comm, full: torch.Tensor) -> torch.Tensor:
    """Return a view of this rank's tokens in ``full``, (B, T) or (B, T, …) of full rows."""
    start, stop = own_places(sharers, full.shape[TOKENS])
    return full[:, start:stop]


def _check(base: Any, ranks: int) -> None:
    """Refuse models and configurations whose rows cannot be split."""
    config = getattr(base, "config", None)
    kind, known = getattr(config, "model_type", None), (*DECODERS, *ENCODER_DECODERS)
    if kind not in known or not isinstance(base, tuple(class_of(auto, config) for auto in lm_classes(config))):
        raise ModelError(
            f"sequence_parallel is for language models of transformers of type {', '.join(sorted(known))}; got "
            f"{type(base).__name__}{f' of type {kind}' if kind else ''}. Train it without sequence_parallel."
        )
    if kind in ENCODER_DECODERS and not getattr(config, "is_encoder_decoder", True):  # their losses do not shift labels
        raise ModelError(
            f"sequence_parallel takes models of type {kind} with their encoder, and {type(base).__name__} is a decoder "
            "alone. Train it without sequence_parallel."
        )
    if is_registered(attention_of(config)):
        raise ShardingError("Ranks share this model's rows already: call sequence_parallel once.")
    if any(hasattr(param, "shard_meta") for param in base.parameters()):
        raise ShardingError("Call sequence_parallel before fully_shard: this model is sharded already.")
    if attention_of(config) not in plain_attentions():
        raise ModelError(
            f"sequence_parallel needs attn_implementation {' or '.join(plain_attentions())}; got "
            f"{attention_of(config)}. Set it when you build the model."
        )
    names = ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads")
    heads = min(getattr(config, name) for name in names if hasattr(config, name))
    if ranks > heads:
        raise ConfigError(
            f"sequence_parallel gives each rank at least one attention head, and {type(base).__name__} has {heads} for "
            f"{ranks} ranks. Use a group of at most {heads} ranks."
        )
    for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "output_router_logits"):
        if getattr(config, name, None):
            raise ConfigError(
                f"sequence_parallel cannot train with {name}: {getattr(config, name)} of the model's configuration: "
                f"{'ranks would leave out different layers' if 'drop' in name else 'that loss needs full rows'}. Set "
                "it to 0."
            )


def _hook_blocks(base: Any) -> None:
    """Register the hooks by which blocks get this rank's part of the tokens."""
    stacks = {"decoder": base}
    if base.config.is_encoder_decoder:
        stacks = {"encoder": base.get_encoder(), "decoder": base.get_decoder()}
    for stack, root in stacks.items():
        for number, block in enumerate(layers_of(root)):
            block.register_forward_pre_hook(partial(_enter_block, stack, number == 0), with_kwargs=True)
    shaped = _SHAPED_AGAIN.get(base.config.model_type)
    if shaped is not None:
        getattr(base.base_model, shaped).register_forward_hook(_fill_up)
        base.get_output_embeddings().register_forward_pre_hook(_cut_again)
    base.get_output_embeddings().register_forward_pre_hook(_note_tokens)


@untraced  # compiled blocks are alike but for what the first one does here
def _enter_block(
    stack: str,
    first: bool,  # noqa: FBT001
    block: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Give a block what belongs to this rank's tokens; the first of a stack also takes its part of hidden states."""
    shared: SharedRows | None = kwargs.get(KEY)
    if shared is None:
        return None
    rows = shared.inside(stack)
    changed: dict[str, Any] = {KEY: rows}
    rotations = kwargs.get("position_embeddings")  # cosines and sines, (1 or B, T, D)
    if rotations is not None:
        changed["position_embeddings"] = tuple(rows.own(one) for one in rotations)
    if first and args:
        args = (take_part(rows.comm, args[0], rows.tokens()), *args[1:])
    elif first:
        changed["hidden_states"] = take_part(rows.comm, kwargs["hidden_states"], rows.tokens())
    kwargs = {**kwargs, **changed}
    attention: Any = getattr(next(iter(getattr(block, "layer", ())), None), "SelfAttention", None)
    if attention is None:
        dtype = (args[0] if args else kwargs["hidden_states"]).dtype
        return tuple(rows.added(one, dtype) for one in args), {k: rows.added(one, dtype) for k, one in kwargs.items()}
    biases = _biases(attention, rows) if first else {}  # T5's, which have the mask put in by each block
    # Arguments stay positional or by name, as the other blocks get them.
    names = [*inspect.signature(type(block).forward).parameters][1:]
    args = tuple(biases.pop(name, value) for name, value in zip(names, args, strict=False))
    return args, kwargs | biases


def _biases(attention: Any, rows: SharedRows) -> dict[str, torch.Tensor]:
    """Return the biases that the first block of a stack is given in place of those of this rank's tokens."""
    none = torch.zeros((), device=attention.q.weight.device)  # in place of zeros of the size of all scores
    return {"position_bias": own_bias(attention, rows), "encoder_decoder_position_bias": none}


def _fill_up(_module: nn.Module, _args: Any, hidden: torch.Tensor) -> torch.Tensor | None:
    """Return hidden states of full rows, with zeros for other ranks' tokens."""
    rows = _rows.get()
    if rows is None:
        return None
    start, stop = rows.tokens("decoder").ranges[rows.comm.rank]
    return F.pad(hidden, (0, 0, start, rows.lengths["decoder"] - stop))


def _cut_again(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor] | None:
    rows = _rows.get()
    return None if rows is None else (take_part(rows.comm, args[0], rows.tokens("decoder")),)


def _note_tokens(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    rows = _rows.get()
    if rows is not None:
        rows.projected = args[0].shape[TOKENS]


def _replace_forward(base: Any, comm: Comm) -> None:
    """Replace the forward of a model, in its instance, where adapters and ``fully_shard`` leave it."""
    original = base.forward.__func__
    arguments = [*inspect.signature(original).parameters][1:]
    names = weakref.WeakKeyDictionary({module: name for name, module in base.named_modules()})
    resplit = Resplit(comm)

    @functools.wraps(original)
    def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(arguments, args, strict=False)) | kwargs
        if given.get("labels") is not None or _splits.get():
            return _shared_forward(model, partial(original, model), given, partial(SharedRows, resplit, names))
        if model.training and torch.is_grad_enabled():
            raise ShardingError(
                "Ranks share this model's rows, which it splits where it computes the loss: pass labels in training. "
                "Calls without labels are for evaluation: model.eval() or torch.no_grad()."
            )
        return original(model, *args, **kwargs)

    base.forward = MethodType(forward, base)


def _shared_forward(
    model: Any, forward: Any, given: dict[str, Any], share: Callable[[dict[str, int]], SharedRows]
) -> Any:
    """Run the forward with this rank's part of the rows; return its output, with labels also the loss of full rows."""
    refuse_arguments(model, given)
    labels, counted = given.pop("labels", None), given.pop("num_items_in_batch", None)
    as_dict = given.pop("return_dict", None)
    both = bool(model.config.is_encoder_decoder)
    if both and given.get("decoder_input_ids") is None and given.get("decoder_inputs_embeds") is None:
        given["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=labels)
    prefixes = {"encoder": "", "decoder": "decoder_"} if both else {"decoder": ""}
    rows = share({stack: tokens_of(given, prefix) for stack, prefix in prefixes.items()})
    if labels is not None:
        require_same_batch(rows.comm, {**given, "labels": labels, "num_items_in_batch": counted})
    require_tokens(rows, labels)
    before = _rows.set(rows)
    try:
        output = forward(**given, use_cache=False, return_dict=True, **{KEY: rows})
    finally:
        _rows.reset(before)
    _require_shared(rows, model)
    if labels is None:
        return output
    targets = labels if both else F.pad(labels[:, 1:], (0, 1), value=_IGNORED)
    loss = _loss(rows, output.logits, targets, counted)
    output = type(output)(**{"loss": loss, **output})
    wants_dict = model.config.return_dict if as_dict is None else as_dict
    return output if wants_dict else output.to_tuple()


def _require_shared(rows: SharedRows, model: Any) -> None:
    """Raise if blocks computed without exchange, or logits are not those of this rank's tokens."""
    start, stop = rows.tokens("decoder").ranges[rows.comm.rank]
    blocks, attended = len(layers_of(model)), (rows.resplit.count - rows.begun) // 2  # there and back
    if attended < blocks or rows.projected != stop - start:
        raise ModelError(
            f"{type(model).__name__} of this release of transformers does not hand its attention what it needs to "
            f"share rows: {attended} attentions of {blocks} blocks exchanged tokens, and logits are of "
            f"{rows.projected} tokens for {stop - start}. Train it without sequence_parallel."
        )


def _loss(rows: SharedRows, logits: torch.Tensor, targets: torch.Tensor, counted: Any) -> torch.Tensor:
    """Return the loss of full rows from the logits of this rank's tokens; ``targets``, (B, T), are those of all."""
    own = rows.own(targets.to(logits.device), "decoder")
    total = F.cross_entropy(logits.flatten(0, 1).float(), own.flatten(), ignore_index=_IGNORED, reduction="sum")
    number = (targets != _IGNORED).sum() if counted is None else counted
    number = number.to(total.device) if isinstance(number, torch.Tensor) else number
    return sum_over(rows.comm, "loss of shared rows", total) / number
