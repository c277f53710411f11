"""Step 1, sharing keys: against brute-force optimisation, errors counted by token, and the NumPy specification."""

from dataclasses import replace

import heads
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optimum import FlatError, PairError, minimised
from torch import Tensor

from headpool.convert.aligned.keys import KeySharing, share_keys
from headpool.convert.aligned.moments import data_free, from_pairs, to_pairs
from headpool.convert.layouts import AttentionWeights, Rotary
from headpool.errors import RequestError

X = heads.normal(7, 40, 7)


def score_errors(source: AttentionWeights, made: AttentionWeights, x_TD: Tensor) -> tuple[float, float]:
    """The mean squared errors of scores that the shared keys make, from the projections' outputs token by token: of a
    query turned by a random phase for the pairs, of the queries themselves for dimensions without rotation. Queries
    and keys are taken at independent tokens.
    """
    assert source.rotary is not None
    q, q_new = (heads.projected(w.q, w.bias_q, x_TD) for w in (source, made))
    k, k_new = (heads.projected(w.k, w.bias_k, x_TD) for w in (source, made))
    pairs, flat = heads.indices(source.rotary, k.shape[2])
    by_key, by_new = len(q) // len(k), len(q) // len(k_new)
    phases = np.exp(2j * np.pi * np.arange(8) / 8)
    rotated = unrotated = 0.0
    for i in range(len(q)):
        j, g = i // by_key, i // by_new
        for a, b in pairs:
            old = np.conj(q[i, :, a] + 1j * q[i, :, b])[:, None] * (k[j, :, a] + 1j * k[j, :, b])
            new = np.conj(q_new[i, :, a] + 1j * q_new[i, :, b])[:, None] * (k_new[g, :, a] + 1j * k_new[g, :, b])
            rotated += float((((old - new)[..., None] * phases).real ** 2).mean())
        error = q[i][:, flat] @ k[j][:, flat].T - q_new[i][:, flat] @ k_new[g][:, flat].T
        unrotated += float((error**2).mean())
    return rotated, unrotated


def contiguous(kv_heads: int, groups: int) -> Tensor:
    return torch.arange(kv_heads).view(groups, -1)


@pytest.mark.parametrize("rotary", heads.ROTARIES)
def test_pairs_are_the_dimensions_that_rotate_together(rotary: Rotary) -> None:
    x = heads.normal(0, 3, 6)
    pairs, flat = to_pairs(x, rotary)
    by_hand, rest = heads.indices(rotary, 6)
    assert pairs.shape == (3, len(by_hand))
    for f, (a, b) in enumerate(by_hand):
        assert torch.equal(pairs[:, f], x[:, a] + 1j * x[:, b])
    assert torch.equal(flat, x[:, rest])
    assert torch.equal(from_pairs(pairs, flat, rotary), x)


@pytest.mark.parametrize("rotary", heads.ROTARIES)
@pytest.mark.parametrize(("query_heads", "biases"), [(4, True), (8, True), (4, False)])
def test_one_head_in_a_group_changes_nothing(rotary: Rotary, query_heads: int, biases: bool) -> None:
    weights = heads.layer(rotary, heads=query_heads, biases=biases)
    moments = heads.moments(
        heads.layer(rotary, heads=query_heads, seed=5), X
    )  # another layer's: exact whatever they are
    made = share_keys(weights, 4, moments)
    np.testing.assert_allclose(heads.attention(made, X), heads.attention(weights, X), rtol=0, atol=1e-12)
    assert (made.bias_k is None) == (made.bias_q is None) == (not biases)
    if rotary.dims == 6:  # nothing to choose but a factor per pair, which is one
        torch.testing.assert_close(made.k, weights.k, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(made.q, weights.q, rtol=1e-12, atol=1e-12)


def multiples(rotary: Rotary, heads_in: int = 4, groups: int = 2, per_key: int = 2) -> AttentionWeights:
    """A layer in which a group's keys are complex multiples of each other, pair by pair, and any maps of each other on
    the dimensions without rotation. Biases included.
    """
    weights = heads.layer(rotary, heads=heads_in * per_key, kv_heads=heads_in)
    assert weights.k is not None
    assert weights.bias_k is not None
    k, bias = weights.k.numpy().copy(), weights.bias_k.numpy().copy()
    rng = np.random.default_rng(3)
    pairs, flat = heads.indices(rotary, k.shape[1])
    size = heads_in // groups
    for j in range(heads_in):
        model = j // size * size
        for a, b in pairs:
            c = complex(rng.normal(), rng.normal())
            turn = np.array([[c.real, -c.imag], [c.imag, c.real]])
            if j > model:
                k[j, [a, b]], bias[j, [a, b]] = turn @ k[model, [a, b]], turn @ bias[model, [a, b]]
        if j > model and flat:
            mixed = rng.normal(size=(len(flat), len(flat)))
            k[j, flat], bias[j, flat] = mixed @ k[model, flat], mixed @ bias[model, flat]
    return replace(weights, k=torch.from_numpy(k), bias_k=torch.from_numpy(bias))


@pytest.mark.parametrize("rotary", heads.ROTARIES)
def test_multiples_of_one_key_are_shared_without_loss(rotary: Rotary) -> None:
    weights = multiples(rotary)
    for moments in (heads.moments(weights, X), data_free(weights, torch.ones(7))):
        made = share_keys(weights, 2, moments)
        assert made.k is not None
        assert made.k.shape == (2, 6, 7)
        np.testing.assert_allclose(heads.attention(made, X), heads.attention(weights, X), rtol=0, atol=1e-9)
        sharing = KeySharing(weights, moments)
        assert float(sharing.lost(contiguous(4, 2)).sum()) < 1e-12 * sharing.energy
    # And not because nothing was there to lose: plain means do lose.
    assert weights.k is not None
    assert weights.bias_k is not None
    pooled = replace(weights, k=weights.k.view(2, 2, 6, 7).mean(1), bias_k=weights.bias_k.view(2, 2, 6).mean(1))
    assert abs(heads.attention(pooled, X) - heads.attention(weights, X)).max() > 0.1


@given(
    st.sampled_from(heads.ROTARIES),
    st.sampled_from([(4, 2), (6, 2), (6, 3), (3, 1)]),
    st.integers(1, 2),
    st.integers(0, 50),
)
@settings(max_examples=40)
def test_what_is_lost_is_the_error_of_the_scores(
    rotary: Rotary, counts: tuple[int, int], per_key: int, seed: int
) -> None:
    kv_heads, groups = counts
    weights = heads.layer(rotary, heads=kv_heads * per_key, kv_heads=kv_heads, seed=seed)
    moments = heads.moments(weights, X)
    sharing = KeySharing(weights, moments)
    lost = float(sharing.lost(contiguous(kv_heads, groups)).sum())
    made = share_keys(weights, groups, moments)
    assert sum(score_errors(weights, made, X)) == pytest.approx(lost, rel=1e-8)
    nothing = replace(weights, q=torch.zeros_like(weights.q), bias_q=None)
    assert sum(score_errors(weights, nothing, X)) == pytest.approx(sharing.energy, rel=1e-8)
    assert 0 <= lost <= sharing.energy
    # Never worse than the published ways: each group's mean, or its first head.
    assert weights.k is not None
    assert weights.bias_k is not None
    k, bias_k = (w.view(groups, -1, *w.shape[1:]) for w in (weights.k, weights.bias_k))
    for pooled in (
        replace(weights, k=k.mean(1), bias_k=bias_k.mean(1)),
        replace(weights, k=k[:, 0].contiguous(), bias_k=bias_k[:, 0].contiguous()),
    ):
        assert lost <= sum(score_errors(weights, pooled, X)) * (1 + 1e-9)


def test_the_shared_key_is_as_large_as_its_group() -> None:
    for rotary in (heads.HALF_SPLIT, heads.NONE):
        weights = heads.layer(rotary)
        made = share_keys(weights, 2, heads.moments(weights, X))
        old, new = (heads.projected(w.k, w.bias_k, X) for w in (weights, made))
        for g in range(2):
            for a, b in heads.indices(rotary, 6)[0] or [(slice(None), slice(None))]:
                size = [(head[:, a] ** 2).sum() + (head[:, b] ** 2).sum() for head in (*old[2 * g : 2 * g + 2], new[g])]
                assert size[2] == pytest.approx((size[0] + size[1]) / 2, rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_no_optimiser_finds_better_factors(seed: int) -> None:
    weights = heads.layer(Rotary("half-split", 2), kv_heads=3, heads=6, head_dim=4, seed=seed)
    moments = heads.moments(weights, X)
    group = contiguous(3, 1)
    w = moments.queries[:, 0].view(3, 2).sum(1)
    pair = minimised(PairError(moments.keys[0], w)) / 2
    flat = minimised(FlatError(moments.flat_keys, moments.flat_queries.view(3, 2, 2, 2).sum(1)))
    assert float(KeySharing(weights, moments).lost(group)) == pytest.approx(pair + flat, rel=1e-6)


# Degenerate inputs


def without_energy(weights: AttentionWeights, case: str) -> AttentionWeights:
    assert weights.q is not None and weights.bias_q is not None
    assert weights.k is not None and weights.bias_k is not None
    q, bias_q, k, bias_k = (w.clone() for w in (weights.q, weights.bias_q, weights.k, weights.bias_k))
    if case == "a query head is zero":
        q[1], bias_q[1] = 0, 0
    elif case == "no query uses a pair":
        q[:, [0, 3]], bias_q[:, [0, 3]] = 0, 0
    elif case == "no queries":
        q[:], bias_q[:] = 0, 0
    elif case == "a key head is zero":
        k[0], bias_k[0] = 0, 0
    elif case == "no keys":
        k[:], bias_k[:] = 0, 0
    return replace(weights, q=q, bias_q=bias_q, k=k, bias_k=bias_k)


CASES = ["a query head is zero", "no query uses a pair", "no queries", "a key head is zero", "no keys", "few tokens"]


@pytest.mark.parametrize("rotary", [heads.HALF_SPLIT, heads.PARTIAL, heads.NONE])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_degenerate_inputs_give_finite_weights(rotary: Rotary, case: str, groups: int) -> None:
    weights = without_energy(heads.layer(rotary), case)
    x = X[:2] if case == "few tokens" else X
    moments = heads.moments(weights, x)
    made = share_keys(weights, groups, moments)
    assert made.q is not None and made.k is not None
    assert made.q.isfinite().all() and made.k.isfinite().all()
    assert max(made.q.abs().max(), made.k.abs().max()) < 1e4
    lost = KeySharing(weights, moments).lost(contiguous(4, groups))
    assert lost.isfinite().all() and (lost >= 0).all()
    if groups == 4 or case in ("no queries", "no keys"):
        np.testing.assert_allclose(heads.attention(made, X), heads.attention(weights, X), rtol=0, atol=1e-9)


def test_keys_without_energy_become_their_mean() -> None:
    """Moments of zero, as of keys that do not vary: nothing tells the heads apart but how much they are used."""
    for rotary in (heads.HALF_SPLIT, heads.NONE):
        weights = heads.layer(rotary, heads=2, kv_heads=2)
        moments = heads.moments(weights, X)
        even = torch.ones_like(moments.queries), torch.eye(len(moments.flat_queries[0])).double().repeat(2, 1, 1)
        silent = replace(
            moments, keys=0 * moments.keys, flat_keys=0 * moments.flat_keys, queries=even[0], flat_queries=even[1]
        )
        made = share_keys(weights, 1, silent)
        assert weights.k is not None and made.k is not None
        if rotary.dims:
            torch.testing.assert_close(made.k, weights.k.mean(0, keepdim=True))
            torch.testing.assert_close(made.q, weights.q)
        else:  # up to an orthogonal map of the head, which the queries undo
            mean = weights.k.mean(0)
            torch.testing.assert_close(made.k[0].T @ made.k[0], mean.T @ mean)


def test_the_same_input_gives_the_same_bytes() -> None:
    weights = heads.layer(heads.PARTIAL)
    moments = heads.moments(weights, X)
    one, other = (share_keys(weights, 2, moments) for _ in range(2))
    assert one.k is not None and other.k is not None
    assert one.q is not None and other.q is not None
    assert torch.equal(one.k, other.k) and torch.equal(one.q, other.q)


def test_what_cannot_be_shared_is_refused() -> None:
    moments = heads.moments(heads.layer(heads.HALF_SPLIT), X)
    with pytest.raises(RequestError, match="which dimensions rotate together"):
        share_keys(heads.layer(None), 2, moments)
    with pytest.raises(RequestError, match="values of their own"):
        share_keys(replace(heads.layer(heads.HALF_SPLIT), v=None), 2, moments)
