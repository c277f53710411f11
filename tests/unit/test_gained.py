"""Step 1 with norms that have gains for every head: what is exact, written out in NumPy, and what keeps its size."""

from dataclasses import replace
from typing import Any

import heads
import numpy as np
import pytest
import torch
from torch import Tensor

from headpool.convert.aligned.keys import KeySharing, share_keys
from headpool.convert.aligned.moments import Moments, data_free
from headpool.convert.layouts import AttentionWeights, Rotary

X = heads.normal(7, 60, 7)
KINDS: dict[str, dict[str, Any]] = {"whole": {"whole_norms": True}, "each": {"centred_norms": True}}
"""One norm across all heads, as OLMo 2 has it; a layer norm for each, as Cohere and StableLM do."""

GAINS_Q, GAINS_K = heads.normal(8, 8, 6).abs() + 0.3, heads.normal(9, 4, 6).abs() + 0.3


def layer(rotary: Rotary, kind: str, **fields: Any) -> AttentionWeights:
    gains = {"query_gains": GAINS_Q, "key_gains": GAINS_K}
    return heads.layer(rotary, heads=8, kv_heads=4, **{**gains, **KINDS[kind], **fields})


def moments(weights: AttentionWeights) -> Moments:
    x_TX = torch.cat((X, torch.ones(len(X), 1, dtype=torch.float64)), 1)
    return replace(heads.moments(weights, X), inputs=x_TX.T @ x_TX / len(x_TX), key_scale=None)


def change(weights: AttentionWeights, kv_heads: int, seen: Moments | None = None) -> float:
    """How far the layer's outputs move when groups of heads share a key."""
    made = share_keys(weights, kv_heads, seen or moments(weights))
    return float(abs(heads.attention(made, X) - heads.attention(weights, X)).max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("rotary", heads.ROTARIES)
def test_one_head_in_a_group_changes_nothing(rotary: Rotary, kind: str, biases: bool) -> None:
    weights = layer(rotary, kind, biases=biases, key_gains=GAINS_K * heads.normal(10, 4, 6).sign())
    assert change(weights, 4) < 1e-10
    assert change(weights, 4, data_free(weights, heads.normal(5, 7))) < 1e-10


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rotary", heads.ROTARIES)
def test_real_multiples_behind_the_norm_lose_nothing(rotary: Rotary, kind: str) -> None:
    """The second key of each two is, behind its norm, the first times a number for each pair."""
    weights = layer(rotary, kind)
    assert weights.k is not None and weights.bias_k is not None
    factor_6 = np.ones(6)
    pairs, flat = heads.indices(rotary, 6)
    for number, at in enumerate([*pairs, *((one,) for one in flat)]):
        factor_6[list(at)] = (1.4, 0.6, 2.0, 0.9, 1.2, 0.5)[number]
    factor = torch.from_numpy(factor_6)
    k, bias, gains = weights.k.clone(), weights.bias_k.clone(), GAINS_K.clone()
    for j in (1, 3):
        size = 1.7 if kind == "each" else factor * gains[j - 1] / gains[j]
        k[j], bias[j] = k[j - 1] * (size if kind == "each" else size[:, None]), bias[j - 1] * size  # type: ignore[index]
        if kind == "each":
            gains[j] = gains[j - 1] * factor
    alike = replace(weights, k=k, bias_k=bias, key_gains=gains)
    seen = moments(alike)
    assert change(alike, 2, seen) < 1e-9
    assert change(alike, 2, data_free(alike, torch.ones(7))) < 1e-9, "without calibration"
    sharing = KeySharing(alike, seen)
    assert float(sharing.lost(torch.arange(4).view(2, 2)).sum()) < 1e-12 * sharing.energy
    assert change(weights, 2) > 0.01, "heads that are not alike do lose"


@pytest.mark.parametrize("kind", KINDS)
def test_every_channel_of_the_keys_keeps_its_size_before_the_norm(kind: str) -> None:
    weights = layer(heads.HALF_SPLIT, kind)
    made = share_keys(weights, 2, moments(weights))
    before, after = (squares(one.k, one.bias_k, centred=kind == "each") for one in (weights, made))
    if kind == "each":  # the heads of a group count as if they were of one size
        sizes = np.sqrt(before.mean(1)).reshape(2, 2)
        before = before * ((sizes.mean(1, keepdims=True) / sizes) ** 2).reshape(4, 1)
        after = squares(made.k, made.bias_k, centred=False)
    np.testing.assert_allclose(after, before.reshape(2, 2, 6).mean(1), rtol=1e-9)
    assert made.key_gains is not None and made.query_gains is not None
    assert (made.key_gains > 0).all(), "gains keep the sign that they had"
    if kind == "whole":
        np.testing.assert_allclose(
            squares(made.q, made.bias_q, centred=False), squares(weights.q, weights.bias_q, centred=False), rtol=1e-9
        )
    else:
        assert made.q is weights.q
        assert not torch.equal(made.query_gains, GAINS_Q), "their gains make up for what the keys lose"


def squares(w: Tensor | None, bias: Tensor | None, *, centred: bool) -> Any:
    """E[y²] of each channel, [heads, d]."""
    y = heads.projected(w, bias, X)
    y = y - y.mean(-1, keepdims=True) if centred else y
    return (y**2).mean(1)


def test_one_norm_across_all_heads_lets_keys_be_turned() -> None:
    """Factors are the best complex ones, behind the norm; with a norm for each head they are real."""
    group = torch.arange(4)[None]
    for kind in KINDS:
        weights = layer(heads.HALF_SPLIT, kind)
        seen = moments(weights)
        turn = KeySharing(weights, seen).factors(group).turn
        assert (turn.imag.abs().max() > 0.01) == (kind == "whole")
        keys = seen.keys if kind == "whole" else seen.keys.real
        w = seen.queries.view(4, 2, 3).sum(1).sqrt()
        least = 0.0
        for f in range(3):
            values = np.linalg.eigvalsh((w[:, f, None] * keys[f] * w[None, :, f]).numpy())
            least += values[:-1].sum() / 2
        assert float(KeySharing(weights, seen).lost(group)) == pytest.approx(least, rel=1e-9)
