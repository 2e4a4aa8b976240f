"""The optimizers of ``training.optimizer``: construction, and the size of their state computed from the layout."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from fullshard.core.layout import ShardMeta, by_block
from fullshard.core.optim.adafactor import Adafactor, matrices_of
from fullshard.core.optim.average import ExponentialMovingAverage
from fullshard.core.optim.groups import decay_groups
from fullshard.core.optim.lowbit import BLOCK, SMALLEST, AdamW8bit, AdamWBF16
from fullshard.core.optim.muon import Muon, muon_groups
from fullshard.core.optim.shards import meta_of
from fullshard.errors import ConfigError
from fullshard.program.config import RunConfig, TrainingConfig

Groups = list[dict[str, Any]]

_FP32 = 4
"""Bytes of an element and of a step count that is a tensor: shards are fp32 in every precision."""

_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Names without weight decay in Hugging Face's Trainer; T5's table of relative positions is one, by its name."""

_TABLES = 2 * 256 * _FP32
"""Bytes of the two lookup tables of 8-bit codes, shared by all parameters."""


@dataclass(frozen=True)
class _Kind:
    title: str  # display name
    make: Callable[[Groups, RunConfig], Optimizer]  # makes the optimizer for the groups of ``_groups``
    state_bytes: Callable[[Groups], int]  # returns the bytes of state that this rank holds for these groups


def make_optimizer(
    model: nn.Module, config: RunConfig, *, decay_by: Literal["names", "dimensions"] = "names"
) -> Optimizer:
    """Make the optimizer of a run over all trainable parameters, in the same order everywhere. Every rank calls it.

    Weight decay is as in Hugging Face's Trainer, by names; ``decay_by="dimensions"``: of parameters with two or more,
    as in a run that an earlier version began. With Muon, vectors (biases, norms) have none.

    Raises:
        ConfigError: The model has no trainable parameters.
    """
    return _KINDS[config.training.optimizer].make(_groups(model, config.training, decay_by), config)


def moving_average(model: nn.Module, config: RunConfig) -> ExponentialMovingAverage | None:
    """Return the average of the trained weights that ``training.ema_decay`` asks for, or None; any rank."""
    decay = config.training.ema_decay
    return None if decay is None else ExponentialMovingAverage(model, decay)


def optimizer_title(name: str) -> str:
    """Return the display name of ``training.optimizer``."""
    return _KINDS[name].title


def expected_state_bytes(model: nn.Module, config: RunConfig) -> int:
    """Return the bytes of optimizer state that this rank holds after a step with all gradients; no communication.

    The sharded model may be on the meta device.

    Raises:
        ConfigError: The model has no trainable parameters.
    """
    return _KINDS[config.training.optimizer].state_bytes(_groups(model, config.training))


def held_state_bytes(optimizer: Optimizer, device: torch.device | None = None) -> int:
    """Return the bytes of optimizer state that this rank holds on ``device`` (None: on all devices).

    Tensors shared by several parameters count once.
    """
    values = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [v for v in values if isinstance(v, torch.Tensor) and device in (None, v.device)]
    return sum({(tensor.data_ptr(), tensor.nbytes): tensor.nbytes for tensor in tensors}.values())


def _groups(model: nn.Module, settings: TrainingConfig, decay_by: str = "names") -> Groups:
    """Return the trainable parameters in groups with their options, the same on every rank; no group is empty."""
    if settings.optimizer != "muon" and decay_by == "dimensions":
        return decay_groups(model, settings.weight_decay)
    if settings.optimizer != "muon":
        norms = {id(p) for one in model.modules() if isinstance(one, nn.LayerNorm) for p in one.parameters()}

        def undecayed(name: str, param: nn.Parameter) -> bool:
            return id(param) in norms or _UNDECAYED.search(name.lower()) is not None

        return decay_groups(model, settings.weight_decay, no_decay=undecayed)
    groups = muon_groups(model, weight_decay=settings.weight_decay)
    trainable = [{**group, "params": [p for p in group["params"] if p.requires_grad]} for group in groups]
    if not any(group["params"] for group in trainable):
        raise ConfigError("The model has no trainable parameters.")
    return [group for group in trainable if group["params"]]


def _held(groups: Groups) -> Iterator[tuple[dict[str, Any], ShardMeta, int]]:
    """Yield for each parameter with elements on this rank: its group, its layout, and the number of elements."""
    for group in groups:
        for meta in map(meta_of, group["params"]):
            start, stop = meta.element_range
            if stop > start:
                yield group, meta, stop - start


def _adam_options(settings: TrainingConfig) -> dict[str, Any]:
    betas = (settings.adam_beta1, settings.adam_beta2)
    return {"lr": settings.learning_rate, "betas": betas, "eps": settings.adam_epsilon}


def _adafactor(groups: Groups, config: RunConfig) -> Optimizer:
    rate = config.training.learning_rate
    # With a learning rate, as in Hugging Face's Trainer; without one, as T5 was trained.
    return Adafactor(groups, lr=rate, scale_parameter=rate is None, relative_step=rate is None)


def _adafactor_bytes(groups: Groups) -> int:
    def numbers(meta: ShardMeta, numel: int) -> int:
        matrices, shape = matrices_of(meta), meta.global_shape
        if matrices is None:
            return numel
        return matrices.part_of_rows(shape[:-1]).numel + matrices.part_of_columns((*shape[:-2], shape[-1])).numel

    return sum(_FP32 * numbers(meta, numel) + _FP32 for _, meta, numel in _held(groups))


def _muon(groups: Groups, config: RunConfig) -> Optimizer:
    settings = config.training
    assert settings.learning_rate is not None, "the schema requires one"
    return Muon(
        groups,
        lr=settings.learning_rate,
        adjust_lr_fn="match_rms_adamw",
        adamw_betas=(settings.adam_beta1, settings.adam_beta2),
        adamw_eps=settings.adam_epsilon,
    )


def _adamw_8bit_bytes(groups: Groups) -> int:
    narrow = [(meta, numel) for _, meta, numel in _held(groups) if meta.placement.numel >= SMALLEST]
    wide = [numel for _, meta, numel in _held(groups) if meta.placement.numel < SMALLEST]
    codes = sum(2 * (numel + _FP32 * by_block(meta, BLOCK).numel) for meta, numel in narrow)
    return codes + (_TABLES if narrow else 0) + 2 * _FP32 * sum(wide)


_KINDS: Mapping[str, _Kind] = {
    "adamw": _Kind(
        "AdamW",
        lambda groups, config: torch.optim.AdamW(groups, fused=True, **_adam_options(config.training)),
        lambda groups: sum(2 * _FP32 * numel + _FP32 for _, _, numel in _held(groups)),
    ),
    "adafactor": _Kind("Adafactor", _adafactor, _adafactor_bytes),
    "muon": _Kind(
        "Muon",
        _muon,
        lambda groups: sum(
            _FP32 * numel if group["use_muon"] else 2 * _FP32 * numel + _FP32 for group, _, numel in _held(groups)
        ),
    ),
    "adamw_8bit": _Kind(
        "8-bit AdamW", lambda groups, config: AdamW8bit(groups, **_adam_options(config.training)), _adamw_8bit_bytes
    ),
    "adamw_bf16": _Kind(
        "AdamW with bf16 state",
        lambda groups, config: AdamWBF16(groups, seed=config.seed, **_adam_options(config.training)),
        lambda groups: sum(2 * 2 * numel + _FP32 for _, _, numel in _held(groups)),
    ),
}
"""Optimizers by their value of ``training.optimizer``."""
