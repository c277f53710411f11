"""Keys that share a norm with gains for every head (OLMo 2, Cohere): the projections and the gains anew.

What leaves such a norm is g_j * k_j / size, and so it is with the queries, whose heads have gains of their own. The
shared key of a group is found behind the norm: kappa = sum_j mix_j (g_j * k_j), its queries become turn_j (g_i * q_i),
with real factors for each pair and each dimension without rotation.

- Where each head has a norm by itself, the turns are real, and the gains of the queries take them: exact.
- Where one norm spans all heads, turns may be complex. They go into the projections, and the gains are chosen so that
  every channel keeps its usual size before the norm, so that the norm, which sees them all, hardly notices. Exact for
  real turns, for which that makes gains of them, too.

The gain of a channel of kappa is what leaves it as large before the norm as its group's heads are on average; sizes
are those that the second moments of the layer's inputs give. A norm that spans all heads then is what it was, where
the keys of a group are multiples of each other, dimension by dimension.

Shape suffixes: h query heads, k source key heads, g groups, r heads of a group, d head_dim, X hidden and the
constant 1.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from headpool.convert.aligned.moments import Moments, centred, rotary_of, rows, unrows
from headpool.convert.aligned.spectra import floored
from headpool.convert.layouts import AttentionWeights, Rotary

Change = Callable[[Tensor, Rotary], Tensor]


def regained(weights: AttentionWeights, moments: Moments, mixed: Change, turned: Change) -> AttentionWeights:
    """The layer with the keys that `mixed` makes of [k, X, d], and the queries that `turned` makes of [h, X, d]."""
    assert weights.k is not None
    assert weights.q is not None
    assert weights.query_gains is not None
    assert weights.key_gains is not None
    rotary = rotary_of(weights)
    k_kXd = centred(rows(weights.k, weights.bias_k), weights)
    groups = len(mixed(k_kXd, rotary))
    squares_kd = energies(k_kXd, moments)
    if not weights.whole_norms:  # each norm brings its head to the same size
        size_k = squares_kd.mean(1).sqrt()
        size_gr = floored(size_k, size_k.amax()).view(groups, -1)
        same_k = (size_gr.mean(1, keepdim=True) / size_gr).flatten()
        k_kXd, squares_kd = k_kXd * same_k[:, None, None], squares_kd * same_k[:, None].square()
    gains_kd, gains_hd = weights.key_gains.double(), weights.query_gains.double()
    usual_gd = torch.unflatten(squares_kd, 0, (groups, -1)).mean(1)
    sign_gd = torch.unflatten(gains_kd, 0, (groups, -1)).sum(1)
    k_gXd, gains_gd = _split(mixed(k_kXd * gains_kd[:, None], rotary), usual_gd, sign_gd, moments)
    k, bias_k = unrows(k_gXd, weights.bias_k)
    made = replace(weights, k=k, bias_k=bias_k, key_gains=gains_gd)
    q_hXd = rows(weights.q, weights.bias_q)
    if not weights.whole_norms:
        return replace(made, query_gains=turned(gains_hd[:, None], rotary)[:, 0])
    turned_hXd = turned(q_hXd * gains_hd[:, None], rotary)
    q_hXd, gains_hd = _split(turned_hXd, energies(q_hXd, moments), gains_hd, moments)
    q, bias_q = unrows(q_hXd, weights.bias_q)
    return replace(made, q=q, bias_q=bias_q, query_gains=gains_hd)


def energies(maps_hXd: Tensor, moments: Moments) -> Tensor:
    """E[y²] [heads, d] of what heads make of the layer's inputs."""
    assert moments.inputs is not None
    size = maps_hXd.shape[1]
    return (maps_hXd * (moments.inputs[:size, :size] @ maps_hXd)).sum(1).clamp(min=0)


def _split(maps_gXd: Tensor, usual_gd: Tensor, sign_gd: Tensor, moments: Moments) -> tuple[Tensor, Tensor]:
    """Maps and gains, of which these are the product, such that the maps' outputs have the usual E[y²]. The gains have
    the sign of `sign_gd`, and are one where there is nothing.
    """
    held_gd = energies(maps_gXd, moments)
    some = (held_gd > 0) & (usual_gd > 0)
    ratio = torch.where(some, held_gd, 1.0) / torch.where(some, usual_gd, 1.0)
    gains_gd = ratio.sqrt().copysign(sign_gd)
    return maps_gXd / gains_gd[:, None], gains_gd
