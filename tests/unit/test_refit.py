"""Step 4, refitting the output projection: against least squares on the tokens themselves, written out."""

from dataclasses import replace

import heads
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headpool.convert.aligned.refit import Normal, refit_output
from headpool.convert.layouts import AttentionWeights
from headpool.errors import RequestError


def layer(biases: bool, seed: int = 0) -> AttentionWeights:
    return heads.layer(heads.HALF_SPLIT, head_dim=3, hidden=5, heads=2, kv_heads=2, biases=biases, seed=seed)


def flat(weights: AttentionWeights) -> Tensor:
    """W_O [h*d, D]: the head outputs side by side times this are the layer's output."""
    assert weights.o is not None
    return torch.cat([o.T for o in weights.o.double()])


def output(weights: AttentionWeights, z: Tensor) -> Tensor:
    y = z.double() @ flat(weights)
    return y if weights.bias_o is None else y + weights.bias_o


def seen(weights: AttentionWeights, z: Tensor, y: Tensor, pieces: int = 3) -> Normal:
    normal = Normal(z.shape[1], y.shape[1])
    residual = y - output(weights, z)
    for part in torch.arange(len(z)).chunk(pieces):
        normal.add(z[part], residual[part])
    return normal


def least_squares(weights: AttentionWeights, z: Tensor, y: Tensor, ridge: float) -> Tensor:
    """The refitted outputs, by NumPy's least squares on the residual with rows for the penalty."""
    rows, targets, spread = z.numpy(), (y - output(weights, z)).numpy(), z.square().sum() / z.shape[1]
    if weights.bias_o is not None:
        rows, spread = np.hstack([rows, np.ones((len(z), 1))]), (z - z.mean(0)).square().sum() / z.shape[1]
    penalty = np.sqrt(ridge * float(spread)) * np.eye(rows.shape[1])[: z.shape[1]]
    solution = np.linalg.lstsq(
        np.vstack([rows, penalty]), np.vstack([targets, np.zeros((len(penalty), 5))]), rcond=None
    )[0]
    fitted = z.numpy() @ solution[: z.shape[1]] + (solution[-1] if weights.bias_o is not None else 0)
    return output(weights, z) + torch.from_numpy(fitted)


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("ridge", [0.0, 1e-4, 0.3])
def test_is_ridge_regression_on_the_residual(biases: bool, ridge: float) -> None:
    weights, z, y = layer(biases), heads.normal(1, 50, 6) + 1, heads.normal(2, 50, 5)
    made = refit_output(weights, seen(weights, z, y), ridge)
    torch.testing.assert_close(output(made, z), least_squares(weights, z, y, ridge), rtol=1e-9, atol=1e-9)
    assert (made.bias_o is None) == (not biases)
    assert made.v is weights.v
    assert (output(made, z) - output(weights, z)).abs().max() > 0.1


@pytest.mark.parametrize("biases", [True, False])
def test_an_exact_layer_stays(biases: bool) -> None:
    weights, z = layer(biases), heads.normal(1, 50, 6)
    made = refit_output(weights, seen(weights, z, output(weights, z)), 0.1)
    assert made.o is not None and weights.o is not None
    torch.testing.assert_close(made.o, weights.o, rtol=0, atol=1e-14)


def test_an_output_that_a_projection_can_reach_is_reached() -> None:
    weights, other, z = layer(True), layer(True, seed=1), heads.normal(1, 50, 6)
    made = refit_output(weights, seen(weights, z, output(other, z)), 0.0)
    assert made.o is not None and other.o is not None
    torch.testing.assert_close(made.o, other.o, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(made.bias_o, other.bias_o, rtol=1e-10, atol=1e-10)


@given(
    st.booleans(), st.integers(1, 40), st.integers(0, 6), st.sampled_from([0.0, 1e-12, 1e-6, 1e-2, 10.0]),
    st.sampled_from([1e-200, 1e-9, 1.0, 1e6]), st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=80)
def test_the_error_on_its_data_never_grows(
    biases: bool, tokens: int, rank: int, ridge: float, scale: float, seed: int
) -> None:
    """Too few tokens, dependent features, none at all, tiny and huge ones."""
    weights = layer(biases)
    z = heads.normal(seed, tokens, rank) @ heads.normal(seed + 1, rank, 6) * scale
    y = heads.normal(seed + 2, tokens, 5) * scale
    normal = seen(weights, z, y)
    made = refit_output(weights, normal, ridge)
    assert made.o is not None and made.o.isfinite().all()
    before, after = ((y - output(one, z)).square().sum() for one in (weights, made))
    assert after <= before * (1 + 1e-12)


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_dependent_features_take_the_shortest_solution(biases: bool, seed: int) -> None:
    weights, y = layer(biases), heads.normal(seed, 50, 5)
    z = heads.normal(seed + 9, 50, 3) @ heads.normal(seed + 10, 3, 6)
    made = refit_output(weights, seen(weights, z, y), 0.0)
    rows, targets = z, y - output(weights, z)
    if biases:
        rows, targets = rows - rows.mean(0), targets - targets.mean(0)
    expected = torch.from_numpy(np.linalg.pinv(rows.numpy(), rcond=1e-9)) @ targets
    torch.testing.assert_close(flat(made) - flat(weights), expected, rtol=1e-7, atol=1e-9)


def test_where_rounding_has_spoilt_the_sums_the_projection_stays() -> None:
    weights, z, y = layer(True), heads.normal(1, 50, 6), heads.normal(2, 50, 5)
    normal = seen(weights, z, y)
    normal.zz.neg_()  # as far as can be from the sum of squares that it should be
    made = refit_output(weights, normal, 1e-3)
    assert torch.equal(flat(made), flat(weights))
    assert made.bias_o is not None and weights.bias_o is not None
    assert torch.equal(made.bias_o, weights.bias_o)


def test_sums_that_are_not_finite_are_refused() -> None:
    weights, y = layer(True), heads.normal(2, 50, 5)
    for scale in (1e200, float("inf"), float("nan")):
        with pytest.raises(RequestError, match="not finite"):
            refit_output(weights, seen(weights, heads.normal(1, 50, 6) * scale, y), 1e-3)


def test_nothing_seen_changes_nothing() -> None:
    for biases in (True, False):
        weights = layer(biases)
        made = refit_output(weights, Normal(6, 5), 1e-3)
        assert made.o is not None and weights.o is not None
        assert torch.equal(made.o, weights.o)


def test_what_is_seen_does_not_depend_on_the_pieces() -> None:
    weights, z, y = layer(True), heads.normal(1, 50, 6), heads.normal(2, 50, 5)
    made = [refit_output(weights, seen(weights, z, y, pieces=pieces), 1e-3).o for pieces in (1, 7)]
    torch.testing.assert_close(*made, rtol=1e-12, atol=1e-12)


def test_the_error_is_counted_from_the_sums() -> None:
    weights, z, y = layer(True), heads.normal(1, 50, 6), heads.normal(2, 50, 5)
    correction, intercept = heads.normal(4, 6, 5), heads.normal(5, 5)
    error = (y - output(weights, z) - z @ correction - intercept).square().sum()
    assert seen(weights, z, y).squared_error(correction, intercept).item() == pytest.approx(float(error), rel=1e-12)


def test_float32_inputs_are_summed_in_float64() -> None:
    weights, z = layer(False), heads.normal(1, 50, 6).float()
    normal = seen(weights, z, z.double() @ flat(layer(False, seed=1)))
    assert normal.zz.dtype == torch.float64
    torch.testing.assert_close(normal.zz, z.double().T @ z.double(), rtol=1e-13, atol=1e-13)
    made = refit_output(replace(weights, o=weights.o.float() if weights.o is not None else None), normal, 0.0)
    assert made.o is not None and made.o.dtype == torch.float64
