"""Activation checkpointing by wrapping modules: the names of torch's ``checkpoint_wrapper`` module.

A script that keeps importing them from ``torch.distributed.algorithms._checkpoint.checkpoint_wrapper`` works with a
sharded model too.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fullshard.compat.torch_fsdp.wrap import lambda_auto_wrap_policy, run_policy
from fullshard.errors import ConfigError

__all__ = [
    "ActivationWrapper",
    "CheckpointImpl",
    "CheckpointWrapper",
    "OffloadWrapper",
    "apply_activation_checkpointing",
    "apply_activation_checkpointing_wrapper",
    "checkpoint_wrapper",
    "offload_wrapper",
]

_WRAPPED = "_checkpoint_wrapped_module"
_PREFIX = f"{_WRAPPED}."


class CheckpointImpl(Enum):
    """torch's two implementations of recomputation.

    REENTRANT: an autograd function around the module.
    NO_REENTRANT: hooks on saved tensors. Preferred: it supports keyword arguments and nested gradients.
    """

    REENTRANT = auto()
    NO_REENTRANT = auto()


class ActivationWrapper(nn.Module):
    """Base class of wrappers that change which activations a module keeps for backward.

    Attributes and items are the inner module's. Names of parameters and in state dicts do not contain the wrapper.
    """

    def __init__(self, mod: nn.Module) -> None:
        """Wrap ``mod``."""
        super().__init__()
        self._checkpoint_wrapped_module = mod
        self.register_state_dict_post_hook(_remove_prefix)
        self.register_load_state_dict_pre_hook(_insert_prefix)

    def __getattr__(self, name: str) -> Any:
        """Return the wrapper's attribute, or else the inner module's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == _WRAPPED:
                raise
            return getattr(self._modules[_WRAPPED], name)

    def __getitem__(self, key: Any) -> Any:
        """Return the inner module's item."""
        return self._checkpoint_wrapped_module[key]  # pyright: ignore[reportIndexIssue]

    def named_parameters(
        self,
        prefix: str = "",
        recurse: bool = True,  # noqa: FBT001, FBT002 (torch's signature)
        remove_duplicate: bool = True,  # noqa: FBT001, FBT002
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Return parameters under the inner module's names."""
        for name, param in super().named_parameters(prefix, recurse, remove_duplicate):
            yield name.replace(_PREFIX, ""), param


class CheckpointWrapper(ActivationWrapper):
    """A module whose activations are recomputed in backward."""

    def __init__(
        self,
        mod: nn.Module,
        checkpoint_impl: Any = CheckpointImpl.NO_REENTRANT,
        checkpoint_fn: Callable[..., Any] | None = None,
        **checkpoint_fn_kwargs: Any,
    ) -> None:
        """See :func:`checkpoint_wrapper`."""
        super().__init__(mod)
        self.checkpoint_impl = _implementation(checkpoint_impl)
        if checkpoint_fn is None:
            reentrant = self.checkpoint_impl is CheckpointImpl.REENTRANT
            checkpoint_fn = functools.partial(checkpoint, use_reentrant=reentrant)
        self.checkpoint_fn = functools.partial(checkpoint_fn, **checkpoint_fn_kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the inner module and keep only its inputs."""
        inner = self._checkpoint_wrapped_module
        if self.checkpoint_impl is CheckpointImpl.NO_REENTRANT or not kwargs:
            return self.checkpoint_fn(inner, *args, **kwargs)
        names = tuple(kwargs)  # the reentrant implementation only takes positional inputs

        def run(*values: Any) -> Any:
            return inner(*values[: len(args)], **dict(zip(names, values[len(args) :], strict=True)))

        return self.checkpoint_fn(run, *args, *kwargs.values())


class OffloadWrapper(ActivationWrapper):
    """A module whose activations are kept in host memory until backward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the inner module and move the tensors that autograd saves to host memory."""
        with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
            return self._checkpoint_wrapped_module(*args, **kwargs)


def checkpoint_wrapper(
    module: nn.Module,
    checkpoint_impl: Any = CheckpointImpl.NO_REENTRANT,
    checkpoint_fn: Callable[..., Any] | None = None,
    **checkpoint_fn_kwargs: Any,
) -> nn.Module:
    """Wrap ``module`` so that it keeps only its inputs and recomputes its activations in backward; any rank.

    Args:
        module: The module to wrap; before or after sharding.
        checkpoint_impl: A :class:`CheckpointImpl`, or torch's; ignored if ``checkpoint_fn`` is given.
        checkpoint_fn: Called as ``checkpoint_fn(module, *inputs, **kwargs)`` instead of torch's checkpoint.
        **checkpoint_fn_kwargs: Further arguments of ``checkpoint_fn``, or of ``torch.utils.checkpoint.checkpoint``
            (``preserve_rng_state=False``). Also ``offload_to_cpu`` of torch 1.12, with a warning: True keeps the inputs
            in host memory.

    Returns:
        The wrapper.

    Raises:
        ConfigError: ``checkpoint_impl`` is not a ``CheckpointImpl``.
    """
    offload = checkpoint_fn_kwargs.pop("offload_to_cpu", None)
    if offload is not None:
        warnings.warn(
            "checkpoint_wrapper(offload_to_cpu=…) is torch 1.12's spelling: leave out False, and replace True by "
            "offload_wrapper(checkpoint_wrapper(module)).",
            FutureWarning,
            stacklevel=2,
        )
    wrapped = CheckpointWrapper(module, checkpoint_impl, checkpoint_fn, **checkpoint_fn_kwargs)
    return OffloadWrapper(wrapped) if offload else wrapped


def offload_wrapper(module: nn.Module) -> nn.Module:
    """Wrap ``module`` so that its activations are in host memory between forward and backward; any rank."""
    return OffloadWrapper(module)


def _every_module(_module: nn.Module) -> bool:
    return True


def apply_activation_checkpointing(
    model: nn.Module,
    checkpoint_wrapper_fn: Callable[..., nn.Module] = checkpoint_wrapper,
    check_fn: Callable[[nn.Module], bool] = _every_module,
    auto_wrap_policy: Any = None,
) -> None:
    """Wrap modules inside ``model`` in place, but not the model itself; any rank.

    Args:
        model: The model, before or after sharding.
        checkpoint_wrapper_fn: Called with each module to wrap; returns the wrapper.
        check_fn: Called with each module; returns whether to wrap it.
        auto_wrap_policy: A wrap policy, ours or torch's, instead of ``check_fn``.

    Raises:
        ConfigError: ``auto_wrap_policy`` is not a policy.
    """
    if auto_wrap_policy is None:
        auto_wrap_policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=check_fn)
    chosen = run_policy(model, auto_wrap_policy, {}, set(), set())
    wrappers: dict[nn.Module, nn.Module] = {}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is None or child not in chosen:
                continue
            if child not in wrappers:  # a module at several places stays one module
                wrappers[child] = checkpoint_wrapper_fn(child, **chosen[child])
            parent._modules[name] = wrappers[child]


def apply_activation_checkpointing_wrapper(
    model: nn.Module,
    checkpoint_wrapper_fn: Callable[..., nn.Module] = checkpoint_wrapper,
    check_fn: Callable[[nn.Module], bool] = _every_module,
) -> None:
    """Call :func:`apply_activation_checkpointing`, whose name this was in torch 1.12."""
    warnings.warn(
        "apply_activation_checkpointing_wrapper was renamed to apply_activation_checkpointing in torch 1.13; the "
        "arguments are the same.",
        FutureWarning,
        stacklevel=2,
    )
    apply_activation_checkpointing(model, checkpoint_wrapper_fn, check_fn)


def _implementation(given: Any) -> CheckpointImpl:
    name = given.name if isinstance(given, Enum) else ""  # ours or torch's
    if name not in CheckpointImpl.__members__:
        raise ConfigError(f"checkpoint_impl must be CheckpointImpl.REENTRANT or NO_REENTRANT; got {given!r}.")
    return CheckpointImpl[name]


def _remove_prefix(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: object) -> None:
    _rename(state, prefix + _PREFIX, prefix)


def _insert_prefix(_module: nn.Module, state: dict[str, Any], prefix: str, *_rest: object) -> None:
    _rename(state, prefix, prefix + _PREFIX)


def _rename(state: dict[str, Any], old: str, new: str) -> None:
    """Replace the prefix ``old`` of keys with ``new``, in place."""
    renamed: Sequence[str] = [key for key in state if key.startswith(old)]
    for key in renamed:
        state[new + key[len(old) :]] = state.pop(key)
