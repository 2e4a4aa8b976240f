"""Frozen policies: given once to ``fully_shard``, never changed later.

No torch here: a dtype is named by its torch name without the module (``"bfloat16"``), and a ``torch.dtype`` given
by the caller is turned into that name on construction, so that policies compare, hash and serialise as plain values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fullshard.errors import ConfigError

FLOAT_NAMES = ("float16", "bfloat16", "float32", "float64")


def dtype_name(dtype: object) -> str | None:
    """Name of a floating dtype given as ``torch.bfloat16``, ``"bfloat16"`` or ``"bf16"``.

    Args:
        dtype: A ``torch.dtype``, its name, a short name (``bf16``, ``fp16``, ``fp32``, ``fp64``) or None.

    Returns:
        The full name, or None for None ("leave as it is").

    Raises:
        ConfigError: The dtype is not a floating dtype that can be computed in.
    """
    if dtype is None:
        return None
    text = str(dtype).removeprefix("torch.")
    text = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}.get(text, text)
    if text not in FLOAT_NAMES:
        raise ConfigError(f"A precision must be one of {', '.join(FLOAT_NAMES)}; got {dtype!r}.")
    return text


@dataclass(frozen=True)
class MixedPrecision:
    """Which dtype each part of a step uses; None leaves that part as it is.

    Attributes:
        param: Dtype that parameters are gathered and computed in. Shards keep their own dtype.
        reduce: Dtype that gradients are reduced in. None: the shard's dtype.
        output: Dtype that the root module's floating outputs are cast to.
        cast_forward_inputs: Whether floating inputs of each unit are cast to ``param``.
    """

    param: Any = None
    reduce: Any = None
    output: Any = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        """Turn dtypes into their names.

        Raises:
            ConfigError: One of the dtypes is not a floating dtype.
        """
        for field in ("param", "reduce", "output"):
            object.__setattr__(self, field, dtype_name(getattr(self, field)))


class ShardingStrategy(Enum):
    """What is sharded, and over which ranks.

    FULL_SHARD: parameters, gradients and optimizer state, gathered unit by unit for forward and again for backward.
    SHARD_GRAD_OP: the same at rest, but what forward gathered stays until backward: fewer gathers, more memory.
    NO_SHARD: nothing; gradients are all-reduced.
    HYBRID_SHARD: FULL_SHARD inside a group of ranks, copies across groups: gathers stay inside the group.
    HYBRID_SHARD_ZERO2: SHARD_GRAD_OP inside a group of ranks, copies across groups.
    """

    FULL_SHARD = "full_shard"
    SHARD_GRAD_OP = "shard_grad_op"
    NO_SHARD = "no_shard"
    HYBRID_SHARD = "hybrid_shard"
    HYBRID_SHARD_ZERO2 = "hybrid_shard_zero2"

    @property
    def needs_two_axes(self) -> bool:
        """Whether the mesh must have a replicating and a sharding axis."""
        return self in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.HYBRID_SHARD_ZERO2)

    @property
    def keeps_after_forward(self) -> bool:
        """Whether what forward gathered stays until backward."""
        return self in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.HYBRID_SHARD_ZERO2)


class BackwardPrefetch(Enum):
    """When backward issues the next unit's all-gather. It changes when things happen, never what is computed.

    BACKWARD_PRE: before the current unit's backward computes; most overlap, two units in memory.
    BACKWARD_POST: after the current unit's gradients went out; the gather runs beside what is left of its backward.
    NONE: when the unit is needed; one unit in memory, no overlap.
    """

    BACKWARD_PRE = "backward_pre"
    BACKWARD_POST = "backward_post"
    NONE = "none"


@dataclass(frozen=True)
class TransformerBlocks:
    """Each module of one of these classes becomes a unit.

    Attributes:
        classes: Classes, or names of classes as ``type(module).__name__`` gives them.
    """

    classes: frozenset[Any]

    def __init__(self, classes: Any) -> None:
        """Take any collection of classes or class names."""
        object.__setattr__(self, "classes", frozenset({classes} if isinstance(classes, (str, type)) else classes))

    @property
    def names(self) -> frozenset[str]:
        """The class names."""
        return frozenset(c if isinstance(c, str) else c.__name__ for c in self.classes)


@dataclass(frozen=True)
class MinNumel:
    """Each module with at least so many parameters of its own, beside those of units inside it, becomes a unit.

    Attributes:
        numel: Smallest number of elements of a unit.
    """

    numel: int

    def __post_init__(self) -> None:
        """Refuse what would make every module a unit.

        Raises:
            ConfigError: ``numel`` is below 1.
        """
        if self.numel < 1:
            raise ConfigError(f"MinNumel takes a number of elements of at least 1; got {self.numel}.")


WrapPolicy = TransformerBlocks | MinNumel | Callable[[Any], bool] | str | None
"""``"auto"``, :class:`TransformerBlocks`, :class:`MinNumel`, a predicate over modules, or None: one unit."""
