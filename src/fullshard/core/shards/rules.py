"""The tables of rules by function of torch. A function in no table is refused."""

from __future__ import annotations

import math
from typing import Any

import torch

from fullshard.core.shards import elementwise, reductions
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
from fullshard.core.shards.shard import Rule, Shard

_ARITHMETIC = """
add sub subtract rsub mul multiply div divide true_divide floor_divide truediv rtruediv floordiv rfloordiv mod rmod radd
rmul iadd isub imul idiv itruediv ifloordiv imod ipow iand ior ixor rdiv rpow fmod remainder pow float_power neg
negative
pos positive abs absolute sign sgn signbit sqrt rsqrt square exp exp2 expm1 log log1p log2 log10 sin cos tan asin acos
atan arcsin arccos arctan sinh cosh tanh asinh acosh atanh arcsinh arccosh arctanh sinc sigmoid logit erf erfc erfinv
lgamma digamma i0 relu relu6 selu celu elu gelu silu mish softplus softsign tanhshrink hardtanh hardsigmoid hardswish
logsigmoid threshold leaky_relu hardshrink softshrink reciprocal frac round floor ceil trunc fix clamp clip clamp_min
clamp_max nan_to_num lerp addcmul addcdiv maximum minimum fmax fmin copysign hypot atan2 arctan2 nextafter ldexp
logaddexp logaddexp2 xlogy masked_fill deg2rad rad2deg heaviside
"""

_QUESTIONS = """
isnan isinf isfinite isposinf isneginf isreal eq ne lt le gt ge greater greater_equal less less_equal not_equal and or
xor not invert rand ror rxor logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_xor
bitwise_not isclose
"""

_COPIES = """
to float double half bfloat16 int long short char byte bool type type_as detach clone contiguous cpu cuda alias copy
zero
fill zeros_like ones_like empty_like full_like pin_memory
"""

_ABOUT = """
size dim ndimension stride storage_offset data_ptr element_size is_contiguous is_floating_point is_complex is_inference
is_pinned is_shared is_same_size get_device requires_grad_ retain_grad register_hook __len__ new_zeros new_ones
new_empty
register_post_accumulate_grad_hook new_full new_tensor result_type untyped_storage storage _typed_storage _is_view
is_conj is_neg is_signed is_set_to __hash__ __dir__ __dlpack_device__ has_names is_distributed share_memory_ backward
_is_zerotensor _has_compatible_shallow_copy_type as_subclass can_cast promote_types dim_order is_tensor is_storage
__sizeof__ record_stream
"""

ELEMENTWISE = frozenset((_ARITHMETIC + _QUESTIONS + _COPIES).split())
"""Functions that compute each element from the elements at the same place."""

ABOUT = frozenset(_ABOUT.split())
"""Questions about the rows in memory, answered as for any tensor. Names in full."""


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
    **dict.fromkeys(("view", "reshape", "view_as", "reshape_as"), elementwise.view),
    **dict.fromkeys(("flatten", "ravel"), elementwise.flatten),
    "unsqueeze": elementwise.unsqueeze,
    **dict.fromkeys(("cat", "concat", "concatenate"), elementwise.cat),
    "getitem": elementwise.getitem,
    "setitem": elementwise.setitem,
    "where": where,
    **dict.fromkeys(("normal", "uniform", "bernoulli", "exponential", "log_normal", "cauchy", "geometric", "random",
                     "kaiming_uniform", "constant"), elementwise.drawn),
    **dict.fromkeys(("randn_like", "rand_like", "randint_like"), elementwise.drawn_like),
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


def find_rule(func: Any) -> Rule:
    """Return the rule of a function by its name; looked up once for each function."""
    # Getters are created anew at each access, but compare and hash as equal.
    rule = _known.get(func)
    if rule is None:
        is_accessor = getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__")
        rule = _known[func] = _of_attribute(func) if is_accessor else _of_function(func.__name__)
    return rule


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
