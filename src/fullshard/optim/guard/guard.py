"""Optimizers that are not elementwise, on shards: refused instead of training with different results.

An elementwise optimizer (SGD, Adam, Lion…) computes each element's update from that element's gradients alone, so it
can step a shard of the parameter like the full one. Others use rows, columns, norms or products of a full matrix: given
a part of one, they run and compute something else. torch calls the hooks of this module around every optimizer's step;
the cost is a look-up of the class. An unknown class is tried once, on a small matrix.
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
from fullshard.optim.guard.trial import Split, maker_like, steps_parts_equally
from fullshard.optim.shards import is_split, meta_of

BLOCK = 256
"""Elements that bitsandbytes (``blocksize``) and torchao (``block_size``; 128 for 4 bits) quantise together."""

_QUANTISING = ("bitsandbytes.", "torchao.")
"""Libraries whose optimizers are judged by name and blocks: a trial on the CPU would fail, or compile kernels."""

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
"""Names in lower case of classes that use a full parameter: its rows and columns, its norm, its blocks."""
_MODELS = frozenset(
    (
        *("lbfgs", "lbfgsnew", "fullbatchlbfgs", "dadaptadam", "dadaptadan", "dadaptadagrad", "dadaptlion"),
        "dadaptsgd",
        *("prodigy", "prodigyplusschedulefree", "dog", "ldog", "mechanic", "kfac", "kate"),
    )
)
"""Names in lower case of classes that sum over all parameters."""

_Verdicts = dict[Split, bool | None]
_tried: WeakKeyDictionary[Optimizer, _Verdicts] = WeakKeyDictionary()
"""Verdicts on optimizers of unknown classes: whether they step parts like the full parameter; None if untried."""
_judged: WeakSet[Optimizer] = WeakSet()


def why_not_elementwise(optimizer_class: type[Optimizer]) -> str | None:
    """Return why a class of optimizers is known not to be elementwise; None if nothing is known."""
    name = _name(optimizer_class)
    if name in _MODELS:
        return "sums over all parameters of the model"
    return "full matrices" if name in _MATRICES else None


def _name(optimizer_class: type[Optimizer]) -> str:
    return optimizer_class.__name__.lower().replace("_", "")


def remedy_for(optimizer_class: type[Optimizer]) -> str:
    """Return what to use instead of an optimizer that is not elementwise."""
    path = f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"
    return _OURS.get(path) or _OURS_BY_NAME.get(_name(optimizer_class), _ELSE)


def refuse_equal_names(params: Iterable[nn.Parameter]) -> None:
    """Refuse equal names among sharded parameters: a name identifies a parameter in one model only.

    Raises:
        ConfigError: There are some; on every rank.
    """
    counts = Counter(meta_of(param).name for param in params)
    name, count = counts.most_common(1)[0]
    if count > 1:
        raise ConfigError(
            f"{count} parameters are called {name!r}: they belong to several sharded models. Make one for each model."
        )


def _knows_shards(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is fullshard's, or describes the parts of its state itself."""
    return type(optimizer).__module__.startswith("fullshard.") or hasattr(optimizer, "state_part")


def refuse_parts(optimizer: Optimizer) -> None:
    """Refuse an optimizer that is not elementwise if it would step parts of matrices.

    The class, its options and the layout decide, so every rank that has the same parameters decides the same, also one
    that holds no rows.

    Raises:
        ConfigError: It would; nothing has changed.
    """
    kind = type(optimizer)
    if kind in _ELEMENTWISE or _knows_shards(optimizer):
        return
    used = why_not_elementwise(kind)
    if used is not None:
        alone = _name(kind) in _MODELS
        concerned = [p for p in _sharded(optimizer) if is_split(p) or (alone and meta_of(p).layout.world_size > 1)]
        rule = f"{kind.__name__} uses {used}, and ranks hold parts of them"
        _refuse(concerned, rule, remedy_for(kind))
    elif is_of_blocks(optimizer):
        rule = f"{kind.__name__} quantises blocks of {BLOCK} elements, and ranks hold parts of blocks"
        cut = [p for p in _sharded(optimizer) if _cuts_blocks(meta_of(p))]
        _refuse(cut, rule, "fullshard.optim.AdamW8bit")
    elif not kind.__module__.startswith(_QUANTISING):
        verdicts = _on_trial(optimizer)
        rule = f"{kind.__name__} is not elementwise (in a trial a matrix and its parts were stepped differently)"
        failed = [p for p in _sharded(optimizer) if is_split(p) and verdicts.get(_split(meta_of(p))) is False]
        _refuse(failed, rule, _ELSE)


def _on_trial(optimizer: Optimizer) -> _Verdicts:
    """Return the verdict for each way in which the parameters are split; empty if none is.

    The trial runs once, before the first step of split parameters. The trial's own optimizers also call the hooks of
    this module, and have no shards.
    """
    verdicts = _tried.get(optimizer)
    if verdicts is None:
        splits = {_split(meta_of(param)) for param in _sharded(optimizer) if is_split(param)}
        verdicts = {split: _verdict(optimizer, split) for split in splits}
        if verdicts:
            _tried[optimizer] = verdicts
    return verdicts


def _verdict(optimizer: Optimizer, split: Split) -> bool | None:
    options = tuple(optimizer.defaults.items())
    try:
        hash(options)
    except TypeError:
        return _try(type(optimizer), options, split)
    return _try_once(type(optimizer), options, split)


def _try(kind: type[Optimizer], options: tuple[tuple[str, Any], ...], split: Split) -> bool | None:
    try:
        return steps_parts_equally(maker_like(kind, dict(options)), split)
    except Exception:
        # A class of another library may raise anything; it is then one that cannot be tried.
        return None


_try_once = lru_cache(maxsize=64)(_try)  # stepping in backward makes an optimizer for each parameter


def _split(meta: ShardMeta) -> Split:
    """Return how ranks hold a parameter; the same on every rank."""
    if len(meta.global_shape) == 1:
        return Split.VECTOR
    return Split.ROWS if meta.row_range is not None else Split.WITHIN_ROWS


def _refuse(params: list[nn.Parameter], rule: str, remedy: str) -> None:
    if not params:
        return
    first = meta_of(params[0])
    raise ConfigError(
        f"{rule}: {len(params)} of its parameters are sharded, such as {first.name}, {first.global_shape}, over "
        f"{len(first.owners)} of {first.layout.world_size} ranks. It would run, but the result would differ from "
        f"unsharded training. Use {remedy}."
    )


def _sharded(optimizer: Optimizer) -> Iterable[nn.Parameter]:
    return (p for group in optimizer.param_groups for p in group["params"] if hasattr(p, "shard_meta"))


def is_of_blocks(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is one of bitsandbytes' or torchao's whose states are quantised in blocks."""
    kind = type(optimizer)
    if kind.__module__.startswith("torchao."):
        return _name(kind).endswith(("8bit", "4bit", "fp8"))
    if not kind.__module__.startswith("bitsandbytes."):
        return False
    return getattr(getattr(optimizer, "args", None), "optim_bits", 32) == 8


def _cuts_blocks(meta: ShardMeta) -> bool:
    """Return whether a boundary between ranks is inside a block of the parameter."""
    return any(meta.layout.local_range(meta.placement, rank)[0] % BLOCK for rank in meta.owners)


def refuse_strange_state(optimizer: Optimizer) -> None:
    """Refuse an unknown optimizer whose state of a part of a matrix is neither elementwise nor single numbers.

    Only one that could not be tried: an optimizer that passed its trial may keep several tensors of a parameter as one.
    Checked once, after the first step of a split parameter, without communication: a rank may have fewer parameters
    than others, and ranks that step in backward do not communicate. All ranks that hold rows decide the same.

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
        if not state or not is_split(param) or verdicts.get(_split(meta_of(param))):
            continue
        _judged.add(optimizer)
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.numel() != 1 and value.shape != param.shape:
                meta = meta_of(param)
                raise ConfigError(
                    f"{kind.__name__} is not elementwise: its state {key!r} of {meta.name}, {meta.global_shape}, has "
                    f"shape {tuple(value.shape)} on a rank that holds {meta.local_shape} of the parameter, which "
                    f"{len(meta.owners)} ranks share. The result would differ from unsharded training. Use {_ELSE}."
                )


def _before(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    refuse_parts(optimizer)
    note_claims(optimizer)


def _after(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    refuse_strange_state(optimizer)


register_optimizer_step_pre_hook(_before)
register_optimizer_step_post_hook(_after)
