"""Step 1 where norms stand between projections and scores: only what commutes with them may be used."""

import itertools
from dataclasses import replace

import heads
import numpy as np
import pytest
import torch
from torch import Tensor

from headpool.convert.aligned.keys import KeySharing, share_keys
from headpool.convert.aligned.moments import data_free
from headpool.convert.layouts import AttentionWeights, Rotary

X = heads.normal(7, 40, 7)
EQUAL = torch.tensor([1.5, 0.7, 1.1, 1.5, 0.7, 1.1], dtype=torch.float64)
"""Gains that are equal within each half-split pair of 6 dimensions, and not within the interleaved ones."""

UNEQUAL = torch.tensor([1.5, 0.7, 1.1, 0.8, 0.9, 1.3], dtype=torch.float64)


def layer(
    rotary: Rotary, query_gain: Tensor, key_gain: Tensor, *, seed: int = 0, centred: bool = False
) -> AttentionWeights:
    norms = {"query_norm": query_gain, "key_norm": key_gain, "centred_norms": centred}
    return heads.layer(rotary, heads=8, kv_heads=4, seed=seed, **norms)


def alike(weights: AttentionWeights, factors: dict[tuple[int, ...], complex], size: float = 1.7) -> AttentionWeights:
    """The second head of each two is the first one times `size` and, at those dimensions, times a sign or complex
    factor.
    """
    assert weights.k is not None and weights.bias_k is not None
    k, bias = weights.k.numpy().copy(), weights.bias_k.numpy().copy()
    for j in (1, 3):
        k[j], bias[j] = k[j - 1] * size, bias[j - 1] * size
        for at, c in factors.items():
            turn = np.array([[c.real, -c.imag], [c.imag, c.real]]) if len(at) == 2 else np.array([[c.real]])
            k[j, list(at)], bias[j, list(at)] = turn @ k[j, list(at)], turn @ bias[j, list(at)]
    return replace(weights, k=torch.from_numpy(k), bias_k=torch.from_numpy(bias))


def change(weights: AttentionWeights) -> float:
    """How far the layer's outputs move when two heads each share a key."""
    made = share_keys(weights, 2, heads.moments(weights, X))
    return float(abs(heads.attention(made, X) - heads.attention(weights, X)).max())


TURN = complex(np.exp(0.7j))


@pytest.mark.parametrize(
    ("rotary", "gains", "factors"),
    [
        (heads.HALF_SPLIT, (EQUAL, EQUAL), {(0, 3): TURN, (1, 4): -1, (2, 5): TURN**3}),
        (heads.HALF_SPLIT, (UNEQUAL, UNEQUAL), {(0, 3): -1, (1, 4): 1, (2, 5): -1}),
        (heads.HALF_SPLIT, (UNEQUAL, EQUAL), {(0, 3): -1}),
        (heads.INTERLEAVED, (EQUAL, EQUAL), {(2, 3): -1, (4, 5): -1}),
        (heads.PARTIAL, (UNEQUAL, UNEQUAL), {(0, 2): -1, (4,): -1}),
        (heads.NONE, (UNEQUAL, UNEQUAL), {(1,): -1, (4,): -1, (5,): -1}),
    ],
)
def test_what_commutes_with_the_norms_loses_nothing(
    rotary: Rotary, gains: tuple[Tensor, Tensor], factors: dict[tuple[int, ...], complex]
) -> None:
    weights = alike(layer(rotary, *gains), factors)
    assert change(weights) < 1e-10
    made = share_keys(weights, 2, replace(heads.moments(weights, X), key_scale=None))
    assert abs(heads.attention(made, X) - heads.attention(weights, X)).max() < 1e-10, "sizes told from the weights"
    made = share_keys(weights, 2, data_free(weights, torch.ones(7)))
    assert abs(heads.attention(made, X) - heads.attention(weights, X)).max() < 1e-10, "without calibration"
    assert change(layer(rotary, *gains)) > 0.01, "heads that are not alike do lose"


@pytest.mark.parametrize(
    ("rotary", "gains"),
    [(heads.HALF_SPLIT, (EQUAL, UNEQUAL)), (heads.HALF_SPLIT, (UNEQUAL, EQUAL)), (heads.INTERLEAVED, (EQUAL, EQUAL))],
)
def test_pairs_with_unequal_gains_are_not_turned(rotary: Rotary, gains: tuple[Tensor, Tensor]) -> None:
    weights = layer(rotary, *gains)
    factors = KeySharing(weights, heads.moments(weights, X)).factors(torch.arange(4).view(1, 4))
    unequal = torch.tensor([gain_a != gain_b for f in range(3) for gain_a, gain_b in [of_pair(rotary, gains, f)]])
    assert unequal.any()
    assert set(factors.turn[..., unequal].flatten().tolist()) == {1, -1}
    assert (factors.turn[:, 0] == 1).all(), "the first head stays as it is"
    everywhere = KeySharing(layer(heads.HALF_SPLIT, EQUAL, EQUAL), heads.moments(weights, X))
    turn = everywhere.factors(torch.arange(4).view(1, 4)).turn
    assert (turn.imag.abs() > 0.01).any()
    torch.testing.assert_close(turn[:, 0], torch.ones_like(turn[:, 0]), rtol=0, atol=1e-15)


def of_pair(rotary: Rotary, gains: tuple[Tensor, Tensor], f: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    a, b = heads.indices(rotary, 6)[0][f]
    return tuple(float(gain[a]) for gain in gains), tuple(float(gain[b]) for gain in gains)


def test_norms_that_centre_leave_only_averages() -> None:
    weights = layer(heads.HALF_SPLIT, EQUAL, EQUAL, centred=True)
    sharing = KeySharing(weights, heads.moments(weights, X))
    assert torch.equal(sharing.factors(torch.arange(4).view(2, 2)).turn, torch.ones(2, 2, 3, dtype=torch.complex128))
    assert change(alike(weights, {})) < 1e-10, "heads that differ in size only are one key"
    flat = layer(heads.NONE, EQUAL, EQUAL, centred=True)
    factors = KeySharing(flat, heads.moments(flat, X)).factors(torch.arange(4).view(2, 2))
    assert torch.equal(factors.flat_turn, torch.eye(6, dtype=torch.float64).expand(2, 2, 6, 6))


@pytest.mark.parametrize("rotary", [heads.HALF_SPLIT, heads.PARTIAL, heads.PARTIAL_INTERLEAVED, heads.NONE])
@pytest.mark.parametrize("gain", [EQUAL, UNEQUAL])
@pytest.mark.parametrize("centred", [False, True])
def test_one_head_in_a_group_changes_nothing(rotary: Rotary, gain: Tensor, centred: bool) -> None:
    weights = layer(rotary, gain, gain, centred=centred)
    made = share_keys(weights, 4, heads.moments(layer(rotary, gain, gain, seed=3), X))
    np.testing.assert_allclose(heads.attention(made, X), heads.attention(weights, X), rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_signs_and_phases_are_the_best_there_are(seed: int) -> None:
    """Against all signs, and a grid of phases, of three heads: the error of the weighted mean counted from the
    moments.
    """
    signed = layer(heads.HALF_SPLIT, UNEQUAL, UNEQUAL, seed=seed)
    moments = heads.moments(signed, X)
    group = torch.arange(3)[None]
    w_3F = moments.queries.view(4, 2, 3).sum(1)[:3]
    circle = np.exp(2j * np.pi * np.arange(90) / 90)
    for gain, allowed, near in ((UNEQUAL, [1, -1], 1e-9), (EQUAL, circle, 2e-3)):
        weights = replace(signed, query_norm=gain, key_norm=gain)
        least = 0.0
        for f in range(3):
            keys, w = moments.keys[f, :3, :3].numpy(), w_3F[:, f].numpy()
            errors = []
            for p in itertools.product([1], allowed, allowed):
                mean = np.conj(np.array(p)) * w / w.sum()
                away = np.eye(3) - np.outer(p, mean)
                errors.append((w * np.einsum("jl,lm,jm->j", away, keys, away.conj()).real).sum())
            least += min(errors) / 2
        lost = float(KeySharing(weights, moments).lost(group).sum())
        assert least * (1 - near) <= lost <= least * (1 + 1e-9)
