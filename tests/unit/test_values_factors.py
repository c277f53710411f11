"""Step 2 where dimensions of values cannot be mixed: against singular values and all signs, and the specification."""

import itertools
from dataclasses import replace

import heads
import numpy as np
import pytest
import torch
from torch import Tensor

from headpool import reference
from headpool.convert.aligned.moments import data_free
from headpool.convert.aligned.values import ValueSharing, folds, share_values
from headpool.convert.layouts import AttentionWeights

X = heads.normal(7, 60, 7)


def gated(seed: int = 0) -> AttentionWeights:
    """8 query heads and 4 value heads; a gate for each dimension of each query head."""
    weights = heads.layer(heads.HALF_SPLIT, heads=8, kv_heads=4, seed=seed)
    return replace(weights, gate=heads.normal(30, 8, 6, 7), bias_gate=heads.normal(31, 8, 6))


def signed(seed: int = 0) -> AttentionWeights:
    """The same with a norm of all that attention gives."""
    per_query_head = {"attn_sub_norm.weight": heads.normal(32, 48)}
    return replace(heads.layer(heads.HALF_SPLIT, heads=8, kv_heads=4, seed=seed), per_query_head=per_query_head)


def attended(weights: AttentionWeights, head: int) -> reference.Array:
    """What one query head gives, [T, d]: read off through an output projection that is a piece of the identity."""
    o = torch.zeros(8, 7, 6, dtype=torch.float64)
    o[head, :6] = torch.eye(6, dtype=torch.float64)
    return heads.attention(replace(weights, o=o, bias_o=None), X)[:, :6]


def output(weights: AttentionWeights) -> reference.Array:
    """Attention, then the gate or the norm, then the output projection."""
    z_hTd = np.stack([attended(weights, head) for head in range(8)])
    if weights.gate is not None:
        z_hTd = z_hTd / (1 + np.exp(-heads.projected(weights.gate, weights.bias_gate, X)))
    else:
        gain_hd = weights.per_query_head["attn_sub_norm.weight"].view(8, 6).numpy()
        z_hTd = z_hTd / np.sqrt((z_hTd**2).mean((0, 2), keepdims=True)) * gain_hd[:, None]
    assert weights.o is not None and weights.bias_o is not None
    return np.asarray(np.einsum("htd,hed->te", z_hTd, weights.o.numpy()) + weights.bias_o.numpy())


def share(weights: AttentionWeights, groups: int) -> AttentionWeights:
    seen = heads.moments(weights, X)
    return share_values(weights, groups, seen.value_groups(groups), seen.value_means, fold_mean=folds(weights))


def alike(weights: AttentionWeights, factor: Tensor) -> AttentionWeights:
    """The second value of each two is the first one times `factor` [6]."""
    assert weights.v is not None and weights.bias_v is not None
    v, bias = weights.v.clone(), weights.bias_v.clone()
    for j in (1, 3):
        v[j], bias[j] = v[j - 1] * factor[:, None], bias[j - 1] * factor
    return replace(weights, v=v, bias_v=bias)


FACTORS = torch.tensor([1.5, -0.4, 2.0, 1.0, -1.0, 0.7], dtype=torch.float64)


@pytest.mark.parametrize("made", [gated, signed])
def test_one_head_in_a_group_changes_nothing(made: object) -> None:
    weights = gated() if made is gated else signed()
    np.testing.assert_allclose(output(share(weights, 4)), output(weights), rtol=0, atol=1e-11)


@pytest.mark.parametrize(("made", "factor"), [(gated, FACTORS), (gated, FACTORS.sign()), (signed, FACTORS.sign())])
def test_values_that_are_alike_up_to_what_is_free_lose_nothing(made: object, factor: Tensor) -> None:
    weights = alike(gated() if made is gated else signed(), factor)
    np.testing.assert_allclose(output(share(weights, 2)), output(weights), rtol=0, atol=1e-10)
    moments = data_free(weights, torch.ones(7))
    free = share_values(weights, 2, moments.value_groups(2), moments.value_means, fold_mean=False)
    np.testing.assert_allclose(output(free), output(weights), rtol=0, atol=1e-10)
    other = gated() if made is gated else signed()
    assert abs(output(share(other, 2)) - output(other)).max() > 0.01, "values that are not alike do lose"


def seen_by_dimension(weights: AttentionWeights) -> tuple[reference.Array, reference.Array]:
    """Values [k, T, d], and how large the output's columns for them are, [k, d]."""
    assert weights.o is not None
    v = heads.projected(weights.v, weights.bias_v, X)
    return v, np.square(weights.o.numpy()).sum(1).reshape(4, 2, 6).sum(1)


@pytest.mark.parametrize("seed", range(3))
def test_factors_are_the_best_there_are(seed: int) -> None:
    weights = gated(seed)
    v_kTd, w_kd = seen_by_dimension(weights)
    least = 0.0
    for d in range(6):
        stacked = v_kTd[:, :, d] * np.sqrt(w_kd[:, d, None])
        least += (np.linalg.svd(stacked, compute_uv=False)[1:] ** 2).sum() / len(X)
    sharing = ValueSharing(weights, heads.moments(weights, X), fold_mean=False)
    assert float(sharing.lost(torch.arange(4)[None])) == pytest.approx(least, rel=1e-9)
    assert sharing.energy == pytest.approx((w_kd[:, None] * v_kTd**2).sum() / len(X), rel=1e-9)
    made = share(weights, 1)
    assert made.v is not None and made.o is not None and weights.o is not None
    read_kd = (made.o / weights.o).view(4, 2, 7, 6)[:, 0, 0].numpy()
    shared_Td = heads.projected(made.v, made.bias_v, X)[0]
    error = (w_kd[:, None] * (v_kTd - read_kd[:, None] * shared_Td) ** 2).sum() / len(X)
    assert error == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_signs_are_the_best_there_are(seed: int) -> None:
    weights = signed(seed)
    v_kTd, w_kd = seen_by_dimension(weights)
    least = 0.0
    for d in range(6):
        v_kT, w = v_kTd[:, :, d], w_kd[:, d]
        errors = []
        for signs in itertools.product([1], *[[1, -1]] * 3):
            p = np.array(signs)[:, None]
            mean = (w[:, None] * p * v_kT).sum(0) / w.sum()
            errors.append((w[:, None] * (v_kT - p * mean) ** 2).sum() / len(X))
        least += min(errors)
    sharing = ValueSharing(weights, heads.moments(weights, X), fold_mean=False)
    assert float(sharing.lost(torch.arange(4)[None])) == pytest.approx(least, rel=1e-9)


def test_a_mean_is_the_same_in_every_output_only_without_gates() -> None:
    assert folds(heads.layer(heads.HALF_SPLIT))
    assert not folds(gated())
    assert not folds(signed())
