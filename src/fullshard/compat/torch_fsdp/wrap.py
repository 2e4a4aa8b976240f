"""Wrap policies: the names of ``torch.distributed.fsdp.wrap``.

Most policies are torch's own. They are called as torch calls them, so that the same policy and model give the same
wrapped modules: functions ``(module, recurse, nonwrapped_numel)`` from the leaves up, objects such as
:class:`ModuleWrapPolicy` once for the tree. ``enable_wrap`` is per thread here, because ranks may be threads.

A policy that torch has is refused on a model in which some modules are wrapped already, as in torch.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn
from torch.distributed.fsdp.wrap import (
    ModuleWrapPolicy,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from fullshard.compat.torch_fsdp.errors import ArgumentError, WrappedError
from fullshard.core.engine import plain_name
from fullshard.core.engine.setup.wrap import NoRepeatedBlocksError, find_units
from fullshard.errors import WrapError

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]

WRAPPED = "_fsdp_wrapped_module"
"""The attribute under which a wrapper keeps the wrapped module."""

CHECKPOINTED = "_checkpoint_wrapped_module"
"""The attribute under which a checkpoint wrapper keeps its module."""

Kwargs = dict[str, Any]

# Wrapping explicitly

_defaults: ContextVar[tuple[Callable[..., nn.Module], Kwargs] | None] = ContextVar(
    "fullshard_enable_wrap", default=None
)
"""Arguments of the current ``enable_wrap``; per thread, because ranks may be threads of one process."""


@contextmanager
def enable_wrap(*, wrapper_cls: Callable[..., nn.Module], **wrapper_kwargs: Any) -> Iterator[None]:
    """Make :func:`wrap` return ``wrapper_cls(module, **wrapper_kwargs)`` in this context; any rank.

    Raises:
        WrapError: It is nested in another one; as in torch.
    """
    if _defaults.get() is not None:
        raise WrapError("enable_wrap cannot be nested. Pass the arguments that differ to wrap() instead.")
    token = _defaults.set((wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _defaults.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wrap ``module`` as the enclosing :func:`enable_wrap` specifies; return it unchanged outside of one.

    Args:
        module: The module to wrap.
        **wrap_overrides: Arguments of the wrapper that override those of ``enable_wrap``.
    """
    given = _defaults.get()
    if given is None:
        return module
    wrapper_cls, kwargs = given
    return wrapper_cls(module, **(kwargs | wrap_overrides))


# Policies that torch lacks or has under private names, or whose errors are ours


def _or_policy(
    module: nn.Module,
    recurse: bool,  # noqa: FBT001 (torch's signature)
    nonwrapped_numel: int,
    policies: Iterable[Callable[..., Any]],
) -> bool:
    """Wrap what any of ``policies`` wraps."""
    return any(policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel) for policy in policies)


class CustomPolicy:
    """Policy that wraps the modules a function chooses, optionally with their own arguments."""

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | Kwargs]) -> None:
        """Create a policy from ``lambda_fn``: it returns True (wrap), False or {} (do not), or overriding arguments."""
        self._lambda_fn = lambda_fn

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: Kwargs
    ) -> dict[nn.Module, Kwargs]:
        found: dict[nn.Module, Kwargs] = {}
        for module in root_module.modules():
            if module in ignored_modules:
                continue
            answer = self._lambda_fn(module)
            if not isinstance(answer, (bool, dict)):
                raise ArgumentError(
                    "The function of a CustomPolicy must return True, False or a dict of arguments; for "
                    f"{type(module).__name__} it returned {answer!r}."
                )
            if answer:
                found[module] = root_kwargs | (answer if isinstance(answer, dict) else {})
        return found


class RepeatedBlocks:
    """Policy of faces that were told nothing: the blocks that ``fullshard.fully_shard`` finds by itself.

    Not a name of torch's. The blocks become units and get no wrappers, so that the model keeps its names and classes.
    A large head is a unit of its own only where its module computes the logits: see :func:`_heads_read_elsewhere`.
    """

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: Kwargs
    ) -> dict[nn.Module, Kwargs]:
        try:
            found = [module for _, modules in find_units(root_module, "auto") for module in modules]
        except NoRepeatedBlocksError:
            found = []
        left = ignored_modules | _heads_read_elsewhere(root_module)
        return {module: dict(root_kwargs) for module in found if module not in left}


def _heads_read_elsewhere(root: nn.Module) -> set[nn.Module]:
    """Return the heads, with all inside, of Hugging Face models whose ``forward`` is not their class's own.

    Liger's forward and that of TRL's chunked loss multiply by ``lm_head.weight``, once or once a chunk, and never call
    the head. In the root's unit it is gathered once a forward for all of that.
    """
    heads: set[nn.Module] = set()
    for module in root.modules():
        head_of: Any = getattr(module, "get_output_embeddings", None)
        head = None if head_of is None else head_of()
        if head is not None:
            forward = inspect.unwrap(module.forward)  # also without decorators, such as autocast's
            own = forward.__module__ in {cls.__module__ for cls in type(module).__mro__}
            heads |= set() if own else set(head.modules())
    return heads


# Running a policy


def is_wrapper(module: nn.Module) -> bool:
    """Return whether ``module`` is a ``FullyShardedDataParallel``."""
    return WRAPPED in module._modules


def modules_to_wrap(
    root: nn.Module,
    policy: Any,
    kwargs: Mapping[str, Any],
    ignored: tuple[set[nn.Module], set[nn.Parameter]],
    always: tuple[type[nn.Module], ...] = (),
) -> dict[nn.Module, Kwargs]:
    """Return the modules inside ``root`` to wrap, each with the wrapper's arguments; any rank.

    Args:
        root: The module that is wrapped in any case; it is not among the results.
        policy: A function, an object with ``_run_policy``, or None.
        kwargs: The root's arguments.
        ignored: Modules that are never wrapped, and parameters that are not counted.
        always: Classes whose modules are wrapped even if the policy does not choose them.

    Raises:
        ConfigError: ``policy`` is not a policy.
        WrapError: ``root`` holds a wrapper.
    """
    if policy is None:
        return {}
    skipped, uncounted = set(ignored[0]), set(ignored[1])
    for name, module in root.named_modules():
        if is_wrapper(module):
            if not isinstance(policy, RepeatedBlocks):
                raise WrappedError(
                    "FSDP auto wrapping requires modules to not already have FSDP applied but found "
                    f"{plain_name(name) or 'a wrapper'} in {type(root).__name__}. Leave out auto_wrap_policy, or wrap "
                    "none by hand: a CustomPolicy can give single modules arguments of their own."
                )
            skipped.update(module.modules())
            uncounted.update(module.parameters())
    if always and hasattr(policy, "_run_policy"):
        forced = run_policy(root, ModuleWrapPolicy(always), kwargs, skipped, uncounted)
        return forced | run_policy(root, policy, kwargs, skipped, uncounted)
    if always and callable(policy):
        policy = functools.partial(_or_policy, policies=[policy, ModuleWrapPolicy(always)])
    return run_policy(root, policy, kwargs, skipped, uncounted)


def run_policy(
    root: nn.Module, policy: Any, kwargs: Mapping[str, Any], skipped: set[nn.Module], uncounted: set[nn.Parameter]
) -> dict[nn.Module, Kwargs]:
    """Return the modules that ``policy`` chooses inside ``root``, each with the wrapper's arguments.

    Raises:
        ConfigError: ``policy`` is not a policy.
    """
    if hasattr(policy, "_run_policy"):
        found = dict(policy._run_policy(root, skipped, dict(kwargs)))
    elif callable(policy):
        chosen: list[nn.Module] = []
        _collect(root, policy, skipped, uncounted, chosen)
        found = {module: dict(kwargs) for module in chosen}
    else:
        raise ArgumentError(
            "auto_wrap_policy must be a function (module, recurse, nonwrapped_numel) or a policy such as "
            f"ModuleWrapPolicy; got {policy!r}."
        )
    found.pop(root, None)
    return found


def _collect(
    module: nn.Module,
    policy: Callable[..., Any],
    skipped: set[nn.Module],
    uncounted: set[nn.Parameter],
    chosen: list[nn.Module],
    *,
    is_root: bool = True,
) -> int:
    """Append the modules that ``policy`` chooses to ``chosen``, innermost first.

    Returns:
        Elements of ``module`` that chosen modules hold.
    """
    numel = sum(param.numel() for param in module.parameters() if param not in uncounted)
    if not policy(module=module, recurse=True, nonwrapped_numel=numel):
        return 0
    inside = 0
    for child in module.children():
        if child not in skipped:
            inside += _collect(child, policy, skipped, uncounted, chosen, is_root=False)
    if is_root or not policy(module=module, recurse=False, nonwrapped_numel=numel - inside):
        return inside
    if module not in chosen:
        chosen.append(module)
    return numel
