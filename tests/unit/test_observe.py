"""Observed moments against sums written out in NumPy, and observation that changes nothing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tiny
import torch
from walking import KINDS, WINDOWS, stock

from headpool import reference
from headpool.convert.aligned import seen
from headpool.convert.aligned.moments import pair_moments
from headpool.convert.aligned.observe import GroupObserver, HeadSizes, MomentsObserver, observing
from headpool.convert.aligned.walk import Block, Layer, Walk
from headpool.convert.layouts import Rotary
from headpool.errors import RequestError

Array = npt.NDArray[Any]
HEADS, KV = 12, 4


def layers(directory: Path, family: str, dtype: torch.dtype = torch.float64) -> Iterator[Layer]:
    tiny.checkpoint(directory, family, num_hidden_layers=3, num_key_value_heads=KV, **KINDS[family])
    yield from Walk(stock(directory, dtype), WINDOWS, batch=2)


def projected(attention: Any, name: str, x: Array) -> Array:
    """Heads [n, T, d] of one projection of a sequence."""
    projection = getattr(attention, name)
    flat = x @ projection.weight.double().numpy().T
    if projection.bias is not None:
        flat = flat + projection.bias.double().numpy()
    return flat.reshape(len(x), -1, attention.head_dim).transpose(1, 0, 2)


def sequences(layer: Layer) -> Iterator[tuple[Array, Array, Array, Array]]:
    """Rotated queries and keys, values, and attention weights [h, T, T] of every sequence, from the layer's inputs."""
    attention: Any = layer.attention
    for block in layer.blocks():
        cos, sin = (one.double().numpy() for one in block.keywords["position_embeddings"])
        for index, x in enumerate(block.x.double().numpy()):
            own = index if len(cos) > 1 else 0
            rotary = reference.Rotary(cos[own], sin[own])
            q, k = (reference.rotate(projected(attention, name, x), rotary) for name in ("q_proj", "k_proj"))
            repeated = reference.repeat_heads(k, HEADS)
            scores = np.einsum("htd,hsd->hts", q, repeated) / np.sqrt(attention.head_dim)
            seen = reference.visible("causal", len(x), len(x))
            yield q, k, projected(attention, "v_proj", x), reference.softmax(np.where(seen, scores, -np.inf))


def as_complex(x: Array, dims: int) -> Array:
    """[..., d] to [..., F]: half-split pairs."""
    return x[..., : dims // 2] + 1j * x[..., dims // 2 : dims]


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi"])
def test_moments_are_the_sums_written_out(family: str, tmp_path: Path) -> None:
    for layer in layers(tmp_path, family):
        rotary = layer.walk.stock.layout.rotary
        assert rotary is not None
        observer = MomentsObserver(rotary)
        with observing(layer.attention, observer):
            layer.advance()
        keys, flat_keys, queries, flat_queries, values, means = ([] for _ in range(6))
        for q, k, v, weights in sequences(layer):
            share = weights.sum((0, 1)) / weights.sum()
            centred = k - np.einsum("t,ktd->kd", share, k)[:, None]
            pairs, flat = as_complex(centred, rotary.dims), centred[..., rotary.dims :]
            keys.append(np.einsum("t,ktf,ltf->fkl", share, pairs, pairs.conj()))
            flat = flat.transpose(1, 0, 2).reshape(len(share), -1)
            flat_keys.append(np.einsum("t,ta,tb->ab", share, flat, flat))
            queries.append((np.abs(as_complex(q, rotary.dims)) ** 2).mean(1))
            flat_queries.append(np.einsum("hta,htb->hab", q[..., rotary.dims :], q[..., rotary.dims :]) / q.shape[1])
            stacked = v.transpose(1, 0, 2).reshape(len(share), -1)
            averaged = weights.mean(0) @ stacked
            values.append(averaged.T @ averaged / len(share))
            means.append(averaged.mean(0))
        expected = {
            "keys": keys, "flat_keys": flat_keys, "queries": queries, "flat_queries": flat_queries, "values": values,
            "value_means": means,
        }  # fmt: skip
        for name, parts in expected.items():
            np.testing.assert_allclose(
                getattr(observer.moments(), name).numpy(), np.mean(parts, 0), rtol=1e-9, atol=1e-12
            )


@pytest.mark.parametrize("tokens", [24, 5])  # more and fewer than a group's value dimensions: two ways to sum
def test_group_moments_are_the_sums_written_out(tokens: int, tmp_path: Path) -> None:
    partition = [(0, 2), (3, 1)]
    tiny.checkpoint(tmp_path, num_key_value_heads=KV)
    for layer in Walk(stock(tmp_path, torch.float64), WINDOWS[:, :tokens], batch=2):
        observer = GroupObserver(partition)
        with observing(layer.attention, observer, every=2):
            layer.advance()
        moments: list[list[Array]] = [[], []]
        means: list[list[Array]] = [[], []]
        for _, _, v, weights in sequences(layer):
            for group, heads in enumerate(partition):
                stacked = np.concatenate([v[head] for head in heads], axis=1)
                for head in [3 * one + own for one in heads for own in range(3)]:
                    rows = (weights[head] @ stacked)[1::2]
                    moments[group].append(rows.T @ rows / len(rows))
                    means[group].append(rows.mean(0))
        found_moments, found_means = observer.moments()
        np.testing.assert_allclose(found_moments.numpy(), np.mean(moments, axis=1), rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(found_means.numpy(), np.mean(means, axis=1).ravel(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_pieces_of_any_size_give_the_same(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for layer in layers(tmp_path, family):
        found = []
        for limit in (1, 3 * 24 * 24, 1 << 22):  # one key/value head of one sequence at a time, some, all
            monkeypatch.setitem(seen._PATCH, "cpu", limit)
            moments, groups = MomentsObserver(Rotary("half-split", 8)), GroupObserver([(0, 3), (1, 2)])
            for one in (moments, groups):
                with observing(layer.attention, one, every=2):
                    layer.advance()
            found.append((moments.moments(), groups.moments()))
        for one, (group_moments, means) in found[1:]:
            torch.testing.assert_close(one.keys, found[0][0].keys, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(one.values, found[0][0].values, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(group_moments, found[0][1][0], rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(means, found[0][1][1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("family", KINDS)
def test_observing_changes_nothing(family: str, tmp_path: Path) -> None:
    class Counter:
        count = 0

        def add(self, seen: Any) -> None:
            rows = torch.cat([seen.attend(patch).sum(-1).flatten() for patch in seen.patches])
            torch.testing.assert_close(rows, torch.ones(3 * HEADS * seen.queries), rtol=1e-5, atol=1e-5)
            self.count += len(seen.q)

    for layer in layers(tmp_path, family, torch.float32):
        block = layer.block(slice(0, 3))
        before = block.through(layer.attention)
        counter = Counter()
        with observing(layer.attention, counter, every=3):
            assert torch.equal(block.through(layer.attention), before)
        assert counter.count == 3
        assert torch.equal(block.through(layer.attention), before)
        assert counter.count == 3


def test_attention_that_does_something_unknown_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations import sdpa_attention

    def doubled(*arguments: Any, **keywords: Any) -> tuple[torch.Tensor, None]:
        return sdpa_attention.sdpa_attention_forward(*arguments, **keywords)[0] * 2, None

    layer = next(layers(tmp_path, "llama"))
    monkeypatch.setitem(sdpa_interface(), "sdpa", doubled)
    block = layer.block(slice(0, 1))
    observer = MomentsObserver(layer.walk.stock.layout.rotary)  # type: ignore[arg-type]
    with (
        pytest.raises(RequestError, match=r"LlamaAttention attends in a way that is not known"),
        observing(layer.attention, observer),
    ):
        block.through(layer.attention)


def test_attention_that_is_not_asked_is_noticed(tmp_path: Path) -> None:
    layer = next(layers(tmp_path, "llama"))
    observer = MomentsObserver(layer.walk.stock.layout.rotary)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="does not say what it attends to"), observing(layer.attention, observer):
        pass


def sdpa_interface() -> dict[str, Any]:
    from transformers import AttentionInterface

    held: dict[str, Any] = AttentionInterface._global_mapping
    return held


def test_a_block_gives_the_attention_inputs_of_the_stock_model(tmp_path: Path) -> None:
    tiny.checkpoint(tmp_path)
    model = tiny.stock_model(tmp_path)
    expected: list[torch.Tensor] = []
    for one in model.model.layers:
        one.self_attn.register_forward_hook(
            lambda _, arguments, keywords, output: expected.extend((keywords["hidden_states"], output[0])),
            with_kwargs=True,
        )
    with torch.no_grad():
        model(WINDOWS[:3])
    for layer in Walk(stock(tmp_path), WINDOWS, batch=2):
        block: Block = layer.block(slice(0, 3))
        torch.testing.assert_close(block.x, expected[2 * layer.index], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(block.through(layer.attention), expected[2 * layer.index + 1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_bfloat16_model_is_observed_as_well(family: str, tmp_path: Path) -> None:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        layer = next(layers(tmp_path, family, dtype))
        observer = MomentsObserver(Rotary("half-split", 8))
        with observing(layer.attention, observer):
            layer.advance()
        found.append(observer.moments())
        assert layer.walk.hidden(1, slice(0, 2)).dtype == dtype
    for name in ("keys", "values", "queries"):
        wide, narrow = (getattr(moments, name) for moments in found)
        assert narrow.dtype == wide.dtype
        assert (narrow - wide).norm() < 0.02 * wide.norm()


def test_sizes_of_heads_are_those_before_the_norm(tmp_path: Path) -> None:
    for layer in layers(tmp_path, "gemma3_text", torch.float32):
        attention: Any = layer.attention
        with HeadSizes(attention.k_proj, KV) as sizes:
            layer.advance()
        k = np.concatenate([projected(attention, "k_proj", x) for b in layer.blocks() for x in b.x.double().numpy()], 1)
        np.testing.assert_allclose(sizes.moments()["key_scale"].numpy(), np.sqrt(np.square(k).mean((1, 2))), rtol=1e-5)


@pytest.mark.parametrize("rotary", [Rotary("half-split", 8), Rotary("half-split", 4), Rotary("interleaved", 6)])
def test_moments_of_pairs_are_products_of_complex_numbers(rotary: Rotary) -> None:
    x = np.random.default_rng(0).normal(size=(2, 3, 5, 8))
    half = rotary.dims // 2
    of = [(f, f + half) if rotary.kind == "half-split" else (2 * f, 2 * f + 1) for f in range(half)]
    pairs = np.stack([x[..., a] + 1j * x[..., b] for a, b in of], -1)
    expected = np.einsum("bjtf,bltf->fjl", pairs, pairs.conj())
    np.testing.assert_allclose(pair_moments(torch.from_numpy(x), rotary).numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", ["llama", "phi"])
def test_what_is_known_is_observed_without_attending(family: str, tmp_path: Path) -> None:
    layer = next(layers(tmp_path, family))
    block = layer.block(slice(0, 3))
    found = []
    for known in (False, True):
        observer = GroupObserver([(0, 2), (3, 1)])
        with observing(layer.attention, observer, every=2, known=known):
            block.through(layer.attention)
        found.append(observer.moments())
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
