"""Step 2 of aligned conversion: the value heads of a group become one, and the output projection makes up for it.

Query head i of source head j gives sum_t a_it v_j,t W_O,i, with attention weights a_it. Attention is linear in values,
so any invertible map of v_j can be undone in W_O,i; and where the values of a group lie in d dimensions together, one
head holds them all. Otherwise the best d dimensions are those that the output sees most of: an error e in v_j costs |e
L_j|² with L_j² = the sum of W_O,i W_O,i^T over j's query heads, and `spectra.share_subspace` finds them. (Errors of
different heads are taken as if they never cancelled; the refit of step 4 knows better.)

Attention weights sum to one, so what is lost of the values' mean is the same in every output: where the layer has an
output bias it goes there, and the moments count from the mean. Not with attention sinks, where weights sum to less.

Not covered: layers that do something between attention and output projection (a gate for each dimension, a norm), or
to the values, which the map of values would have to commute with. Whoever calls knows them by the family.

Shape suffixes: h query heads, k source key/value heads, g groups, r heads of a group, d head_dim, D hidden, X hidden
and the constant 1.
"""

from dataclasses import replace

from torch import Tensor

from headpool.convert.aligned.moments import Moments, rows, unrows
from headpool.convert.aligned.spectra import blocks, lost_energy, roots, share_subspace, stack, sum_groups, weigh
from headpool.convert.layouts import AttentionWeights
from headpool.errors import RequestError


def share_values(
    weights: AttentionWeights, kv_heads: int, group_moments: Tensor, value_means: Tensor, *, fold_mean: bool
) -> AttentionWeights:
    """The layer with `kv_heads` value heads, one for each contiguous group of the source's; o changes with them.

    group_moments [g, r*d, r*d] are E[v^T v] of each group's values, stacked and not centred: of single tokens' values
    or, better, of values averaged by the attention of the group's query heads. value_means [k*d] is their mean. With
    `fold_mean` and an output bias, what is lost of the mean goes into the bias. All else is as it was; results are
    float64.

    A group whose values span at most d dimensions loses nothing, and so does any group of one. RequestError for layers
    whose values are their keys.
    """
    if weights.v is None or weights.o is None:
        raise RequestError("method aligned needs values of their own; this layer's are its keys")
    group_size = len(weights.v) // kv_heads
    per_value = len(weights.o) // len(weights.v)
    mean_gR = value_means.double().view(kv_heads, -1)
    fold = fold_mean and weights.bias_o is not None
    root, inverse = output_roots(weights)
    mix, read = share_subspace(
        centred(group_moments.double(), mean_gR) if fold else group_moments.double(),
        root.view(kv_heads, group_size, *root.shape[1:]),
        inverse.view(kv_heads, group_size, *inverse.shape[1:]),
    )

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
        root, _ = output_roots(weights)
        kv_heads, self._d = root.shape[:2]
        fold = fold_mean and weights.bias_o is not None
        seen = weigh(centred(moments.values, moments.value_means) if fold else moments.values, root)
        self._seen_kkdd = blocks(seen, kv_heads)

    def lost(self, groups: Tensor) -> Tensor:
        """The energy [g] that the output loses for each group of source heads in `groups` [g, r]."""
        return lost_energy(stack(self._seen_kkdd[groups[:, :, None], groups[:, None]]), self._d)

    @property
    def energy(self) -> float:
        """The energy of all heads: what would be lost without any value."""
        return float(self._seen_kkdd.diagonal(0, 0, 1).diagonal(0, 0, 1).sum())
