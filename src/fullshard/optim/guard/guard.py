"""Optimizers that are not elementwise, on shards: refused instead of training silently wrong.

An elementwise optimizer (SGD, Adam, Lion…) computes each element's update from that element's gradients alone, so that
a shard of the parameter is as good as the whole. Others look at rows, columns, norms or products of a whole matrix:
given a part of one, they run and compute something else. torch calls the hooks of this module around every optimizer's
step; what it costs is a look-up of the class. A class of which nothing is known is tried once, on a small matrix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fullshard.errors import ConfigError
from fullshard.layout import ShardMeta
from fullshard.optim.guard.claims import note_claims
from fullshard.optim.guard.trial import Cut, maker_like, steps_parts_alike
from fullshard.optim.shards import is_split, meta_of

BLOCK = 256
"""Elements that bitsandbytes (``blocksize``) and torchao (``block_size``; 128 where of 4 bits) quantise together."""

_QUANTISING = ("bitsandbytes.", "torchao.")
"""Libraries whose optimizers are judged by name and blocks: on the CPU they fail, or compile kernels first."""

_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        *("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD"),
        *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam"),
    )
)
_OURS = {
    "transformers.optimization.Adafactor": "fullshard.optim.Adafactor, which has transformers' arguments",
    "torch.optim.Adafactor": "fullshard.optim.TorchAdafactor, which has torch's arguments",
    "torch.optim.Muon": "fullshard.optim.Muon",
}
_OURS_BY_NAME = {
    "adafactor": "fullshard.optim.Adafactor or TorchAdafactor",
    "muon": "fullshard.optim.Muon",
    "normuon": "fullshard.optim.Muon",
}
_ELSE = "an elementwise one (AdamW, SGD, Lion, Sophia…), or fullshard.optim's Adafactor or Muon"
_MATRICES = frozenset(
    (
        *("adafactor", "adamuon", "adammini", "adalomo", "adan8bit", "apollo", "apolloadamw", "came", "cautiousmuon"),
        *("conda", "dion", "distributedmuon", "distributedshampoo", "fira", "fromage", "fusedlamb", "galoreadafactor"),
        *("galoreadamw", "galoreadamw8bit", "gravity", "kron", "lamb", "lambc", "lars", "larc", "lomo", "muon"),
        *("muonwithauxadam", "normuon", "novograd", "psgd", "psgdkron", "ranger21", "scalableshampoo", "scion"),
        *("shampoo", "singledevicemuon", "singledevicemuonwithauxadam", "sm3", "soap", "splus", "spam", "tfadafactor"),
        *("adamp", "fusednovograd", "lamb32bit", "lamb8bit", "lars32bit", "lars8bit", "mars", "nero", "nvnovograd"),
        *("pytorchlars", "sgdp", "stableadamw"),
    )
)
"""Names in lower case of classes that look at a whole parameter: its rows and columns, its norm, its blocks."""
_MODELS = frozenset(
    (
        *("lbfgs", "lbfgsnew", "fullbatchlbfgs", "dadaptadam", "dadaptadan", "dadaptadagrad", "dadaptlion"),
        "dadaptsgd",
        *("prodigy", "prodigyplusschedulefree", "dog", "ldog", "mechanic", "kfac", "kate"),
    )
)
"""Names in lower case of classes that add something up over all parameters."""

_Verdicts = dict[Cut, bool | None]
_tried: WeakKeyDictionary[Optimizer, _Verdicts] = WeakKeyDictionary()
"""Of optimizers of unknown classes: whether they step parts alike; None where it could not be tried."""
_judged: WeakSet[Optimizer] = WeakSet()


def why_not_elementwise(optimizer_class: type[Optimizer]) -> str | None:
    """What a class of optimizers that is known not to be elementwise looks at; None: nothing is known against it."""
    name = _name(optimizer_class)
    if name in _MODELS:
        return "sums over all parameters of the model"
    return "whole matrices" if name in _MATRICES else None


def _name(optimizer_class: type[Optimizer]) -> str:
    return optimizer_class.__name__.lower().replace("_", "")


def remedy_for(optimizer_class: type[Optimizer]) -> str:
    """What to use instead of an optimizer that is not elementwise."""
    path = f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"
    return _OURS.get(path) or _OURS_BY_NAME.get(_name(optimizer_class), _ELSE)


def refuse_equal_names(params: Iterable[nn.Parameter]) -> None:
    """Refuse sharded parameters of several roots, which cannot be told apart by their names.

    Raises:
        ConfigError: There are some; on every rank.
    """
    counts = Counter(meta_of(param).name for param in params)
    name, count = counts.most_common(1)[0]
    if count > 1:
        raise ConfigError(
            f"{count} parameters are called {name!r}: they are of several sharded models. Make one for each."
        )


def _knows_shards(optimizer: Optimizer) -> bool:
    """Whether an optimizer is made for shards: one of this package, or one that says which part of a state is where."""
    return type(optimizer).__module__.startswith("fullshard.") or hasattr(optimizer, "state_part")


def refuse_parts(optimizer: Optimizer) -> None:
    """Refuse an optimizer that is not elementwise where it would step parts of matrices.

    It is decided by the class, its options and the layout, so that every rank that has the same parameters decides
    alike, also one that holds no rows.

    Raises:
        ConfigError: It would; nothing has changed.
    """
    kind = type(optimizer)
    if kind in _ELEMENTWISE or _knows_shards(optimizer):
        return
    looks_at = why_not_elementwise(kind)
    if looks_at is not None:
        alone = _name(kind) in _MODELS
        concerned = [p for p in _sharded(optimizer) if is_split(p) or (alone and _meta(p).layout.world_size > 1)]
        rule = f"{kind.__name__} looks at {looks_at}, and ranks hold parts of them"
        _refuse(concerned, rule, remedy_for(kind))
    elif is_of_blocks(optimizer):
        rule = f"{kind.__name__} quantises blocks of {BLOCK} elements, and ranks hold parts of blocks"
        cut = [p for p in _sharded(optimizer) if _cuts_blocks(_meta(p))]
        _refuse(cut, rule, "fullshard.optim.AdamW8bit")
    elif not kind.__module__.startswith(_QUANTISING):
        verdicts = _on_trial(optimizer)
        rule = f"{kind.__name__} is not elementwise (on trial a matrix and its parts were stepped differently)"
        failed = [p for p in _sharded(optimizer) if is_split(p) and verdicts.get(_cut(_meta(p))) is False]
        _refuse(failed, rule, _ELSE)


def _on_trial(optimizer: Optimizer) -> _Verdicts:
    """Whether parts as ranks hold them are stepped alike; nothing where there are none.

    Tried once, before the first step of parameters that are split. The optimizers of the trial come through the hooks
    of this module too, and have no shards.
    """
    verdicts = _tried.get(optimizer)
    if verdicts is None:
        cuts = {_cut(_meta(param)) for param in _sharded(optimizer) if is_split(param)}
        verdicts = {cut: _verdict(optimizer, cut) for cut in cuts}
        if verdicts:
            _tried[optimizer] = verdicts
    return verdicts


def _verdict(optimizer: Optimizer, cut: Cut) -> bool | None:
    options = tuple(optimizer.defaults.items())
    try:
        hash(options)
    except TypeError:
        return _try(type(optimizer), options, cut)
    return _try_once(type(optimizer), options, cut)


def _try(kind: type[Optimizer], options: tuple[tuple[str, Any], ...], cut: Cut) -> bool | None:
    try:
        return steps_parts_alike(maker_like(kind, dict(options)), cut)
    except Exception:
        # Whatever a class of another library raises, it only cannot be tried.
        return None


_try_once = lru_cache(maxsize=64)(_try)  # in backward each parameter has an optimizer


def _cut(meta: ShardMeta) -> Cut:
    """How ranks hold a parameter; the same on every rank."""
    if len(meta.global_shape) == 1:
        return Cut.VECTOR
    return Cut.ROWS if meta.row_range is not None else Cut.WITHIN_ROWS


def _refuse(params: list[nn.Parameter], rule: str, remedy: str) -> None:
    if not params:
        return
    first = _meta(params[0])
    raise ConfigError(
        f"{rule}: {len(params)} of its parameters are sharded, such as {first.name}, "
        f"{first.global_shape}, over {len(first.owners)} of {first.layout.world_size} ranks. It would run, and train "
        f"something else than without sharding. Use {remedy}."
    )


def _sharded(optimizer: Optimizer) -> Iterable[nn.Parameter]:
    return (p for group in optimizer.param_groups for p in group["params"] if hasattr(p, "shard_meta"))


def _meta(param: nn.Parameter) -> ShardMeta:
    return param.shard_meta  # type: ignore[attr-defined, no-any-return]


def is_of_blocks(optimizer: Optimizer) -> bool:
    """Whether it is one of bitsandbytes' or torchao's of few bits; its states are of blocks, not of rows."""
    kind = type(optimizer)
    if kind.__module__.startswith("torchao."):
        return _name(kind).endswith(("8bit", "4bit", "fp8"))
    if not kind.__module__.startswith("bitsandbytes."):
        return False
    return getattr(getattr(optimizer, "args", None), "optim_bits", 32) == 8


def _cuts_blocks(meta: ShardMeta) -> bool:
    """Whether a boundary between ranks lies within a block of the parameter."""
    return any(meta.layout.local_range(meta.placement, rank)[0] % BLOCK for rank in meta.owners)


def refuse_strange_state(optimizer: Optimizer) -> None:
    """Refuse an unknown optimizer whose state of a part of a matrix is neither by element nor single numbers.

    Only one that could not be tried: what passed its trial may keep several tensors of a parameter as one. Looked at
    once, after the first step of a parameter that is split. There is no communication: a rank may have been given fewer
    parameters than others, and ranks that step in backward step alone. All that hold rows find the same.

    Raises:
        ConfigError: There is one; the parameters have taken one step.
    """
    kind = type(optimizer)
    if kind in _ELEMENTWISE or optimizer in _judged:
        return
    if _knows_shards(optimizer) or kind.__module__.startswith(_QUANTISING):
        return
    verdicts = _tried.get(optimizer, {})
    for param in _sharded(optimizer):
        state = optimizer.state.get(param)
        if not state or not is_split(param) or verdicts.get(_cut(_meta(param))):
            continue
        _judged.add(optimizer)
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.numel() != 1 and value.shape != param.shape:
                meta = _meta(param)
                raise ConfigError(
                    f"{kind.__name__} is not elementwise: its state {key!r} of {meta.name}, {meta.global_shape}, has "
                    f"shape {tuple(value.shape)} on a rank that holds {meta.local_shape} of the parameter, which "
                    f"{len(meta.owners)} ranks share. It would train something else than without sharding. Use "
                    f"{_ELSE}."
                )


def _before(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    refuse_parts(optimizer)
    note_claims(optimizer)


def _after(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    refuse_strange_state(optimizer)


register_optimizer_step_pre_hook(_before)
register_optimizer_step_post_hook(_after)
