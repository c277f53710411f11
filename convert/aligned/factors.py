"""Heads of a group that become one up to factors: a number for each pair of dimensions, or for each dimension.

With factors c_j, the heads x_j of a group are told from one shared x by x_j ~ c_j x, and whoever reads x_j takes the
factor in. What matters of an error e in x_j is w_j |e|². Real numbers come as complex ones.

Shape suffixes: g groups, r heads of a group, F pairs, or dimensions; s starts.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from headpool.convert.aligned.spectra import FLOOR, floored, lost_energy, principal

ROUNDS = 20
"""Passes over the heads of a group when their phases are chosen; they settle in a few."""


def floored_weights(w: Tensor) -> Tensor:
    """Weights [heads, F] with a floor under each, relative to the largest of its pair and to the mean of all."""
    return floored(w, torch.maximum(w.amax(0), FLOOR * w.mean())) if w.numel() else w


def weighted(moments: Tensor, w: Tensor) -> Tensor:
    """Moments E[x_j conj(x_l)] [..., r, r] times w_j w_l."""
    return w[..., :, None] * moments * w[..., None, :]


def scalars(moments: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """(mix, turn) [g, r, F] from E[x_j conj(x_l)] [g, F, r, r] and w [g, F, r]: the shared head is sum_j mix_j x_j, and
    x_j ~ conj(turn_j) times that; the best for any numbers.

    The sum of w_j |x_j - c_j x|² is least for the leading eigenvector u of A_jl = sqrt(w_j) E[x_j conj(x_l)] sqrt(w_l):
    x = sum_j conj(u_j) sqrt(w_j) x_j and c_j = u_j / sqrt(w_j); the loss is trace A - lambda_1. The shared head is made
    as large as the group's heads are on average. Heads of no energy count as equal ones.
    """
    energy = moments.diagonal(0, -2, -1).real.sum(-1)[..., None, None]
    moments = torch.where(energy > 0, moments, 1.0)
    values, vectors = principal(weighted(moments, w.sqrt()), 1)
    mean = moments.diagonal(0, -2, -1).real.mean(-1, keepdim=True)
    scale = (mean / values).sqrt()
    u = vectors[..., 0].conj()
    return (u * w.sqrt() * scale).mT, (u / (w.sqrt() * scale)).mT


def unscaled(moments: Tensor, w: Tensor) -> Tensor:
    """What is lost with the factors of `scalars`, [g]."""
    return lost_energy(weighted(moments, w.sqrt()), 1).sum(-1)


Units = Callable[[Tensor], Tensor]
"""The allowed factor [..., F] that is nearest to a complex number: for factors p, the one that makes Re(conj(p) z)
largest.
"""


def one(z: Tensor) -> Tensor:
    return torch.ones_like(z)


def sign(z: Tensor) -> Tensor:
    return torch.where(z.real < 0, -1.0, torch.ones_like(z))


def averages(moments: Tensor, w: Tensor, unit: Units) -> tuple[Tensor, Tensor]:
    """`scalars` where factors have to be units: the shared head is the mean of conj(p_j) x_j, weighted by w_j."""
    away = _align(moments, w, unit).conj().mT
    return away * (w / w.sum(-1, keepdim=True)).mT, away


def unaligned(moments: Tensor, w: Tensor, unit: Units) -> Tensor:
    """What is lost with the factors of `averages`, [g]: the sum of w_j E|x_j - p_j x|²."""
    p = _align(moments, w, unit)
    kept = (p.conj() * (weighted(moments, w) @ p[..., None])[..., 0]).sum(-1).real / w.sum(-1)
    return ((w * moments.diagonal(0, -2, -1).real).sum(-1) - kept).clamp(min=0).sum(-1)


def _align(moments: Tensor, w: Tensor, unit: Units) -> Tensor:
    """Factors p [g, F, r] of which x_j ~ p_j x, with x the weighted mean of conj(p_j) x_j; p of the first head is 1.

    They make p^H B p large, B_jl = w_j E[x_j conj(x_l)] w_l: each head in turn takes the best factor given the
    others', from the mean, from the leading eigenvector and from every head as a model; the best of these ends is
    taken. Never worse than the plain mean.
    """
    b = weighted(moments, w)
    vector = principal(b, 1)[1].movedim(-1, 0)
    starts = torch.cat((torch.ones_like(vector), vector, b.movedim(-1, 0)))
    p = unit(starts.transpose(-2, -1)).transpose(-2, -1)
    for _ in range(ROUNDS):
        for j in range(p.shape[-1]):
            others = (b[..., j, :] * p).sum(-1) - b[..., j, j] * p[..., j]
            p[..., j] = unit(others)
    kept = (p.conj() * (b @ p[..., None])[..., 0]).sum(-1).real
    best = p.gather(0, kept.argmax(0)[None, ..., None].expand(1, *p.shape[1:]))[0]
    return best * best[..., :1].conj()
