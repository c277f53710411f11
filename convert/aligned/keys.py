"""Step 1 of aligned conversion: the key heads of a group become one, and their queries make up for it.

A score is q k^T = sum over rotary pairs of Re(conj(q_f) k_f), plus the dimensions that do not rotate; q_f and k_f are
the complex pairs of `moments.to_pairs`, and rotation multiplies them by exp(i p theta_f). So with one key pair kappa_f
for all heads j of a group,

    k_j,f ~ c_j,f kappa_f    gives    Re(conj(q_f) c_j,f kappa_f) = Re(conj(conj(c_j,f) q_f) kappa_f):

query head i of head j takes the factor conj(c_j,f), before or after rotation, as complex factors commute with it. They
are the only linear maps of a pair that do, for every position. Of dimensions without rotation any linear map does.

Best c: an error e in k_j,f changes the score of query head i by Re(conj(q_i,f) e), on average over the phase of q by
E|q_i,f|² |e|² / 2. With w_j,f the sum of E|q_i,f|² over j's query heads, `factors.scalars` has the c of least loss.
Without rotation it is `spectra.share_subspace` with L_j² = the sum of E[q_i^T q_i].

With norms between the projections and the scores (Qwen3, Gemma 3) a factor must commute with them, too. What does: a
sign for a pair or a dimension without rotation, whatever the gains; any phase for a pair in which both gains of the
query norm are equal, and both of the key norm. Nothing does where a norm also subtracts the mean. These factors p_j
are exact for each head by itself; the shared key is then the mean of conj(p_j) k_j, every head first brought to the
same size, weighted by w_j: of all keys the one nearest to its heads up to those factors, before the norm is taken of
it. Where keys are cut off at a size (DBRX), only signs commute. Norms that have gains for every head are in `gained`.

Shape suffixes: h query heads, k source key/value heads, g groups (any groups, also overlapping ones), r heads of a
group, d head_dim, D hidden, X hidden and the constant 1, F rotary pairs, n dimensions without rotation.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from headpool.convert.aligned.factors import (
    Units,
    averages,
    floored_weights,
    one,
    scalars,
    sign,
    unaligned,
    unscaled,
)
from headpool.convert.aligned.gained import regained
from headpool.convert.aligned.moments import Moments, from_pairs, is_normed, rotary_of, rows, to_pairs, unrows
from headpool.convert.aligned.spectra import (
    blocks,
    floored,
    lost_energy,
    roots,
    share_subspace,
    stack,
    sum_groups,
    weigh,
)
from headpool.convert.layouts import AttentionWeights, Rotary
from headpool.errors import RequestError

KeyFreedom = Literal["maps", "factors", "units"]
"""Any map that commutes with rotation; a number for each pair and dimension; or a number of absolute value one."""


def share_keys(weights: AttentionWeights, kv_heads: int, moments: Moments) -> AttentionWeights:
    """The layer with `kv_heads` key heads, one for each contiguous group of the source's; q and bias_q change with
    them, and the gains of norms where every head has its own.

    All else is as it was; results are float64. Without norms, a group whose heads are complex multiples of one
    another, pair by pair, loses nothing, and so does any group of one. RequestError where it is unknown how dimensions
    pair, and for layers whose values are their keys: those have no freedom left, and can only be pooled.
    """
    if weights.q is None or weights.k is None or weights.v is None:
        raise RequestError("method aligned needs queries, keys and values of their own; this layer lacks some")
    contiguous = torch.arange(len(weights.k), device=weights.k.device).view(kv_heads, -1)
    factors = KeySharing(weights, moments).factors(contiguous)
    if weights.key_gains is not None:
        return regained(weights, moments, factors.mixed, factors.turned)
    rotary = rotary_of(weights)
    k, bias_k = unrows(factors.mixed(rows(weights.k, weights.bias_k), rotary), weights.bias_k)
    q, bias_q = unrows(factors.turned(rows(weights.q, weights.bias_q), rotary), weights.bias_q)
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

    def mixed(self, k_kXd: Tensor, rotary: Rotary) -> Tensor:
        """What the keys of the groups become, [g, X, d]."""
        k_pairs, k_flat = to_pairs(k_kXd, rotary)
        k_pairs = sum_groups(k_pairs * self.mix.flatten(0, 1)[:, None], len(self.mix))
        k_flat = sum_groups(k_flat @ self.flat_mix.flatten(0, 1), len(self.mix))
        return from_pairs(k_pairs, k_flat, rotary)

    def turned(self, q_hXd: Tensor, rotary: Rotary) -> Tensor:
        """What the queries become, [h, X, d]."""
        per_key = len(q_hXd) // self.mix.shape[:2].numel()
        q_pairs, q_flat = to_pairs(q_hXd, rotary)
        q_pairs = q_pairs * self.turn.flatten(0, 1).repeat_interleave(per_key, 0)[:, None]
        q_flat = q_flat @ self.flat_turn.flatten(0, 1).repeat_interleave(per_key, 0)
        return from_pairs(q_pairs, q_flat, rotary)


class KeySharing:
    """What sharing costs, and the factors that cost least, for any groups of one layer's key heads."""

    def __init__(self, weights: AttentionWeights, moments: Moments) -> None:
        rotary_of(weights)
        self._weights = weights
        self._moments = moments
        kv_heads = moments.keys.shape[1]
        self._n = len(moments.flat_keys) // kv_heads
        self._w_kF = floored_weights(sum_groups(moments.queries, kv_heads))
        self._flat_w_knn = sum_groups(moments.flat_queries, kv_heads)
        self._flat_kknn = blocks(moments.flat_keys, kv_heads)
        self.freedom = key_freedom(weights)

    def factors(self, groups: Tensor) -> KeyFactors:
        """The best factors for the groups of source heads in `groups` [g, r]."""
        keys, w = self._keys(groups), self._pair_weights(groups)
        if self.freedom == "maps":
            root, inverse = self._flat_roots
            flat = share_subspace(self._flat_keys(groups), root[groups], inverse[groups])
            return KeyFactors(*scalars(keys, w), *flat)
        if self.freedom == "factors":
            flat = scalars(*self._flat_diagonals(groups))
            return KeyFactors(*scalars(keys, w), *(each.real.diag_embed() for each in flat))
        size = self._sizes(groups)
        mix, turn = averages(keys, w, self._turns)
        flat_mix, flat_turn = averages(*self._flat_diagonals(groups), self._flips)
        return KeyFactors(mix * size, turn, (flat_mix * size).real.diag_embed(), flat_turn.real.diag_embed())

    def lost(self, groups: Tensor) -> Tensor:
        """The energy [g] of score errors that each group of `groups` [g, r] has with its best factors."""
        keys, w = self._keys(groups), self._pair_weights(groups)
        if self.freedom == "maps":
            root = self._flat_roots[0]
            flat = lost_energy(weigh(self._flat_keys(groups), root[groups]), self._n) if self._n else 0.0
            return unscaled(keys, w) / 2 + flat
        if self.freedom == "factors":
            return unscaled(keys, w) / 2 + unscaled(*self._flat_diagonals(groups))
        flat_keys, flat_w = self._flat_diagonals(groups)
        return unaligned(keys, w, self._turns) / 2 + unaligned(flat_keys, flat_w, self._flips)

    @property
    def energy(self) -> float:
        """The energy of the scores of all heads: what would be lost without any key."""
        pairs = (self._w_kF * self._moments.keys.diagonal(0, 1, 2).real.T).sum() / 2
        flat = (self._flat_w_knn * self._flat_kknn.diagonal(0, 0, 1).permute(2, 0, 1)).sum()
        return float(pairs + flat)

    def _keys(self, groups: Tensor) -> Tensor:
        """E[k_j conj(k_l)] [g, F, r, r]; their real parts where factors have to be real."""
        keys = self._moments.keys[:, groups[:, :, None], groups[:, None]].transpose(0, 1)
        real = self.freedom == "factors" and not self._weights.whole_norms
        return keys.real.to(keys.dtype) if real else keys

    def _pair_weights(self, groups: Tensor) -> Tensor:
        """w [g, F, r]"""
        return self._w_kF[groups].mT

    def _flat_keys(self, groups: Tensor) -> Tensor:
        """E[k^T k] [g, r*n, r*n]"""
        return stack(self._flat_kknn[groups[:, :, None], groups[:, None]])

    @cached_property
    def _flat_roots(self) -> tuple[Tensor, Tensor]:
        return roots(self._flat_w_knn)

    def _flat_diagonals(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        """Of every dimension without rotation by itself: E[k_j k_l] [g, n, r, r] and E[q²] [g, n, r], as complex
        numbers.
        """
        keys = self._flat_kknn.diagonal(0, 2, 3)[groups[:, :, None], groups[:, None]].movedim(-1, 1)
        w = floored_weights(self._flat_w_knn.diagonal(0, 1, 2))
        return keys.to(torch.complex128), w[groups].mT

    # With norms, or where keys are cut off

    def _sizes(self, groups: Tensor) -> Tensor:
        """What brings the heads of a group to the same size [g, r, 1], where a norm sees to the size of what comes of
        it; `gained` does that itself.
        """
        scale = self._moments.key_scale
        if not is_normed(self._weights) or self._weights.key_gains is not None:
            return torch.ones_like(groups, dtype=torch.float64)[..., None]
        if scale is None:
            assert self._weights.k is not None
            scale = rows(self._weights.k, self._weights.bias_k).square().sum((1, 2)).sqrt()
        size = floored(scale, scale.amax())[groups]
        return (size.mean(1, keepdim=True) / size)[..., None]

    @cached_property
    def _turns(self) -> Units:
        return _units(self._weights)

    @property
    def _flips(self) -> Units:
        """What the dimensions without rotation may be multiplied by."""
        return one if self._weights.centred_norms else sign


def key_freedom(weights: AttentionWeights) -> KeyFreedom:
    """By what the keys of a layer can be told from a shared one."""
    if weights.clipped or (is_normed(weights) and weights.key_gains is None):
        return "units"
    return "maps" if weights.key_gains is None else "factors"


def _units(weights: AttentionWeights) -> Units:
    if weights.centred_norms:
        return one
    if weights.clipped:
        return sign
    gains = [norm.double() for norm in (weights.query_norm, weights.key_norm) if norm is not None]
    pairs = [to_pairs(gain, rotary_of(weights))[0] for gain in gains]
    equal = [pair.real == pair.imag for pair in pairs]

    def unit(z: Tensor) -> Tensor:
        phase = torch.where(z.abs() > 0, z / z.abs(), 1.0)
        return torch.where(torch.stack(equal).all(0), phase, sign(z)) if equal else phase

    return unit
