"""Activation checkpointing by wrapping modules: the names of torch's ``checkpoint_wrapper`` file.

torch keeps them in ``torch.distributed.algorithms._checkpoint.checkpoint_wrapper``; a script that keeps that import
works with a sharded model as well.
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

from fullshard.compat.torch_fsdp.wrap import _ask, lambda_auto_wrap_policy
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
    """Which of torch's two implementations computes again.

    REENTRANT: an autograd function around the whole module.
    NO_REENTRANT: by hooks on saved tensors; the one to use, it keeps keyword arguments and nested gradients right.
    """

    REENTRANT = auto()
    NO_REENTRANT = auto()


class ActivationWrapper(nn.Module):
    """A module that runs another one and changes what is kept of its forward for backward.

    Attributes and items are the inner module's; parameters and state dicts have its names, without the wrapper's.
    """

    def __init__(self, mod: nn.Module) -> None:
        """Wrap ``mod``."""
        super().__init__()
        self._checkpoint_wrapped_module = mod
        self.register_state_dict_post_hook(_leave_out_prefix)
        self.register_load_state_dict_pre_hook(_put_in_prefix)

    def __getattr__(self, name: str) -> Any:
        """The wrapper's attribute, else the inner module's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == _WRAPPED:
                raise
            return getattr(self._modules[_WRAPPED], name)

    def __getitem__(self, key: Any) -> Any:
        """The inner module's item."""
        return self._checkpoint_wrapped_module[key]  # pyright: ignore[reportIndexIssue]

    def named_parameters(
        self,
        prefix: str = "",
        recurse: bool = True,  # noqa: FBT001, FBT002 (torch's signature)
        remove_duplicate: bool = True,  # noqa: FBT001, FBT002
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under the inner module's names."""
        for name, param in super().named_parameters(prefix, recurse, remove_duplicate):
            yield name.replace(_PREFIX, ""), param


class CheckpointWrapper(ActivationWrapper):
    """A module whose activations are computed again in backward."""

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
        """Run the inner module, and keep its inputs only."""
        inner = self._checkpoint_wrapped_module
        if self.checkpoint_impl is CheckpointImpl.NO_REENTRANT or not kwargs:
            return self.checkpoint_fn(inner, *args, **kwargs)
        names = tuple(kwargs)  # the reentrant kind takes inputs by position only

        def run(*values: Any) -> Any:
            return inner(*values[: len(args)], **dict(zip(names, values[len(args) :], strict=True)))

        return self.checkpoint_fn(run, *args, *kwargs.values())


class OffloadWrapper(ActivationWrapper):
    """A module whose activations wait in host memory for backward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the inner module, and move what autograd keeps of it to the host."""
        with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
            return self._checkpoint_wrapped_module(*args, **kwargs)


def checkpoint_wrapper(
    module: nn.Module,
    checkpoint_impl: Any = CheckpointImpl.NO_REENTRANT,
    checkpoint_fn: Callable[..., Any] | None = None,
    **checkpoint_fn_kwargs: Any,
) -> nn.Module:
    """``module`` in a wrapper that keeps its inputs only and computes the rest again in backward; any rank.

    Args:
        module: What to wrap; before or after sharding.
        checkpoint_impl: A :class:`CheckpointImpl`, or torch's; without a say where ``checkpoint_fn`` is given.
        checkpoint_fn: Called as ``checkpoint_fn(module, *inputs, **kwargs)`` in place of torch's checkpoint.
        **checkpoint_fn_kwargs: Further arguments of ``checkpoint_fn``, or of ``torch.utils.checkpoint.checkpoint``
            (``preserve_rng_state=False``). Also the ``offload_to_cpu`` of torch 1.12, with a warning: True keeps the
            inputs in host memory.

    Returns:
        The wrapper.

    Raises:
        ConfigError: ``checkpoint_impl`` is something else.
    """
    offload = checkpoint_fn_kwargs.pop("offload_to_cpu", None)
    if offload is not None:
        warnings.warn(
            "checkpoint_wrapper(offload_to_cpu=…) is the spelling of torch 1.12; leave out False, and write True as "
            "offload_wrapper(checkpoint_wrapper(module)).",
            FutureWarning,
            stacklevel=2,
        )
    wrapped = CheckpointWrapper(module, checkpoint_impl, checkpoint_fn, **checkpoint_fn_kwargs)
    return OffloadWrapper(wrapped) if offload else wrapped


def offload_wrapper(module: nn.Module) -> nn.Module:
    """``module`` in a wrapper that keeps its activations in host memory between forward and backward; any rank."""
    return OffloadWrapper(module)


def _every_module(_module: nn.Module) -> bool:
    return True


def apply_activation_checkpointing(
    model: nn.Module,
    checkpoint_wrapper_fn: Callable[..., nn.Module] = checkpoint_wrapper,
    check_fn: Callable[[nn.Module], bool] = _every_module,
    auto_wrap_policy: Any = None,
) -> None:
    """Put modules inside ``model`` into wrappers, in place, the model itself not; any rank.

    Args:
        model: The model, before or after sharding.
        checkpoint_wrapper_fn: Makes the wrapper of a module.
        check_fn: Whether a module is wrapped.
        auto_wrap_policy: A wrap policy, ours or torch's, in place of ``check_fn``.

    Raises:
        ConfigError: The policy is none.
    """
    chosen = _chosen(model, auto_wrap_policy, check_fn)
    wrappers: dict[nn.Module, nn.Module] = {}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is None or child not in chosen:
                continue
            if child not in wrappers:  # a module at several places keeps being one module
                wrappers[child] = checkpoint_wrapper_fn(child, **chosen[child])
            parent._modules[name] = wrappers[child]


def apply_activation_checkpointing_wrapper(
    model: nn.Module,
    checkpoint_wrapper_fn: Callable[..., nn.Module] = checkpoint_wrapper,
    check_fn: Callable[[nn.Module], bool] = _every_module,
) -> None:
    """The name that :func:`apply_activation_checkpointing` had in torch 1.12."""
    warnings.warn(
        "apply_activation_checkpointing_wrapper is called apply_activation_checkpointing since torch 1.13; the "
        "arguments are the same.",
        FutureWarning,
        stacklevel=2,
    )
    apply_activation_checkpointing(model, checkpoint_wrapper_fn, check_fn)


def _chosen(model: nn.Module, policy: Any, check_fn: Callable[[nn.Module], bool]) -> dict[nn.Module, dict[str, Any]]:
    """The modules to wrap, each with arguments for its wrapper."""
    if policy is None:
        policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=check_fn)
    if callable(policy):
        modules: list[nn.Module] = []
        _ask(model, policy, set(), set(), modules)
        return {module: {} for module in modules}
    if not hasattr(policy, "_run_policy"):
        raise ConfigError(
            "auto_wrap_policy is a function (module, recurse, nonwrapped_numel) or a policy such as ModuleWrapPolicy; "
            f"got {policy!r}."
        )
    found = dict(policy._run_policy(model, ignored_modules=set(), root_kwargs={}))
    found.pop(model, None)
    return found


def _implementation(given: Any) -> CheckpointImpl:
    """Ours for ours or torch's."""
    name = given.name if isinstance(given, Enum) else ""
    if name not in CheckpointImpl.__members__:
        raise ConfigError(f"checkpoint_impl is CheckpointImpl.REENTRANT or CheckpointImpl.NO_REENTRANT; got {given!r}.")
    return CheckpointImpl[name]


def _leave_out_prefix(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: object) -> None:
    _rename(state, prefix + _PREFIX, prefix)


def _put_in_prefix(_module: nn.Module, state: dict[str, Any], prefix: str, *_rest: object) -> None:
    _rename(state, prefix, prefix + _PREFIX)


def _rename(state: dict[str, Any], old: str, new: str) -> None:
    """Let keys that begin with ``old`` begin with ``new``, in place."""
    renamed: Sequence[str] = [key for key in state if key.startswith(old)]
    for key in renamed:
        state[new + key[len(old) :]] = state.pop(key)
