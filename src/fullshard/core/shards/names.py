"""Names of torch's functions by kind. A name covers every spelling: ``mul`` for mul_, __imul__, _foreach_mul_."""

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
