"""What aligned conversion knows of a layer beyond its weights: second moments of queries, keys and values.

Shape suffixes: h query heads, k source key/value heads, g groups, d head_dim, D hidden, X hidden and the constant 1, F
rotary pairs, n dimensions without rotation, r source heads of a group.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headpool.convert.aligned.spectra import blocks, floored, stack
from headpool.convert.layouts import AttentionWeights, Rotary
from headpool.errors import RequestError


def to_pairs(x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
    """Heads [..., d] as their rotary pairs, complex [..., F], and the dimensions that do not rotate [..., n].

    Pair f is a + ib of dimensions (a, b) = (f, f + F), interleaved (2f, 2f + 1), among the first 2F. Rotation by an
    angle, (a cos - b sin, b cos + a sin), is then multiplication by exp(i angle), whatever the layout.
    """
    turned, flat = x[..., : rotary.dims], x[..., rotary.dims :]
    if rotary.kind == "interleaved":
        return torch.complex(turned[..., 0::2].contiguous(), turned[..., 1::2].contiguous()), flat
    return torch.complex(*(half.contiguous() for half in turned.chunk(2, -1))), flat


def pair_moments(heads_BkTd: Tensor, rotary: Rotary) -> Tensor:
    """The sum over all tokens of x_j conj(x_l), complex [F, k, k], of each rotary pair of heads [B, k, T, d].

    With x = a + ib, its real part is a_j a_l + b_j b_l, one product of real numbers.
    """
    turned = heads_BkTd[..., : rotary.dims]
    halves = (rotary.dims // 2, 2) if rotary.kind == "interleaved" else (2, rotary.dims // 2)
    order = (3, 1, 4, 0, 2) if rotary.kind == "interleaved" else (4, 1, 3, 0, 2)
    parts_FkcN = torch.unflatten(turned, -1, halves).permute(order).flatten(3)
    both, (a, b) = parts_FkcN.flatten(2), parts_FkcN.unbind(2)
    crossed = a @ b.mT
    return torch.complex(both @ both.mT, crossed.mT - crossed)


def from_pairs(pairs: Tensor, flat: Tensor, rotary: Rotary) -> Tensor:
    """Heads [..., d] from their pairs and the rest: the inverse of `to_pairs`."""
    if rotary.kind == "interleaved":
        turned = torch.stack((pairs.real, pairs.imag), -1).flatten(-2)
    else:
        turned = torch.cat((pairs.real, pairs.imag), -1)
    return torch.cat((turned, flat), -1)


def rotary_of(weights: AttentionWeights) -> Rotary:
    """How the dimensions of a head pair. RequestError where that is not known: a wrong pairing would go unnoticed."""
    if weights.rotary is None:
        raise RequestError(
            "method aligned needs to know which dimensions rotate together, and for this family it is unknown"
        )
    return weights.rotary


def is_normed(weights: AttentionWeights) -> bool:
    """Whether norms stand between the projections of queries or keys and the scores."""
    gains = (weights.query_norm, weights.key_norm, weights.query_gains, weights.key_gains)
    return weights.bare_norms or any(one is not None for one in gains)


def centred(maps_hXd: Tensor, weights: AttentionWeights) -> Tensor:
    """Heads less their mean over the dimensions, where the norms between projections and scores take it away."""
    return maps_hXd - maps_hXd.mean(-1, keepdim=True) if weights.centred_norms else maps_hXd


def rows(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Projections [heads, d, D] as maps of row vectors, the bias as the last row: [heads, X, d] in float64."""
    maps = weight.double().mT
    return maps if bias is None else torch.cat((maps, bias.double()[:, None]), 1)


def unrows(maps: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Weights [heads, d, D] and bias [heads, d] from maps [heads, X, d]; `bias` says whether there is one."""
    return (maps.mT, None) if bias is None else (maps[:, :-1].mT, maps[:, -1])


def reorder_heads(heads: Tensor, order: Sequence[int]) -> Tensor:
    """Heads [h, ...], or what is stacked by head [h*m, ...], moved along with their K/V heads: to place j comes all
    that belongs to K/V head `order[j]`.
    """
    parts = torch.unflatten(heads, 0, (len(order), len(heads) // len(order)))
    return parts[torch.as_tensor(order, device=heads.device)].flatten(0, 1)


@dataclass(frozen=True)
class Moments:
    """Second moments of one layer's attention over calibration text, in float64 and complex128.

    keys [F, k, k]: E[k_j conj(k_l)] of each rotary pair, of the keys as attention sees them: after rotation and key
        norm, weighted by the attention that they receive and centred within the sequence, or plain ones.
    queries [h, F]: E|q|² of each pair, after the query norm. flat_keys [k*n, k*n], flat_queries [h, n, n]: the same
    for the dimensions without rotation, keys stacked by head, and E[q^T q] whole.
    values [k*d, k*d]: E[v^T v] of all values stacked by head, averaged by attention (without text, single tokens').
        Not centred.
    value_means [k*d]: their mean. key_scale [k]: the root mean square of each head's keys before the key norm; None
    where there is no norm, or where it is to be told from the weights. inputs [X, X]: E[x^T x] of the layer's inputs
    with the constant 1, where norms have gains for every head; else None.
    """

    keys: Tensor
    queries: Tensor
    flat_keys: Tensor
    flat_queries: Tensor
    values: Tensor
    value_means: Tensor
    key_scale: Tensor | None = None
    inputs: Tensor | None = None

    def permuted(self, order: Sequence[int]) -> "Moments":
        """The moments of the layer whose K/V head j is this one's `order[j]`, query heads moved along."""
        index = torch.as_tensor(order, device=self.keys.device)
        kv_heads = len(index)

        def stacked(matrix: Tensor) -> Tensor:
            return stack(blocks(matrix, kv_heads)[index][:, index])

        return replace(
            self,
            keys=self.keys[:, index][:, :, index],
            queries=reorder_heads(self.queries, order),
            flat_keys=stacked(self.flat_keys),
            flat_queries=reorder_heads(self.flat_queries, order),
            values=stacked(self.values),
            value_means=reorder_heads(self.value_means, order),
            key_scale=None if self.key_scale is None else self.key_scale[index],
        )

    def value_groups(self, groups: int) -> Tensor:
        """The blocks [g, r*d, r*d] of `values` that belong to contiguous groups, as `share_values` takes them."""
        return blocks(self.values, groups).diagonal(0, 0, 1).permute(2, 0, 1)


def data_free(weights: AttentionWeights, gain: Tensor) -> Moments:
    """Moments without calibration: inputs of independent entries, uncorrelated and without mean.

    `gain` [D] is the gain of the norm before the attention, so that E[x^T x] = diag(gain²); the bias is a row for the
    constant 1. Key and query norms divide each head by its expected size; their gains, if the same for every head, are
    left out: they scale all moments of a pair alike. Positions are left out as well.
    """
    assert weights.q is not None
    assert weights.k is not None
    assert weights.v is not None
    rotary = rotary_of(weights)
    gain_X1 = torch.cat((gain.double(), gain.new_ones(1, dtype=torch.float64)))[:, None]

    def spread(weight: Tensor, bias: Tensor | None) -> Tensor:
        """The projection [heads, X, d] of inputs of unit variance."""
        maps_hXd = rows(weight, bias)
        return maps_hXd * gain_X1[: maps_hXd.shape[1]]

    def stacked(maps_kXn: Tensor) -> Tensor:
        """E[y^T y] of all heads' outputs, stacked."""
        maps_XK = maps_kXn.transpose(0, 1).flatten(1)
        return maps_XK.mT @ maps_XK

    def normed(maps_hXd: Tensor, gains_hd: Tensor | None) -> Tensor:
        maps_hXd = centred(maps_hXd, weights)
        if not weights.whole_norms:
            maps_hXd = maps_hXd / floored(_size(maps_hXd), _size(maps_hXd).amax())[:, None, None]
        return maps_hXd if gains_hd is None else maps_hXd * gains_hd.double()[:, None]

    q_hXd, k_kXd = spread(weights.q, weights.bias_q), spread(weights.k, weights.bias_k)
    scale = inputs = None
    if is_normed(weights):
        scale = _size(centred(k_kXd, weights))
        q_hXd, k_kXd = normed(q_hXd, weights.query_gains), normed(k_kXd, weights.key_gains)
    if weights.key_gains is not None:
        inputs = gain_X1.square()[:, 0].diag()
    q_hXF, q_hXn = to_pairs(q_hXd, rotary)
    k_kXF, k_kXn = to_pairs(k_kXd, rotary)
    return Moments(
        keys=torch.einsum("jxf,lxf->fjl", k_kXF, k_kXF.conj()),
        queries=q_hXF.abs().square().sum(1),
        flat_keys=stacked(k_kXn),
        flat_queries=q_hXn.mT @ q_hXn,
        values=stacked(spread(weights.v, weights.bias_v)),
        value_means=(torch.zeros_like(weights.v[..., 0]) if weights.bias_v is None else weights.bias_v)
        .double()
        .flatten(),
        key_scale=scale,
        inputs=inputs,
    )


def _size(maps_hXd: Tensor) -> Tensor:
    """The root mean square [h] of heads whose inputs have unit variance."""
    return (maps_hXd.square().sum((1, 2)) / maps_hXd.shape[2]).sqrt()
