"""The data-free methods: what becomes of the key and value heads of a group (Ainslie et al. 2023, section 2.1).

Pure functions over `AttentionWeights`. Group j is made of the contiguous source heads j*r … (j+1)*r-1.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headpool.convert.layouts import AttentionWeights, Part
from headpool.rounding import round_once


@dataclass(frozen=True)
class Setting:
    """What a method may know beyond the weights: the layer's number, the run's seed, the model's initializer_range, and
    the dtype in which the result is stored (None: each tensor's own).
    """

    layer: int
    seed: int
    initializer_range: float
    dtype: torch.dtype | None


def mean_heads(heads: Tensor, kv_heads: int, dtype: torch.dtype) -> Tensor:
    """[k, ...] → [kv_heads, ...]: each group's mean, summed in float64, divided once, rounded once to `dtype`."""
    groups = _groups(heads, kv_heads)
    result = torch.empty(groups.shape[:1] + groups.shape[2:], dtype=dtype)
    total, member = (torch.empty(groups.shape[2:], dtype=torch.float64) for _ in range(2))
    for pooled, group in zip(result, groups, strict=True):
        total.copy_(group[0])
        for head in group[1:]:
            total.add_(member.copy_(head))
        pooled.copy_(round_once(total.div_(len(group)), dtype))
    return result


def _groups(heads: Tensor, kv_heads: int) -> Tensor:
    """[k, ...] → [kv_heads, k / kv_heads, ...]"""
    return heads.view(kv_heads, -1, *heads.shape[1:])


def first_heads(heads: Tensor, kv_heads: int) -> Tensor:
    """[k, ...] → [kv_heads, ...]: the first head of each group."""
    return _groups(heads, kv_heads)[:, 0]


def _mean(weights: AttentionWeights, kv_heads: int, setting: Setting) -> AttentionWeights:
    return _map_heads(weights, lambda heads: mean_heads(heads, kv_heads, setting.dtype or heads.dtype))


def _first(weights: AttentionWeights, kv_heads: int, setting: Setting) -> AttentionWeights:
    return _map_heads(weights, lambda heads: first_heads(heads, kv_heads))


def _random(weights: AttentionWeights, kv_heads: int, setting: Setting) -> AttentionWeights:
    """Fresh weights N(0, initializer_range²) and zero biases, as transformers initialises a linear layer.

    Each projection has a generator of its own, so that the result does not depend on the order of the work.
    """

    def fresh(part: Part, heads: Tensor | None) -> Tensor | None:
        if heads is None:
            return None
        key = hashlib.sha256(f"{setting.seed} {setting.layer} {part}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little", signed=True))
        shape = (kv_heads, *heads.shape[1:])
        return torch.randn(shape, generator=generator, dtype=torch.float64) * setting.initializer_range

    def zeros(bias: Tensor | None) -> Tensor | None:
        return None if bias is None else torch.zeros(kv_heads, bias.shape[1], dtype=torch.float64)

    return replace(
        weights,
        key_gains=None
        if weights.key_gains is None
        else weights.key_gains.new_ones(kv_heads, weights.key_gains.shape[1]),
        k=fresh("k", weights.k),
        v=fresh("v", weights.v),
        bias_k=zeros(weights.bias_k),
        bias_v=zeros(weights.bias_v),
    )


def _map_heads(weights: AttentionWeights, pool: Callable[[Tensor], Tensor]) -> AttentionWeights:
    def each(heads: Tensor | None) -> Tensor | None:
        return None if heads is None else pool(heads)

    return replace(
        weights,
        key_gains=each(weights.key_gains),
        k=each(weights.k),
        v=each(weights.v),
        bias_k=each(weights.bias_k),
        bias_v=each(weights.bias_v),
    )


Apply = Callable[[AttentionWeights, int, Setting], AttentionWeights]

APPLY: Mapping[str, Apply] = {"mean": _mean, "first": _first, "random": _random}
"""The function of each method: from the weights of one unit to the same with fewer K/V heads, rounded once to
`Setting.dtype` or not at all (whoever writes them rounds what is not)."""
