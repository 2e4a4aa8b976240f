"""Frozen policies, set once in ``fully_shard`` and never changed later.

No torch here: a dtype is stored by its torch name without the module (``"bfloat16"``), and a ``torch.dtype`` passed by
the caller is converted on construction, so that policies compare, hash and serialize as plain values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Self, cast

from fullshard.errors import ConfigError

FLOAT_NAMES = ("float16", "bfloat16", "float32", "float64")


def dtype_name(dtype: object) -> str | None:
    """Return the name of a floating dtype given as ``torch.bfloat16``, ``"bfloat16"`` or ``"bf16"``.

    Args:
        dtype: A ``torch.dtype``, its name, a short name (``bf16``, ``fp16``, ``fp32``, ``fp64``) or None.

    Returns:
        The full name, or None for None ("leave unchanged").

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
    """Dtypes of the parts of a step; None leaves a part unchanged.

    Attributes:
        param: Dtype that parameters are gathered and computed in. Shards keep their own dtype.
        reduce: Dtype that gradients are collected and sent in. None: the shard's dtype.
        reduce_sum: Dtype that gradients of different ranks are added in; None: ``reduce``. With ``reduce`` bfloat16 and
            ``reduce_sum`` float32 half the bytes are sent, each rank's gradient is rounded to bfloat16 once, and the
            sum over ranks is not rounded again. Every pair of ranks exchanges messages: for small worlds.
        divide: Divisor of the summed gradients; None: the number of ranks, which gives their mean.
        buffer: Dtype that floating-point buffers are cast to, once, when the model is sharded.
        output: Dtype that floating-point outputs of the module passed to ``fully_shard`` are cast to.
        cast_forward_inputs: Whether floating-point inputs of each unit are cast to ``param``.
        cast_root_forward_inputs: The same for the root alone; None: as ``cast_forward_inputs``.
        keep_low_precision_grads: Whether gradients of the shards keep the dtype that they were added in, for an
            optimizer that accepts it; otherwise they have the shard's dtype.
        keep_fp32: Modules that compute in float32 regardless of ``param``: classes, class names, or the last part of
            module names (``"wo"``). Their inputs are cast to float32, their outputs to ``param``; gradients of their
            parameters are sent in at least float32, and their buffers keep their dtype.
        keep_frozen: Whether shards of frozen parameters keep their own dtype, so that they are saved unrounded;
            otherwise they have the dtype ``param``, which takes less memory.
    """

    param: Any = None
    reduce: Any = None
    reduce_sum: Any = None
    divide: float | None = None
    buffer: Any = None
    output: Any = None
    cast_forward_inputs: bool = True
    cast_root_forward_inputs: bool | None = None
    keep_low_precision_grads: bool = False
    keep_fp32: Any = ()
    keep_frozen: bool = False

    def __post_init__(self) -> None:
        """Convert dtypes to their names.

        Raises:
            ConfigError: One of the dtypes is not a floating dtype, or ``divide`` is not above zero.
        """
        for field in ("param", "reduce", "reduce_sum", "buffer", "output"):
            object.__setattr__(self, field, dtype_name(getattr(self, field)))
        kept: Any = self.keep_fp32
        kept = {kept} if isinstance(kept, (str, type)) else kept
        names = (one if isinstance(one, str) else one.__name__ for one in kept)
        object.__setattr__(self, "keep_fp32", tuple(sorted(names)))
        if self.divide is not None and not self.divide > 0:
            raise ConfigError(f"MixedPrecision(divide=…) must be above zero; got {self.divide}.")


class ShardingStrategy(Enum):
    """What is sharded, and over which ranks.

    FULL_SHARD: parameters, gradients and optimizer state; units are gathered for forward and again for backward.
    SHARD_GRAD_OP: the same, but gathered parameters stay from forward to backward: fewer gathers, more memory.
    NO_SHARD: nothing; gradients are all-reduced.
    HYBRID_SHARD: FULL_SHARD inside a group of ranks, replicas across groups: gathers stay inside the group.
    HYBRID_SHARD_ZERO2: SHARD_GRAD_OP inside a group of ranks, replicas across groups.

    Code asks for these three, never which member it is, so that a new member works everywhere:

    Attributes:
        shards: Whether ranks hold parts; otherwise each holds everything.
        keeps_after_forward: Whether gathered parameters stay in memory from forward to backward.
        needs_two_axes: Whether the mesh must have a replicating and a sharding axis.
    """

    FULL_SHARD = "full_shard", True, False, False
    SHARD_GRAD_OP = "shard_grad_op", True, True, False
    NO_SHARD = "no_shard", False, False, False
    HYBRID_SHARD = "hybrid_shard", True, False, True
    HYBRID_SHARD_ZERO2 = "hybrid_shard_zero2", True, True, True

    _value_: str
    shards: bool
    keeps_after_forward: bool
    needs_two_axes: bool

    def __new__(cls, value: str, shards: bool, keeps_after_forward: bool, needs_two_axes: bool) -> Self:  # noqa: FBT001
        """Make a member whose ``value`` is its name in run files."""
        member = object.__new__(cls)
        member._value_ = value
        member.shards, member.keeps_after_forward = shards, keeps_after_forward
        member.needs_two_axes = needs_two_axes
        return member


class BackwardPrefetch(Enum):
    """When backward issues the next unit's all-gather. It changes timing, never results.

    BACKWARD_PRE: before the current unit's backward computes; most overlap, two units in memory.
    BACKWARD_POST: after the current unit's gradients were sent; the gather overlaps with the rest of its backward.
    NONE: when the unit is needed; one unit in memory, no overlap.
    """

    BACKWARD_PRE = "backward_pre"
    BACKWARD_POST = "backward_post"
    NONE = "none"


@dataclass(frozen=True)
class Prefetch:
    """Which units are gathered early, while another one computes. It never changes results.

    Attributes:
        backward: When backward gathers units early.
        forward: Whether forward gathers units early, in the order of the last forward.
        ahead: Number of units gathered early; each costs the memory of a gathered unit.
        forward_lists: For units by name, the units to gather when their forward starts, instead of the
            order of the last forward.
        backward_lists: The same for backward.
        max_in_flight: Most units, besides the root, that may hold gathered memory before another one is gathered
            early; None: limited by ``ahead`` or the lists only.
    """

    backward: BackwardPrefetch = BackwardPrefetch.BACKWARD_PRE
    forward: bool = True
    ahead: int = 1
    forward_lists: Any = ()
    backward_lists: Any = ()
    max_in_flight: int | None = None

    def __post_init__(self) -> None:
        """Freeze the lists.

        Raises:
            ConfigError: A number is below 1.
        """
        for field in ("forward_lists", "backward_lists"):
            lists: Any = getattr(self, field)
            given = cast("Iterable[tuple[str, Iterable[str]]]", lists.items() if isinstance(lists, dict) else lists)
            frozen = tuple(sorted((name, tuple(units)) for name, units in given))
            object.__setattr__(self, field, frozen)
        for field in ("ahead", "max_in_flight"):
            number = getattr(self, field)
            if number is not None and number < 1:
                raise ConfigError(f"Prefetch({field}=…) must be at least 1 unit; got {number}.")


@dataclass(frozen=True)
class CPUOffload:
    """Shards, their gradients and so the optimizer's state are in host memory; units are gathered on the device.

    Each gather copies this rank's shard to the device, each reduce its gradient back; the optimizer steps on the CPU.

    Attributes:
        pin_memory: Whether host memory is page-locked: copies then overlap with compute, and it cannot be swapped out.
    """

    pin_memory: bool = True


FROZEN = ("shard", "replicate", "auto")
"""Placement of frozen parameters: sharded like the rest, replicated on every rank, or replicated if they are small
compared with the device's memory."""


TABLES = ("gather", "auto", "home")
"""Use of the tables of embeddings and heads: gathered like the rest; tokens travel to their rows where that sends
fewer bytes; or always."""


@dataclass(frozen=True)
class UnitPolicy:
    """The policies of one unit.

    Attributes:
        strategy: What is sharded.
        precision: Dtypes.
        offload: Whether shards are in host memory.
        frozen: ``"shard"`` or ``"replicate"`` the frozen parameters.
        tables: One of ``TABLES``.
    """

    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    precision: MixedPrecision = MixedPrecision()
    offload: CPUOffload | None = None
    frozen: str = "shard"
    tables: str = "gather"


@dataclass(frozen=True)
class TransformerBlocks:
    """Wrap policy: each module of one of these classes becomes a unit.

    Attributes:
        classes: Classes, or names of classes (``type(module).__name__``).
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
    """Wrap policy: each module with at least this many parameter elements outside of other units becomes a unit.

    Attributes:
        numel: Smallest number of elements of a unit.
    """

    numel: int

    def __post_init__(self) -> None:
        """Refuse a number that would make every module a unit.

        Raises:
            ConfigError: ``numel`` is below 1.
        """
        if self.numel < 1:
            raise ConfigError(f"MinNumel(numel=…) must be at least 1 element; got {self.numel}.")


@dataclass(frozen=True)
class Named:
    """Wrap policy: units by name; each item is the name of a module, or a tuple of names that form one unit.

    Attributes:
        units: Names as in ``model.named_modules()``, one tuple for each unit; members in the order they run in.
    """

    units: tuple[tuple[str, ...], ...]

    def __init__(self, *units: str | Iterable[str]) -> None:
        """Take names and groups of names."""
        object.__setattr__(self, "units", tuple((u,) if isinstance(u, str) else tuple(u) for u in units))


QUANTIZED_TYPES = ("nf4", "int8")


@dataclass(frozen=True)
class Quantize:
    """How frozen linear layers are quantised while their weights are read: ``Pretrained(path, quantize=Quantize())``.

    Layers stay as they are if they are trainable, an adapter's, tied to another module, no plain ``nn.Linear``, or if
    their ``forward`` was replaced.

    Attributes:
        type: ``"nf4"`` (4 bits, blocks of 64 weights) or ``"int8"`` (a scale for each row), in bitsandbytes' formats.
        double_quant: Whether the scales of nf4 are quantised too, in blocks of 256: 4.13 bits a weight, not 4.5;
            int8 ignores it.
        compute_dtype: Dtype that quantised layers compute in, whatever their input has; None: the input's.
        skip: Names of modules that are not quantised: a name's last part, or some successive parts of it, such as
            ``"lm_head"``, ``"wo"`` or ``"decoder.block.0"``.
    """

    type: str = "nf4"
    double_quant: bool = True
    compute_dtype: Any = None
    skip: Any = ("lm_head",)

    def __post_init__(self) -> None:
        """Convert the dtype to its name.

        Raises:
            ConfigError: The type is unknown, or the dtype is not a floating dtype.
        """
        if self.type not in QUANTIZED_TYPES:
            raise ConfigError(f"Quantize(type=…) must be one of {', '.join(QUANTIZED_TYPES)}; got {self.type!r}.")
        object.__setattr__(self, "compute_dtype", dtype_name(self.compute_dtype))
        object.__setattr__(self, "skip", (self.skip,) if isinstance(self.skip, str) else tuple(self.skip))


WrapPolicy = TransformerBlocks | MinNumel | Named | Callable[[Any], bool] | str | None
"""``"auto"``, :class:`TransformerBlocks`, :class:`MinNumel`, :class:`Named`, a predicate over modules, or None."""
