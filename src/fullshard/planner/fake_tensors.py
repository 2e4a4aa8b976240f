"""Running operators without memory: tensors have shapes, dtypes and addresses, but their memory is never written.

The engine changes the classes of parameters, compares addresses and resizes storages, which torch's FakeTensor does
not support. So tensors here are plain CPU tensors whose memory is reserved and never touched: the system assigns it
no pages. torch's FakeTensorMode computes the outputs' shapes.
"""

from __future__ import annotations

import functools
import math
import mmap
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from fullshard.core.torch_private import (
    dispatch_mode,
    fake_tensors,
    in_backward,
    is_composite,
    operator,
    plain_functions,
    run_composite,
    storage_references,
    tree_flatten,
    tree_map,
    tree_unflatten,
    without_modes,
)
from fullshard.errors import ModelError
from fullshard.planner.memory_tracker import MemoryTracker, spend
from fullshard.planner.work import IN_PLACE, is_view

KNOWN_NUMEL = 1 << 18
"""Elements up to which whole numbers (token ids, masks, checksums) keep their values: programs branch on them."""

LARGE_BYTES = 1 << 30
"""Size from which on a tensor has address space only, in bytes."""

_NORESERVE = 0x4000
"""Linux's ``MAP_NORESERVE``, which Python's mmap does not name before 3.13."""

_LOSSES = {"aten::mse_loss": 2, "aten::smooth_l1_loss": 2, "aten::binary_cross_entropy": 1, "aten::huber_loss": 1}
"""Losses, and how many tensors of all elements their kernel makes before the sum or mean."""
_LOSSES_KEPT = _LOSSES.keys() - {"aten::huber_loss"}
"""Those whose sum or mean keeps the storage of one of these tensors."""

_REDUCTIONS = {f"aten::{name}" for name in ("sum", "prod", "mean", "cumsum", "cumprod", "linalg_vector_norm")}
"""Operators that first copy their input to the dtype that they compute in."""

_SCATTERED = {f"aten::{name}" for name in ("scatter", "scatter_add", "scatter_reduce")}
_SCATTERED |= {f"{name}_" for name in _SCATTERED}
"""Operators that copy the tensor that they write to into float32 if it is in 16 bits."""

_PRODUCTS = {"aten::mm", "aten::addmm"}
"""Operators that copy a matrix whose elements are neither row by row nor column by column, such as expanded ones."""

_CONSTANTS = {"aten::ones", "aten::zeros", "aten::full", "aten::arange", "aten::scalar_tensor"}
CONSTANTS_LIKE = {"aten::ones_like", "aten::zeros_like", "aten::full_like"}
CONSTANTS_LIKE |= {"aten::new_ones", "aten::new_zeros", "aten::new_full"}
_CONSTANT_NUMEL = 1 << 16
"""Elements up to which floats from these operators keep their values: masks of ones are made of them."""


class Form(NamedTuple):
    """A tensor without its memory."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    nbytes: int  # of its storage

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        """Return the form of a tensor."""
        storage = tensor.untyped_storage().nbytes()
        offset = int(tensor.storage_offset())
        return cls(tensor.size(), tensor.stride(), offset, tensor.dtype, tensor.device, storage)

    def empty(self) -> torch.Tensor:
        """Return a tensor without memory; a large one in address space that the system does not promise memory for."""
        if self.device.type == "meta" or self.nbytes < LARGE_BYTES:
            return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)
        # Not torch's allocator: Linux refuses a single allocation above the memory of the machine.
        space = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        return torch.frombuffer(space, dtype=self.dtype).as_strided(self.size, self.stride)

    def view_of(self, owner: torch.Tensor) -> torch.Tensor:
        """Return ``owner`` itself, or its view of this form."""
        if owner.size() == self.size and owner.stride() == self.stride:
            return owner
        return torch.as_strided(owner, self.size, self.stride, self.offset + owner.storage_offset())


@dataclass(frozen=True)
class Shapes:
    """The outputs of an operator without their memory, and what depends on its inputs' forms alone."""

    leaves: list[Any]  # forms and other values
    owners: list[int | None]  # for each, the index of the input whose memory it shares
    spec: Any  # how they are nested
    small: bool  # whether it is computed where what it reads is known
    temporary_bytes: int  # that its kernel holds beside them
    kept_bytes: int  # of the storage of its only output, where that is larger than its elements; else 0


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among an operator's arguments or results. Called for each; pytree took a third of the time."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(value)
    return found


def is_small(func: Any, leaves: list[Any], given: list[torch.Tensor]) -> bool:
    """Return whether an operator that reads ``given`` is to be computed: few elements, no weights or activations."""
    made = [leaf for leaf in leaves if isinstance(leaf, Form)]
    numels = [math.prod(form.size) for form in made]
    if max((*numels, *(tensor.numel() for tensor in given)), default=0) > KNOWN_NUMEL:
        return False
    if any(form.device.type == "meta" for form in made) or any(tensor.is_meta for tensor in given):
        return False
    # Bytes are codes of quantised weights, whose buffers the engine fills and frees like those of numbers.
    if given or not any(form.dtype.is_floating_point or form.dtype == torch.uint8 for form in made):
        return True
    constants = func._schema.name in _CONSTANTS | CONSTANTS_LIKE
    return constants and all(numel <= _CONSTANT_NUMEL for numel in numels)


def temporary_bytes(func: Any, given: list[torch.Tensor], leaves: Sequence[Any] = ()) -> int:
    """Return the bytes that a kernel for the CPU holds beside inputs and outputs, as far as they grow with these.

    Beside the kinds above: a pointwise operator computes on one dtype, an embedding's gradient is added from rows in
    order, and logsumexp subtracts the maximum first.
    """
    name = func._schema.name
    if func is torch.ops.aten.embedding_dense_backward.default:
        return 0 if given[0].is_contiguous() else given[0].numel() * given[0].itemsize
    if name == "aten::logsumexp":
        return given[0].numel() * given[0].itemsize
    if name in _REDUCTIONS and leaves:
        computed = torch.float32 if name == "aten::mean" and leaves[0].dtype.itemsize == 2 else leaves[0].dtype
        return 0 if given[0].dtype == computed else given[0].numel() * computed.itemsize
    if name in _SCATTERED:
        return 4 * given[0].numel() if given[0].itemsize == 2 else 0
    if name in _PRODUCTS:
        return sum(one.numel() * one.itemsize for one in given[-2:] if not _has_rows(one))
    if torch.Tag.pointwise not in func.tags:
        return 0
    numbers = [tensor for tensor in given if tensor.dtype != torch.bool and tensor.dim()]
    if len({tensor.dtype for tensor in numbers}) < 2:
        return 0
    common = functools.reduce(torch.promote_types, (tensor.dtype for tensor in numbers))
    return sum(tensor.numel() * common.itemsize for tensor in numbers if tensor.dtype != common)


def _has_rows(matrix: torch.Tensor) -> bool:
    """Return whether the elements of each row or each column of a matrix are side by side, as BLAS needs it."""
    (rows, columns), (down, right) = matrix.shape, matrix.stride()
    return (right == 1 and down >= max(1, columns)) or (down == 1 and right >= max(1, rows))


def loss_bytes(func: Any, given: list[torch.Tensor], leaves: list[Any]) -> tuple[int, int]:
    """Return the bytes of a reduced loss's storage that its kernel makes for all elements, and of what it holds beside.

    In 16 bits the latter is that of a mean; a sum would take less.
    """
    made = _LOSSES.get(func._schema.name)
    if made is None or leaves[0].size:
        return 0, 0
    numel, itemsize = torch.broadcast_shapes(*(tensor.shape for tensor in given)).numel(), leaves[0].dtype.itemsize
    kept = numel * itemsize if func._schema.name in _LOSSES_KEPT else 0
    return kept, numel * (made * itemsize + 4 * (itemsize == 2)) - kept


def written_by(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors that an operator writes to."""
    return tensors_in(args[index] if index < len(args) else kwargs.get(name) for index, name in _written_places(func))


@functools.cache
def _written_places(func: Any) -> list[tuple[int, str]]:
    """Return place and name of the arguments that an operator writes to."""
    places = enumerate(func._schema.arguments)
    return [(index, one.name) for index, one in places if one.alias_info is not None and one.alias_info.is_write]


class UnplannedStepError(ModelError):
    """A step that cannot be run without values: the plan is at its limit, the step itself may be right."""


_OPERATORS_A_CHECK = 64
"""Operators from one look at the limit to the next: some milliseconds."""

_GROUPED = operator("_grouped_mm")
"""The products of experts. Torch knows their shape for bf16 only, but computes every dtype."""

_COMPOSED = {"bitsandbytes::gemm_4bit", "aten::_safe_softmax", "aten::binary_cross_entropy_with_logits"}
"""Operators whose kernel for the CPU calls others, and holds their results: by name, since packages may be missing."""

_SHAPE_ONLY = {"aten::set_", "aten::resize_", "aten::lift_fresh"}
"""Operators that change or return their argument without reading it, apart from views, which take no memory."""


_KNOWN_SHAPES: dict[Any, Shapes] = {}
"""Outputs of operators; one for all plans of the process, as those of a search differ in few operators."""
_MOST_SHAPES = 20_000
"""Operators that are remembered, some 2 kB each; a step of a large model has a few thousand different ones."""


class FakeMode(dispatch_mode):
    """Context in which operators compute shapes instead of values.

    Whole numbers that follow from known ones are computed, up to 262,144 elements a tensor, so that a model may look at
    its masks and the engine at its checksums. A single number that is drawn uniformly is 0.5, its mean, so that layers
    run that are dropped with a smaller probability. Everything else is fake: a float's value is never known.

    Attributes:
        on_operator: Called with each operator, its arguments and its result.
        operators: Number of operators so far.
        has_host: True if host memory is not the device's.
        on_host: Decides from the tensors that a result is made of whether it is the host's; None: there is one memory.
        assumed: Returns the value when a program reads an unknown one; None: that is an error.
    """

    def __init__(self, tracker: MemoryTracker) -> None:
        """Report every tensor to ``tracker``."""
        super().__init__()
        self.tracker = tracker
        self.on_operator: Callable[[Any, Any, Any, Any], object] = self.ignore
        self.assumed: Callable[[], float] | None = None
        self.on_host: Callable[[list[torch.Tensor]], bool] | None = None
        self.has_host = False
        self.operators = 0
        self._torchs = fake_tensors()
        self._fake = self._torchs.FakeTensorMode(allow_non_fake_inputs=False)
        self._unshared: tuple[int, int, int] | None = None
        self._in_attention = False

    @staticmethod
    def ignore(func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Ignore an operator."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch's guard costs 2 us an operator, and nothing is compiled while a mode is on."""
        return False

    def __enter__(self) -> FakeMode:
        """Start; also count memory changed without operators: resized storages, and copies of the random state."""
        self._outer, _planning.mode = _planning.mode, self
        _replace_functions(+1)
        super().__enter__()
        try:
            self._count_references()
        except BaseException:  # the time may be up: without __exit__, torch would stay in this mode for good
            self.__exit__(None, None, None)
            raise
        return self

    def _assume(self, func: Any) -> float:
        """Return the assumed value for a read of an unknown one."""
        if self.assumed is None:
            raise _unknown(func)
        return self.assumed()

    def _count_references(self) -> None:
        """Measure the number of references to a gradient that only autograd's sum holds."""
        with torch.enable_grad():
            start = torch.empty(2, 2, requires_grad=True) * 1
            (start.exp() + start.sin()).sum().backward()

    def __exit__(self, *error: Any) -> None:
        """Stop."""
        super().__exit__(*error)
        _replace_functions(-1)
        _planning.mode = self._outer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return what ``func`` would return, without computing it.

        Raises:
            ModelError: Its result depends on values, or torch does not know its shape.
            TooMuchWorkError: See :func:`~fullshard.planner.memory_tracker.work_limit`.
        """
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # its class first, which calls operators with the tensors inside
        self.operators += 1
        if not self.operators % _OPERATORS_A_CHECK:
            spend(_OPERATORS_A_CHECK)
        with plain_functions():
            taken = None
            if self._in_attention and func is torch.ops.aten.add.Tensor:
                taken = self._masked_in_place(*args)
            elif in_backward() and not torch.is_grad_enabled():
                taken = self._summed_in_place(*args, **(kwargs or {})) if func is torch.ops.aten.add.Tensor else None
                func = IN_PLACE.get(func, func)
            if taken is not None:
                self.on_operator(func, args, kwargs or {}, taken)
                return taken
            result = self._run(func, args, kwargs or {})
            if self.on_host is not None:
                self._place(func, tensors_in((*args, *(kwargs or {}).values())), result)
            self.on_operator(func, args, kwargs or {}, result)
            return result

    def _place(self, func: Any, given: list[torch.Tensor], result: Any) -> None:
        """Count a result as the host's if it is; and during a copy to the device, the host memory that it takes."""
        assert self.on_host is not None, "asked before"
        if self.on_host(given):
            for tensor in tensors_in((result,)):
                if not tensor.is_meta:
                    self.tracker.to_host(tensor)
        elif func is torch.ops.aten.copy_.default and self.tracker.is_on_host(given[-1]):
            self.tracker.touch(given[-1].numel() * given[-1].itemsize)

    def _summed_in_place(self, one: Any, other: Any, alpha: Any = 1) -> torch.Tensor | None:
        """Return the gradient that autograd would add another one to, in place; None if it would make a third.

        It does so if nothing else holds the first one, except while a dispatch mode is on, as here.
        """
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor) or alpha != 1:
            return None
        # Counted at one place: each name and each call on the way here is a reference to the object.
        counts = [_references(one), _references(other)]
        if self._unshared is None:
            self._unshared = counts[0]
        if one.shape != other.shape or one.dtype != other.dtype:
            return None
        for index, tensor in enumerate((one, other)):
            if counts[index] == self._unshared and _is_dense(tensor):
                return tensor
        return None

    def _masked_in_place(self, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor | None:
        """Return attention's scores after its mask is added in place; None if it would make others.

        Torch's plain attention adds in place, except while a dispatch mode is on, as here.
        """
        if torch.promote_types(scores.dtype, mask.dtype) != scores.dtype:
            return None
        self.tracker.see(mask)
        self.tracker.see(scores, fake=True)
        self.tracker.touch(temporary_bytes(torch.ops.aten.add_.Tensor, [scores, mask]))
        return scores.view_as(scores)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = tensors_in((*args, *kwargs.values()))
        for tensor in given:
            self.tracker.see(tensor)
        way = _way_of(func)
        if way is not None:
            return way(self, func, args, kwargs)
        read = [] if func._schema.name in CONSTANTS_LIKE else given
        known = not any(map(self.tracker.is_fake, read))
        if func._schema.name == "aten::_local_scalar_dense" and not known:
            return self._assume(func)
        try:
            shapes = self._shapes_of(func, args, kwargs, given)
        except (self._torchs.DataDependentOutputException, self._torchs.DynamicOutputShapeException) as error:
            if known:
                return self._computed(func, args, kwargs)
            if func is torch.ops.aten.index.Tensor and not any(map(self.tracker.is_fake, tensors_in(args[1]))):
                return self._run(func, (args[0], self._places(args[1])), kwargs)
            raise _unknown(func) from error
        except self._torchs.UnsupportedOperatorException as error:
            raise UnplannedStepError(
                f"The plan cannot follow {func}: torch does not know the shape of its result without computing it. "
                "Plan the model without the module that calls it."
            ) from error
        if known and shapes.small:
            result = self._computed(func, args, kwargs)
        else:
            for tensor in written_by(func, args, kwargs):
                self.tracker.see(tensor, fake=True)
            result = self._fake_outputs(shapes, given)
        self.tracker.touch(shapes.temporary_bytes)
        return result

    def _decomposed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Follow the operators that one that may copy is made of; torch does so before, except in tensor subclasses."""
        self.operators -= 1
        super().__enter__()
        try:
            return func.decompose(*args, **kwargs)
        finally:
            super().__exit__(None, None, None)

    def _composed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Follow the operators that an operator's kernel calls, for what they hold; for a step's time it stays one."""
        told, self.on_operator = self.on_operator, self.ignore
        super().__enter__()
        try:
            return run_composite(func, args, kwargs)
        finally:
            super().__exit__(None, None, None)
            self.on_operator = told

    def _places(self, indices: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return the indices of a mask's places, whose number is known, as the kernel computes them."""
        found: list[torch.Tensor | None] = []
        for index in indices:
            is_mask = index is not None and index.dtype == torch.bool
            found += self._computed(torch.nonzero, (index,), {}).unbind(1) if is_mask else [index]
        return found

    def _drawn(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the mean for a single uniform number."""
        if math.prod(args[0]) == 1:
            return self._computed(torch.full, (args[0], 0.5), {key: kwargs.get(key) for key in ("dtype", "device")})
        return self._fake_outputs(self._shapes_of(func, args, kwargs, []), [])

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        for tensor in tensors_in((result,)):
            self.tracker.see(tensor)
        return result

    def _shapes_of(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> Shapes:
        """Return the outputs of an operator; for blocks of one kind, torch is asked once."""
        key = _key(func, args, kwargs, given)
        try:
            known = _KNOWN_SHAPES.get(key)
        except TypeError:  # an argument that cannot be compared
            return self._fake_shapes(func, args, kwargs, given)
        if known is None:
            if len(_KNOWN_SHAPES) >= _MOST_SHAPES:
                _KNOWN_SHAPES.clear()
            known = _KNOWN_SHAPES[key] = self._fake_shapes(func, args, kwargs, given)
        return known

    def _fake_shapes(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> Shapes:
        """Return the outputs of an operator on fake inputs."""
        made: dict[int, torch.Tensor] = {}

        def fake_of(tensor: Any) -> Any:
            if not isinstance(tensor, torch.Tensor):
                return tensor
            if id(tensor) not in made:
                dtype = torch.bfloat16 if func is _GROUPED and tensor.is_floating_point() else tensor.dtype
                shape = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device="meta")
                made[id(tensor)] = self._torchs.FakeTensor(self._fake, shape, tensor.device)
            return made[id(tensor)]

        fake_args, fake_kwargs = tree_map(fake_of, (args, kwargs))
        with self._fake:
            result = func(*fake_args, **fake_kwargs)
        inputs = {made[id(tensor)].untyped_storage()._cdata: index for index, tensor in enumerate(given)}
        if func is _GROUPED:
            result = result.to(given[0].dtype)
        found, spec = tree_flatten(result)
        owners = [inputs.get(t.untyped_storage()._cdata) if isinstance(t, torch.Tensor) else None for t in found]
        leaves = [Form.of(one) if isinstance(one, torch.Tensor) else one for one in found]
        read = [] if func._schema.name in CONSTANTS_LIKE else given
        kept, beside = loss_bytes(func, given, leaves)
        small = is_small(func, leaves, read)
        return Shapes(leaves, owners, spec, small, temporary_bytes(func, given, leaves) + beside, kept)

    def _fake_outputs(self, shapes: Shapes, given: list[torch.Tensor]) -> Any:
        """Return tensors of these shapes; where one shares an input's memory, that input or a view of it."""
        outputs = []
        for leaf, owner in zip(shapes.leaves, shapes.owners, strict=True):
            if not isinstance(leaf, Form):
                outputs.append(leaf)
            elif owner is None:
                made = leaf.empty()
                self.tracker.see(made, fake=True)
                if shapes.kept_bytes:
                    self.tracker.resized(made.untyped_storage(), shapes.kept_bytes)
                outputs.append(made)
            else:
                outputs.append(leaf.view_of(given[owner]))
        return outputs[0] if shapes.spec.is_leaf() else tree_unflatten(outputs, shapes.spec)


class _Planning(threading.local):
    """What this thread plans."""

    mode: FakeMode | None = None


_planning = _Planning()


def planning() -> FakeMode | None:
    """Return the mode that this thread is in; None if it plans nothing."""
    return _planning.mode


def _resize(mode: FakeMode, resize: Any, storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    if storage.resizable():
        resize(storage, size)
    mode.tracker.resized(storage, size)
    return storage


def _size(mode: FakeMode, size_of: Any, storage: torch.UntypedStorage) -> int:
    return size_of(storage) if storage.resizable() else mode.tracker.size_of(storage, size_of(storage))


def _random_state(mode: FakeMode, state: Any) -> torch.Tensor:
    made = state()
    mode.tracker.see(made)
    return made


def _read_list(mode: FakeMode, to_list: Any, tensor: torch.Tensor) -> Any:
    """Ask for values: ``tolist`` calls no operator, and fake tensors have random content."""
    if mode.tracker.is_fake(tensor):
        tensor = torch.full(tensor.shape, mode._assume("tolist"), dtype=tensor.dtype)
    return to_list(tensor)


def _attend(mode: FakeMode, attention: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Note that attention runs, which adds its mask in place: see :meth:`FakeMode._masked_in_place`."""
    mode._in_attention = True
    try:
        return attention(*args, **kwargs)
    finally:
        mode._in_attention = False


_WITHOUT_OPERATORS: list[tuple[Any, str, Callable[..., Any]]] = [
    (torch.UntypedStorage, "resize_", _resize),
    (torch.UntypedStorage, "nbytes", _size),
    (torch, "get_rng_state", _random_state),
    (torch.Tensor, "tolist", _read_list),
    (F, "scaled_dot_product_attention", _attend),
]
"""Functions that a dispatch mode does not see, or not enough of; what a planning thread calls in place of each."""

_lock = threading.Lock()
_modes = 0
_restore = ExitStack()


def _replace_functions(more: int) -> None:
    """Count the modes of all threads; while there are any, torch's functions ask whether their thread plans."""
    global _modes
    with _lock:
        if not _modes:
            for owner, name, ours in _WITHOUT_OPERATORS:
                theirs, inherited = getattr(owner, name), name not in vars(owner)
                setattr(owner, name, _where_planned(theirs, ours))
                _restore.callback(partial(delattr, owner, name) if inherited else partial(setattr, owner, name, theirs))
        _modes += more
        if not _modes:
            _restore.close()


def _where_planned(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``ours`` with the mode of a planning thread, and ``theirs`` in other threads."""

    @functools.wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        mode = _planning.mode
        return theirs(*args, **kwargs) if mode is None else ours(mode, theirs, *args, **kwargs)

    return call


def real_tensors() -> AbstractContextManager[Any]:
    """Return a context inside a :class:`FakeMode` in which operators compute, and nothing is counted."""
    return without_modes()


def _key(func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> Any:
    """Return what an operator's shapes depend on, to be compared."""
    places = {id(tensor): index for index, tensor in enumerate(reversed(given))}  # an input given twice is one owner

    def part(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            form = (value.size(), value.stride(), value.storage_offset(), value.dtype, value.device)
            return (places[id(value)], *form)
        if isinstance(value, (list, tuple)):
            return (type(value), *map(part, value))
        return type(value), value  # 1, 1.0 and True are equal, and promote dtypes differently

    return func, torch.get_default_dtype(), part(args), *((name, part(kwargs[name])) for name in kwargs)


def _references(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return the numbers of references to a tensor, to its Python object and to its storage."""
    storage: Any = storage_references(tensor.untyped_storage()._cdata)
    return tensor._use_count(), sys.getrefcount(tensor), storage  # type: ignore[attr-defined]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has no gaps and no overlaps: only then does ``empty_like`` keep its strides."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _viewed(_mode: FakeMode, func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


@functools.cache
def _way_of(func: Any) -> Callable[[FakeMode, Any, Any, Any], Any] | None:
    """Return how an operator is run that reads and writes no element, or that calls others; None for all else."""
    name = func._schema.name
    if func is torch.ops.aten.rand.default:
        return FakeMode._drawn
    if name in _COMPOSED:
        return FakeMode._composed
    if name in _SHAPE_ONLY:
        return FakeMode._computed
    if is_view(func) and is_composite(func):
        return FakeMode._decomposed
    return _viewed if is_view(func) or torch.Tag.inplace_view in func.tags else None


def _unknown(func: Any) -> UnplannedStepError:
    return UnplannedStepError(
        f"The model or its loss reads a number that has to be computed ({func}), but a plan computes shapes, not "
        "values. Leave that out of the planned step, or make it depend only on the batch's whole numbers."
    )
