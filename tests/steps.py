"""The steps of aligned with one source head in each group, where nothing has to be lost."""

from dataclasses import replace

import heads
import numpy as np

from headpool.convert.aligned.grouping import permute
from headpool.convert.aligned.keys import share_keys
from headpool.convert.aligned.moments import Moments, data_free
from headpool.convert.aligned.values import share_values
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
    sinks = "sinks" in weights.per_query_head
    return share_values(weights, count, moments.value_groups(count), moments.value_means, fold_mean=not sinks)


def groups(weights: AttentionWeights, index: int) -> AttentionWeights:
    assert weights.k is not None
    return permute(weights, np.random.default_rng(index).permutation(len(weights.k)).tolist())


def together(weights: AttentionWeights, index: int) -> AttentionWeights:
    return values(keys(groups(weights, index), index), index)
