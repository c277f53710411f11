"""Random layers for the NumPy specification, and how its results are compared."""

from typing import Any

import numpy as np

from headpool.reference import (
    Array,
    LayerWeights,
    Mask,
    Rotary,
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
