"""``summon_full_params``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from fullshard.engine import plain_name, sharded_roots, summoned_parameters
from fullshard.errors import ConfigError


@contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,  # noqa: FBT001, FBT002 (torch's signature)
    writeback: bool = True,  # noqa: FBT001, FBT002
    rank0_only: bool = False,  # noqa: FBT001, FBT002
    offload_to_cpu: bool = False,  # noqa: FBT001, FBT002
    with_grads: bool = False,  # noqa: FBT001, FBT002
) -> Iterator[None]:
    """Register full parameters in the shards' dtype for a context; every rank enters it.

    Inside, the module is a plain module with plain Parameters: it can be called, initialized or changed in place.
    Gradients computed inside are dropped at the end, or written back with ``with_grads``. All these parameters are in
    memory at once.

    Args:
        module: A wrapped or sharded model, a module inside one, or one that contains some.
        recurse: Whether to include units inside ``module``; False: only the parameters of its own unit.
        writeback: Whether each rank copies its rows of the Parameters back at the end; False: changes are dropped,
            also with one rank.
        rank0_only: Whether only rank 0 gets full parameters; other ranks keep their shards.
        offload_to_cpu: Whether the full parameters are in host memory.
        with_grads: Whether ``.grad`` is the full gradient.

    Raises:
        ConfigError: ``rank0_only`` with ``writeback``.
        ShardingError: During forward or backward, in a nested context on the same parameters, or if a Parameter was
            replaced inside.
    """
    if writeback and rank0_only:
        raise ConfigError(
            "With summon_full_params(rank0_only=True) other ranks have no full parameters to write back: add "
            "writeback=False, or leave out rank0_only."
        )
    modules = list(module.modules()) if recurse else _with_wrapped(module)
    with ExitStack() as stack:
        for root in sharded_roots(module):
            stack.enter_context(
                summoned_parameters(
                    root,
                    modules,
                    writeback=writeback,
                    rank0_only=rank0_only,
                    offload_to_cpu=offload_to_cpu,
                    with_grads=with_grads,
                )
            )
        yield


def _with_wrapped(module: nn.Module) -> list[nn.Module]:
    """Return ``module`` and, if it is a wrapper, the modules it wraps."""
    chain = [module]
    while inner := [child for key, child in chain[-1].named_children() if not plain_name(key)]:
        chain += inner
    return chain
