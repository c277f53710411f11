"""Step 2 of aligned conversion: the value heads of a group become one, and the output projection makes up for it.

Query head i of source head j gives sum_t a_it v_j,t W_O,i, with attention weights a_it. Attention is linear in values,
so any invertible map of v_j can be undone in W_O,i; and where the values of a group lie in d dimensions together, one
head holds them all. Otherwise the best d dimensions are those that the output sees most of: an error e in v_j costs |e
L_j|² with L_j² = the sum of W_O,i W_O,i^T over j's query heads, and `spectra.share_subspace` finds them. (Errors of
different heads are taken as if they never cancelled; the refit of step 4 knows better.)

Where a gate scales every dimension of a head's output, and dimensions cannot be mixed, heads share up to a factor for
each dimension; where a norm spans all of the output, or values are cut off at a size, up to a sign.

Attention weights sum to one, so what is lost of the values' mean is the same in every output: where the layer has an
output bias it goes there, and the moments count from the mean. Not with attention sinks, where weights sum to less, and
not behind gates and norms.

Shape suffixes: h query heads, k source key/value heads, g groups, r heads of a group, d head_dim, D hidden, X hidden
and the constant 1.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from headpool.convert.aligned.factors import averages, floored_weights, scalars, sign, unaligned, unscaled
from headpool.convert.aligned.moments import Moments, rows, unrows
from headpool.convert.aligned.spectra import blocks, lost_energy, roots, share_subspace, stack, sum_groups, weigh
from headpool.convert.layouts import AttentionWeights
from headpool.errors import RequestError

ValueFreedom = Literal["maps", "factors", "signs"]
"""What a head's values may be multiplied by, as the output projection undoes it: any linear map, a factor for each
dimension, or a sign.
"""

BESIDE: Mapping[str, ValueFreedom] = {
    "sinks": "maps", "gate_proj.weight": "factors", "gate_bias": "factors", "attn_sub_norm.weight": "signs",
}  # fmt: skip
"""What the tensors that belong to the query heads leave of it."""


def value_freedom(weights: AttentionWeights) -> ValueFreedom:
    """What a layer's values may be multiplied by. KeyError for a tensor of the query heads that is not in BESIDE."""
    found = {BESIDE[name] for name in weights.per_query_head}
    if weights.clipped or weights.normed_values or "signs" in found:
        return "signs"
    return "factors" if weights.gate is not None or "factors" in found else "maps"


def folds(weights: AttentionWeights) -> bool:
    """Whether a lost mean of the values is the same in every output: attention weights sum to one, and nothing comes
    between attention and the output projection.
    """
    return weights.gate is None and not weights.per_query_head


def share_values(
    weights: AttentionWeights, kv_heads: int, group_moments: Tensor, value_means: Tensor, *, fold_mean: bool
) -> AttentionWeights:
    """The layer with `kv_heads` value heads, one for each contiguous group of the source's; o changes with them.

    group_moments [g, r*d, r*d] are E[v^T v] of each group's values, stacked and not centred: of single tokens' values
    or, better, of values averaged by the attention of the group's query heads. value_means [k*d] is their mean. With
    `fold_mean` and an output bias, what is lost of the mean goes into the bias. All else is as it was; results are
    float64.

    A group whose values span at most d dimensions, or are multiples of each other where less is free, loses nothing,
    and so does any group of one. RequestError for layers whose values are their keys.
    """
    if weights.v is None or weights.o is None:
        raise RequestError("method aligned needs values of their own; this layer's are its keys")
    group_size = len(weights.v) // kv_heads
    per_value = len(weights.o) // len(weights.v)
    mean_gR = value_means.double().view(kv_heads, -1)
    fold = fold_mean and weights.bias_o is not None
    seen = centred(group_moments.double(), mean_gR) if fold else group_moments.double()
    mix, read = _maps(weights, seen) if value_freedom(weights) == "maps" else _factors(weights, seen)

    def shared(rows_kXd: Tensor) -> Tensor:
        """What the groups' heads [k, X, d] become, [g, X, d]."""
        return sum_groups(rows_kXd @ mix.flatten(0, 1), kv_heads)

    v, bias_v = unrows(shared(rows(weights.v, weights.bias_v)), weights.bias_v)
    o_hDd = weights.o.double() @ read.flatten(0, 1).repeat_interleave(per_value, 0)
    bias_o = weights.bias_o
    if fold and bias_o is not None:
        mean_k1d = mean_gR.view(len(weights.v), 1, -1)
        kept_k1d = shared(mean_k1d).repeat_interleave(group_size, 0) @ read.flatten(0, 1).mT
        lost_hd = (mean_k1d - kept_k1d)[:, 0].repeat_interleave(per_value, 0)
        bias_o = bias_o.double() + (weights.o.double() @ lost_hd[..., None]).sum((0, 2))
    return replace(weights, v=v, o=o_hDd, bias_v=bias_v, bias_o=bias_o)


def _maps(weights: AttentionWeights, seen_gRR: Tensor) -> tuple[Tensor, Tensor]:
    """(mix, read) [g, r, d, d]: the shared value is sum_j v_j mix_j, and v_j is told from it by read_j^T."""
    root, inverse = (torch.unflatten(each, 0, (len(seen_gRR), -1)) for each in output_roots(weights))
    return share_subspace(seen_gRR, root, inverse)


def _factors(weights: AttentionWeights, seen_gRR: Tensor) -> tuple[Tensor, Tensor]:
    """`_maps` that are diagonal."""
    w_grd = torch.unflatten(output_weights(weights), 0, (len(seen_gRR), -1))
    size, d = w_grd.shape[1:]
    seen_gdrr = torch.unflatten(torch.unflatten(seen_gRR, 2, (size, d)), 1, (size, d)).diagonal(0, 2, 4).movedim(-1, 1)
    moments, w = seen_gdrr.to(torch.complex128), w_grd.mT
    mix, read = scalars(moments, w) if value_freedom(weights) == "factors" else averages(moments, w, sign)
    return mix.real.diag_embed(), read.real.diag_embed()


def output_weights(weights: AttentionWeights) -> Tensor:
    """How much the output sees of an error in each dimension of every source value head, [k, d]."""
    assert weights.v is not None
    assert weights.o is not None
    return floored_weights(sum_groups(weights.o.double().square().sum(1), len(weights.v)))


def output_roots(weights: AttentionWeights) -> tuple[Tensor, Tensor]:
    """L_j and its inverse, [k, d, d], of every source value head: how much the output sees of an error in it."""
    assert weights.v is not None
    assert weights.o is not None
    o_hDd = weights.o.double()
    return roots(sum_groups(o_hDd.mT @ o_hDd, len(weights.v)))


def centred(moments: Tensor, mean: Tensor) -> Tensor:
    """E[v^T v] [..., n, n] about the mean [..., n] instead of zero."""
    return moments - mean[..., :, None] * mean[..., None, :]


class ValueSharing:
    """What sharing costs for any groups of one layer's value heads; `fold_mean` as in `share_values`."""

    def __init__(self, weights: AttentionWeights, moments: Moments, *, fold_mean: bool) -> None:
        assert weights.v is not None
        kv_heads, self._d = weights.v.shape[:2]
        self.freedom = value_freedom(weights)
        fold = fold_mean and weights.bias_o is not None
        seen = centred(moments.values, moments.value_means) if fold else moments.values
        if self.freedom == "maps":
            self._seen_kkdd = blocks(weigh(seen, output_roots(weights)[0]), kv_heads)
        else:
            self._seen_kkd = blocks(seen, kv_heads).diagonal(0, 2, 3)
            self._w_kd = output_weights(weights)

    def lost(self, groups: Tensor) -> Tensor:
        """The energy [g] that the output loses for each group of source heads in `groups` [g, r]."""
        if self.freedom == "maps":
            return lost_energy(stack(self._seen_kkdd[groups[:, :, None], groups[:, None]]), self._d)
        moments = self._seen_kkd[groups[:, :, None], groups[:, None]].movedim(-1, 1).to(torch.complex128)
        w = self._w_kd[groups].mT
        return unscaled(moments, w) if self.freedom == "factors" else unaligned(moments, w, sign)

    @property
    def energy(self) -> float:
        """The energy of all heads: what would be lost without any value."""
        if self.freedom == "maps":
            return float(self._seen_kkdd.diagonal(0, 0, 1).diagonal(0, 0, 1).sum())
        return float((self._seen_kkd.diagonal(0, 0, 1).mT * self._w_kd).sum())
