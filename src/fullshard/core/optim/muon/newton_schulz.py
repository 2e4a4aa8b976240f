"""Orthogonalisation of matrices by Newton-Schulz iterations."""

from __future__ import annotations

import torch


def newton_schulz(
    matrices: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Bring all singular values near 1 and keep the singular vectors; any rank, no communication.

    The quintic iteration of Keller Jordan's Muon (https://kellerjordan.github.io/posts/muon), operation by operation as
    in ``torch.optim.Muon``: ``X / |X|``, then ``X <- a X + (b G + c G G) X`` with ``G = X X'`` on the short side. With
    the usual coefficients singular values end between about 0.7 and 1.2.

    Args:
        matrices: (rows, columns), or (n, rows, columns) for a batch, floating, in the dtype to compute in; not changed.
        coefficients: a, b and c.
        steps: Number of iterations.
        eps: Smallest norm that a matrix is divided by.

    Returns:
        Matrices of the same shape and dtype.
    """
    a, b, c = coefficients
    add_product = torch.addmm if matrices.ndim == 2 else torch.baddbmm
    upright = matrices.size(-2) > matrices.size(-1)
    wide = matrices.mT if upright else matrices
    wide = wide / torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = wide @ wide.mT
        factor = add_product(gram, gram, gram, beta=b, alpha=c)
        wide = add_product(wide, factor, wide, beta=a)
    return wide.mT if upright else wide
