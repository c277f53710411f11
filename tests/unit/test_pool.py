"""The pooling functions against the NumPy specification, and rounding against exact arithmetic."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headpool import reference
from headpool.convert.layouts import AttentionWeights
from headpool.convert.methods import METHODS
from headpool.convert.pool import APPLY, Setting, first_heads, mean_heads
from headpool.rounding import round_once

SETTING = Setting(layer=3, seed=0, initializer_range=0.03, dtype=torch.float32)
shapes = st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.integers(1, 6))


@given(shapes, st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]), st.integers(0, 99))
def test_mean_is_the_specifications(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> None:
    g, r, d, hidden = shape
    heads = torch.randn(g * r, d, hidden, generator=torch.Generator().manual_seed(seed)).to(dtype)
    pooled = mean_heads(heads, g, torch.float64)
    assert pooled.dtype == torch.float64
    expected = reference.mean_heads(heads.double().numpy(), g)
    np.testing.assert_allclose(pooled.numpy(), expected, rtol=1e-15, atol=1e-16)
    # By hand, with the index written out: group j is heads j*r to (j+1)*r - 1.
    for j in range(g):
        by_hand = sum(heads[j * r + m].double() for m in range(r)) / r
        torch.testing.assert_close(pooled[j], by_hand, rtol=1e-15, atol=1e-16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2, 3, 4, 9])
def test_the_mean_of_equal_heads_is_that_head(dtype: torch.dtype, size: int) -> None:
    heads = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(size)).to(dtype)
    repeated = heads.repeat_interleave(size, 0)
    assert torch.equal(mean_heads(repeated, 4, dtype), heads)
    if dtype == torch.float32 and size == 3:
        in_float32 = repeated.unflatten(0, (4, size)).mean(1)
        assert not torch.equal(in_float32, heads), "float32 moves it: the reason for float64"


def test_first_is_each_groups_first() -> None:
    heads = torch.arange(12.0).view(12, 1, 1)
    assert first_heads(heads, 4).flatten().tolist() == [0, 3, 6, 9]


def test_random_is_fresh_seeded_and_of_the_models_range() -> None:
    weights = AttentionWeights(k=torch.ones(8, 64, 512), bias_k=torch.ones(8, 64))
    apply = APPLY["random"]
    made = apply(weights, 4, SETTING)
    again = apply(weights, 4, SETTING)
    assert made.k is not None and again.k is not None and made.bias_k is not None
    assert torch.equal(made.k, again.k)
    assert made.k.shape == (4, 64, 512)
    # 131072 draws: the standard error of the deviation is 0.03 / sqrt(2n) = 6e-5, that of the mean 8e-5.
    assert abs(made.k.std().item() - 0.03) < 4e-4
    assert abs(made.k.mean().item()) < 5e-4
    assert torch.equal(made.bias_k, torch.zeros(4, 64, dtype=torch.float64))
    for other in (replace(SETTING, layer=2), replace(SETTING, seed=1)):
        different = apply(weights, 4, other)
        assert different.k is not None and not torch.equal(different.k, made.k)
    value = apply(AttentionWeights(v=torch.ones(8, 64, 512)), 4, SETTING)
    assert value.v is not None and not torch.equal(value.v, made.k)


def test_every_method_has_a_function() -> None:
    assert set(APPLY) == {name for name, method in METHODS.items() if not method.aligned}


@pytest.mark.parametrize("method", APPLY)
def test_methods_touch_keys_and_values_only(method: str) -> None:
    weights = AttentionWeights(
        q=torch.ones(4, 2, 8), o=torch.ones(4, 8, 2), k=torch.ones(4, 2, 8), v=torch.ones(4, 2, 8)
    )
    made = APPLY[method](weights, 2, SETTING)
    assert made.q is weights.q
    assert made.o is weights.o
    assert made.bias_k is None
    for part in (made.k, made.v):
        assert part is not None and part.shape == (2, 2, 8)
    assert {part for unit in METHODS[method].units for part in unit} == {"k", "v"}


def nearest(value: float, dtype: torch.dtype) -> float:
    """Round to nearest even by exact rational arithmetic over the candidates of the format."""
    precision, least = {torch.bfloat16: (8, -126), torch.float16: (11, -14)}[dtype]
    exact = Fraction(value)
    if exact == 0:
        return 0.0
    exponent = max(int(np.floor(np.log2(abs(float(exact))))), least)
    unit = Fraction(2) ** (exponent - precision + 1)
    steps = exact / unit
    below = steps.numerator // steps.denominator
    rest = steps - below
    up = rest > Fraction(1, 2) or (rest == Fraction(1, 2) and below % 2 == 1)
    return float((below + up) * unit)


def near_ties(dtype: torch.dtype) -> st.SearchStrategy[float]:
    """Values a hair away from the middle between two neighbours: what two roundings get wrong."""
    bits = {torch.bfloat16: 8, torch.float16: 11}[dtype]
    return st.builds(
        lambda steps, tilt, exponent, sign: sign * (steps + 0.5 + tilt * 2.0**-44) * 2.0 ** (exponent - bits + 1),
        st.integers(2 ** (bits - 1), 2**bits - 1),
        st.integers(-2, 2),
        st.integers(-20, 3),
        st.sampled_from([-1, 1]),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounds_once(dtype: torch.dtype) -> None:
    @given(near_ties(dtype) | st.floats(-100, 100).filter(lambda x: x == 0 or abs(x) > 1e-7))
    def check(value: float) -> None:
        assert round_once(torch.tensor([value], dtype=torch.float64), dtype).item() == nearest(value, dtype)

    check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_infinities_stay_and_what_is_too_large_becomes_one(dtype: torch.dtype) -> None:
    inf = float("inf")
    values = torch.tensor([inf, -inf, 1e300, -1e300], dtype=torch.float64)
    assert round_once(values, dtype).tolist() == [inf, -inf, inf, -inf]


def test_each_tensor_keeps_its_own_dtype() -> None:
    weights = AttentionWeights(k=torch.randn(4, 2, 8).bfloat16(), bias_k=torch.randn(4, 2))
    made = APPLY["mean"](weights, 2, replace(SETTING, dtype=None))
    assert made.k is not None and made.k.dtype == torch.bfloat16
    assert made.bias_k is not None and made.bias_k.dtype == torch.float32


def test_rounding_by_way_of_float32_would_miss() -> None:
    value = 1 + 2.0**-8 + 2.0**-40  # just above the middle between two bfloat16 neighbours
    x = torch.tensor([value], dtype=torch.float64)
    assert round_once(x, torch.bfloat16).item() == 1 + 2.0**-7
    assert x.to(torch.bfloat16).item() == 1.0, "PyTorch rounds twice: if this fails, round_once has lost its purpose"
    assert torch.equal(round_once(x, torch.float32), x.float())
