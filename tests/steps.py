"""The steps of aligned with one source head in each group, where nothing has to be lost."""

from dataclasses import fields, replace

import heads
import numpy as np
import torch
from torch import Tensor

from headpool.convert.aligned.grouping import permute
from headpool.convert.aligned.keys import share_keys
from headpool.convert.aligned.moments import Moments, data_free, is_normed
from headpool.convert.aligned.values import folds, share_values
from headpool.convert.aligned.walk import Layer
from headpool.convert.layouts import AttentionWeights


def noise(weights: AttentionWeights, index: int) -> Moments:
    """Moments of some other layer of the same shape: with one head in a group any will do."""
    parts = {
        part: heads.normal(10 * index + number, *w.shape)
        for number, part in enumerate(("q", "k", "v", "bias_q", "bias_k", "bias_v"))
        if (w := getattr(weights, part)) is not None
    }
    assert weights.q is not None
    return data_free(replace(weights, **parts), heads.normal(5, weights.q.shape[2]))


def keys(weights: AttentionWeights, index: int) -> AttentionWeights:
    assert weights.k is not None
    return share_keys(weights, len(weights.k), noise(weights, index))


def values(weights: AttentionWeights, index: int) -> AttentionWeights:
    assert weights.v is not None
    moments = noise(weights, index)
    count = len(weights.v)
    return share_values(weights, count, moments.value_groups(count), moments.value_means, fold_mean=folds(weights))


def groups(weights: AttentionWeights, index: int) -> AttentionWeights:
    assert weights.k is not None
    return permute(weights, np.random.default_rng(index).permutation(len(weights.k)).tolist())


def together(weights: AttentionWeights, index: int) -> AttentionWeights:
    return values(keys(groups(weights, index), index), index)


def check(layer: Layer) -> None:
    """With other weights, which the steps make, a layer's attention gives the same (tests/parity holds this to 1e-10
    for a model of each kind; this is float32); and its keys pass a norm if and only if that is known.
    """
    held, block = layer.walk.stock, layer.block(slice(0, 1))
    found = held.weights(layer.index)
    wide = {one.name: w.double() for one in fields(found) if isinstance(w := getattr(found, one.name), Tensor)}
    weights = replace(found, **wide)  # type: ignore[arg-type]

    def output(made: AttentionWeights) -> Tensor:
        with torch.no_grad():
            return block.through(held.attention_with(layer.index, held.layout.write(made, layer.index)))

    own = block.through(layer.attention)
    made = together(weights, layer.index)
    assert made.k is not None
    assert not torch.equal(made.k.float(), wide["k"].float()), "the steps did something"
    assert (output(made) - own).abs().max() < 1e-4 * own.abs().max()
    large, larger = (
        output(replace(weights, **{part: size * wide[part] for part in ("k", "bias_k") if part in wide}))  # type: ignore[arg-type]
        for size in (4, 8)  # so that what norms add to squares is little beside them
    )
    assert ((larger - large).abs().max() < 1e-3 * own.abs().max()) == is_normed(weights)
