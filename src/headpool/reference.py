"""The attention family in NumPy: the specification that the rest of headpool is tested against.

Multi-head, grouped-query and multi-query attention are one function that differs in g, the number of
key/value heads. The h query heads fall into g contiguous groups of r = h / g: group j owns query heads
j*r .. (j+1)*r - 1.

    query head         0   1   2   3   4   5
                       |   |   |   |   |   |
    MHA, g = h         0   1   2   3   4   5       a K/V head for every query head

                       0   1   2   3   4   5
                       '---+---'   '---+---'
    GQA, 1 < g < h         0           1           r query heads read the same K/V head

                       0   1   2   3   4   5
                       '---+---+-+-+---+---'
    MQA, g = 1                   0                 all query heads read one K/V head

Written for reading, not for speed. One sequence, no batch. `attention` and `mean_heads` compute in float64,
whatever comes in. Not covered: norms of queries and keys, sinks, ALiBi, soft-capping, scales other than
1/sqrt(head_dim).

Shape suffixes: H query heads, G key/value heads, R query heads of one group, D head_dim of queries and keys,
V head_dim of values, E hidden, F rotated dimensions, T new tokens (queries), S all tokens so far (keys).

Sources: Vaswani et al. 2017 (1706.03762) section 3.2 for attention; Shazeer 2019 (1911.02150) for a single
K/V head; Ainslie et al. 2023 (2305.13245) section 2 for groups and mean-pooling; Su et al. 2021 (2104.09864)
for rotary positions.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Mask = Literal["causal", "bidirectional", "sliding"]


def _require_equal(name: str, size: int, other_name: str, other_size: int) -> None:
    if size != other_size:
        raise ValueError(f"{name} is {size}, but {other_name} is {other_size}: they must be equal")


def _require_divisible(name: str, size: int, divisor_name: str, divisor: int) -> None:
    if divisor < 1 or size % divisor:
        raise ValueError(f"{name} is {size}, which does not split evenly into {divisor_name} = {divisor}")


@dataclass(frozen=True)
class LayerWeights:
    """One attention layer: q [H, D, E], k [G, D, E], v [G, V, E], o [H, E, V].

    Biases: None, or bias_q [H, D], bias_k [G, D], bias_v [G, V], bias_o [E]. ValueError where shapes do not
    fit one another.
    """

    q: Array
    k: Array
    v: Array
    o: Array
    bias_q: Array | None = None
    bias_k: Array | None = None
    bias_v: Array | None = None
    bias_o: Array | None = None

    def __post_init__(self) -> None:
        for name, weight in (("q", self.q), ("k", self.k), ("v", self.v), ("o", self.o)):
            _require_equal(f"the number of dimensions of {name}", weight.ndim, "the number expected", 3)
        _require_divisible("the number of query heads", self.q.shape[0], "key/value heads", self.k.shape[0])
        _require_equal("heads of v", self.v.shape[0], "heads of k", self.k.shape[0])
        _require_equal("heads of o", self.o.shape[0], "heads of q", self.q.shape[0])
        _require_equal("head_dim of k", self.k.shape[1], "head_dim of q", self.q.shape[1])
        _require_equal("head_dim of o", self.o.shape[2], "head_dim of v", self.v.shape[1])
        for name, size in (("k", self.k.shape[2]), ("v", self.v.shape[2]), ("o", self.o.shape[1])):
            _require_equal(f"the hidden size of {name}", size, "the hidden size of q", self.q.shape[2])
        for name, bias, shape in (
            ("bias_q", self.bias_q, self.q.shape[:2]),
            ("bias_k", self.bias_k, self.k.shape[:2]),
            ("bias_v", self.bias_v, self.v.shape[:2]),
            ("bias_o", self.bias_o, self.o.shape[1:2]),
        ):
            if bias is not None and bias.shape != shape:
                raise ValueError(f"{name} has shape {bias.shape}, but its weight asks for {shape}")


class Rotary(NamedTuple):
    """Cosines and sines [T, F], one row per new token, one column per rotated dimension.

    The first F dimensions of every head are rotated, the rest pass unchanged. The pairs are dimensions
    (f, f + F/2) or, interleaved, (2f, 2f + 1); the two columns of a pair hold the same angle.
    """

    cos: Array
    sin: Array
    interleaved: bool = False


@dataclass(frozen=True)
class KVCache:
    """Rotated keys [G, S, D] and values [G, S, V] of all tokens so far: nothing here counts query heads."""

    k: Array
    v: Array

    def __len__(self) -> int:
        return int(self.k.shape[1])

    def extended(self, k_GTD: Array, v_GTV: Array) -> "KVCache":
        """A new cache with these tokens behind the old ones; ValueError where heads or dimensions differ."""
        for name, old, new in (("k", self.k, k_GTD), ("v", self.v, v_GTV)):
            _require_equal(f"heads of the new {name}", new.shape[0], "heads in the cache", old.shape[0])
            _require_equal(f"head_dim of the new {name}", new.shape[2], "head_dim in the cache", old.shape[2])
        return KVCache(np.concatenate((self.k, k_GTD), axis=1), np.concatenate((self.v, v_GTV), axis=1))


def visible(mask: Mask, queries: int, keys: int, window: int | None = None) -> npt.NDArray[np.bool_]:
    """Which of the keys each query sees, [T, S]; the queries are the last of the keys' positions.

    Causal: query p sees keys 0 .. p. Sliding: keys p - window + 1 .. p, so that the window counts the query's
    own key, as Hugging Face's `sliding_window` does. Bidirectional: all. ValueError for another mask, for a
    window that is missing, superfluous or below 1, and for more queries than keys where positions matter.
    """
    if mask not in get_args(Mask):
        raise ValueError(f"mask is {mask!r}, but must be one of {', '.join(get_args(Mask))}")
    if (mask == "sliding") != (window is not None):
        raise ValueError(f"window is {window}, but mask is {mask!r}: only 'sliding' takes (and needs) one")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}, but must be 1 or more")
    if mask == "bidirectional":
        return np.ones((queries, keys), dtype=np.bool_)
    if queries > keys:
        raise ValueError(f"there are {queries} queries, but only {keys} keys")
    position_T1 = np.arange(keys - queries, keys)[:, None]
    position_S = np.arange(keys)
    seen_TS = position_S <= position_T1
    if window is not None:
        seen_TS &= position_S > position_T1 - window
    return seen_TS


def softmax(scores: Array) -> Array:
    """Softmax over the last axis. Minus infinity gets weight 0; a row that holds nothing else becomes NaN."""
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True), dtype=np.float64)


def rotate(x_HTD: Array, rotary: Rotary) -> Array:
    """Each pair (a, b) of the rotated dimensions becomes (a cos - b sin, b cos + a sin); returns [H, T, D].

    ValueError when F is odd or exceeds D, and when cosines, sines and x disagree about T or F.
    """
    cos_TF, sin_TF, interleaved = rotary
    tokens, dims = cos_TF.shape
    _require_equal("rows of cosines", tokens, "rows of sines", sin_TF.shape[0])
    _require_equal("columns of cosines", dims, "columns of sines", sin_TF.shape[1])
    _require_equal("rows of cosines", tokens, "the number of new tokens", x_HTD.shape[1])
    _require_divisible("the number of rotated dimensions", dims, "pairs of", 2)
    if dims > x_HTD.shape[2]:
        raise ValueError(f"{dims} dimensions are to be rotated, but head_dim is {x_HTD.shape[2]}")
    turned, rest = x_HTD[..., :dims], x_HTD[..., dims:]
    if interleaved:
        quarter = np.stack((-turned[..., 1::2], turned[..., 0::2]), axis=-1).reshape(turned.shape)
    else:
        quarter = np.concatenate((-turned[..., dims // 2 :], turned[..., : dims // 2]), axis=-1)
    return np.concatenate((turned * cos_TF + quarter * sin_TF, rest), axis=-1)


def dot_product_attention(q_HTD: Array, k_GSD: Array, v_GSV: Array, seen_TS: npt.NDArray[np.bool_]) -> Array:
    """softmax(q k^T / sqrt(D)) v for every query head over its group's key/value head; returns [H, T, V].

    A key that is not seen gets minus infinity for a score before the softmax. K and V are read where they
    lie and never copied out per query head. ValueError when the key/value heads do not divide the query heads
    and when q, k, v and seen disagree about D, G, S or T.
    """
    heads, tokens, head_dim = q_HTD.shape
    kv_heads, keys, _ = k_GSD.shape
    _require_divisible("the number of query heads", heads, "key/value heads", kv_heads)
    _require_equal("head_dim of k", k_GSD.shape[2], "head_dim of q", head_dim)
    _require_equal("heads of v", v_GSV.shape[0], "heads of k", kv_heads)
    _require_equal("tokens of v", v_GSV.shape[1], "tokens of k", keys)
    if seen_TS.shape != (tokens, keys):
        raise ValueError(f"the mask has shape {seen_TS.shape}, but queries and keys ask for {(tokens, keys)}")
    q_GRTD = q_HTD.reshape(kv_heads, heads // kv_heads, tokens, head_dim)
    scores_GRTS = np.einsum("grtd,gsd->grts", q_GRTD, k_GSD) / np.sqrt(head_dim)
    weights_GRTS = softmax(np.where(seen_TS, scores_GRTS, -np.inf))
    z_GRTV = np.einsum("grts,gsv->grtv", weights_GRTS, v_GSV)
    return np.asarray(z_GRTV.reshape(heads, tokens, v_GSV.shape[2]), dtype=np.float64)


def _project(x_TE: Array, w_NDE: Array, bias_ND: Array | None) -> Array:
    y_NTD: Array = np.einsum("te,nde->ntd", x_TE, w_NDE)
    return y_NTD if bias_ND is None else y_NTD + bias_ND[:, None, :]


def attention(
    x_TE: npt.ArrayLike,
    weights: LayerWeights,
    *,
    mask: Mask = "causal",
    window: int | None = None,
    rotary: Rotary | None = None,
    cache: KVCache | None = None,
) -> tuple[Array, KVCache]:
    """One attention layer over new tokens x [T, E]: its output [T, E], and a cache that holds them as well.

    With a cache the new tokens follow those in it and see them as far as the mask allows, so that a sequence
    fed in pieces gives what it gives whole. The rows of `rotary` are for the new tokens' own positions. Under
    a bidirectional mask earlier tokens see later ones, which pieces cannot: ValueError for a cache that holds
    tokens. ValueError also where shapes do not fit, as in the functions above.
    """
    x = np.asarray(x_TE, dtype=np.float64)
    if x.ndim != 2:
        raise ValueError(f"x has {x.ndim} dimensions, but 2 are expected: tokens and hidden")
    _require_equal("the hidden size of x", x.shape[1], "the hidden size of q", weights.q.shape[2])
    if mask == "bidirectional" and cache is not None and len(cache):
        raise ValueError(f"mask is {mask!r}, but {len(cache)} cached tokens could not see these {len(x)}")
    q_HTD = _project(x, weights.q, weights.bias_q)
    k_GTD = _project(x, weights.k, weights.bias_k)
    v_GTV = _project(x, weights.v, weights.bias_v)
    if rotary is not None:
        q_HTD, k_GTD = rotate(q_HTD, rotary), rotate(k_GTD, rotary)
    cache = KVCache(k_GTD, v_GTV) if cache is None else cache.extended(k_GTD, v_GTV)
    seen_TS = visible(mask, len(x), len(cache), window)
    z_HTV = dot_product_attention(q_HTD, cache.k, cache.v, seen_TS)
    y_TE: Array = np.einsum("htv,hev->te", z_HTV, weights.o)
    return y_TE if weights.bias_o is None else y_TE + weights.bias_o, cache


def mean_heads(w: npt.ArrayLike, kv_heads: int) -> Array:
    """Mean-pooling: [k, ...], a key or value projection or its bias, to [kv_heads, ...] in float64.

    Each contiguous group of k / kv_heads heads is summed in float64 and divided once; the caller rounds to
    what a checkpoint stores. ValueError when kv_heads does not divide k.
    """
    heads = np.asarray(w, dtype=np.float64)
    _require_divisible("the number of heads", heads.shape[0], "groups", kv_heads)
    group_size = heads.shape[0] // kv_heads
    groups = heads.reshape(kv_heads, group_size, *heads.shape[1:])
    return np.asarray(groups.sum(axis=1) / group_size, dtype=np.float64)


def repeat_heads(w: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """[g, ...] to [heads, ...], each head heads / g times in a row; the dtype stays.

    MHA with K/V heads so repeated computes what GQA did. `mean_heads` undoes it, bit for bit where the values
    have float32's precision or less. ValueError when g does not divide heads.
    """
    _require_divisible("the number of heads", heads, "groups", w.shape[0])
    return np.repeat(w, heads // w.shape[0], axis=0)
