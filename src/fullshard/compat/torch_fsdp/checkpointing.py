"""Activation checkpointing by wrapping modules: the names of torch's ``checkpoint_wrapper`` module.

The wrapper of recomputation is torch's own, which a script may also import from there. torch's offload wrapper pins
memory, which needs a GPU, and its ``apply_activation_checkpointing`` makes two modules of one at two places.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fullshard.compat.torch_fsdp.wrap import lambda_auto_wrap_policy, run_policy
from fullshard.core.torch_private import checkpoint_wrappers
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


ActivationWrapper, CheckpointImpl, CheckpointWrapper = checkpoint_wrappers()
_theirs: Any = sys.modules[ActivationWrapper.__module__]  # its save_on_cpu: scripts that replace it there change ours


class OffloadWrapper(ActivationWrapper):
    """A module whose activations are kept in host memory until backward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the inner module and move the tensors that autograd saves to host memory."""
        with _theirs.save_on_cpu(pin_memory=torch.cuda.is_available()):
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
        checkpoint_impl: A :class:`CheckpointImpl`; ignored if ``checkpoint_fn`` is given.
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
    if not isinstance(checkpoint_impl, CheckpointImpl):
        raise ConfigError(f"checkpoint_impl must be CheckpointImpl.REENTRANT or NO_REENTRANT; got {checkpoint_impl!r}.")
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
