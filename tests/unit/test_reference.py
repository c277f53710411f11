"""The NumPy specification against closed forms, and with a cache against itself without one."""

import dataclasses
import itertools
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headpool.reference import (
    Array,
    KVCache,
    LayerWeights,
    Mask,
    Rotary,
    attention,
    dot_product_attention,
    mean_heads,
    repeat_heads,
    rotate,
    softmax,
    visible,
)

MASKS: list[tuple[Mask, int | None]] = [("causal", None), ("bidirectional", None), ("sliding", 3)]


def assert_close(actual: Array, expected: Any, *, atol: float) -> None:
    """Absolute: assert_allclose alone would forgive a relative error of 1e-7 as well."""
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


def random_weights(
    rng: np.random.Generator,
    *,
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 4,
    value_dim: int = 3,
    hidden: int = 5,
) -> LayerWeights:
    """Weights with every bias, whose sizes all differ so that no two axes can be mistaken for one another."""

    def normal(*shape: int) -> Array:
        return rng.normal(size=shape)

    return LayerWeights(
        q=normal(heads, head_dim, hidden),
        k=normal(kv_heads, head_dim, hidden),
        v=normal(kv_heads, value_dim, hidden),
        o=normal(heads, hidden, value_dim),
        bias_q=normal(heads, head_dim),
        bias_k=normal(kv_heads, head_dim),
        bias_v=normal(kv_heads, value_dim),
        bias_o=normal(hidden),
    )


def random_rotary(rng: np.random.Generator, tokens: int, dims: int, *, interleaved: bool = False) -> Rotary:
    """Arbitrary angles for every token and pair: the specification takes what it is given."""
    angles = rng.uniform(-np.pi, np.pi, size=(tokens, dims // 2))
    columns = np.repeat(angles, 2, axis=1) if interleaved else np.tile(angles, 2)
    return Rotary(np.cos(columns), np.sin(columns), interleaved)


def rows(rotary: Rotary | None, start: int, stop: int) -> Rotary | None:
    if rotary is None:
        return None
    return rotary._replace(cos=rotary.cos[start:stop], sin=rotary.sin[start:stop])


# Masks and softmax


def test_masks_written_out() -> None:
    assert visible("causal", 3, 3).astype(int).tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert visible("bidirectional", 2, 3).astype(int).tolist() == [[1, 1, 1], [1, 1, 1]]
    assert visible("sliding", 4, 4, 2).astype(int).tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 1, 1, 0],
        [0, 0, 1, 1],
    ]


def test_queries_are_the_last_positions() -> None:
    assert visible("causal", 2, 4).astype(int).tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert visible("sliding", 2, 4, 2).astype(int).tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]


def test_window_at_least_as_long_as_the_text_is_causal() -> None:
    assert (visible("sliding", 5, 5, 5) == visible("causal", 5, 5)).all()
    assert not (visible("sliding", 5, 5, 4) == visible("causal", 5, 5)).all()


def test_softmax_of_logarithms_is_their_proportions() -> None:
    assert_close(softmax(np.log([1.0, 3.0, 4.0])), [0.125, 0.375, 0.5], atol=1e-13)


@pytest.mark.parametrize("shift", [-1e4, -3.0, 1e4])
def test_softmax_ignores_a_shift(shift: float) -> None:
    scores = np.random.default_rng(0).normal(size=(3, 7))
    assert_close(softmax(scores + shift), softmax(scores), atol=1e-11)


def test_softmax_gives_minus_infinity_no_weight() -> None:
    assert softmax(np.array([-np.inf, 0.0, 0.0])).tolist() == [0.0, 0.5, 0.5]


# Attention on given queries, keys and values


@pytest.mark.parametrize("kv_heads", [6, 2, 1])
@pytest.mark.parametrize(("mask", "window"), MASKS)
def test_zero_queries_take_the_mean_of_what_they_see(mask: Mask, window: int | None, kv_heads: int) -> None:
    rng = np.random.default_rng(1)
    k, v = rng.normal(size=(kv_heads, 8, 4)), rng.normal(size=(kv_heads, 8, 3))
    z = dot_product_attention(np.zeros((6, 8, 4)), k, v, visible(mask, 8, 8, window))
    for head in range(6):
        for p in range(8):
            start = 0 if window is None else max(0, p - window + 1)
            stop = 8 if mask == "bidirectional" else p + 1
            expected = v[head // (6 // kv_heads), start:stop].mean(axis=0)
            assert_close(z[head, p], expected, atol=1e-13)


def test_window_of_one_returns_the_value_itself() -> None:
    rng = np.random.default_rng(2)
    q, k, v = rng.normal(size=(6, 5, 4)), rng.normal(size=(2, 5, 4)), rng.normal(size=(2, 5, 3))
    z = dot_product_attention(q, k, v, visible("sliding", 5, 5, 1))
    assert (z == v[[0, 0, 0, 1, 1, 1]]).all()


def test_scores_are_divided_by_the_root_of_head_dim() -> None:
    q = np.array([[[2.0, 0, 0, 0]]])
    k = np.array([[[np.log(3.0), 0, 0, 0], [0, 5.0, 0, 0]]])
    z = dot_product_attention(q, k, np.array([[[0.0], [1.0]]]), visible("causal", 1, 2))
    assert_close(z, [[[0.25]]], atol=1e-13)


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 1), (6, 2), (6, 3), (6, 6), (8, 2), (9, 3)])
def test_groups_are_contiguous(heads: int, kv_heads: int) -> None:
    rng = np.random.default_rng(3)
    v = np.broadcast_to(np.arange(float(kv_heads))[:, None, None], (kv_heads, 4, 1))
    z = dot_product_attention(
        rng.normal(size=(heads, 4, 2)), rng.normal(size=(kv_heads, 4, 2)), v, visible("causal", 4, 4)
    )
    expected = np.repeat(np.arange(float(kv_heads)), heads // kv_heads)
    assert_close(z, np.broadcast_to(expected[:, None, None], z.shape), atol=1e-13)


def test_each_query_head_is_an_attention_of_its_own() -> None:
    rng = np.random.default_rng(4)
    q, k, v = rng.normal(size=(6, 5, 4)), rng.normal(size=(2, 5, 4)), rng.normal(size=(2, 5, 3))
    seen = visible("causal", 5, 5)
    for head, z in enumerate(dot_product_attention(q, k, v, seen)):
        scores = q[head] @ k[head // 3].T / 2.0
        powers = np.exp(scores) * seen
        assert_close(z, powers / powers.sum(axis=1, keepdims=True) @ v[head // 3], atol=1e-13)


# Rotary positions


@pytest.mark.parametrize(("interleaved", "partner"), [(False, 3), (True, 1)])
def test_rotation_turns_a_pair_by_its_angle(interleaved: bool, partner: int) -> None:
    x = np.zeros((1, 1, 8))
    x[..., 0], x[..., 7] = 1.0, 9.0
    rotary = Rotary(np.full((1, 6), np.cos(0.3)), np.full((1, 6), np.sin(0.3)), interleaved)
    expected = np.zeros(8)
    expected[0], expected[partner], expected[7] = np.cos(0.3), np.sin(0.3), 9.0
    assert_close(rotate(x, rotary)[0, 0], expected, atol=1e-13)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_is_a_complex_product(interleaved: bool) -> None:
    rng = np.random.default_rng(5)
    x = rng.normal(size=(3, 4, 8))
    rotary = random_rotary(rng, 4, 6, interleaved=interleaved)
    first, second = (slice(0, 6, 2), slice(1, 6, 2)) if interleaved else (slice(0, 3), slice(3, 6))
    product = (x[..., first] + 1j * x[..., second]) * (rotary.cos[:, first] + 1j * rotary.sin[:, first])
    y = rotate(x, rotary)
    assert_close(y[..., first], product.real, atol=1e-13)
    assert_close(y[..., second], product.imag, atol=1e-13)
    assert (y[..., 6:] == x[..., 6:]).all()


@pytest.mark.parametrize("interleaved", [False, True])
def test_output_depends_on_relative_positions_only(interleaved: bool) -> None:
    rng = np.random.default_rng(6)
    weights, x = random_weights(rng), rng.normal(size=(7, 5))
    frequencies = np.array([1.0, 0.1])

    def output(first_position: int) -> Array:
        angles = np.arange(first_position, first_position + 7)[:, None] * frequencies
        columns = np.repeat(angles, 2, axis=1) if interleaved else np.tile(angles, 2)
        return attention(x, weights, rotary=Rotary(np.cos(columns), np.sin(columns), interleaved))[0]

    assert_close(output(11), output(0), atol=1e-12)
    assert abs(output(0) - attention(x, weights)[0]).max() > 1e-3


# A layer


def test_layer_written_out() -> None:
    """Two query heads on one key/value head, one dimension each: every number can be checked by hand."""
    weights = LayerWeights(
        q=np.array([[[0.0]], [[1.0]]]),
        k=np.array([[[1.0]]]),
        v=np.array([[[2.0]]]),
        o=np.array([[[1.0]], [[10.0]]]),
        bias_q=np.array([[0.0], [-1.0]]),
        bias_v=np.array([[4.0]]),
        bias_o=np.array([0.5]),
    )
    x = np.array([[0.0], [1.0 + np.log(3.0)]])
    # Values are 4 and 6 + 2 ln 3. The second token's query is 0 in head 0 and ln 3 in head 1; keys are x.
    ln3, second = np.log(3.0), 6 + 2 * np.log(3.0)
    strength = np.exp(ln3 * (1 + ln3))
    head0, head1 = (4 + second) / 2, (4 + strength * second) / (1 + strength)
    expected = [[4 + 40 + 0.5], [head0 + 10 * head1 + 0.5]]
    assert_close(attention(x, weights)[0], expected, atol=1e-12)


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
@pytest.mark.parametrize(("mask", "window"), MASKS)
def test_grouped_equals_multi_head_with_repeated_heads(mask: Mask, window: int | None, kv_heads: int) -> None:
    rng = np.random.default_rng(7)
    weights, x = random_weights(rng, kv_heads=kv_heads), rng.normal(size=(7, 5))
    assert weights.bias_k is not None
    assert weights.bias_v is not None
    repeated = dataclasses.replace(
        weights,
        k=repeat_heads(weights.k, 6),
        v=repeat_heads(weights.v, 6),
        bias_k=repeat_heads(weights.bias_k, 6),
        bias_v=repeat_heads(weights.bias_v, 6),
    )
    rotary = random_rotary(rng, 7, 4)
    grouped, cache = attention(x, weights, mask=mask, window=window, rotary=rotary)
    multi_head, _ = attention(x, repeated, mask=mask, window=window, rotary=rotary)
    assert_close(grouped, multi_head, atol=1e-13)
    assert cache.k.shape == (kv_heads, 7, 4)
    assert cache.v.shape == (kv_heads, 7, 3)


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
def test_mean_pooled_equals_heads_overwritten_by_their_mean(kv_heads: int) -> None:
    rng = np.random.default_rng(8)
    source, x = random_weights(rng, kv_heads=6), rng.normal(size=(7, 5))
    pooled, overwritten = {}, {}
    for name in ("k", "v", "bias_k", "bias_v"):
        tensor = getattr(source, name)
        pooled[name] = mean_heads(tensor, kv_heads)
        size = 6 // kv_heads
        overwritten[name] = np.stack([tensor[i // size * size : (i // size + 1) * size].mean(0) for i in range(6)])
    converted, _ = attention(x, dataclasses.replace(source, **pooled))
    expected, _ = attention(x, dataclasses.replace(source, **overwritten))
    assert_close(converted, expected, atol=1e-13)
    same_as_source = np.allclose(converted, attention(x, source)[0], atol=1e-3)
    assert same_as_source == (kv_heads == 6)


@pytest.mark.parametrize(("mask", "window", "reach"), [("causal", None, 8), ("sliding", 3, 3)])
def test_what_is_masked_has_no_influence(mask: Mask, window: int | None, reach: int) -> None:
    rng = np.random.default_rng(9)
    weights, x = random_weights(rng), rng.normal(size=(8, 5))
    before, _ = attention(x, weights, mask=mask, window=window)
    x[4] += 1.0
    changed = (attention(x, weights, mask=mask, window=window)[0] != before).any(axis=1)
    assert changed.tolist() == [4 <= p < 4 + reach for p in range(8)]


def test_bidirectional_attention_has_no_order() -> None:
    rng = np.random.default_rng(10)
    weights, x = random_weights(rng), rng.normal(size=(8, 5))
    order = rng.permutation(8)
    shuffled, _ = attention(x[order], weights, mask="bidirectional")
    assert_close(shuffled, attention(x, weights, mask="bidirectional")[0][order], atol=1e-13)


def test_computes_in_float64_whatever_comes_in() -> None:
    rng = np.random.default_rng(11)
    weights, x = random_weights(rng), rng.normal(size=(6, 5)).astype(np.float32)
    rotary = random_rotary(rng, 6, 4)
    single = LayerWeights(*(getattr(weights, f.name).astype(np.float32) for f in dataclasses.fields(weights)))
    double = LayerWeights(*(getattr(single, f.name).astype(np.float64) for f in dataclasses.fields(single)))
    y, cache = attention(x, single, rotary=rotary)
    assert {y.dtype, cache.k.dtype, cache.v.dtype} == {np.dtype(np.float64)}
    assert_close(y, attention(x.astype(np.float64), double, rotary=rotary)[0], atol=1e-13)


# The cache


@settings(deadline=None, max_examples=150)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_in_pieces_equals_all_at_once(data: st.DataObject, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = data.draw(st.integers(1, 12), "tokens")
    kv_heads, group_size = (
        data.draw(st.integers(1, 3), "kv_heads"),
        data.draw(st.integers(1, 3), "group_size"),
    )
    head_dim = data.draw(st.integers(1, 6), "head_dim")
    weights = random_weights(
        rng,
        heads=kv_heads * group_size,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=data.draw(st.integers(1, 4), "value_dim"),
        hidden=data.draw(st.integers(1, 5), "hidden"),
    )
    window = data.draw(st.none() | st.integers(1, tokens + 2), "window")
    mask: Mask = "causal" if window is None else "sliding"
    dims = 2 * data.draw(st.integers(0, head_dim // 2), "rotated pairs")
    rotary = random_rotary(rng, tokens, dims, interleaved=data.draw(st.booleans(), "interleaved")) if dims else None
    cuts = data.draw(st.sets(st.integers(1, tokens - 1)) if tokens > 1 else st.just(set()), "cuts")

    x = rng.normal(size=(tokens, weights.q.shape[2]))
    whole, whole_cache = attention(x, weights, mask=mask, window=window, rotary=rotary)
    pieces: list[Array] = []
    cache: KVCache | None = None
    bounds = [0, *sorted(cuts), tokens]
    for start, stop in itertools.pairwise(bounds):
        y, cache = attention(
            x[start:stop],
            weights,
            mask=mask,
            window=window,
            rotary=rows(rotary, start, stop),
            cache=cache,
        )
        assert len(cache) == stop
        pieces.append(y)
    assert cache is not None
    assert_close(np.concatenate(pieces), whole, atol=1e-11)
    assert_close(cache.k, whole_cache.k, atol=1e-12)
    assert_close(cache.v, whole_cache.v, atol=1e-12)


@pytest.mark.parametrize(("mask", "window"), [("causal", None), ("sliding", 3)])
@pytest.mark.parametrize("kv_heads", [6, 2, 1])
def test_prefill_then_token_by_token(mask: Mask, window: int | None, kv_heads: int) -> None:
    rng = np.random.default_rng(12)
    weights, x = random_weights(rng, kv_heads=kv_heads), rng.normal(size=(10, 5))
    rotary = random_rotary(rng, 10, 2)
    whole, _ = attention(x, weights, mask=mask, window=window, rotary=rotary)
    y, cache = attention(x[:4], weights, mask=mask, window=window, rotary=rows(rotary, 0, 4))
    assert_close(y, whole[:4], atol=1e-13)
    for p in range(4, 10):
        y, cache = attention(
            x[p : p + 1], weights, mask=mask, window=window, rotary=rows(rotary, p, p + 1), cache=cache
        )
        assert_close(y[0], whole[p], atol=1e-13)


def test_a_cache_is_not_changed_by_use() -> None:
    rng = np.random.default_rng(13)
    weights, x = random_weights(rng), rng.normal(size=(6, 5))
    _, cache = attention(x[:4], weights)
    once, _ = attention(x[4:], weights, cache=cache)
    again, _ = attention(x[4:], weights, cache=cache)
    assert len(cache) == 4
    assert (once == again).all()


def peak_bytes(work: Callable[[], object]) -> int:
    """The most that NumPy and Python held at once during the work, above what they held before."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_keys_and_values_are_never_held_per_query_head() -> None:
    """16 query heads read one K/V head over 4096 tokens: K alone, once per query head, would be 8 (K + V)."""
    rng = np.random.default_rng(14)
    heads, tokens, head_dim = 16, 4096, 64
    q, k, v = rng.normal(size=(heads, 1, head_dim)), *rng.normal(size=(2, 1, tokens, head_dim))
    seen = visible("causal", 1, tokens)
    limit = k.nbytes + v.nbytes
    assert peak_bytes(lambda: dot_product_attention(q, k, v, seen)) < limit
    # The measurement sees such a copy when one is made, even of the keys alone.
    copied = peak_bytes(lambda: dot_product_attention(q, repeat_heads(k, heads), repeat_heads(v, heads), seen))
    assert copied > 8 * limit
    assert peak_bytes(lambda: repeat_heads(k, heads)) > 4 * limit


def test_cached_path_holds_two_caches_and_little_more() -> None:
    """A new token may cost the new cache and the scores of 16 query heads; the old cache was there before."""
    rng = np.random.default_rng(15)
    weights = random_weights(rng, heads=16, kv_heads=1, head_dim=64, value_dim=64)
    k, v = rng.normal(size=(2, 1, 4096, 64))
    cache, x = KVCache(k, v), rng.normal(size=(1, 5))
    assert peak_bytes(lambda: attention(x, weights, cache=cache)) < 2 * (k.nbytes + v.nbytes)


# Pooling


def test_mean_heads_written_out() -> None:
    assert mean_heads([[0.0], [1.0], [2.0], [3.0], [4.0], [8.0]], 2).tolist() == [[1.0], [5.0]]
    assert mean_heads([[0.0], [1.0], [2.0], [3.0], [4.0], [8.0]], 1).tolist() == [[3.0]]
    assert mean_heads(np.arange(6), 6).tolist() == list(range(6))


def test_repeat_heads_written_out() -> None:
    assert repeat_heads(np.array([[1, 2], [3, 4]]), 6).tolist() == [[1, 2]] * 3 + [[3, 4]] * 3


def test_mean_heads_sums_in_float64() -> None:
    """Neither fp16's overflow nor float32's rounding reaches the mean."""
    assert mean_heads(np.full((4, 1), 60000, np.float16), 1).tolist() == [[60000.0]]
    third = np.full((3, 1), np.float32(1 / 3))
    assert mean_heads(third, 1).tolist() == [[float(np.float32(1 / 3))]]


@pytest.mark.parametrize("group_size", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("kept_bits", [24, 11, 8], ids=["float32", "fp16", "bf16"])
def test_repeated_heads_return_bit_for_bit(group_size: int, kept_bits: int) -> None:
    mantissas, exponents = np.frexp(np.random.default_rng(16).normal(size=(3, 40, 50)))
    w = np.ldexp(np.round(np.ldexp(mantissas, kept_bits)), exponents - kept_bits)
    assert len(np.unique(w)) > 100
    repeated = repeat_heads(w, 3 * group_size)
    assert repeated.shape == (3 * group_size, 40, 50)
    assert (mean_heads(repeated, 3) == w).all()


@settings(deadline=None)
@given(kv_heads=st.integers(1, 4), group_size=st.integers(1, 5), seed=st.integers(0, 2**32 - 1))
def test_what_the_mean_leaves_sums_to_zero_in_every_group(kv_heads: int, group_size: int, seed: int) -> None:
    w = np.random.default_rng(seed).normal(size=(kv_heads * group_size, 3, 2))
    residual = w - repeat_heads(mean_heads(w, kv_heads), len(w))
    for j in range(kv_heads):
        assert_close(residual[j * group_size : (j + 1) * group_size].sum(axis=0), 0, atol=1e-13)


# What is refused


def layer(**shapes: tuple[int, ...]) -> LayerWeights:
    sizes = {"q": (6, 4, 5), "k": (2, 4, 5), "v": (2, 3, 5), "o": (6, 5, 3)} | shapes
    return LayerWeights(**{name: np.zeros(size) for name, size in sizes.items()})


@pytest.mark.parametrize(
    ("shapes", "numbers"),
    [
        ({"q": (6, 4)}, "dimensions of q is 2.* 3"),
        ({"k": (4, 4, 5), "v": (4, 3, 5)}, "query heads is 6.*key/value heads = 4"),
        ({"k": (0, 4, 5), "v": (0, 3, 5)}, "query heads is 6.*key/value heads = 0"),
        ({"v": (3, 3, 5)}, "heads of v is 3.*heads of k is 2"),
        ({"o": (4, 5, 3)}, "heads of o is 4.*heads of q is 6"),
        ({"k": (2, 2, 5)}, "head_dim of k is 2.*head_dim of q is 4"),
        ({"o": (6, 5, 4)}, "head_dim of o is 4.*head_dim of v is 3"),
        ({"k": (2, 4, 7)}, "hidden size of k is 7.*of q is 5"),
        ({"v": (2, 3, 7)}, "hidden size of v is 7.*of q is 5"),
        ({"o": (6, 7, 3)}, "hidden size of o is 7.*of q is 5"),
        ({"bias_q": (2, 4)}, r"bias_q has shape \(2, 4\).*\(6, 4\)"),
        ({"bias_k": (6, 4)}, r"bias_k has shape \(6, 4\).*\(2, 4\)"),
        ({"bias_v": (2, 4)}, r"bias_v has shape \(2, 4\).*\(2, 3\)"),
        ({"bias_o": (6,)}, r"bias_o has shape \(6,\).*\(5,\)"),
    ],
)
def test_weights_that_do_not_fit(shapes: dict[str, tuple[int, ...]], numbers: str) -> None:
    layer()
    with pytest.raises(ValueError, match=numbers):
        layer(**shapes)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: visible("full", 3, 3), "mask is 'full'.*causal, bidirectional, sliding"),  # type: ignore[arg-type]
        (lambda: visible("sliding", 3, 3), "window is None.*mask is 'sliding'"),
        (lambda: visible("causal", 3, 3, 2), "window is 2.*mask is 'causal'"),
        (lambda: visible("sliding", 3, 3, 0), "window is 0.*1 or more"),
        (lambda: visible("causal", 4, 3), "4 queries.*3 keys"),
        (lambda: mean_heads(np.zeros((6, 2)), 4), "heads is 6.*groups = 4"),
        (lambda: mean_heads(np.zeros((6, 2)), 0), "heads is 6.*groups = 0"),
        (lambda: repeat_heads(np.zeros((4, 2)), 6), "heads is 6.*groups = 4"),
    ],
)
def test_masks_and_groups_that_cannot_be(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("cos", "sin", "message"),
    [
        ((4, 2), (3, 2), "rows of cosines is 4.*rows of sines is 3"),
        ((4, 2), (4, 4), "columns of cosines is 2.*columns of sines is 4"),
        ((3, 2), (3, 2), "rows of cosines is 3.*new tokens is 4"),
        ((4, 3), (4, 3), "rotated dimensions is 3.*pairs of = 2"),
        ((4, 6), (4, 6), "6 dimensions are to be rotated, but head_dim is 4"),
    ],
)
def test_rotations_that_do_not_fit(cos: tuple[int, ...], sin: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention(np.zeros((4, 5)), layer(), rotary=Rotary(np.zeros(cos), np.zeros(sin)))


@pytest.mark.parametrize(
    ("q", "k", "v", "seen", "message"),
    [
        ((6, 3, 4), (4, 3, 4), (4, 3, 2), (3, 3), "query heads is 6.*key/value heads = 4"),
        ((6, 3, 4), (2, 3, 5), (2, 3, 2), (3, 3), "head_dim of k is 5.*head_dim of q is 4"),
        ((6, 3, 4), (2, 3, 4), (3, 3, 2), (3, 3), "heads of v is 3.*heads of k is 2"),
        ((6, 3, 4), (2, 5, 4), (2, 3, 2), (3, 5), "tokens of v is 3.*tokens of k is 5"),
        ((6, 3, 4), (2, 5, 4), (2, 5, 2), (5, 5), r"mask has shape \(5, 5\).*\(3, 5\)"),
    ],
)
def test_queries_keys_and_values_that_do_not_fit(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], seen: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        dot_product_attention(np.zeros(q), np.zeros(k), np.zeros(v), np.ones(seen, dtype=np.bool_))


def test_inputs_and_caches_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="x has 3 dimensions, but 2"):
        attention(np.zeros((1, 4, 5)), layer())
    with pytest.raises(ValueError, match=r"hidden size of x is 6.*of q is 5"):
        attention(np.zeros((4, 6)), layer())
    for k, v, message in (
        ((6, 3, 4), (6, 3, 3), "heads of the new k is 2.*heads in the cache is 6"),
        ((2, 3, 4), (2, 3, 5), "head_dim of the new v is 3.*head_dim in the cache is 5"),
    ):
        with pytest.raises(ValueError, match=message):
            attention(np.zeros((1, 5)), layer(), cache=KVCache(np.zeros(k), np.zeros(v)))


def test_bidirectional_attention_cannot_continue_a_cache() -> None:
    _, cache = attention(np.zeros((3, 5)), layer(), mask="bidirectional")
    with pytest.raises(ValueError, match="'bidirectional', but 3 cached tokens could not see these 2"):
        attention(np.zeros((2, 5)), layer(), mask="bidirectional", cache=cache)
