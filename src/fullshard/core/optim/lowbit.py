"""AdamW with moments in 8 bits or bfloat16: the common step, stochastic rounding to bfloat16, 8-bit codes by block."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from torch.optim import Optimizer

from fullshard.core.comm import Comm
from fullshard.core.layout import ShardMeta, StatePart, by_block, on_all_owners
from fullshard.core.optim.exchange import OwnerReduce, OwnerValue
from fullshard.core.optim.shards import RowsOptimizer, by_comm, meta_of, refuse_torch_options, require_same_parameters
from fullshard.core.shards import on_rows
from fullshard.errors import CheckpointError, ConfigError

_WIDE = (torch.float32, torch.float64)


class NarrowAdamW(RowsOptimizer):
    """AdamW with decoupled weight decay, computed in float32 whatever its states are kept in.

    For each element, with the gradient g, step t and the stored moments m and v: ``m = b1 m + (1 - b1) g``,
    ``v = b2 v + (1 - b2) g^2``, ``w = w (1 - lr wd)``, ``w = w - lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps)``
    (https://arxiv.org/abs/1711.05101). The weight is updated from the moments before they are narrowed again.

    Every operation is a single IEEE operation. The rounding of torch's fused kernels is unspecified and depends on the
    element's position and the machine: a last bit that depended on where a shard begins would make a narrowed value
    jump.
    """

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        """Check the defaults, among them lr, betas, eps and weight_decay."""
        numbers = {key: defaults[key] for key in ("lr", "eps", "weight_decay")}
        wrong = [f"{key} = {value}" for key, value in numbers.items() if not value >= 0]
        if wrong or len(defaults["betas"]) != 2 or not all(0 <= beta < 1 for beta in defaults["betas"]):
            raise ConfigError(
                "lr, eps and weight_decay must be zero or more, and betas two numbers from 0 to below 1; got "
                f"{numbers} and betas = {defaults['betas']}."
            )
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group.

        Raises:
            ConfigError: It has an option that is not implemented.
        """
        refuse_torch_options(param_group, type(self).__name__)
        super().add_param_group(param_group)

    @on_rows
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict()`` returned; tensors move to the parameter's device and keep their own dtype.

        torch's implementation would cast floating-point tensors, and the codes, to the parameter's dtype.

        Raises:
            ConfigError: A group has an option that is not implemented; nothing has changed then.
        """
        loaded: dict[nn.Parameter, dict[str, Any]] = {}

        def without_state(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            # All checks come before any change: a refused state must leave the optimizer as it was, on every rank.
            for group in state["param_groups"]:
                refuse_torch_options(group, type(self).__name__)
            numbers = chain.from_iterable(group["params"] for group in state["param_groups"])
            for number, param in zip(numbers, self._params(), strict=False):  # torch checks the groups after this
                if number in state["state"]:
                    loaded[param] = self._loaded_state(param, state["state"][number])
            return {**state, "state": {}}

        # Registered last, so that it receives the state after the user's own hooks.
        handle = self.register_load_state_dict_pre_hook(without_state)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        for param, state in loaded.items():
            self.state[param] = state

    @abstractmethod
    def _loaded_state(self, param: nn.Parameter, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a parameter's state from that of a state dict."""

    def _to_update(self) -> Iterable[tuple[int, nn.Parameter, dict[str, Any]]]:
        """Yield each parameter with a gradient and elements here, with its index in the optimizer and its group."""
        groups = ((param, group) for group in self.param_groups for param in group["params"])
        for number, (param, group) in enumerate(groups):
            if param.grad is not None and param.numel():
                yield number, param, group


def advance(
    first: torch.Tensor, second: torch.Tensor, grad: torch.Tensor, betas: tuple[float, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Update the moments with a gradient, in place; all float32, of one shape."""
    first.mul_(betas[0]).add_(grad * (1 - betas[0]))
    second.mul_(betas[1]).add_(grad.square().mul_(1 - betas[1]))
    return first, second


def descend(
    weights: torch.Tensor, first: torch.Tensor, second: torch.Tensor, group: Mapping[str, Any], step: int
) -> None:
    """Update ``weights``, float32 or float64, in place, from the moments with the gradient of step ``step``."""
    beta1, beta2 = group["betas"]
    if group["weight_decay"]:
        weights.mul_(1 - group["lr"] * group["weight_decay"])
    scale = second.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
    weights.sub_(torch.div(first, scale).mul_(group["lr"] / (1 - beta1**step)))


def widened(weights: torch.Tensor) -> torch.Tensor:
    """Return ``weights``, or a float32 copy if they are narrower."""
    return weights if weights.dtype in _WIDE else weights.float()


def flat(param: nn.Parameter) -> torch.Tensor:
    """Return a parameter's elements, (n,), to be changed in place.

    Raises:
        ConfigError: They are not contiguous.
    """
    if not param.is_contiguous():
        raise ConfigError(
            f"Optimizers with narrow states need contiguous parameters; one of shape {tuple(param.shape)} has strides "
            f"{param.stride()}. Call param.data = param.data.contiguous() before making the optimizer."
        )
    return param.detach().view(-1)


_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""SplitMix64's constants: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014."""

_WORD = 2**64 - 1


def stream_key(*parts: int) -> int:
    """Return a 64-bit hash of a tuple of numbers, for :func:`random_words`."""
    key = 0
    for part in parts:
        key = _mixed((key ^ part & _WORD) + _GAMMA)
    return key


def random_words(key: int, start: int, stop: int, device: torch.device) -> torch.Tensor:
    """Return 64 random bits for each of the elements ``start`` to ``stop``: output i of SplitMix64 seeded with ``key``.

    The generator is a counter and a mixer, so any part of a stream can be computed alone, on any device, with the same
    result.

    Returns:
        int64, (stop - start,).
    """
    words = torch.arange(start, stop, device=device)  # int64; products and sums wrap around, as they should
    words.mul_(_signed(_GAMMA)).add_(_signed(key + _GAMMA & _WORD))
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        words.bitwise_xor_(_shifted(words, shift)).mul_(_signed(factor))
    return words.bitwise_xor_(_shifted(words, 31))


def sixteen_bits(words: torch.Tensor, field: int) -> torch.Tensor:
    """Return the bits ``16 * field`` to ``16 * field + 15`` of words of :func:`random_words`; int32, 0 to 65535."""
    return (words >> 16 * field).bitwise_and_(0xFFFF).to(torch.int32)


def round_to_bfloat16(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Round to one of the two neighbors in bfloat16, to the nearer one more often, so that the mean is exact.

    The 16 bits of a float32 that bfloat16 lacks, over 2 ** 16, are the distance to the neighbor nearer to zero; random
    bits are added to them and the carry, if any, goes into the bits that remain. Values that bfloat16 can represent,
    infinities and nans are unchanged. The method is that of Zamirai et al., "Revisiting BFloat16 Training",
    https://arxiv.org/abs/2010.06192.

    Args:
        values: float32.
        bits: Random, int32, 0 to 65535, of the same shape; overwritten.

    Returns:
        bfloat16, of the same shape.
    """
    carried = bits.add_(values.view(torch.int32)).bitwise_and_(-0x10000).view(torch.float32)
    return torch.where(values.isfinite(), carried, values).to(torch.bfloat16)


def _mixed(word: int) -> int:
    word &= _WORD
    word = (word ^ word >> 30) * _FIRST & _WORD
    word = (word ^ word >> 27) * _SECOND & _WORD
    return word ^ word >> 31


def _shifted(words: torch.Tensor, shift: int) -> torch.Tensor:
    """Shift right, filling with zeros; torch's own shift fills with the sign."""
    return (words >> shift).bitwise_and_(2 ** (64 - shift) - 1)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


class AdamWBF16(NarrowAdamW):
    """AdamW whose moments, and bfloat16 weights, are kept in bfloat16 by stochastic rounding.

    Rounded to nearest, a bfloat16 second moment stops changing: with the usual 0.999 it should change by a thousandth
    of itself a step, and neighbors in bfloat16 are 1/256 to 1/128 apart. Rounded up or down at random, more often to
    the nearer one, it is right on average, and so are bfloat16 weights.

    The random bits of an element are a hash of the seed, the step, the number of the parameter in the optimizer and the
    number of the element in the *unsharded* parameter: the same under any sharding and after a resume, and no generator
    state is saved. Optimizers of one parameter each, as ``step_in_backward`` makes them, number their parameters as one
    optimizer of ``model.parameters()`` would, and round as that one; those made by hand all round with the same bits
    unless each has its own seed.

    The state's keys are those of ``torch.optim.AdamW``: ``step`` (float32, 0-d, on the CPU), ``exp_avg`` and
    ``exp_avg_sq`` (bfloat16, the shard's shape), all elementwise. State dicts and checkpoints of ``torch.optim.AdamW``
    can be loaded; their moments are rounded to nearest when loaded, or at the first step.

    float32 and float64 weights are not rounded, float16 ones to nearest.

    Args:
        params: Parameters or groups of them, as in any torch optimizer; under sharding all of ``model.parameters()``.
        lr: Learning rate.
        betas: Decay rates of the first and the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay, times the learning rate.
        seed: Seed of the rounding; stored in the groups.

    Attributes:
        first_number: The number of its first parameter, if it is one of several optimizers of a model.

    Raises:
        ConfigError: A number is out of range.
    """

    first_number = 0

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        seed: int = 0,
    ) -> None:
        """Make the optimizer; see the class."""
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "seed": seed})

    @on_rows
    def state_kinds(self, param: nn.Parameter, group: Mapping[str, Any]) -> dict[str, None]:
        """Return the keys of a parameter's state after a step.

        Raises:
            CheckpointError: The group has an option that is not implemented.
        """
        refuse_torch_options(group, "AdamWBF16", CheckpointError)
        return dict.fromkeys(("step", "exp_avg", "exp_avg_sq"))

    def _update_all(self) -> None:
        for number, param, group in self._to_update():
            self._update(self.first_number + number, param, group)

    def _update(self, number: int, param: nn.Parameter, group: Mapping[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state["exp_avg"] = torch.zeros(param.shape, dtype=torch.bfloat16, device=param.device)
            state["exp_avg_sq"] = torch.zeros_like(state["exp_avg"])
        for field in ("exp_avg", "exp_avg_sq"):  # wider if loaded from a checkpoint of torch.optim.AdamW
            state[field] = state[field].to(torch.bfloat16)
        state["step"] += 1
        step = int(state["step"])
        assert param.grad is not None
        weights, grad = flat(param), param.grad.detach().reshape(-1)
        kept = state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1)
        start, stop = meta_of(param).element_range
        key = stream_key(group["seed"], step, number)
        for first, end in chunks(start, stop):
            run = slice(first - start, end - start)
            moments = advance(kept[0][run].float(), kept[1][run].float(), grad[run].float(), group["betas"])
            wide = widened(weights[run])
            descend(wide, *moments, group, step)
            words = random_words(key, first, end, param.device)
            if param.dtype == torch.bfloat16:
                weights[run] = round_to_bfloat16(wide, sixteen_bits(words, 2))
            elif param.dtype == torch.float16:
                weights[run] = wide.half()
            for field, moment in enumerate(moments):
                kept[field][run] = round_to_bfloat16(moment, sixteen_bits(words, field))

    def _loaded_state(self, param: nn.Parameter, state: Mapping[str, Any]) -> dict[str, Any]:
        loaded = {k: v.to(param.device, torch.bfloat16) for k, v in state.items() if k != "step"}
        return loaded | {"step": torch.tensor(float(state["step"]), device="cpu")} if "step" in state else loaded


BLOCK = 256
"""Elements that share a scale."""

CHUNK = 2**20
"""Elements updated at a time, a multiple of BLOCK: bounds the float32 copies of 8-bit and bfloat16 states."""

TINY = torch.finfo(torch.float32).tiny


def dynamic_codes(*, signed: bool) -> torch.Tensor:
    """Return the values of 8-bit codes: dynamic tree quantisation, https://arxiv.org/abs/2110.02861, section 1.3.

    A code has an exponent e from -6 to 0 in a varying number of bits; the remaining bits divide 0.1 to 1 into equal
    parts, whose middle times ``10 ** e`` is the value: 2 ** (e + 6) parts with a sign, twice as many without. Zero and
    one have codes of their own. Equal to bitsandbytes' ``create_dynamic_map``.

    Args:
        signed: True: values from -1 to 1; False: from 0 to 1.

    Returns:
        float32, (256,), ascending, on the CPU.
    """
    parts = [torch.tensor([0.0, 1.0], device="cpu")]
    for exponent in range(-6, 1):
        count = 2 ** (exponent + 6) * (1 if signed else 2)
        edges = torch.linspace(0.1, 1.0, count + 1, dtype=torch.float32, device="cpu")
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0**exponent
        parts += [middles, -middles] if signed else [middles]
    return torch.cat(parts).sort().values


@dataclass(frozen=True)
class CodeBook:
    """The values of codes, and a table to find the nearest code.

    The upper half of a float32's bits (sign, exponent and 7 bits) leaves at most one midpoint of two codes undecided,
    which one comparison decides: on a CPU 3.4 times faster than ``torch.bucketize`` over 255 midpoints.
    """

    values: torch.Tensor  # float32, (256,), ascending
    midpoints: torch.Tensor  # between neighbors, and infinity; float32, (256,)
    # by the upper 16 bits of a number, the code of the smallest number that has them; int32, (65536,)
    lowest: torch.Tensor

    @classmethod
    def of(cls, values: torch.Tensor) -> CodeBook:
        """Return the book of ``values``, on their device; neighbors are at least 1/128 of the greater one apart."""
        device = values.device
        midpoints = torch.cat([(values[:-1] + values[1:]) / 2, torch.full((1,), math.inf, device=device)])
        upper = torch.arange(2**16, dtype=torch.int32, device=device) << 16
        least = torch.where(upper < 0, upper | 0xFFFF, upper).view(torch.float32)
        return cls(values, midpoints, torch.bucketize(least, midpoints[:-1], out_int32=True))

    def nearest(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the code nearest to each number, the lower of two equally near ones; finite float32 to uint8."""
        codes = self.lowest.index_select(0, (numbers.view(torch.int32) >> 16).bitwise_and_(0xFFFF))
        return codes.add_(numbers > self.midpoints.index_select(0, codes)).to(torch.uint8)


def block_maxima(values: torch.Tensor, lead: int = 0) -> torch.Tensor:
    """Return the largest absolute value of each block that a run is in; nan if the block has one.

    Args:
        values: float32, (n,).
        lead: Elements of the first block before the run.

    Returns:
        float32, (blocks,).
    """
    return _in_blocks(values.abs(), lead).amax(1)


def quantise(values: torch.Tensor, scales: torch.Tensor, book: CodeBook, lead: int = 0) -> torch.Tensor:
    """Return the code nearest to each value over its block's scale.

    Args:
        values: float32, (n,).
        scales: float32, (blocks,), of each block that the run is in; zero is allowed for a block of zeros.
        book: The values of codes.
        lead: Elements of the first block before the run.

    Returns:
        uint8, (n,).
    """
    scaled = _in_blocks(values, lead) / scales.clamp_min(TINY)[:, None]
    return book.nearest(scaled.view(-1)[lead : lead + values.numel()])


def dequantise(quantised: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor, lead: int = 0) -> torch.Tensor:
    """Return the values of codes.

    Args:
        quantised: Codes, uint8, (n,).
        scales: float32, (blocks,), of each block that the run is in.
        codes: The values of codes, float32, (256,).
        lead: Elements of the first block before the run.

    Returns:
        float32, (n,), new.
    """
    values = codes.index_select(0, quantised.int())
    return (_in_blocks(values, lead) * scales[:, None]).view(-1)[lead : lead + values.numel()]


def _in_blocks(values: torch.Tensor, lead: int) -> torch.Tensor:
    """Return a run as full blocks, (blocks, 256), padded with zeros; a view if it consists of full blocks."""
    tail = -(lead + values.numel()) % BLOCK
    return (pad(values, (lead, tail)) if lead or tail else values).view(-1, BLOCK)


def chunks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Divide a run of elements at multiples of CHUNK, so that no block is split.

    Examples:
        >>> list(chunks(100, 2**20 + 7))
        [(100, 1048576), (1048576, 1048583)]
    """
    while start < stop:
        end = min(stop, (start // CHUNK + 1) * CHUNK)
        yield start, end
        start = end


@dataclass(frozen=True)
class SplitBlock:
    """A block of a parameter that several ranks hold elements of."""

    index: int  # its number among the blocks of the unsharded parameter
    # first and past-the-last element of it that this rank holds, counted in the flattened parameter
    held: tuple[int, int]
    owners: range  # the ranks that hold some of it; they are consecutive


def split_blocks(meta: ShardMeta) -> tuple[SplitBlock, ...]:
    """Return the blocks of which this rank holds some elements but not all: none, one or two, in ascending order.

    Examples:
        >>> from fullshard.core.layout.unit_layout import plan_unit
        >>> lane = plan_unit(((9, 48),), 3).lanes[0]  # ranks hold 144 elements each
        >>> for block in split_blocks(ShardMeta("w", (), (9, 48), lane, lane.placements[0], rank=1)):
        ...     print(block.index, block.held, block.owners)
        0 (144, 256) range(0, 2)
        1 (256, 288) range(1, 3)
    """
    start, stop = meta.element_range
    if start == stop:
        return ()
    place, size = meta.placement, meta.layout.shard_numel
    found = []
    for index in sorted({start // BLOCK, (stop - 1) // BLOCK}):
        first, end = index * BLOCK, min((index + 1) * BLOCK, place.numel)
        owners = range((place.start + first) // size, (place.start + end - 1) // size + 1)
        if len(owners) > 1:
            found.append(SplitBlock(index, (max(first, start), min(end, stop)), owners))
    return tuple(found)


def any_block_is_split(meta: ShardMeta) -> bool:
    """Return whether a shard boundary, of any rank, is inside a block of the parameter; the same on every rank."""
    ends = [(rank * meta.layout.shard_numel - meta.placement.start) % BLOCK for rank in meta.owners[1:]]
    return any(ends)


SMALLEST = 4096
"""Smallest number of elements, unsharded, of a parameter with 8-bit moments; the same in bitsandbytes and torchao."""

_WRAPPED = "__bnb_optimizer_quant_state__"
"""The key that holds a parameter's tensors in bitsandbytes' ``state_dict()``; it also loads them without that key."""

_Splits = list[tuple[nn.Parameter, SplitBlock]]
_Plan = tuple[list[tuple[int, ShardMeta | None]], list[tuple[Comm, _Splits]]]


@dataclass(frozen=True)
class _ElementRun:
    """Elements ``first`` to ``end`` of a flattened parameter whose elements this rank holds from ``start`` on."""

    start: int
    first: int
    end: int

    @property
    def elements(self) -> slice:
        """Positions of the vectors' elements among this rank's."""
        return slice(self.first - self.start, self.end - self.start)

    @property
    def blocks(self) -> slice:
        """The blocks that they are in, among the blocks of which this rank holds any elements."""
        before = self.start // BLOCK
        return slice(self.first_block - before, -(-self.end // BLOCK) - before)

    @property
    def first_block(self) -> int:
        """The first block that they are in, among all blocks."""
        return self.first // BLOCK

    @property
    def lead(self) -> int:
        """Elements of that block before the run."""
        return self.first % BLOCK


class AdamW8bit(NarrowAdamW):
    """AdamW whose moments are 8-bit codes with a float32 scale for each 256 elements: about 2.03 bytes a parameter.

    The method and the state's format are those of bitsandbytes' ``AdamW8bit`` (Dettmers et al.,
    https://arxiv.org/abs/2110.02861): a parameter's state is ``step`` (int), ``state1`` and ``state2`` (uint8, the
    shard's shape), ``qmap1`` and ``qmap2`` (float32, (256,), the values of the codes) and ``absmax1`` and ``absmax2``
    (float32, one for each block); below 4096 elements it is ``step`` and float32 ``state1`` and ``state2``. State dicts
    can be exchanged with it in both directions.

    Blocks are those of the flattened *unsharded* parameter. If a shard boundary splits one, the ranks that hold parts
    of it share its scale, two numbers for each block in one exchange a step; if rows are multiples of 256 elements, as
    in most models, no block is split and nothing is exchanged. So the results do not depend on the number of ranks, and
    states reshard exactly.

    Comparison: the step is that of bitsandbytes' plain PyTorch path and of torchao's ``AdamW8bit``, up to the rounding
    of float32. bitsandbytes' CUDA kernel decays the weight after the update instead of before, gives the first moment
    the code next to zero if the nearest one is zero, and skips elements whose gradient is not finite; its CPU kernel
    takes a code next to the nearest one for 1 in 700 elements. torchao quantises only parameters with a multiple of 256
    elements *on the rank*, with scales of at least 1e-12. Here a gradient that is not finite corrupts its block: clip
    with ``error_if_nonfinite``, or use a gradient scaler, which skips such steps.

    Args:
        params: Parameters or groups of them, as in any torch optimizer; under sharding all of ``model.parameters()``,
            in the same order on every rank.
        lr: Learning rate.
        betas: Decay rates of the first and the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay, times the learning rate.

    Raises:
        ConfigError: A number is out of range; or, if ranks share blocks, at the first step and on every rank,
            parameters differ between ranks.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        """Make the optimizer; see the class."""
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._books: dict[torch.device, tuple[CodeBook, CodeBook]] = {}
        self._plan: _Plan = ([], [])

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the attributes that a copy lacks: torch copies groups and state only."""
        super().__setstate__({"_books": {}, "_plan": ([], [])} | self.__dict__ | state)

    @on_rows
    def communicates(self, param: nn.Parameter) -> bool:
        """Return whether ranks communicate about a parameter in a step."""
        return _is_8bit(param) and any_block_is_split(meta_of(param))

    @on_rows
    def state_part(self, param: nn.Parameter, key: str) -> StatePart | None:
        """Return which part of the unsharded optimizer's state a tensor is; None if it is elementwise."""
        meta = meta_of(param)
        if key in ("qmap1", "qmap2"):
            return on_all_owners(meta, (256,))
        return by_block(meta, BLOCK) if key in ("absmax1", "absmax2") else None

    @on_rows
    def state_kinds(
        self, param: nn.Parameter, group: Mapping[str, Any]
    ) -> dict[str, torch.dtype | torch.Tensor | None]:
        """Return the state of a parameter after a step: dtypes, the code books themselves, None for the step.

        Raises:
            CheckpointError: The group has an option that is not implemented.
        """
        refuse_torch_options(group, "AdamW8bit", CheckpointError)
        if not _is_8bit(param):
            return {"step": None, "state1": torch.float32, "state2": torch.float32}
        kinds: dict[str, torch.dtype | torch.Tensor | None] = {"step": None}
        for number, book in enumerate(self._books_on(param.device), 1):
            kinds |= {f"state{number}": torch.uint8, f"absmax{number}": torch.float32, f"qmap{number}": book.values}
        return kinds

    def _update_all(self) -> None:
        groups = {param: group for _, param, group in self._to_update()}
        shared, reduces = self._share_scales(groups)
        for param, group in groups.items():
            if param not in shared:
                self._update(param, group, {})
        for one in reduces:
            one.wait()
        for param, scales in shared.items():
            self._update(param, groups[param], scales)

    def _share_scales(
        self, groups: Mapping[nn.Parameter, Mapping[str, Any]]
    ) -> tuple[dict[nn.Parameter, dict[int, torch.Tensor]], list[OwnerReduce]]:
        """Start to reduce the new scales of blocks that several ranks hold.

        Returns:
            For the parameters to update, by block number, the scales of both moments, (2,), valid after the reductions;
            and the reductions.
        """
        shared: dict[nn.Parameter, dict[int, torch.Tensor]] = {}
        reduces = []
        for comm, splits in self._splits_by_comm():
            values = []
            for param, block in splits:
                # On the device of the collectives, even if shards are elsewhere. Zeros if there is no gradient here.
                value = torch.zeros(2, device=comm.device)
                if param in groups:
                    run = _ElementRun(_range(param)[0], *block.held)
                    moments = self._moments(param, run, groups[param]["betas"])
                    value.copy_(torch.stack([moment.abs().amax() for moment in moments]))
                    shared.setdefault(param, {})[block.index] = value
                values.append(OwnerValue(block.owners, value))
            reduces.append(OwnerReduce(comm, values, "scales of 8-bit blocks", op="max", at_once=True))
        return shared, reduces

    def _splits_by_comm(self) -> list[tuple[Comm, _Splits]]:
        """Return the blocks whose scales this rank shares; planned again when parameters or their shards have changed.

        Only layouts decide, so the plan is the same on every rank, whichever parameters have a gradient.
        """
        params = list(self._params())
        now: list[tuple[int, ShardMeta | None]] = [(id(param), getattr(param, "shard_meta", None)) for param in params]
        if self._plan[0] != now:
            plan = []
            for comm, of_comm in by_comm(params):
                shared = [param for param in of_comm if self.communicates(param)]
                if shared:
                    require_same_parameters(comm, of_comm, "AdamW8bit")
                    plan.append((comm, [(param, block) for param in shared for block in split_blocks(meta_of(param))]))
            self._plan = (now, plan)
        return self._plan[1]

    def _update(self, param: nn.Parameter, group: Mapping[str, Any], shared: Mapping[int, torch.Tensor]) -> None:
        """Step one parameter; ``shared`` has the new scales of blocks that other ranks hold parts of."""
        state = self._state_of(param)
        state["step"] += 1
        weights, (start, stop) = flat(param), _range(param)
        for first, end in chunks(start, stop):
            run = _ElementRun(start, first, end)
            moments = self._moments(param, run, group["betas"])
            here = weights[run.elements]
            wide = widened(here)
            descend(wide, *moments, group, state["step"])
            if wide is not here:
                here.copy_(wide)
            if _is_8bit(param):
                self._keep(state, run, moments, shared)

    def _moments(
        self, param: nn.Parameter, run: _ElementRun, betas: tuple[float, float]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the moments of a run of elements with the new gradient, float32; float32 states change in place."""
        state = self._state_of(param)
        assert param.grad is not None
        grad = param.grad.detach().reshape(-1)[run.elements].float()
        kept = [state[key].view(-1)[run.elements] for key in ("state1", "state2")]
        if _is_8bit(param):
            kept = [
                dequantise(codes, state[f"absmax{n}"][run.blocks], state[f"qmap{n}"], run.lead)
                for n, codes in enumerate(kept, 1)
            ]
        return advance(kept[0], kept[1], grad, betas)

    def _keep(
        self,
        state: Mapping[str, Any],
        run: _ElementRun,
        moments: Sequence[torch.Tensor],
        shared: Mapping[int, torch.Tensor],
    ) -> None:
        """Store codes and scales of a run's moments in the state."""
        for number, (moment, book) in enumerate(zip(moments, self._books_on(moments[0].device), strict=True)):
            scales = block_maxima(moment, run.lead)
            for index, both in shared.items():
                if run.first_block <= index < run.first_block + scales.numel():
                    scales[index - run.first_block] = both[number]
            state[f"state{number + 1}"].view(-1)[run.elements] = quantise(moment, scales, book, run.lead)
            state[f"absmax{number + 1}"][run.blocks] = scales

    def _state_of(self, param: nn.Parameter) -> dict[str, Any]:
        """Return a parameter's state; zeros before its first step."""
        state = self.state[param]
        if not state:
            is_8bit = _is_8bit(param)
            state["step"] = 0
            for number in (1, 2):
                state[f"state{number}"] = torch.zeros(
                    param.shape, dtype=torch.uint8 if is_8bit else torch.float32, device=param.device
                )
                if is_8bit:
                    state[f"qmap{number}"] = self._books_on(param.device)[number - 1].values
                    blocks = by_block(meta_of(param), BLOCK).numel
                    state[f"absmax{number}"] = torch.zeros(blocks, device=param.device, dtype=torch.float32)
        return state

    def _books_on(self, device: torch.device) -> tuple[CodeBook, CodeBook]:
        """Return the code books of the first and the second moment, shared by all parameters of a device."""
        if device not in self._books:
            signed, unsigned = (CodeBook.of(dynamic_codes(signed=signed).to(device)) for signed in (True, False))
            self._books[device] = signed, unsigned
        return self._books[device]

    def _loaded_state(self, param: nn.Parameter, state: Mapping[str, Any]) -> dict[str, Any]:
        bare = {key: value for key, value in state.items() if key != _WRAPPED} | dict(state.get(_WRAPPED, {}))
        if not bare or not param.numel():
            return {}
        loaded = {k: v.to(param.device) if isinstance(v, torch.Tensor) else v for k, v in bare.items()}
        kept = torch.uint8 if _is_8bit(param) else torch.float32
        found = [getattr(loaded.get(key), "dtype", None) for key in ("state1", "state2")]
        if found != [kept, kept]:
            raise CheckpointError(
                f"AdamW8bit keeps state1 and state2 as uint8 for parameters of {SMALLEST} elements or more, as "
                f"float32 for smaller ones; for one of {meta_of(param).placement.numel} the loaded ones are {found}. "
                "Load a state dict of AdamW8bit, fullshard's or bitsandbytes', for the same parameters."
            )
        for number, book in enumerate(self._books_on(param.device) if _is_8bit(param) else (), 1):
            codes = loaded.get(f"qmap{number}", torch.empty(0))
            if codes.shape != book.values.shape or not torch.allclose(codes, book.values, rtol=1e-6, atol=0):
                raise CheckpointError(
                    f"AdamW8bit's codes have the values of dynamic quantisation; qmap{number} in the loaded state has "
                    "others. Load a state dict of AdamW8bit, fullshard's or bitsandbytes'."
                )
            loaded[f"qmap{number}"] = book.values  # one for all parameters
        return loaded | {"step": int(loaded["step"])}


def _is_8bit(param: nn.Parameter) -> bool:
    return meta_of(param).placement.numel >= SMALLEST


def _range(param: nn.Parameter) -> tuple[int, int]:
    return meta_of(param).element_range
