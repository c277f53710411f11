"""The NumPy specification with a cache against itself without one, and the memory that it takes."""

import itertools
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specification import assert_close, random_rotary, random_weights, rows

from headpool.reference import (
    Array,
    KVCache,
    Mask,
    attention,
    dot_product_attention,
    repeat_heads,
    visible,
)


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
