"""Random attention layers by head, their second moments by plain loops, and what the specification makes of them."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from headpool import reference
from headpool.convert.aligned.moments import Moments
from headpool.convert.layouts import AttentionWeights, Rotary

HALF_SPLIT, PARTIAL = Rotary("half-split", 6), Rotary("half-split", 4)
INTERLEAVED, PARTIAL_INTERLEAVED = Rotary("interleaved", 6), Rotary("interleaved", 2)
NONE = Rotary("half-split", 0)
ROTARIES = (HALF_SPLIT, PARTIAL, INTERLEAVED, PARTIAL_INTERLEAVED, NONE)
"""For heads of 6 dimensions."""


def normal(seed: int, *shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def layer(
    rotary: Rotary | None,
    *,
    heads: int = 4,
    kv_heads: int = 4,
    head_dim: int = 6,
    hidden: int = 7,
    biases: bool = True,
    seed: int = 0,
    **fields: Any,
) -> AttentionWeights:
    """Random weights in float64, with every bias or none."""
    shapes: dict[str, tuple[int, ...]] = {
        "q": (heads, head_dim, hidden), "k": (kv_heads, head_dim, hidden), "v": (kv_heads, head_dim, hidden),
        "o": (heads, hidden, head_dim), "bias_q": (heads, head_dim), "bias_k": (kv_heads, head_dim),
        "bias_v": (kv_heads, head_dim), "bias_o": (hidden,),
    }  # fmt: skip
    parts = {
        name: normal(100 * seed + number, *shape)
        for number, (name, shape) in enumerate(shapes.items())
        if biases or not name.startswith("bias")
    }
    return AttentionWeights(rotary=rotary, **parts, **fields)


def attention(weights: AttentionWeights, x_TD: Tensor, mask: reference.Mask = "causal") -> reference.Array:
    """What the NumPy specification makes of the layer, positions 0, 1, 2, … and rotary base 10.

    K and V are repeated for every query head, so that there may be fewer of either. The specification has no norms;
    with them, its pieces are put together here.
    """
    assert weights.q is not None and weights.o is not None
    assert weights.rotary is not None
    pairs, interleaved = weights.rotary.dims // 2, weights.rotary.kind == "interleaved"
    angles = np.arange(len(x_TD))[:, None] * 10.0 ** -np.arange(pairs)
    columns = np.repeat(angles, 2, axis=1) if interleaved else np.tile(angles, 2)
    rotary = reference.Rotary(np.cos(columns), np.sin(columns), interleaved)
    if weights.query_norm is None and weights.query_gains is None:
        names = ("q", "k", "v", "o", "bias_q", "bias_k", "bias_v", "bias_o")
        held = {name: w.numpy() for name in names if (w := getattr(weights, name)) is not None}
        for name in ("k", "v", "bias_k", "bias_v"):
            if name in held:
                held[name] = reference.repeat_heads(held[name], len(weights.q))
        return reference.attention(x_TD.numpy(), reference.LayerWeights(**held), mask=mask, rotary=rotary)[0]
    q, k = (reference.rotate(each, rotary) for each in queries_and_keys(weights, x_TD))
    v = projected(weights.v, weights.bias_v, x_TD)
    k, v = (reference.repeat_heads(each, len(weights.q)) for each in (k, v))
    z = reference.dot_product_attention(q, k, v, reference.visible(mask, len(x_TD), len(x_TD)))
    y = np.einsum("htv,hev->te", z, weights.o.numpy())
    return np.asarray(y if weights.bias_o is None else y + weights.bias_o.numpy())


def indices(rotary: Rotary, head_dim: int) -> tuple[list[tuple[int, int]], list[int]]:
    """The dimensions of each pair, and those without rotation, written out."""
    half = rotary.dims // 2
    pairs = [(f, f + half) if rotary.kind == "half-split" else (2 * f, 2 * f + 1) for f in range(half)]
    return pairs, list(range(rotary.dims, head_dim))


def projected(w: Tensor | None, bias: Tensor | None, x_TD: Tensor) -> reference.Array:
    """The outputs [heads, T, d] of a projection."""
    assert w is not None
    y = np.einsum("td,hvd->htv", x_TD.numpy(), w.numpy())
    return y if bias is None else y + bias.numpy()[:, None]


def queries_and_keys(weights: AttentionWeights, x_TD: Tensor) -> tuple[reference.Array, reference.Array]:
    """Queries [h, T, d] and keys [k, T, d] before rotation, after their norms where there are any."""
    q, k = projected(weights.q, weights.bias_q, x_TD), projected(weights.k, weights.bias_k, x_TD)
    gains = (weights.query_norm, weights.query_gains), (weights.key_norm, weights.key_gains)
    return _normed(q, *gains[0], weights), _normed(k, *gains[1], weights)


def _normed(
    x_HTd: reference.Array, gain_d: Tensor | None, gains_Hd: Tensor | None, weights: AttentionWeights
) -> reference.Array:
    if gain_d is None and gains_Hd is None:
        return x_HTd
    gain = gain_d.numpy() if gains_Hd is None else gains_Hd.numpy()[:, None]  # type: ignore[union-attr]
    x_HTd = x_HTd - x_HTd.mean(-1, keepdims=True) if weights.centred_norms else x_HTd
    across = (0, -1) if weights.whole_norms else -1
    return np.asarray(x_HTd / np.sqrt((x_HTd**2).mean(across, keepdims=True)) * gain)


def moments(weights: AttentionWeights, x_TD: Tensor) -> Moments:
    """Second moments of the layer on inputs x, without positions, one number at a time."""
    assert weights.rotary is not None
    q, k = queries_and_keys(weights, x_TD)
    v = projected(weights.v, weights.bias_v, x_TD)
    tokens, head_dim = k.shape[1:]
    pairs, flat = indices(weights.rotary, head_dim)
    keys = np.zeros((len(pairs), len(k), len(k)), dtype=np.complex128)
    queries = np.zeros((len(q), len(pairs)))
    for f, (a, b) in enumerate(pairs):
        for j in range(len(k)):
            for l in range(len(k)):
                keys[f, j, l] = ((k[j, :, a] + 1j * k[j, :, b]) * (k[l, :, a] - 1j * k[l, :, b])).mean()
        for i in range(len(q)):
            queries[i, f] = (q[i, :, a] ** 2 + q[i, :, b] ** 2).mean()
    k_flat = np.concatenate([head[:, flat] for head in k], axis=1)
    v_all = np.concatenate(list(v), axis=1)
    return Moments(
        keys=torch.from_numpy(keys),
        queries=torch.from_numpy(queries),
        flat_keys=torch.from_numpy(k_flat.T @ k_flat / tokens),
        flat_queries=torch.from_numpy(np.stack([head[:, flat].T @ head[:, flat] / tokens for head in q])),
        values=torch.from_numpy(v_all.T @ v_all / tokens),
        value_means=torch.from_numpy(v_all.mean(0)),
        key_scale=None if weights.key_norm is None else torch.from_numpy(_root_mean_square(weights, x_TD)),
    )


def _root_mean_square(weights: AttentionWeights, x_TD: Tensor) -> reference.Array:
    return np.asarray(np.sqrt((projected(weights.k, weights.bias_k, x_TD) ** 2).mean((1, 2))))
