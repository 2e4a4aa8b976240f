"""What modules and parameters are called, whatever was put around them."""

from __future__ import annotations

WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})
"""Attributes in which wrappers keep the module that they are around: fullshard's, torch's, torch.compile's."""


def plain_name(path: str) -> str:
    """A qualified name as it is without the wrappers on the way.

    Examples:
        >>> plain_name("_fsdp_wrapped_module.blocks.0._checkpoint_wrapped_module.norm.weight")
        'blocks.0.norm.weight'
    """
    return ".".join(part for part in path.split(".") if part not in WRAPPERS)
