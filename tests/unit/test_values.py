"""Step 2, sharing values: against brute-force optimisation, errors counted by token, and the NumPy specification."""

from dataclasses import replace

import heads
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optimum import FlatError, minimised
from torch import Tensor

from headpool import reference
from headpool.convert.aligned.moments import data_free
from headpool.convert.aligned.values import ValueSharing, share_values
from headpool.convert.layouts import AttentionWeights
from headpool.errors import RequestError

X = heads.normal(7, 60, 7)


def share(weights: AttentionWeights, groups: int, x_TD: Tensor = X, *, fold: bool = False) -> AttentionWeights:
    moments = heads.moments(weights, x_TD)
    return share_values(weights, groups, moments.value_groups(groups), moments.value_means, fold_mean=fold)


def additions(weights: AttentionWeights, x_TD: Tensor) -> reference.Array:
    """What each query head would add to the output for attention to one token alone: [h, T, D]."""
    assert weights.o is not None
    v = reference.repeat_heads(heads.projected(weights.v, weights.bias_v, x_TD), len(weights.o))
    return np.stack([v_TV @ o.T for v_TV, o in zip(v, weights.o.numpy(), strict=True)])


def energy(errors: reference.Array) -> float:
    return float((errors**2).sum(-1).mean(1).sum())


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("query_heads", [4, 8])
def test_one_head_in_a_group_changes_nothing(biases: bool, fold: bool, query_heads: int) -> None:
    weights = heads.layer(heads.HALF_SPLIT, heads=query_heads, biases=biases)
    other = heads.moments(heads.layer(heads.HALF_SPLIT, seed=5), X)
    made = share_values(weights, 4, other.value_groups(4), other.value_means, fold_mean=fold)
    np.testing.assert_allclose(heads.attention(made, X), heads.attention(weights, X), rtol=0, atol=1e-11)
    assert (made.bias_v is None) == (made.bias_o is None) == (not biases)
    assert made.q is weights.q and made.k is weights.k


def spanning(per_value: int, *, rank: int = 6, offset: bool = False) -> AttentionWeights:
    """A layer in which the values of two heads are maps of the same `rank` numbers, up to a constant with `offset`."""
    weights = heads.layer(heads.HALF_SPLIT, heads=4 * per_value)
    v, bias = np.zeros((4, 6, 7)), np.zeros((4, 6))
    for j in range(4):
        base, constant = heads.normal(50 + j // 2, rank, 7).numpy(), heads.normal(60 + j // 2, rank).numpy()
        spread = heads.normal(70 + j, 6, rank).numpy()
        v[j], bias[j] = spread @ base, spread @ constant
        if offset:
            bias[j] += heads.normal(80 + j, 6).numpy()
    return replace(weights, v=torch.from_numpy(v), bias_v=torch.from_numpy(bias))


@pytest.mark.parametrize("per_value", [1, 2])
@pytest.mark.parametrize("rank", [6, 3])
def test_values_that_span_one_heads_dimensions_are_shared_without_loss(per_value: int, rank: int) -> None:
    weights = spanning(per_value, rank=rank)
    for moments in (heads.moments(weights, X), data_free(weights, torch.ones(7))):
        for fold in (False, True):
            made = share_values(weights, 2, moments.value_groups(2), moments.value_means, fold_mean=fold)
            assert made.v is not None and made.v.shape == (2, 6, 7)
            np.testing.assert_allclose(heads.attention(made, X), heads.attention(weights, X), rtol=0, atol=1e-9)
            sharing = ValueSharing(weights, moments, fold_mean=fold)
            assert float(sharing.lost(torch.arange(4).view(2, 2)).sum()) < 1e-12 * sharing.energy
    assert weights.v is not None and weights.bias_v is not None
    pooled = replace(weights, v=weights.v.view(2, 2, 6, 7).mean(1), bias_v=weights.bias_v.view(2, 2, 6).mean(1))
    assert abs(heads.attention(pooled, X) - heads.attention(weights, X)).max() > 0.1


def test_the_mean_goes_into_the_output_bias() -> None:
    """Values that span d dimensions but for a constant: exact with the mean folded in, whatever attention does."""
    weights = spanning(2, offset=True)
    folded, unfolded = share(weights, 2, fold=True), share(weights, 2)
    for mask in ("causal", "bidirectional"):
        y = heads.attention(weights, X, mask)
        np.testing.assert_allclose(heads.attention(folded, X, mask), y, rtol=0, atol=1e-9)
        assert abs(heads.attention(unfolded, X, mask) - y).max() > 0.01
    assert torch.equal(unfolded.bias_o, weights.bias_o)
    without = replace(weights, bias_o=None)
    assert share(without, 2, fold=True).bias_o is None


@given(st.sampled_from([(4, 2), (6, 2), (6, 3), (3, 1)]), st.integers(1, 2), st.booleans(), st.integers(0, 50))
@settings(max_examples=40)
def test_what_is_lost_is_the_error_of_the_output(
    counts: tuple[int, int], per_value: int, fold: bool, seed: int
) -> None:
    kv_heads, groups = counts
    weights = heads.layer(heads.HALF_SPLIT, heads=kv_heads * per_value, kv_heads=kv_heads, seed=seed)
    moments = heads.moments(weights, X)
    sharing = ValueSharing(weights, moments, fold_mean=fold)
    lost = float(sharing.lost(torch.arange(kv_heads).view(groups, -1)).sum())
    made = share(weights, groups, fold=fold)
    errors = additions(weights, X) - additions(made, X)
    assert weights.bias_o is not None and made.bias_o is not None
    if fold:  # the bias makes up for the errors' mean
        np.testing.assert_allclose(made.bias_o - weights.bias_o, errors.mean(1).sum(0), rtol=0, atol=1e-9)
        errors -= errors.mean(1, keepdims=True)
    assert energy(errors) == pytest.approx(lost, rel=1e-8)
    silent = additions(weights, X)
    assert energy(silent - fold * silent.mean(1, keepdims=True)) == pytest.approx(sharing.energy, rel=1e-8)
    assert weights.v is not None and weights.bias_v is not None
    v, bias_v = (w.view(groups, -1, *w.shape[1:]) for w in (weights.v, weights.bias_v))
    for pooled in (
        replace(weights, v=v.mean(1), bias_v=bias_v.mean(1)),
        replace(weights, v=v[:, 0].contiguous(), bias_v=bias_v[:, 0].contiguous()),
    ):
        assert lost <= energy(additions(weights, X) - additions(pooled, X)) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_no_optimiser_finds_a_better_subspace(seed: int) -> None:
    weights = heads.layer(heads.NONE, heads=4, kv_heads=2, head_dim=2, seed=seed)
    moments = heads.moments(weights, X)
    assert weights.o is not None
    seen = [sum(o.T @ o for o in weights.o[2 * j : 2 * j + 2]) for j in range(2)]
    least = minimised(FlatError(moments.values, torch.stack([torch.as_tensor(each) for each in seen])))
    lost = ValueSharing(weights, moments, fold_mean=False).lost(torch.tensor([[0, 1]]))
    assert float(lost) == pytest.approx(least, rel=1e-6)


def test_the_shared_head_is_as_large_as_its_group() -> None:
    weights = heads.layer(heads.HALF_SPLIT)
    old, new = (heads.projected(w.v, w.bias_v, X) for w in (weights, share(weights, 2)))
    for g in range(2):
        assert (new[g] ** 2).sum() == pytest.approx((old[2 * g : 2 * g + 2] ** 2).sum() / 2, rel=1e-9)


CASES = ["no output", "one head without output", "no values", "one head without values", "few tokens"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("fold", [False, True])
def test_degenerate_inputs_give_finite_weights(case: str, groups: int, fold: bool) -> None:
    weights = heads.layer(heads.HALF_SPLIT)
    assert weights.o is not None and weights.v is not None and weights.bias_v is not None
    o, v, bias_v = (w.clone() for w in (weights.o, weights.v, weights.bias_v))
    if case == "no output":
        o[:] = 0
    elif case == "one head without output":
        o[1] = 0
    elif case == "no values":
        v[:], bias_v[:] = 0, 0
    elif case == "one head without values":
        v[2], bias_v[2] = 0, 0
    weights = replace(weights, o=o, v=v, bias_v=bias_v)
    made = share(weights, groups, X[:2] if case == "few tokens" else X, fold=fold)
    for part in (made.o, made.v, made.bias_v, made.bias_o):
        assert part is not None and part.isfinite().all()
        assert part.abs().max() < 1e4
    if groups == 4 or case in ("no output", "no values"):
        np.testing.assert_allclose(heads.attention(made, X), heads.attention(weights, X), rtol=0, atol=1e-9)


def test_the_same_input_gives_the_same_bytes() -> None:
    weights = heads.layer(heads.HALF_SPLIT)
    one, other = (share(weights, 2) for _ in range(2))
    assert one.v is not None and one.o is not None
    assert torch.equal(one.v, other.v) and torch.equal(one.o, other.o)  # type: ignore[arg-type]


def test_layers_whose_values_are_their_keys_are_refused() -> None:
    weights = heads.layer(heads.HALF_SPLIT)
    with pytest.raises(RequestError, match="values of their own"):
        share_values(replace(weights, v=None), 2, torch.zeros(2, 12, 12), torch.zeros(24), fold_mean=False)
