"""Step 1 of aligned conversion: the key heads of a group become one, and their queries make up for it.

A score is q k^T = sum over rotary pairs of Re(conj(q_f) k_f), plus the dimensions that do not rotate; q_f and k_f are
the complex pairs of `moments.to_pairs`, and rotation multiplies them by exp(i p theta_f). So with one key pair kappa_f
for all heads j of a group,

    k_j,f ~ c_j,f kappa_f    gives    Re(conj(q_f) c_j,f kappa_f) = Re(conj(conj(c_j,f) q_f) kappa_f):

query head i of head j takes the factor conj(c_j,f), before or after rotation, as complex factors commute with it. They
are the only linear maps of a pair that do, for every position. Of dimensions without rotation any linear map does.

Best c: an error e in k_j,f changes the score of query head i by Re(conj(q_i,f) e), on average over the phase of q by
E|q_i,f|² |e|² / 2. With w_j,f the sum of E|q_i,f|² over j's query heads, the sum of w_j |k_j - c_j kappa|² is least
for the leading eigenvector u of A_jl = sqrt(w_j) E[k_j conj(k_l)] sqrt(w_l): kappa = sum_j conj(u_j) sqrt(w_j) k_j and
c_j = u_j / sqrt(w_j); the loss is trace A - lambda_1. Without rotation it is `spectra.share_subspace` with L_j² = the
sum of E[q_i^T q_i].

With norms between the projections and the scores (Qwen3, Gemma 3) a factor must commute with them, too. What does: a
sign for a pair or a dimension without rotation, whatever the gains; any phase for a pair in which both gains of the
query norm are equal, and both of the key norm. Nothing does where a norm also subtracts the mean. These factors p_j
are exact for each head by itself; the shared key is then the mean of conj(p_j) k_j, every head first brought to the
same size, weighted by w_j: of all keys the one nearest to its heads up to those factors, before the norm is taken of
it.

Shape suffixes: h query heads, k source key/value heads, g groups (any groups, also overlapping ones), r heads of a
group, d head_dim, D hidden, X hidden and the constant 1, F rotary pairs, n dimensions without rotation, s starts.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from headpool.convert.aligned.moments import Moments, from_pairs, rotary_of, rows, to_pairs, unrows
from headpool.convert.aligned.spectra import (
    FLOOR,
    blocks,
    floored,
    lost_energy,
    principal,
    roots,
    share_subspace,
    stack,
    sum_groups,
    weigh,
)
from headpool.convert.layouts import AttentionWeights
from headpool.errors import RequestError

ROUNDS = 20
"""Passes over the heads of a group when their phases are chosen; they settle in a few."""


def share_keys(weights: AttentionWeights, kv_heads: int, moments: Moments) -> AttentionWeights:
    """The layer with `kv_heads` key heads, one for each contiguous group of the source's; q and bias_q change with
    them.

    All else is as it was; results are float64. Without norms, a group whose heads are complex multiples of one
    another, pair by pair, loses nothing, and so does any group of one. RequestError where it is unknown how dimensions
    pair, and for layers whose values are their keys: those have no freedom left, and can only be pooled.
    """
    if weights.q is None or weights.k is None or weights.v is None:
        raise RequestError("method aligned needs queries, keys and values of their own; this layer lacks some")
    rotary = rotary_of(weights)
    group_size = len(weights.k) // kv_heads
    per_key = len(weights.q) // len(weights.k)
    contiguous = torch.arange(len(weights.k), device=weights.k.device).view(kv_heads, group_size)
    factors = KeySharing(weights, moments).factors(contiguous)

    k_pairs, k_flat = to_pairs(rows(weights.k, weights.bias_k), rotary)
    k_pairs = sum_groups(k_pairs * factors.mix.flatten(0, 1)[:, None], kv_heads)
    k_flat = sum_groups(k_flat @ factors.flat_mix.flatten(0, 1), kv_heads)
    q_pairs, q_flat = to_pairs(rows(weights.q, weights.bias_q), rotary)
    q_pairs = q_pairs * factors.turn.flatten(0, 1).repeat_interleave(per_key, 0)[:, None]
    q_flat = q_flat @ factors.flat_turn.flatten(0, 1).repeat_interleave(per_key, 0)
    k, bias_k = unrows(from_pairs(k_pairs, k_flat, rotary), weights.bias_k)
    q, bias_q = unrows(from_pairs(q_pairs, q_flat, rotary), weights.bias_q)
    return replace(weights, q=q, k=k, bias_q=bias_q, bias_k=bias_k)


@dataclass(frozen=True)
class KeyFactors:
    """The shared key of a group is sum_j mix_j k_j (flat: k_j flat_mix_j), and its queries become turn_j q (q
    flat_turn_j).

    mix, turn [g, r, F] complex; flat_mix, flat_turn [g, r, n, n].
    """

    mix: Tensor
    turn: Tensor
    flat_mix: Tensor
    flat_turn: Tensor


class KeySharing:
    """What sharing costs, and the factors that cost least, for any groups of one layer's key heads."""

    def __init__(self, weights: AttentionWeights, moments: Moments) -> None:
        self._weights = weights
        self._moments = moments
        kv_heads = moments.keys.shape[1]
        self._n = len(moments.flat_keys) // kv_heads
        per_head = sum_groups(moments.queries, kv_heads)
        self._w_kF = floored(per_head, torch.maximum(per_head.amax(0), FLOOR * per_head.mean()))
        self._flat_w_knn = sum_groups(moments.flat_queries, kv_heads)
        self._flat_kknn = blocks(moments.flat_keys, kv_heads)
        self._normed = weights.query_norm is not None or weights.key_norm is not None

    def factors(self, groups: Tensor) -> KeyFactors:
        """The best factors for the groups of source heads in `groups` [g, r]."""
        if self._normed:
            return self._normed_factors(groups)
        mix, turn = _scalars(self._keys(groups), self._pair_weights(groups))
        root, inverse = self._flat_roots
        return KeyFactors(mix, turn, *share_subspace(self._flat_keys(groups), root[groups], inverse[groups]))

    def lost(self, groups: Tensor) -> Tensor:
        """The energy [g] of score errors that each group of `groups` [g, r] has with its best factors."""
        keys, w = self._keys(groups), self._pair_weights(groups)
        if not self._normed:
            root = self._flat_roots[0]
            flat = lost_energy(weigh(self._flat_keys(groups), root[groups]), self._n) if self._n else 0.0
            return lost_energy(_weighted(keys, w.sqrt()), 1).sum(-1) / 2 + flat
        flat_keys, flat_w = self._flat_diagonals(groups)
        return _unaligned(keys, w, self._turns).sum(-1) / 2 + _unaligned(flat_keys, flat_w, self._flips).sum(-1)

    @property
    def energy(self) -> float:
        """The energy of the scores of all heads: what would be lost without any key."""
        pairs = (self._w_kF * self._moments.keys.diagonal(0, 1, 2).real.T).sum() / 2
        flat = (self._flat_w_knn * self._flat_kknn.diagonal(0, 0, 1).permute(2, 0, 1)).sum()
        return float(pairs + flat)

    def _keys(self, groups: Tensor) -> Tensor:
        """E[k_j conj(k_l)] [g, F, r, r]"""
        return self._moments.keys[:, groups[:, :, None], groups[:, None]].transpose(0, 1)

    def _pair_weights(self, groups: Tensor) -> Tensor:
        """w [g, F, r]"""
        return self._w_kF[groups].mT

    def _flat_keys(self, groups: Tensor) -> Tensor:
        """E[k^T k] [g, r*n, r*n]"""
        return stack(self._flat_kknn[groups[:, :, None], groups[:, None]])

    @cached_property
    def _flat_roots(self) -> tuple[Tensor, Tensor]:
        return roots(self._flat_w_knn)

    # With norms

    @cached_property
    def _turns(self) -> "Units":
        return _units(self._weights)

    @property
    def _flips(self) -> "Units":
        """What the dimensions without rotation may be multiplied by."""
        return _one if self._weights.centred_norms else _sign

    def _flat_diagonals(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        """Of every dimension without rotation by itself: E[k_j k_l] [g, n, r, r] and E[q²] [g, n, r], as complex
        numbers.
        """
        keys = self._flat_kknn.diagonal(0, 2, 3)[groups[:, :, None], groups[:, None]].movedim(-1, 1)
        w = self._flat_w_knn.diagonal(0, 1, 2)
        if w.numel():
            w = floored(w, torch.maximum(w.amax(0), FLOOR * w.mean()))
        return keys.to(torch.complex128), w[groups].mT

    def _normed_factors(self, groups: Tensor) -> KeyFactors:
        scale = self._moments.key_scale
        if scale is None:
            assert self._weights.k is not None
            scale = rows(self._weights.k, self._weights.bias_k).square().sum((1, 2)).sqrt()
        size = floored(scale, scale.amax())[groups]
        size = (size.mean(1, keepdim=True) / size)[..., None]

        def factors(keys: Tensor, w: Tensor, unit: "Units") -> tuple[Tensor, Tensor]:
            away = _align(keys, w, unit).conj().mT
            return away * (w / w.sum(-1, keepdim=True)).mT * size, away

        mix, turn = factors(self._keys(groups), self._pair_weights(groups), self._turns)
        flat_mix, flat_turn = factors(*self._flat_diagonals(groups), self._flips)
        return KeyFactors(mix, turn, flat_mix.real.diag_embed(), flat_turn.real.diag_embed())


def _weighted(keys: Tensor, w: Tensor) -> Tensor:
    return w[..., :, None] * keys * w[..., None, :]


def _scalars(keys: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """(mix, turn) [g, r, F] from E[k_j conj(k_l)] [g, F, r, r] and w [g, F, r].

    The shared key is made as large as the group's keys are on average. Keys of no energy count as equal ones.
    """
    energy = keys.diagonal(0, -2, -1).real.sum(-1)[..., None, None]
    keys = torch.where(energy > 0, keys, 1.0)
    values, vectors = principal(_weighted(keys, w.sqrt()), 1)
    mean = keys.diagonal(0, -2, -1).real.mean(-1, keepdim=True)
    scale = (mean / values).sqrt()
    u = vectors[..., 0].conj()
    return (u * w.sqrt() * scale).mT, (u / (w.sqrt() * scale)).mT


# What commutes with norms

Units = Callable[[Tensor], Tensor]
"""The allowed factor [..., F] that is nearest to a complex number: for factors p, the one that makes Re(conj(p) z)
largest.
"""


def _one(z: Tensor) -> Tensor:
    return torch.ones_like(z)


def _sign(z: Tensor) -> Tensor:
    return torch.where(z.real < 0, -1.0, torch.ones_like(z))


def _units(weights: AttentionWeights) -> Units:
    if weights.centred_norms:
        return _one
    gains = [norm.double() for norm in (weights.query_norm, weights.key_norm) if norm is not None]
    pairs = [to_pairs(gain, rotary_of(weights))[0] for gain in gains]
    equal_F = torch.stack([pair.real == pair.imag for pair in pairs]).all(0)

    def unit(z: Tensor) -> Tensor:
        return torch.where(equal_F, torch.where(z.abs() > 0, z / z.abs(), 1.0), _sign(z))

    return unit


def _align(keys: Tensor, w: Tensor, unit: Units) -> Tensor:
    """Factors p [g, F, r] of which k_j ~ p_j kappa, with kappa the weighted mean of conj(p_j) k_j; p of the first head
    is 1.

    They make p^H B p large, B_jl = w_j E[k_j conj(k_l)] w_l: each head in turn takes the best factor given the
    others', from the mean, from the leading eigenvector and from every head as a model; the best of these ends is
    taken. Never worse than the plain mean.
    """
    b = _weighted(keys, w)
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


def _unaligned(keys: Tensor, w: Tensor, unit: Units) -> Tensor:
    """The sum over heads of w_j E|k_j - p_j kappa|² [g, F] with the factors of `_align`."""
    p = _align(keys, w, unit)
    kept = (p.conj() * (_weighted(keys, w) @ p[..., None])[..., 0]).sum(-1).real / w.sum(-1)
    return ((w * keys.diagonal(0, -2, -1).real).sum(-1) - kept).clamp(min=0)
