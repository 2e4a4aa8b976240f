"""Which modules are wrapped: the names of ``torch.distributed.fsdp.wrap``.

A policy is asked here as torch asks it, so that the same modules are wrapped for the same policy and model: plain
functions ``(module, recurse, nonwrapped_numel)`` from the leaves up, objects such as :class:`ModuleWrapPolicy` once for
the whole tree. torch's own policies, of a script that kept that import or of PEFT, are asked in the same way.

Beyond torch: a policy may be given to a model in which some modules were wrapped by hand. What they hold is not asked
about and not counted.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

from fullshard.errors import ConfigError, WrapError

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
"""The attribute in which a wrapper keeps the module that it is around."""

Kwargs = dict[str, Any]

# Wrapping by hand

_defaults: ContextVar[tuple[Callable[..., nn.Module], Kwargs] | None] = ContextVar(
    "fullshard_enable_wrap", default=None
)
"""What ``enable_wrap`` was given: of one thread, so that ranks as threads do not meet in it."""


@contextmanager
def enable_wrap(*, wrapper_cls: Callable[..., nn.Module], **wrapper_kwargs: Any) -> Iterator[None]:
    """Have :func:`wrap` wrap with ``wrapper_cls(module, **wrapper_kwargs)`` inside; any rank.

    Raises:
        WrapError: Entered inside another one, as in torch.
    """
    if _defaults.get() is not None:
        raise WrapError("enable_wrap cannot be entered inside another enable_wrap. Give wrap() what differs instead.")
    token = _defaults.set((wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _defaults.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """``module`` in the wrapper of the :func:`enable_wrap` around this call; outside of one the module itself.

    Args:
        module: What to wrap.
        **wrap_overrides: The wrapper's arguments, before those that ``enable_wrap`` was given.
    """
    given = _defaults.get()
    if given is None:
        return module
    wrapper_cls, kwargs = given
    return wrapper_cls(module, **(kwargs | wrap_overrides))


# Policies that are functions. ``recurse``: asked whether to look at the children; else whether to wrap the module.


def always_wrap_policy(*_args: Any, **_kwargs: Any) -> bool:
    """Wrap every module."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,  # noqa: FBT001 (torch's signature)
    nonwrapped_numel: int,
    lambda_fn: Callable[[nn.Module], bool],
) -> bool:
    """Wrap modules that ``lambda_fn`` is true of."""
    return recurse or lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,  # noqa: FBT001 (torch's signature)
    nonwrapped_numel: int,
    transformer_layer_cls: Iterable[type[nn.Module]],
) -> bool:
    """Wrap modules of the classes ``transformer_layer_cls``.

    A parameter that several blocks share stays with the module around all of them; nothing has to be wrapped for it.
    """
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,  # noqa: FBT001
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: Iterable[type[nn.Module]] | None = None,
    exclude_wrap_modules: Iterable[type[nn.Module]] | None = None,
) -> bool:
    """Wrap modules that hold many elements beside those that wrapped modules inside them hold.

    Args:
        module: The module that is asked about.
        recurse: Whether it is asked if the children are looked at.
        nonwrapped_numel: Elements of its parameters, without those of wrapped modules inside.
        min_num_params: Wrap from so many elements on.
        force_leaf_modules: Classes whose children are never wrapped; None: the function's ``FORCE_LEAF_MODULES``.
        exclude_wrap_modules: Classes that are never wrapped; None: the function's ``EXCLUDE_WRAP_MODULES``.
    """
    leaves = size_based_auto_wrap_policy.FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules  # pyright: ignore[reportFunctionMemberAccess]
    never = size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules  # pyright: ignore[reportFunctionMemberAccess]
    return nonwrapped_numel >= min_num_params and not isinstance(module, tuple(leaves if recurse else never))


# Containers have no forward to gather for; attention reads its children's weights without calling them.
size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # pyright: ignore[reportFunctionMemberAccess]
size_based_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # pyright: ignore[reportFunctionMemberAccess]


def _or_policy(
    module: nn.Module,
    recurse: bool,  # noqa: FBT001 (torch's signature)
    nonwrapped_numel: int,
    policies: Iterable[Callable[..., Any]],
) -> bool:
    """Wrap what any of ``policies`` wraps."""
    return any(policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel) for policy in policies)


# Policies that are objects


class _Policy(ABC):
    """A policy that looks at the whole tree at once."""

    @abstractmethod
    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: Kwargs
    ) -> dict[nn.Module, Kwargs]:
        """The modules to wrap, each with the wrapper's arguments."""


class ModuleWrapPolicy(_Policy):
    """Wrap every module of some classes."""

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        """Take the classes."""
        self._module_classes = frozenset(module_classes)

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: Kwargs
    ) -> dict[nn.Module, Kwargs]:
        classes = tuple(self._module_classes)
        found = (module for module in root_module.modules() if module not in ignored_modules)
        return {module: dict(root_kwargs) for module in found if isinstance(module, classes)}

    def __call__(self, module: nn.Module, recurse: bool, *_args: Any, **_kwargs: Any) -> bool:  # noqa: FBT001
        """The same as a function, for use inside ``_or_policy``."""
        return recurse or isinstance(module, tuple(self._module_classes))

    def __repr__(self) -> str:
        """With the classes' names."""
        return f"ModuleWrapPolicy({{{', '.join(sorted(one.__name__ for one in self._module_classes))}}})"


class CustomPolicy(_Policy):
    """Wrap what a function says, with arguments of its own where it says so."""

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | Kwargs]) -> None:
        """Take the function: of a module to True (wrap it), False or {} (do not), or arguments that differ."""
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
                raise ConfigError(
                    f"The function of a CustomPolicy returns True, False or a dict of arguments; of "
                    f"{type(module).__name__} it returned {answer!r}."
                )
            if answer:
                found[module] = root_kwargs | (answer if isinstance(answer, dict) else {})
        return found


# Asking a policy


def is_wrapper(module: nn.Module) -> bool:
    """Whether ``module`` is a ``FullyShardedDataParallel``."""
    return WRAPPED in module._modules


def modules_to_wrap(
    root: nn.Module,
    policy: Any,
    kwargs: Mapping[str, Any],
    ignored: tuple[set[nn.Module], set[nn.Parameter]],
    alone: tuple[type[nn.Module], ...] = (),
) -> dict[nn.Module, Kwargs]:
    """The modules that ``policy`` wraps in ``root``, which itself is none of them, each with its arguments; any rank.

    Args:
        root: The module that is wrapped anyway.
        policy: A function, an object with ``_run_policy``, of ours or torch's, or None.
        kwargs: The root's arguments.
        ignored: Modules that are not asked about, with all modules in them, and parameters that are not counted.
        alone: Classes whose modules are wrapped whatever the policy says.

    Raises:
        ConfigError: It is no policy.
    """
    if policy is None:
        return {}
    skipped, uncounted = set(ignored[0]), set(ignored[1])
    for module in root.modules():
        if is_wrapper(module):
            skipped.update(module.modules())
            uncounted.update(module.parameters())
    if hasattr(policy, "_run_policy"):
        found = dict(policy._run_policy(root, skipped, dict(kwargs)))
        of_classes = (module for module in root.modules() if module not in skipped and isinstance(module, alone))
        found = {module: dict(kwargs) for module in of_classes if module not in found} | found
    elif callable(policy):
        asked: Callable[..., Any] = policy
        if alone:
            asked = functools.partial(_or_policy, policies=[policy, ModuleWrapPolicy(alone)])
        wrapped: list[nn.Module] = []
        _ask(root, asked, skipped, uncounted, wrapped)
        found = {module: dict(kwargs) for module in wrapped}
    else:
        raise ConfigError(
            f"auto_wrap_policy is a function (module, recurse, nonwrapped_numel) or a policy such as ModuleWrapPolicy; "
            f"got {policy!r}."
        )
    found.pop(root, None)
    return found


def _ask(
    module: nn.Module,
    policy: Callable[..., Any],
    skipped: set[nn.Module],
    uncounted: set[nn.Parameter],
    wrapped: list[nn.Module],
    *,
    is_root: bool = True,
) -> int:
    """Put the modules to wrap into ``wrapped``, innermost first.

    Returns:
        Elements of ``module`` that wrapped modules hold.
    """
    numel = sum(param.numel() for param in module.parameters() if param not in uncounted)
    if not policy(module=module, recurse=True, nonwrapped_numel=numel):
        return 0
    inside = 0
    for child in module.children():
        if child not in skipped:
            inside += _ask(child, policy, skipped, uncounted, wrapped, is_root=False)
    if is_root or not policy(module=module, recurse=False, nonwrapped_numel=numel - inside):
        return inside
    if module not in wrapped:
        wrapped.append(module)
    return numel
