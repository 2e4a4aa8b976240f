"""What a tensor subclass says of its own gather: ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``.

Both are called on a tensor of the subclass that has this rank's rows. What the first returns is gathered, in its own
dtypes, and the second makes the full parameter of it. In between, the engine knows such a parameter as the plain tensor
inside the subclass: optimizers, checkpoints and first values have these values.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fullshard.core.comm import Comm
from fullshard.core.comm.torch_objects import torch_mesh, torch_policy
from fullshard.core.policy import MixedPrecision
from fullshard.core.torch_private import is_traceable_wrapper
from fullshard.errors import WrapError

METHODS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


class Extension:
    """The subclass around one parameter.

    Attributes:
        name: The parameter's, for messages.
        values: The plain tensor inside, in the parameter's shape and dtype, until :meth:`cut`.
        takes_mesh_only: True if ``fsdp_pre_all_gather`` has one argument, the mesh: then it does not know how many rows
            other ranks have.
        module: The module that has the parameter.
        precision: The policy of its unit.
        full_shape: Shape of the full parameter.
    """

    def __init__(self, name: str, param: nn.Parameter, module: nn.Module) -> None:
        """Find the tensor inside ``param``.

        Raises:
            WrapError: It has one of the two methods only, or cannot be taken apart.
        """
        self.name = name
        self.module = module
        self.precision = MixedPrecision()
        self.full_shape = param.shape
        self.kind = type(param)
        self._inner = _inner_of(name, param)
        self.values: torch.Tensor = getattr(param, self._inner).detach()
        self._whole: torch.Tensor | None = param
        self._local: torch.Tensor | None = None
        count = len(inspect.signature(param.fsdp_pre_all_gather).parameters)  # type: ignore[attr-defined]
        if count not in (1, 5):
            raise WrapError(
                f"{_called(name, param)}: its fsdp_pre_all_gather takes {count} arguments. It takes (mesh), or (mesh, "
                "outer_size, outer_stride, module, mp_policy)."
            )
        self.takes_mesh_only = count == 1

    def cut(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        """Make this rank's tensor of the subclass, in ``shape``, and free the full one.

        Raises:
            WrapError: ``new_zeros`` of the subclass does not keep it.
        """
        whole = self._local if self._whole is None else self._whole
        assert whole is not None
        with torch.no_grad():
            local = whole.detach().new_zeros(tuple(shape), dtype=dtype, device=device)
        if type(local) is not self.kind:
            raise WrapError(
                f"{_called(self.name, whole)}: its new_zeros() gives a {type(local).__name__}. torch's FSDP2 needs "
                "split, new_zeros, narrow and copy_ to keep the class, and so does fullshard."
            )
        if self._whole is not None:
            self.values = torch.empty(0)
            setattr(self._whole, self._inner, self.values)
        self._local, self._whole = local, None

    def local(self, rows: torch.Tensor) -> torch.Tensor:
        """Return this rank's tensor of the subclass around ``rows``: the same object in each call.

        What a user sets on it, such as a scale that was computed ahead, is kept.
        """
        local = self._local
        assert local is not None
        if (local.dtype, local.device) != (rows.dtype, rows.device):
            self.cut(rows.shape, rows.dtype, rows.device)
            local = self._local
        setattr(local, self._inner, rows)
        return local  # type: ignore[return-value]

    def takes(self, attribute: str) -> bool:
        """Return True if the class has such an attribute."""
        return hasattr(self._local, attribute)

    def set(self, attribute: str, value: object) -> None:
        """Set an attribute of this rank's tensor of the subclass, for the next gathers."""
        setattr(self._local, attribute, value)

    def get(self, attribute: str) -> Any:
        """Return an attribute of this rank's tensor of the subclass."""
        return getattr(self._local, attribute)

    def before_gather(self, rows: torch.Tensor, comm: Comm) -> tuple[Sequence[torch.Tensor], Any]:
        """Return what is sent of ``rows``, this rank's, and what is kept for :meth:`after_gather`."""
        local: Any = self.local(rows)
        arguments: tuple[Any, ...] = (torch_mesh(comm, rows.device),)
        if not self.takes_mesh_only:
            stride = torch.empty(self.full_shape, device="meta").stride()
            arguments += (self.full_shape, stride, self.module, torch_policy(self.precision))
        sent, metadata = local.fsdp_pre_all_gather(*arguments)
        return tuple(sent), metadata

    def after_gather(
        self, gathered: Sequence[torch.Tensor], metadata: Any, dtype: torch.dtype, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]] | None:
        """Return the full parameter, made of what was gathered, and the tensors to be freed with it.

        With ``out``, an earlier result whose memory is allocated, write there and return None.
        """
        local: Any = self._local
        if out is not None:
            local.fsdp_post_all_gather(gathered, metadata, dtype, out=out)
            return None
        return local.fsdp_post_all_gather(gathered, metadata, dtype)


def _called(name: str, param: torch.Tensor) -> str:
    return f"Parameter {name} {tuple(param.shape)} is a {type(param).__name__}"


def _inner_of(name: str, param: torch.Tensor) -> str:
    """Return the attribute of the one plain tensor inside ``param``."""
    lacking = [method for method in METHODS if not hasattr(param, method)]
    if lacking:
        raise WrapError(
            f"{_called(name, param)}, a tensor made of others, without {lacking[0]}: it cannot be gathered."
        )
    if not is_traceable_wrapper(param):
        raise WrapError(
            f"{_called(name, param)}, which says nothing of the tensors inside. Give it __tensor_flatten__ and "
            "__tensor_unflatten__."
        )
    parts = {part: getattr(param, part) for part in param.__tensor_flatten__()[0]}  # type: ignore[attr-defined]
    alike = [part for part, inner in parts.items() if (inner.shape, inner.dtype) == (param.shape, param.dtype)]
    if len(alike) != 1 or type(parts[alike[0]]) not in (torch.Tensor, nn.Parameter):
        inside = ", ".join(f"{part} {tuple(inner.shape)} {inner.dtype}" for part, inner in parts.items())
        raise WrapError(
            f"{_called(name, param)} of {param.dtype} around {inside}. fullshard takes subclasses around one plain "
            "tensor of their own shape and dtype, which optimizers and checkpoints then see. Leave out what made it, "
            "or use torch's own fully_shard."
        )
    return alike[0]
