"""What the NumPy specification refuses."""

from collections.abc import Callable

import numpy as np
import pytest

from headpool.reference import (
    KVCache,
    LayerWeights,
    Rotary,
    attention,
    dot_product_attention,
    mean_heads,
    repeat_heads,
    visible,
)


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
