"""The tables of rules by function of torch. A function in no table is refused."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any

import torch

from fullshard.core.shards import draws, reductions, views
from fullshard.core.shards.elementwise import (
    about,
    item,
    local,
    local_lists,
    numel,
    read_data,
    refused,
    set_requires_grad,
    where,
    write_data,
)
from fullshard.core.shards.names import ABOUT, ELEMENTWISE
from fullshard.core.shards.shard import Rule, Shard

TENSOR_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "imag"})
"""Attributes that are other views of the elements; refused."""

_BY_NAME: dict[str, Rule] = {
    **dict.fromkeys(("sum", "nansum", "count_nonzero"), reductions.reduction(torch.sum)),
    **dict.fromkeys(("max", "amax"), reductions.reduction(torch.amax, -math.inf)),
    **dict.fromkeys(("min", "amin"), reductions.reduction(torch.amin, math.inf)),
    "any": reductions.reduction(torch.any),
    "all": reductions.reduction(torch.all),
    **dict.fromkeys(("mean", "var", "std"), reductions.moments),
    **dict.fromkeys(("norm", "vector_norm"), reductions.norm),
    **dict.fromkeys(("dot", "vdot", "inner"), reductions.dot),
    **dict.fromkeys(("equal", "allclose"), reductions.agree),
    "cosine_similarity": reductions.cosine_similarity,
    **dict.fromkeys(("softmax", "log_softmax", "logsumexp", "cumsum", "cumprod", "argmax", "argmin", "argsort"),
                    reductions.within_rows(1)),
    **dict.fromkeys(("sort", "prod", "median"), reductions.within_rows(1)),
    **dict.fromkeys(("topk", "quantile", "kthvalue"), reductions.within_rows(2)),
    **dict.fromkeys(("view", "reshape", "view_as", "reshape_as"), views.view),
    **dict.fromkeys(("flatten", "ravel"), views.flatten),
    "unsqueeze": views.unsqueeze,
    **dict.fromkeys(("cat", "concat", "concatenate"), views.cat),
    "getitem": views.getitem,
    "setitem": views.setitem,
    "where": where,
    **dict.fromkeys(("normal", "uniform", "bernoulli", "exponential", "log_normal", "cauchy", "geometric", "random",
                     "kaiming_uniform", "constant"), draws.drawn),
    **dict.fromkeys(("randn_like", "rand_like", "randint_like"), draws.drawn_like),
    "amp_foreach_non_finite_check_and_unscale": reductions.unscale,
    "numel": numel,
    "nelement": numel,
    **dict.fromkeys(("item", "tolist"), item),
}  # fmt: skip

_FOREACH: dict[str, Rule] = {"norm": reductions.foreach_norm, "max": reductions.foreach_max}

_CONVERSIONS = frozenset({"__bool__", "__float__", "__int__", "__index__", "__complex__"})

_IN_PLACE_ONLY = frozenset({"normal", "bernoulli"})
"""Names that are fills in place with an underscore and something else without."""

_known: dict[Any, Rule] = {}
RULES = MappingProxyType(_known)
"""Rules found so far, by function."""


def find_rule(func: Any) -> Rule:
    """Return the rule of a function by its name; looked up once for each function."""
    # Getters are created anew at each access, but compare and hash as equal.
    rule = _known.get(func)
    if rule is None:
        rule = _known[func] = _of_attribute(func) if _is_accessor(func) else _of_function(func.__name__)
    return rule


def _is_accessor(func: Any) -> bool:
    return getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__")


def _of_attribute(func: Any) -> Rule:
    attribute = getattr(func.__self__, "__name__", "")
    if attribute in ("data", "grad", "_grad"):
        return write_data if func.__name__ == "__set__" else read_data
    if attribute == "real":
        return local
    if attribute == "requires_grad" and func.__name__ == "__set__":
        return set_requires_grad
    return refused if attribute in TENSOR_ATTRIBUTES else about


def plain_name(name: str) -> str:
    """Return a function's name without prefixes and underscores: ``mul`` for ``_foreach_mul_`` and ``__imul__``."""
    for prefix in ("_foreach_", "linalg_", "special_"):
        name = name.removeprefix(prefix)
    return name.strip("_")


def _of_function(name: str) -> Rule:
    short = plain_name(name)
    if name in _CONVERSIONS:
        return item
    if short in ("numel", "nelement"):
        return numel
    if name == "requires_grad_":
        return set_requires_grad
    if name in ABOUT or name.startswith("_fused_"):
        return about
    if name.startswith("_foreach_"):
        return _FOREACH.get(short) or (local_lists if short in ELEMENTWISE else refused)
    if short in _IN_PLACE_ONLY and not name.endswith("_"):
        return refused
    return local if short in ELEMENTWISE else _BY_NAME.get(short, refused)


Shard.find_rule = staticmethod(find_rule)
