"""Eigendecompositions as aligned conversion needs them: floors under tiny eigenvalues, signs that are always the same.

Everything is float64 or complex128 on the device of its input; leading dimensions are batches.

Shape suffixes: g groups, r heads of a group, n dimensions of a head.
"""

import torch
from torch import Tensor

FLOOR = 1e-6
"""Eigenvalues and weights below this share of the largest count as this share: their inverses stay finite."""


def principal(matrix: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest eigenvalues [..., count] of Hermitian matrices [..., n, n], descending, and their
    eigenvectors [..., n, count].

    An eigenvector is known up to its sign, or phase: here its largest component (the first of several) is real and
    positive, so that the same matrix gives the same bytes.
    """
    values, vectors = torch.linalg.eigh((matrix + matrix.mH) / 2)
    values, vectors = values[..., -count:].flip(-1), vectors[..., -count:].flip(-1)
    largest = vectors.gather(-2, vectors.abs().argmax(-2, keepdim=True))
    return values, vectors * (largest.conj() / largest.abs())


def lost_energy(matrix: Tensor, count: int) -> Tensor:
    """What the `count` largest eigenvalues of positive semidefinite matrices [..., n, n] leave of the trace [...]."""
    values: Tensor = torch.linalg.eigvalsh((matrix + matrix.mH) / 2)
    return values[..., :-count].clamp(min=0).sum(-1)


def roots(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The symmetric square root of positive semidefinite matrices [..., n, n], and its inverse.

    Eigenvalues are raised to FLOOR times the largest one of all matrices, so that both exist; to 1 where all are zero.
    """
    if not matrix.numel():
        return matrix, matrix
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    root = floored(values, values.amax()).sqrt()[..., None, :]
    return (vectors * root) @ vectors.mT, (vectors / root) @ vectors.mT


def floored(values: Tensor, largest: Tensor) -> Tensor:
    """`values`, raised to FLOOR times `largest` where they are below; ones where `largest` is not positive."""
    return torch.where(largest > 0, torch.maximum(values, FLOOR * largest), 1.0)


def sum_groups(heads: Tensor, groups: int) -> Tensor:
    """[groups * m, ...] → [groups, ...]: sums over consecutive heads."""
    return torch.unflatten(heads, 0, (groups, len(heads) // groups)).sum(1)


def blocks(matrix: Tensor, heads: int) -> Tensor:
    """Moments of stacked heads [heads*n, heads*n] head by head: [heads, heads, n, n]."""
    size = len(matrix) // heads
    return matrix.view(heads, size, heads, size).transpose(1, 2)


def stack(blocks_rrnn: Tensor) -> Tensor:
    """[..., r, r, n, n] → [..., r*n, r*n]: the inverse of `blocks`."""
    return blocks_rrnn.transpose(-3, -2).flatten(-2).flatten(-3, -2)


def weigh(moments: Tensor, roots_rnn: Tensor) -> Tensor:
    """L M L for M [..., r*n, r*n] and L block-diagonal, its blocks [..., r, n, n] symmetric."""

    heads = roots_rnn.shape[-3:-1]
    left: Tensor = (roots_rnn @ torch.unflatten(moments, -2, heads)).flatten(-3, -2)
    both: Tensor = (roots_rnn @ torch.unflatten(left.mT, -2, heads)).flatten(-3, -2)
    return both.mT


def share_subspace(moments: Tensor, roots_grnn: Tensor, inverses_grnn: Tensor) -> tuple[Tensor, Tensor]:
    """How the heads of each group share one head when any linear map of a head can be undone by whoever reads it.

    x_j are the heads of a group (row vectors), M = E[x^T x] of them stacked [g, r*n, r*n], and what matters of an
    error e_j in head j is |e_j L_j|². With U the n leading eigenvectors of L M L, cut into blocks U_j, the shared head
    is y = sum_j x_j L_j U_j, and x_j ~ y U_j^T L_j^-1 is the best that n dimensions can do (Eckart and Young): the
    loss is the sum of the other eigenvalues. Whoever read x_j through a matrix W now reads y through U_j^T L_j^-1 W.

    Returns (mix, read), both [g, r, n, n]: y = sum_j x_j mix_j and x_j ~ y read_j^T. They are scaled so that y is as
    large as the group's heads are on average. With one head in a group read_j^T is the inverse of mix_j. Where M is
    zero, the heads count as equal, which makes y their (weighted) mean.
    """
    r, n = roots_grnn.shape[1:3]
    if not n:
        return roots_grnn, inverses_grnn
    energy = moments.diagonal(0, -2, -1).sum(-1)[:, None, None]
    equal = torch.eye(n, dtype=moments.dtype, device=moments.device).repeat(r, r)
    moments = torch.where(energy > 0, moments, equal)
    values, vectors = principal(weigh(moments, roots_grnn), n)
    u_grnn = torch.unflatten(vectors, 1, (r, n))
    mean = moments.diagonal(0, -2, -1).sum(-1) / r
    scale = (mean / values.sum(-1)).sqrt()[:, None, None, None]
    return roots_grnn @ u_grnn * scale, inverses_grnn @ u_grnn / scale
