"""What a tensor subclass says of its own gather: ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``.

Both are called on a tensor of the subclass that has this rank's rows. What the first returns is gathered, in its own
dtypes, and the second makes the full parameter of it. In between, the engine knows such a parameter as the plain tensor
inside the subclass: optimizers, checkpoints and first values have these values.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fullshard.core.comm import Comm
from fullshard.core.comm.torch_objects import torch_mesh, torch_policy
from fullshard.core.policy import MixedPrecision
from fullshard.core.torch_private import is_traceable_wrapper, plain_functions
from fullshard.errors import ShardingError, WrapError

METHODS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


class Extension:
    """The subclass around one parameter.

    Attributes:
        name: The parameter's, for messages.
        values: What the engine shards: the plain tensor inside, until :meth:`cut`.
        packed: True if ``values`` are bytes: see :class:`PackedExtension`.
        takes_mesh_only: True if ``fsdp_pre_all_gather`` has one argument, the mesh: then it does not know how many rows
            other ranks have.
        module: The module that has the parameter.
        precision: The policy of its unit.
        full_shape: Shape of the full parameter.
        dtype: Its dtype before sharding.
        kind: Its class.
    """

    packed = False

    def __init__(self, name: str, param: nn.Parameter, module: nn.Module, values: dict[str, torch.Tensor]) -> None:
        """Describe ``param``; ``values`` are the tensors inside that the engine shards, by attribute."""
        self.name = name
        self.module = module
        self.precision = MixedPrecision()
        self.full_shape, self.dtype, self.kind = param.shape, param.dtype, type(param)
        self._inside = tuple(values)
        self._whole: torch.Tensor | None = param
        self._local: torch.Tensor | None = None
        self._ahead: tuple[str, weakref.ref[nn.Parameter], int] | None = None  # set for a version of the shard
        self.values = next(iter(values.values())).detach()
        self.takes_mesh_only = len(inspect.signature(param.fsdp_pre_all_gather).parameters) == 1  # type: ignore[attr-defined]

    def values_of(self, param: torch.Tensor) -> torch.Tensor:
        """Return what the engine shards of ``param``, another full tensor of the subclass, or a plain one."""
        return getattr(param, self._inside[0]) if isinstance(param, self.kind) else param

    def cut(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        """Make this rank's tensor of the subclass, for rows of ``shape`` of the values, and free the full one."""
        self._local = self._cut(shape, dtype, device)
        self._empty_local()
        if self._whole is not None:
            self.values = torch.empty(0)
            for name in self._inside:
                setattr(self._whole, name, self.values)
            self._whole = None

    def try_cut(self, shape: Sequence[int]) -> None:
        """Refuse a subclass that :meth:`cut` cannot cut; nothing changes.

        Raises:
            WrapError: The subclass is lost on the way.
        """
        self._cut(shape, self.values.dtype, self.values.device)

    def _cut(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        whole = self._local if self._whole is None else self._whole
        assert whole is not None
        with torch.no_grad():
            local = self._made_for(whole.detach(), shape, dtype, device)
        if type(local) is not self.kind:
            raise WrapError(
                f"{_called(self.name, whole)}, but its rows a {type(local).__name__}. torch's FSDP2 needs split, "
                "new_zeros, narrow and copy_ to keep the class, and so does fullshard."
            )
        return local

    def _empty_local(self) -> None:
        """Let go of the rows in this rank's tensor: between gathers they would be held twice, or on the device."""
        for name in self._inside:
            setattr(self._local, name, getattr(self._local, name).new_empty(0))

    def _made_for(
        self, whole: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return whole.new_zeros(tuple(shape), dtype=dtype, device=device)

    def local(self, rows: torch.Tensor) -> torch.Tensor:
        """Return this rank's tensor of the subclass around ``rows``: the same object in each call.

        What a user sets on it, such as a scale that was computed ahead, is kept.
        """
        assert self._local is not None
        if (self._local.dtype, self._local.device) != (rows.dtype, rows.device):
            self.cut(rows.shape, rows.dtype, rows.device)
        setattr(self._local, self._inside[0], rows)
        return self._local

    def takes(self, attribute: str) -> bool:
        """Return True if the class has such an attribute."""
        return hasattr(self._local, attribute)

    def set(self, attribute: str, value: object, shard: nn.Parameter) -> None:
        """Set an attribute of this rank's tensor of the subclass, for gathers until ``shard``, the parameter, changes.

        After that it is None: a scale of other values, such as those before weights were loaded, would clamp these.
        """
        setattr(self._local, attribute, value)
        with plain_functions():  # a guarded shard need not be asked
            self._ahead = attribute, weakref.ref(shard), shard._version

    def _forget_if_changed(self) -> None:
        if self._ahead is not None:
            attribute, shard, version = self._ahead
            with plain_functions():
                kept = shard()
                changed = kept is None or kept._version != version
            if changed:
                self._ahead = None
                setattr(self._local, attribute, None)

    def get(self, attribute: str) -> Any:
        """Return an attribute of this rank's tensor of the subclass."""
        return getattr(self._local, attribute)

    def before_gather(self, rows: torch.Tensor, comm: Comm) -> tuple[Sequence[torch.Tensor], Any]:
        """Return what is sent of ``rows``, this rank's, and what is kept for :meth:`after_gather`."""
        local: Any = self.local(rows)
        self._forget_if_changed()
        arguments: tuple[Any, ...] = (torch_mesh(comm, rows.device),)
        if not self.takes_mesh_only:
            stride = torch.empty(self.full_shape, device="meta").stride()
            arguments += (self.full_shape, stride, self.module, torch_policy(self.precision))
        sent, metadata = local.fsdp_pre_all_gather(*arguments)
        return tuple(sent), metadata

    def after_gather(
        self, gathered: Sequence[torch.Tensor], metadata: Any, dtype: torch.dtype
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Return the full parameter, made of what was gathered first, and the tensors to be freed with it.

        Raises:
            ShardingError: Its class did not return these.
        """
        local: Any = self._local
        made = local.fsdp_post_all_gather(gathered, metadata, dtype)
        self._empty_local()
        if not isinstance(made, tuple | list) or len(made) != 2 or not isinstance(made[0], torch.Tensor):
            raise ShardingError(
                f"fsdp_post_all_gather of {self.name}, a {self.kind.__name__}, returned a {type(made).__name__} in the "
                "first gather. Without out= it must return the full parameter and the tensors to be freed with it."
            )
        return made[0], made[1]

    def write_gathered(
        self, gathered: Sequence[torch.Tensor], metadata: Any, dtype: torch.dtype, out: torch.Tensor
    ) -> torch.Tensor | None:
        """Let the class write to ``out``, its first result, in a later gather; return the tensor that it returned."""
        local: Any = self._local
        made = local.fsdp_post_all_gather(gathered, metadata, dtype, out=out)
        self._empty_local()
        made = made[0] if isinstance(made, tuple | list) and made else made
        return made if isinstance(made, torch.Tensor) else None


class PackedExtension(Extension):
    """A frozen subclass around several tensors, such as codes and their scales.

    The engine shards their bytes, (groups, bytes of a group), uint8. A group is the fewest rows of which each tensor
    inside has full elements along its dimension 0. Tensors that are not divided as the rows are, such as a table of
    values, are the same on each rank.
    """

    packed = True

    def __init__(self, name: str, param: nn.Parameter, module: nn.Module, values: dict[str, torch.Tensor]) -> None:
        """Pack ``values``, the tensors inside that are divided as the rows are.

        Raises:
            WrapError: They are on the meta device.
        """
        if param.is_meta:
            raise WrapError(
                f"{_called(name, param)} on the meta device, where nothing gives it values: make it on CPU."
            )
        super().__init__(name, param, module, values)
        groups = math.gcd(param.shape[0], *(len(one) for one in values.values()))
        self._forms = [(len(one) // groups, one.shape[1:], one.dtype) for one in values.values()]
        self._rows = param.shape[0] // groups
        parts = [one.detach().contiguous().view(groups, -1).view(torch.uint8) for one in values.values()]
        self.values = torch.cat(parts, 1)

    def _made_for(
        self, whole: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return whole.split(shape[0] * self._rows)[0].to(device)

    def local(self, rows: torch.Tensor) -> torch.Tensor:
        """See :meth:`Extension.local`; ``rows`` are groups of bytes."""
        start = 0
        for name, (count, tail, dtype) in zip(self._inside, self._forms, strict=True):
            size = count * tail.numel() * dtype.itemsize
            part = rows[:, start : start + size].contiguous().view(-1).view(dtype)
            setattr(self._local, name, part.view(count * len(rows), *tail))
            start += size
        assert self._local is not None
        return self._local


def extension_of(name: str, param: nn.Parameter, module: nn.Module) -> Extension:
    """Take ``param`` of ``module``, which is made of others, apart.

    Raises:
        WrapError: Its class has one of the two methods only, or does not say what is inside; or several tensors are
            inside and it is trained, or they are not divided as its rows are.
    """
    lacking = [method for method in METHODS if not hasattr(param, method)]
    if lacking:
        raise WrapError(
            f"{_called(name, param)}, a tensor made of others, without {lacking[0]}: it cannot be gathered."
        )
    count = len(inspect.signature(param.fsdp_pre_all_gather).parameters)  # type: ignore[attr-defined]
    if count not in (1, 5):
        raise WrapError(
            f"{_called(name, param)}: its fsdp_pre_all_gather takes {count} arguments. It takes (mesh), or (mesh, "
            "outer_size, outer_stride, module, mp_policy)."
        )
    if not is_traceable_wrapper(param):
        raise WrapError(
            f"{_called(name, param)}, which says nothing of the tensors inside. Give it __tensor_flatten__ and "
            "__tensor_unflatten__."
        )
    inside = {part: getattr(param, part) for part in param.__tensor_flatten__()[0]}  # type: ignore[attr-defined]
    alike = {part: one for part, one in inside.items() if (one.shape, one.dtype) == (param.shape, param.dtype)}
    plain = all(type(one) in (torch.Tensor, nn.Parameter) for one in inside.values())
    if plain and len(alike) == 1:
        return Extension(name, param, module, alike)
    divided = _divided(param, inside) if plain and not param.requires_grad and param.dim() else {}
    if not divided:
        described = ", ".join(f"{part} {tuple(one.shape)} {one.dtype}" for part, one in inside.items())
        raise WrapError(
            f"{_called(name, param)} of {param.dtype} around {described}. fullshard takes subclasses around one plain "
            "tensor of their own shape and dtype, which optimizers and checkpoints then see; and frozen ones around "
            "several that split() divides as it does the rows. Freeze it, leave out what made it, or use torch's own "
            "fully_shard."
        )
    return PackedExtension(name, param, module, divided)


def _called(name: str, param: torch.Tensor) -> str:
    return f"Parameter {name} {tuple(param.shape)} is a {type(param).__name__}"


def _divided(param: torch.Tensor, inside: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors inside that ``split`` divides as it does the rows; all, if there is one row only."""
    rows = param.shape[0]
    factor = next((one for one in range(2, rows + 1) if rows % one == 0), 1)
    with torch.no_grad():
        part = param.detach().split(rows // factor)[0]
    if type(part) is not type(param):
        return {}
    return {name: one for name, one in inside.items() if one.dim() and len(one) == factor * len(getattr(part, name))}
