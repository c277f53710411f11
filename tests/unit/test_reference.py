"""The NumPy specification against closed forms."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specification import MASKS, assert_close, random_rotary, random_weights

from headpool.reference import (
    Array,
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
