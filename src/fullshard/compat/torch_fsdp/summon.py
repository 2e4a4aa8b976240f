"""Full parameters on show: ``summon_full_params``."""

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
    """Show full parameters, in the dtype that they are kept in; every rank enters it.

    Inside, what is shown is a plain module with plain Parameters: it can be called, changed in place, initialised. Its
    gradients stay in the Parameters; they are dropped at the end, or written back ``with_grads``. Memory: what is
    shown, whole.

    Args:
        module: A wrapped or sharded model, a part of one, or a module around some.
        recurse: Whether units inside of ``module`` are shown too; False: only what its own unit holds.
        writeback: Whether each rank takes over its rows of what the Parameters hold in the end; False: changes are
            dropped, with one rank too.
        rank0_only: Whether rank 0 alone gets full parameters; other ranks keep seeing their shards.
        offload_to_cpu: Whether they are in host memory.
        with_grads: Whether ``.grad`` is the full gradient.

    Raises:
        ConfigError: ``rank0_only`` with ``writeback``.
        ShardingError: During forward or backward, or where full parameters are on show already; or a Parameter was
            replaced inside.
    """
    if writeback and rank0_only:
        raise ConfigError(
            "summon_full_params(rank0_only=True) shows full parameters on rank 0 only, so other ranks would have "
            "nothing to write back: add writeback=False, or leave out rank0_only."
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
    """A module, and where it is a wrapper, what it is around."""
    chain = [module]
    while inner := [child for key, child in chain[-1].named_children() if not plain_name(key)]:
        chain += inner
    return chain
