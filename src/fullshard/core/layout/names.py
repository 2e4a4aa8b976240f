"""Names of modules and parameters without the wrappers around them."""

from __future__ import annotations

WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})
"""Attributes in which wrappers store the wrapped module: FSDP's, activation checkpointing's, torch.compile's."""


def plain_name(path: str) -> str:
    """Return a qualified name without the wrappers in it.

    Examples:
        >>> plain_name("_fsdp_wrapped_module.blocks.0._checkpoint_wrapped_module.norm.weight")
        'blocks.0.norm.weight'
    """
    return ".".join(part for part in path.split(".") if part not in WRAPPERS)
