"""What is observed of attention with one projection, by classes that ask transformers for its function or do not."""

from pathlib import Path
from typing import Any

import fused
import numpy as np
import pytest
import torch
from fused import HEADS, KINDS, KV
from walking import WINDOWS, stock

from headpool import reference
from headpool.convert.aligned.observe import MomentsObserver, observing
from headpool.convert.aligned.walk import Walk
from headpool.convert.layouts import Rotary


def projected(projection: Any, x: reference.Array, model_type: str) -> list[reference.Array]:
    """Queries, keys and values [heads, T, d] of a sequence."""
    weight = fused.split(projection.weight, model_type, KV)
    rows = {head: x @ one.numpy().T for head, one in weight.items()}
    if projection.bias is not None:
        rows = {head: rows[head] + one.numpy() for head, one in fused.split(projection.bias, model_type, KV).items()}
    return [np.stack([rows[part, head] for head in range(HEADS if part == "q" else KV)]) for part in "qkv"]


@pytest.mark.parametrize("name", ["phi3", "falcon two norms"])
def test_values_are_averaged_by_the_heads_own_attention(name: str, tmp_path: Path) -> None:
    """Falcon repeats keys and values for each query head before it attends; they are still those of 4 heads."""
    directory = fused.checkpoint(tmp_path, name, grouped=True)
    projection = fused.FUSED[KINDS[name][0]]
    for layer in Walk(stock(directory, torch.float64), WINDOWS, batch=2):
        observer = MomentsObserver(Rotary("half-split", 8))
        with observing(layer.attention, observer):
            layer.advance()
        own = layer.attention.get_submodule(projection)
        moments, keys = [], []
        for block in layer.blocks():
            cos, sin = (one.double().numpy() for one in block.keywords["position_embeddings"])
            for row, x in enumerate(block.x.numpy()):
                rotary = reference.Rotary(*(one[row if len(one) > 1 else 0] for one in (cos, sin)))

                q, k, v = projected(own, x, KINDS[name][0])
                q, k = (reference.rotate(each, rotary) for each in (q, k))
                seen = reference.visible("causal", len(x), len(x))
                scores = np.einsum("htd,hsd->hts", q, reference.repeat_heads(k, HEADS)) / np.sqrt(fused.HEAD_DIM)
                weights = reference.softmax(np.where(seen, scores, -np.inf))
                stacked = v.transpose(1, 0, 2).reshape(len(x), -1)
                averaged = weights.mean(0) @ stacked
                moments.append(averaged.T @ averaged / len(x))
                share = weights.sum((0, 1)) / weights.sum()
                pairs = k[..., :4] + 1j * k[..., 4:]
                pairs = pairs - np.einsum("t,ktf->kf", share, pairs)[:, None]
                keys.append(np.einsum("t,ktf,ltf->fkl", share, pairs, pairs.conj()))
        found = observer.moments()
        np.testing.assert_allclose(found.values.numpy(), np.mean(moments, 0), rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(found.keys.numpy(), np.mean(keys, 0), rtol=1e-9, atol=1e-12)
