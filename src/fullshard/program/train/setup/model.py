"""The model of a run: built or loaded, changed for training, sharded, and its forward on a batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from fullshard.core.comm import Comm, machine_axes, on_gpu, whole_memory_bytes
from fullshard.core.engine import WeightSource, check_wrapped, fully_shard
from fullshard.core.engine.registry import runtime_of
from fullshard.core.engine.setup.weights import WantedTensor
from fullshard.core.engine.setup.wrap import BY_CLASS, ONE_UNIT
from fullshard.core.policy import (
    BackwardPrefetch,
    CPUOffload,
    MinNumel,
    MixedPrecision,
    ShardingStrategy,
    TransformerBlocks,
    WrapPolicy,
)
from fullshard.core.sequence import own_places, own_tokens, rows_split, sharers_of
from fullshard.core.transformers_private import rows_apart, set_attention
from fullshard.errors import ConfigError, ModelError, WrapError
from fullshard.program.config import RunConfig, require_base
from fullshard.program.data import IGNORED_LABEL, Batch
from fullshard.program.models import (
    PLAIN,
    SPLIT_BASE,
    AdapterSpec,
    AdapterWeights,
    GrownWeights,
    Objective,
    Preference,
    RouterLoss,
    add_adapter,
    add_embedding_noise,
    add_rows,
    base_of,
    blocks_of,
    build_model,
    build_skeleton,
    can_fuse,
    converted_names,
    decoder_inputs,
    enable_activation_checkpointing,
    fuse_head,
    fused_head_of,
    init_of,
    is_causal,
    lacks_rows,
    load_model,
    model_loss,
    rates_of_dropout,
    require_fp16_fit,
    require_left_to_right,
    require_plain_loss,
    resolve_adapter,
    resolve_model,
    router_loss,
    row_loss,
    row_sums,
    saved_adapter,
    set_attention_dropout,
    trains_rows,
)
from fullshard.program.models.loss import PackedLabels
from fullshard.program.models.packing import PackedRows, enable_packing, packed_inputs
from fullshard.program.speed import WAYS, Facts, apply_ways, biased_layers
from fullshard.program.train.setup.activation_offload import ActivationOffload
from fullshard.program.train.setup.devices import Choice, Devices, for_devices
from fullshard.program.train.setup.float8 import float8_notes, use_float8
from fullshard.program.train.setup.frozen import freeze, frozen_notes
from fullshard.program.train.setup.quantization import (
    quantise_outline,
    quantises_head,
    quantization_notes,
    quantize_of,
    require_by_shard,
    require_quantizable,
)
from fullshard.program.train.setup.sequence import share_rows
from fullshard.sizes import format_bytes
from fullshard.state.saving import Pretrained

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CPU = torch.device("cpu")

SHARE_OF_LOGITS = 0.05
"""Share of the device's memory that all logits of a micro-batch may take before the loss is computed in the head."""

_WIDE = {"bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"}
"""Dtype of gathered weights and activations, by precision."""

_CASTS_ITSELF = {"SwitchTransformersTop1Router"}
"""Classes of transformers whose forward casts the module to float32; a gathered parameter cannot change its dtype."""


@dataclass(frozen=True)
class ReadyModel:
    """A model that is ready to be sharded."""

    model: PreTrainedModel  # on the CPU or the meta device; with an adapter, peft's model around it
    weights: WeightSource | None  # source of the weights; None: the model has its values
    notes: tuple[str, ...]  # notes for the user


def prepare_model(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path | None = None,
    *,
    filled: bool = False,
    memory_bytes: int | None = None,
) -> ReadyModel:
    """Build the model, or its skeleton on the meta device, and prepare it for training; any rank.

    ``directory`` is ``model.path`` resolved by ``resolve_model``; None: resolved here. ``filled``: a snapshot fills all
    trained parameters later; then weights are neither made nor read, unless some are frozen and so not in the snapshot.
    ``memory_bytes`` is the smallest memory of all ranks' devices, which decides ``training.fused_cross_entropy: auto``
    alike on every rank; None: this host's, or that of the planned device.

    Raises:
        UserError: The model cannot be built, or the settings do not match it.
    """
    if config.model.path is None:
        require_base(config.model)
        ready = _made(config, tokenizer, memory_bytes, filled=filled)
    else:
        directory = directory or resolve_model(config.model.path)
        ready = ReadyModel(*choose_loader(make_model(config, tokenizer, directory), config, tokenizer, directory))
        ready = _adapted(
            replace(ready, model=_changed(ready.model, config, memory_bytes)),
            config,
            tokenizer,
            directory,
            memory_bytes,
        )
        if filled and ready.weights is not None and _all_trained(ready.model):
            ready = replace(ready, weights=UnreadWeights())
    _change_forward(ready.model, config)
    ready = replace(ready, notes=(*ready.notes, *frozen_notes(ready.model, config)))
    loss = loss_choice(ready.model, config, memory_bytes)
    if loss is not None and _fuses(base_of(ready.model), config, memory_bytes):
        ready = replace(ready, notes=(*ready.notes, str(loss)))
    return replace(ready, notes=(*ready.notes, *float8_notes(ready.model, config)))


def _made(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, memory_bytes: int | None, *, filled: bool
) -> ReadyModel:
    """Return the model of ``model.config``; on the meta device if its values come later."""
    if filled:
        with torch.device("meta"):
            skeleton = _changed(make_model(config, tokenizer), config, memory_bytes)
        if _all_trained(skeleton):
            return ReadyModel(skeleton, UnreadWeights(), ())
    return ReadyModel(_changed(make_model(config, tokenizer), config, memory_bytes), None, ())


def _all_trained(model: nn.Module) -> bool:
    return all(parameter.requires_grad for parameter in model.parameters())


def _change_forward(model: PreTrainedModel, config: RunConfig) -> None:
    """Change the model's forward in place, after its adapter was added."""
    if config.training.neftune_noise_alpha is not None:
        add_embedding_noise(model, config.training.neftune_noise_alpha)
    asked = config.training.gradient_checkpointing
    if asked not in (False, "auto"):  # the memory check resolves auto; where nothing is planned, nothing is recomputed
        enable_activation_checkpointing(model, None if asked is True else int(asked))
    if config.training.packing:
        longest = config.data.max_source_length + config.data.max_target_length
        enable_packing(model, longest, windows="varlen" in config.ways)


def make_model(config: RunConfig, tokenizer: PreTrainedTokenizerBase, directory: Path | None = None) -> PreTrainedModel:
    """Return the model of ``model.config`` on the CPU, the same on every rank, or of ``model.path`` on the meta device.

    The latter may lack rows for new tokens. ``directory`` is ``model.path`` resolved by ``resolve_model``; None:
    resolved here.

    Raises:
        ModelError: It cannot be built.
    """
    settings = config.model
    kind, attention = settings.model_class, settings.attn_implementation
    if settings.path is not None:
        directory = directory or resolve_model(settings.path)
        return build_skeleton(directory, tokenizer, model_class=kind, attention=attention, grows=_may_grow(config))
    assert settings.config is not None, "the schema requires path or config"
    return build_model(settings.config, tokenizer, model_class=kind, attention=attention, seed=config.seed)


def _may_grow(config: RunConfig) -> bool:
    """Return whether the tables of ``model.path`` may lack rows for ids of the tokenizer, which has new tokens."""
    adapter = config.model.adapter
    begun = None if adapter is None or adapter.path is None else resolve_adapter(adapter.path)
    return bool(config.model.new_tokens) or (begun is not None and trains_rows(begun))


def choose_loader(
    skeleton: PreTrainedModel, config: RunConfig, tokenizer: PreTrainedTokenizerBase, directory: Path | None = None
) -> tuple[PreTrainedModel, Pretrained | GrownWeights | None, tuple[str, ...]]:
    """Decide whether ``model.path`` can be read shard by shard, or must be loaded in full by transformers.

    ``skeleton`` is the model on the meta device, ``directory`` the resolved ``model.path``; None: resolved here.

    Returns:
        The skeleton and the weights to shard it with, or the loaded model, None and a note for the user.

    Raises:
        CheckpointError: A file is missing or damaged.
        ConfigError: The model would be loaded in full, and ``model.quantization`` is set.
        ModelError: Transformers cannot load it either.
    """
    assert config.model.path is not None, "called for model.path only"
    directory = directory or resolve_model(config.model.path)
    weights = Pretrained(directory, quantize=quantize_of(config))
    converted = converted_names(skeleton, weights.names())
    reason = f"transformers converts {len(converted)} of its tensors ({converted[0]}, …)" if converted else None
    reason = reason or weights.misfit(skeleton)
    if reason is None and (
        lacks_rows(skeleton.config, tokenizer) or (config.model.adapter and config.model.new_tokens)
    ):
        note = f"the embeddings of {config.model.path} were read in full on every rank, to take rows of new tokens from"
        return skeleton, GrownWeights(skeleton, weights, tokenizer, config.seed), (note,)
    if reason is None:
        return skeleton, weights, ()
    require_by_shard(config, reason)
    return _load_full(config, tokenizer, directory), None, (_full_load_note(config, reason),)


def _load_full(config: RunConfig, tokenizer: PreTrainedTokenizerBase, directory: Path) -> PreTrainedModel:
    settings = config.model
    kind, attention = settings.model_class, settings.attn_implementation
    grow = config.seed if _may_grow(config) else None
    return load_model(directory, tokenizer, model_class=kind, attention=attention, grow=grow)


def _full_load_note(config: RunConfig, reason: str) -> str:
    return f"{config.model.path} was loaded in full on every rank, not shard by shard: {reason}"


def _changed(model: PreTrainedModel, config: RunConfig, memory_bytes: int | None) -> PreTrainedModel:
    """Change the model in place; called before its adapter is added."""
    freeze(model, config)
    if config.training.objective != "sft" and config.model.path is not None:
        for owner, name, _ in rates_of_dropout(model.modules()):  # the configuration that is published keeps them
            setattr(owner, name, 0.0)
    if config.model.attention_dropout is not None:
        set_attention_dropout(model, config.model.attention_dropout)
    if refuses_fp16(config):
        require_fp16_fit(model.config.model_type)
    quantised = quantises_head(model, config)
    fuses = _fuses(model, config, memory_bytes)
    if config.training.fused_cross_entropy is True:
        fuse_head(model)
    elif (fuses or config.sharding.tables != "gather") and not quantised and can_fuse(model):
        fuse_head(model, fuses=fuses)
    require_plain_loss(model.config)
    require_left_to_right(model.config)
    require_quantizable(model, config)
    return model


def _fuses(model: PreTrainedModel, config: RunConfig, memory_bytes: int | None) -> bool:
    """Return ``training.fused_cross_entropy``; ``auto``: whether float32 logits could take more than 5 % of memory."""
    asked = config.training.fused_cross_entropy
    if asked != "auto":
        return asked
    return _logits_bytes(model, config) > SHARE_OF_LOGITS * (memory_bytes or whole_memory_bytes(CPU))


def _logits_bytes(model: PreTrainedModel, config: RunConfig) -> int:
    """Return the most bytes of a micro-batch's logits in float32."""
    words = model.config.get_text_config().vocab_size
    tokens = config.data.max_target_length + is_causal(model) * config.data.max_source_length
    tokens = tokens if config.data.text_column is None else config.data.max_source_length  # no target is longer
    rows = config.training.per_device_train_batch_size * (1 if config.training.objective in ("sft", "kto") else 2)
    tokens = config.training.per_device_train_batch_tokens or rows * tokens
    return 4 * tokens * words


def loss_choice(model: nn.Module, config: RunConfig, memory_bytes: int | None = None) -> Choice | None:
    """Return what ``training.fused_cross_entropy: auto`` is for a prepared model; None if it is set; any rank.

    ``memory_bytes``: see :func:`prepare_model`.
    """
    if config.training.fused_cross_entropy != "auto":
        return None
    base, memory = base_of(model), memory_bytes or whole_memory_bytes(CPU)
    fuses = _fuses(base, config, memory)
    limit = f"{100 * SHARE_OF_LOGITS:.0f} % of {format_bytes(memory)} of memory"
    why = f"logits of up to {format_bytes(_logits_bytes(base, config))}, {'over' if fuses else 'within'} {limit}"
    if fuses and fused_head_of(model) is None:
        return Choice("training.fused_cross_entropy", "false", f"{why}, but this output layer cannot compute the loss")
    return Choice("training.fused_cross_entropy", str(fuses).lower(), why)


def own_loss(model: nn.Module, config: RunConfig) -> tuple[RouterLoss | None, tuple[str, ...]]:
    """Return the routers' own loss to train, or None, and notes for the user; any rank. ``model`` has its adapter.

    Raises:
        ConfigError: It cannot be trained.
    """
    router, note = router_loss(base_of(model).config, config.model.output_router_logits)
    if router is not None and config.model.adapter is not None and _spec_of(config).type == "prefix":
        raise ConfigError(
            "A prefix adapter is incompatible with the routers' own loss: transformers counts the prefix as tokens "
            "that the routers have seen. Set model.output_router_logits: false, or use another adapter."
        )
    if router is not None and config.training.objective != "sft":
        raise ConfigError(
            f"The routers' own loss has not been tried with training.objective: {config.training.objective}. Set "
            "model.output_router_logits: false."
        )
    if router is not None and config.training.packing:
        raise ConfigError(
            "training.packing is incompatible with the routers' own loss: transformers counts its tokens by a padding "
            "mask, which packed rows do not have. Set packing: false, or model.output_router_logits: false."
        )
    return router, () if note is None else (note,)


def _adapted(
    ready: ReadyModel, config: RunConfig, tokenizer: PreTrainedTokenizerBase, directory: Path, memory_bytes: int | None
) -> ReadyModel:
    settings = config.model.adapter
    if settings is None:
        return ready
    spec = _spec_of(config, tokenizer)
    _check_adapter(config, spec.type, causal=is_causal(ready.model))
    adapted, notes = add_adapter(ready.model, spec, seed=config.seed), ready.notes
    weights: WeightSource | None = ready.weights
    if adapted.lacking is not None:
        reason = f"peft computes {adapted.lacking} from its weights"
        require_by_shard(config, reason)
        notes = (*notes, _full_load_note(config, reason))
        full = _changed(_load_full(config, tokenizer, directory), config, memory_bytes)
        adapted, weights = add_adapter(full, spec, seed=config.seed), None
    elif weights is not None:
        weights = AdapterWeights(weights, adapted.values)
    _require_fused(adapted.model, config)
    share = adapted.trainable / adapted.total
    begun = "" if spec.path is None else f" of {settings.path}, trained over {saved_adapter(spec.path)[1]}"
    trained = (
        f"{spec.type} adapter{begun}: {adapted.trainable:,} of {adapted.total:,} parameters are trained ({share:.3%})"
    )
    return ReadyModel(adapted.model, weights, (*notes, *quantization_notes(config), trained))


def _require_fused(model: nn.Module, config: RunConfig) -> None:
    if config.training.fused_cross_entropy is True and fused_head_of(model) is None:
        raise ModelError(
            "The adapter changes the output layer, in which fused_cross_entropy computes the loss. Remove one of them."
        )


def _spec_of(config: RunConfig, tokenizer: PreTrainedTokenizerBase | None = None) -> AdapterSpec:
    """Return type and options of the run's adapter, of which it has one; without a tokenizer, without new tokens."""
    settings = config.model.adapter
    assert settings is not None, "called where there is one"
    values, base = dict(settings), str(config.model.path)
    if settings.path is None:
        vocabulary = {} if tokenizer is None else tokenizer.get_vocab()
        rows = tuple(vocabulary[token] for token in config.model.new_tokens if token in vocabulary)
        return AdapterSpec(base=base, new_tokens=rows, **values)
    directory = resolve_adapter(settings.path)
    return AdapterSpec(type=saved_adapter(directory)[0], base=base, path=directory)


def _require_reference(config: RunConfig) -> None:
    """Refuse a new adapter under which the base is not the model that a reference is of.

    Raises:
        ConfigError: Its values are of peft's that change the base's weights, and do not add up to them again.
    """
    adapter, objective = config.model.adapter, config.training.objective
    if adapter is None or adapter.path is not None or not config.training.preference_has_reference:
        return
    init = init_of(adapter.options)
    if init not in ("none", "true", "false", "gaussian", "orthogonal", *SPLIT_BASE):
        raise ConfigError(
            f"init_lora_weights: {init} changes the base model's weights, and base and adapter together only "
            f"approximate them: the reference of training.objective: {objective} would be another model. Leave "
            f"init_lora_weights out, or set it to {' or '.join(SPLIT_BASE)}."
        )


def _check_adapter(config: RunConfig, kind: str, *, causal: bool) -> None:
    """Refuse combinations for which peft computes a wrong result.

    Raises:
        ConfigError: The adapter is incompatible with another setting.
    """
    _require_reference(config)
    training = config.training
    if kind in ("prompt", "prefix") and training.packing:
        raise ConfigError(
            f"A {kind} adapter is incompatible with training.packing: its vectors stand only before the first row of a "
            "packed sequence. Set packing: false."
        )
    if kind in ("prompt", "prefix") and config.sharding.sequence_parallel > 1:
        raise ConfigError(
            f"A {kind} adapter is incompatible with sharding.sequence_parallel: its vectors stand before the tokens "
            "that ranks share. Use another adapter, or set sequence_parallel: 1."
        )
    if kind == "prefix" and training.gradient_checkpointing not in (False, "auto"):
        raise ConfigError(
            "A prefix adapter is incompatible with gradient_checkpointing: transformers mistakes the prefix for a "
            "key-value cache and drops it. Remove one of them."
        )
    if kind == "prompt" and causal and training.eval_strategy != "no" and training.per_device_eval_batch_size > 1:
        raise ConfigError(
            "With a prompt adapter, padding changes the text of a decoder-only model, because peft counts padding as "
            "positions. Set per_device_eval_batch_size to 1, so that nothing is padded, or use a prefix adapter."
        )


def shard_model(model: nn.Module, config: RunConfig, comm: Comm, weights: WeightSource | None = None) -> None:
    """Shard a model on the CPU or the meta device in place by the run's settings; every rank calls it.

    ``weights`` is None for the model's own values, or initial ones for a meta model.

    Raises:
        UserError: Wrapping, precision or weights do not match the model.
    """
    if isinstance(weights, AdapterWeights):
        weights.compute_magnitudes(model, comm)
    config = for_devices(config, Devices.of_ranks(comm))
    use_float8(model, config, comm.size)
    if attention_choice(model, config, gpu=on_gpu(comm.device)) is not None:
        set_attention(base_of(model), "eager")
    share_rows(model, config, comm)
    if config.ways:
        apply_ways(cast("PreTrainedModel", model), config.ways, speed_facts(config, comm.device))
    try:
        _shard(model, config, comm, weights)
        check_wrapped(model)
        if config.training.activation_offload and comm.device.type == "cuda":
            ActivationOffload(model, blocks_of(model), runtime_of(model).device)
    except WrapError as error:
        raise WrapError(_with_run_file_remedies(str(error), config)) from error


def attention_choice(model: nn.Module, config: RunConfig, *, gpu: bool) -> Choice | None:
    """Return the attention that a run chooses itself: on GPUs for T5's family, if nothing else is asked for."""
    asked = config.model.attn_implementation is not None or any(WAYS[way].part == "attention" for way in config.ways)
    if not gpu or asked or not biased_layers(base_of(model)):
        return None
    why = "with T5's trained bias, transformers' own choice takes 1.2 to 1.5 times as long on GPUs"
    return Choice("model.attn_implementation", "eager", why)


def speed_facts(config: RunConfig, device: torch.device) -> Facts:
    """Return what ways may ask about a run whose precision is chosen; any rank."""
    dtype = torch.float32 if config.training.precision == "fp32" else getattr(torch, _WIDE[config.training.precision])
    longest = config.data.max_source_length + config.data.max_target_length
    return Facts(device, dtype, config.training.packing, longest)


def _with_run_file_remedies(text: str, config: RunConfig) -> str:
    """Replace the library's remedies in an error about wrapping by the run file's."""
    size = config.sharding.wrap
    own = {ONE_UNIT: "set sharding.wrap: none", BY_CLASS: "sharding.wrap: [Block, ...]"}
    if isinstance(size, int):
        own[f"MinNumel({size:,})"] = f"sharding.wrap: {size}"
    for theirs, ours in own.items():
        text = text.replace(theirs, ours)
    return text


def _shard(model: nn.Module, config: RunConfig, comm: Comm, weights: WeightSource | None) -> None:
    settings = config.sharding
    strategy = ShardingStrategy(settings.strategy)
    fully_shard(
        model,
        machine_axes(comm, config.nproc) if strategy.needs_two_axes else comm,
        wrap=_wrap_policy(settings.wrap),
        strategy=strategy,
        mp_policy=_mixed_precision(model, config),
        prefetch=BackwardPrefetch(settings.prefetch),
        offload_policy=CPUOffload() if settings.cpu_offload else None,
        frozen=settings.frozen,
        tables=settings.tables,
        device=comm.device,
        weights=weights,
    )


def _mixed_precision(model: nn.Module, config: RunConfig) -> MixedPrecision:
    if config.training.precision == "fp32":
        return MixedPrecision()
    kept = _CASTS_ITSELF & {type(module).__name__ for module in model.modules()}
    # An adapter is saved without its frozen base; other frozen weights are part of the model that is published.
    keep_frozen = bool(config.model.freeze or config.model.train)
    return MixedPrecision(
        param=_WIDE[config.training.precision], reduce="float32", keep_fp32=tuple(kept), keep_frozen=keep_frozen
    )


def _wrap_policy(wrap: str | int | tuple[str, ...]) -> WrapPolicy:
    if isinstance(wrap, tuple):
        return TransformerBlocks(wrap)
    if isinstance(wrap, int):
        return MinNumel(wrap)
    return None if wrap == "none" else wrap


def outline_model(config: RunConfig, tokenizer: PreTrainedTokenizerBase, memory_bytes: int | None = None) -> nn.Module:
    """Return the model without weights, on the meta device, with its adapter, to inspect its units; any process.

    ``memory_bytes``: see :func:`prepare_model`.

    Raises:
        UserError: The model cannot be built, or the settings do not match it.
    """
    with torch.device("meta"):
        model = make_model(config, tokenizer)
        add_rows(model, tokenizer, config.seed)
        model = _changed(model, config, memory_bytes)
    settings = config.model.adapter
    if settings is not None:
        spec = _spec_of(config, tokenizer)
        _check_adapter(config, spec.type, causal=is_causal(model))
        adapted = add_adapter(model, spec, seed=config.seed)
        if adapted.model is None:
            raise ModelError(
                f"peft makes this adapter from the model's weights ({adapted.lacking}), and only the run itself reads "
                "them. Use another adapter, or another init_lora_weights in model.adapter.options."
            )
        model = adapted.model
        _require_fused(model, config)
        quantise_outline(model, config)
    _change_forward(model, config)
    return model


def refuses_fp16(config: RunConfig) -> bool:
    """Return True if models that are known to overflow in fp16 are refused."""
    return config.training.precision == "fp16" and not config.training.allow_fp16


class UnreadWeights:
    """A weight source that reads nothing: shards and persistent buffers get memory as if it did."""

    def open(self, model: nn.Module, wanted: list[WantedTensor]) -> UnreadWeights:
        """See :meth:`WeightSource.open`: claims that every tensor fits."""
        self._buffers = {name for one in wanted if one.buffer for name in one.names}
        return self

    def has(self, name: str) -> bool:
        """See :meth:`WeightReader.has`: buffers need memory of their own, parameters already have it in the shards."""
        return name in self._buffers

    def read(self, name: str, start: int, out: torch.Tensor) -> None:
        """See :meth:`WeightReader.read`: does nothing."""


def model_inputs(model: PreTrainedModel, batch: Batch, *, causal: bool, routed: bool = False) -> dict[str, Any]:
    """Return the keyword arguments of the model's forward for a packed or padded batch on its device; any rank.

    The logits are for ``batch.labels_BT``; a causal model's logits at position t are for label t + 1. With ``routed``
    the routers' own loss is computed, which counts tokens by the mask.
    """
    if batch.packing is not None:
        packing = batch.packing
        rows = PackedRows(
            input_ids_BS=batch.input_ids_BS,
            labels_BT=batch.labels_BT,
            segments_BS=packing.segments_BS,
            target_segments_BT=packing.target_segments_BT,
            positions_BS=packing.positions_BS,
            starts=packing.starts,
            longest=packing.longest,
        )
        return packed_inputs(model, rows)
    inputs = {"input_ids": batch.input_ids_BS, "use_cache": False}
    if causal and not routed:
        # No token sees the padding, which is behind it. Without a mask the fastest kernels apply, and nothing reads
        # on the CPU whether the mask hides anything.
        return inputs
    inputs["attention_mask"] = batch.attention_mask_BS
    if causal:
        return inputs
    return {**inputs, "decoder_input_ids": decoder_inputs(model, batch.labels_BT)}


def loss_sum(
    model: PreTrainedModel,
    batch: Batch,
    *,
    causal: bool,
    objective: Objective = PLAIN,
    expected_gradient: float | Tensor = 1.0,
) -> Tensor:
    """Return the loss summed over the target tokens of one batch; every rank calls it, as it runs a forward.

    0-d float32; zero for a batch of filler rows. Of ranks that share rows each returns that of its own tokens.
    ``expected_gradient`` is the factor that the loss is multiplied by before backward; see ``model_loss``.
    """
    return losses(model, batch, None, causal=causal, objective=objective, expected_gradient=expected_gradient)[0]


def losses(
    model: PreTrainedModel,
    batch: Batch,
    router: RouterLoss | None,
    *,
    causal: bool,
    objective: Objective = PLAIN,
    expected_gradient: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor | None]:
    """Return the loss of :func:`loss_sum`, and of the same forward the routers' own loss, 0-d, or None."""
    inputs = model_inputs(model, batch, causal=causal, routed=router is not None)
    own: list[Tensor] = []
    sharers = sharers_of(model)
    labels_BT, weights_BT, targets = _predicted(batch, causal=causal), batch.weights_BT, batch.target_tokens
    if causal:
        weights_BT = None if weights_BT is None else functional.pad(weights_BT[:, 1:], (0, 1), value=1.0)
    if sharers is not None:
        targets = sum(batch.targets_T[slice(*own_places(sharers, labels_BT.shape[1]))])
        labels_BT = own_tokens(sharers, labels_BT)
        weights_BT = None if weights_BT is None else own_tokens(sharers, weights_BT)

    def forward() -> Tensor:
        with (
            nullcontext() if sharers is None else rows_split(),
            rows_apart() if batch.packing is None else nullcontext(),
        ):
            output = model(**inputs, **({} if router is None else {"output_router_logits": True}))
        if router is not None:
            own.append(router.of(output))
        return output.logits

    loss = model_loss(
        model,
        forward,
        labels_BT,
        objective,
        expected_gradient=expected_gradient,
        weights_BT=weights_BT,
        targets=targets,
    )
    return loss, own[0] if own else None


def _predicted(batch: Batch, *, causal: bool) -> Tensor:
    """Return the label that each position predicts."""
    # Position t of a causal model predicts label t + 1; the last position predicts nothing.
    return functional.pad(batch.labels_BT[:, 1:], (0, 1), value=IGNORED_LABEL) if causal else batch.labels_BT


def preference_of(config: RunConfig) -> Preference | None:
    """Return the loss of preferences that a run trains; None: it learns targets."""
    settings = config.training
    if settings.objective == "sft":
        return None
    options = (settings.beta, settings.simpo_gamma, settings.desirable_weight, settings.undesirable_weight)
    return Preference(settings.objective, *options)


def row_logps(model: PreTrainedModel, batch: Batch, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each row's targets, summed over them, (B,), and their number, (B,).

    Every rank calls it, as it runs a forward, without gradients. Zero for fillers.
    """
    found: list[Tensor] = []

    def note(logps_B: Tensor) -> Tensor:
        found.append(logps_B)
        return logps_B.sum()

    with torch.no_grad():
        _of_rows(model, batch, note, causal=causal)
    return found[0], _num_targets(batch, causal=causal)


def _num_targets(batch: Batch, *, causal: bool) -> Tensor:
    counted, packed = _predicted(batch, causal=causal) != IGNORED_LABEL, _packed_labels(batch)
    return counted.sum(1) if packed is None else row_sums(counted, packed)


def _packed_labels(batch: Batch) -> PackedLabels | None:
    """Return the row of each label, which a causal model predicts at a token of the same row."""
    return None if batch.packing is None else (batch.packing.target_segments_BT - 1, len(batch.indices))


def summed_divergence(model: PreTrainedModel, batch: Batch, *, causal: bool) -> Tensor:
    """Return by how much unrelated completions are likelier than under the reference, summed over them; 0-d.

    Every rank calls it, as it runs a forward, without gradients. Zero without such completions.
    """
    other = None if batch.pairs is None else batch.pairs.unrelated
    if other is None or other.pairs is None:
        return torch.zeros((), device=batch.input_ids_BS.device)
    gains_P = row_logps(model, other, causal=causal)[0] - other.pairs.reference_B
    return torch.dot(gains_P, other.pairs.counts_P.to(gains_P.dtype))


def preference_loss(
    model: PreTrainedModel, batch: Batch, preference: Preference, divergence: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return the loss summed over the preferences of one batch, 0-d, and :attr:`PreferenceLosses.rewards` summed, (5,).

    Every rank calls it, as it runs a forward: of the chosen and the rejected completions together. ``divergence`` is
    the mean of :func:`summed_divergence` over the step, at least 0; not read of pairs.
    """
    pairs, tokens_B = batch.pairs, _num_targets(batch, causal=causal)
    assert pairs is not None, "batches of preferences have them"
    rewards: list[Tensor] = []

    def loss(logps_B: Tensor) -> Tensor:
        reference_B, counts_P = pairs.reference_B.to(logps_B.dtype), pairs.counts_P.to(logps_B.dtype)
        if pairs.desirable_P is None:
            found = preference.of_pairs(logps_B, tokens_B, reference_B)
        else:
            found = preference.of_labels(logps_B, reference_B, pairs.desirable_P, divergence.to(logps_B.dtype))
        rewards.append(found.rewards @ counts_P)
        return torch.dot(found.losses_P, counts_P)

    return _of_rows(model, batch, loss, causal=causal), rewards[0]


def _of_rows(model: PreTrainedModel, batch: Batch, of_rows: Callable[[Tensor], Tensor], *, causal: bool) -> Tensor:
    inputs = model_inputs(model, batch, causal=causal)

    def forward() -> Tensor:
        with rows_apart() if batch.packing is None else nullcontext():
            return model(**inputs).logits

    labels_BT, packed = _predicted(batch, causal=causal), _packed_labels(batch)
    return row_loss(model, forward, labels_BT, of_rows, targets=batch.target_tokens, packed=packed)
