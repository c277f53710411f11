"""Step 3 of aligned conversion: which source heads share, and the layer rearranged so that they stand together."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations
from math import comb
from typing import Any

import torch
from torch import Tensor

from headpool.convert.aligned.keys import KeySharing
from headpool.convert.aligned.moments import Moments, reorder_heads
from headpool.convert.aligned.values import ValueSharing
from headpool.convert.layouts import AttentionWeights

Group = tuple[int, ...]

EXACT_STEPS = 400_000
"""Up to so many steps the best partition is found exactly; a step takes about a microsecond."""

EXACT_GROUPS = 2_000
"""Up to so many possible groups the loss of every one is computed."""

WORK = 10**10
"""How many multiplications eigenvalues for the losses of groups may cost: a few seconds a layer."""

PORTION = 64
"""Losses of so many groups are computed at once."""


def best_partition(loss: Callable[[Group], float], heads: int, kv_heads: int, *, search: bool) -> list[Group]:
    """Cut the heads 0 … heads-1 into `kv_heads` groups of equal size so that the sum of `loss` over them is small.

    Smallest where `is_exact` says so; otherwise no swap of two heads makes it smaller. Never larger than that of
    contiguous groups, which are the result without `search`, and of several equally good partitions. Groups and their
    members are ascending; the loss is asked at most once for each group.
    """
    size = heads // kv_heads
    contiguous = [tuple(range(start, start + size)) for start in range(0, heads, size)]
    if not search or kv_heads in (1, heads):
        return contiguous
    known = cache(loss)
    found = _exact(known, heads, size) if is_exact(heads, kv_heads) else _swap(known, contiguous)
    return found if _total(known, found) < _total(known, contiguous) else contiguous


def is_exact(heads: int, kv_heads: int) -> bool:
    """Whether `best_partition` looks at every partition.

    It fills groups one after the other, each with the lowest head that is left: after m groups there are at most
    C(heads-1, m*size-1) sets of used heads.
    """
    size = heads // kv_heads
    steps = comb(heads - 1, size - 1) + sum(
        comb(heads - 1, used - 1) * comb(heads - used - 1, size - 1) for used in range(size, heads, size)
    )
    return steps <= EXACT_STEPS and comb(heads, size) <= EXACT_GROUPS


def _total(loss: Callable[[Group], float], partition: Sequence[Group]) -> float:
    return sum(loss(group) for group in partition)


def _exact(loss: Callable[[Group], float], heads: int, size: int) -> list[Group]:
    """Dynamic programming over sets of heads that are still free."""

    @cache
    def best(free: Group) -> tuple[float, tuple[Group, ...]]:
        if not free:
            return 0.0, ()
        first, rest = free[0], free[1:]
        options = []
        for others in combinations(rest, size - 1):
            group = (first, *others)
            after, groups = best(tuple(head for head in rest if head not in others))
            options.append((loss(group) + after, (group, *groups)))
        return min(options)

    return list(best(tuple(range(heads)))[1])


def _swap(loss: Callable[[Group], float], partition: Sequence[Group]) -> list[Group]:
    """Swap two heads of two groups as long as that helps: of every pair of groups the best swap, until none does."""
    groups = list(partition)
    improved = True
    while improved:
        improved = False
        for a, b in combinations(range(len(groups)), 2):
            pairs = [_swapped(groups[a], groups[b], x, y) for x in groups[a] for y in groups[b]]
            one, other = min(pairs, key=lambda pair: (_total(loss, pair), pair))
            before = _total(loss, (groups[a], groups[b]))
            if _total(loss, (one, other)) < before - 1e-12 * abs(before):
                groups[a], groups[b] = one, other
                improved = True
    return sorted(groups)


def _swapped(one: Group, other: Group, x: int, y: int) -> tuple[Group, Group]:
    return tuple(sorted({*one, y} - {x})), tuple(sorted({*other, x} - {y}))


class GroupLoss:
    """The loss of a group of source heads for `best_partition`: lost energy of keys and of values.

    Each is relative to the layer's total, so that over a partition both lie between 0 and 1; `keys` and `values` weigh
    them against each other (docs/method.md has the figures behind the defaults). `fold_mean` as in `share_values`.
    """

    def __init__(
        self,
        weights: AttentionWeights,
        moments: Moments,
        *,
        keys: float = 3.0,
        values: float = 1.0,
        fold_mean: bool = False,
    ) -> None:
        self._sharing: dict[str, KeySharing | ValueSharing] = {
            "keys": KeySharing(weights, moments),
            "values": ValueSharing(weights, moments, fold_mean=fold_mean),
        }
        self._shares = {"keys": keys, "values": values}
        self._device = moments.keys.device
        self._heads = moments.keys.shape[1]
        self._head_dim = len(moments.value_means) // self._heads

    def __call__(self, group: Group) -> float:
        return self._losses([group])[0]

    def lost(self, partition: Sequence[Group]) -> Mapping[str, float]:
        """The lost energy of "keys" and "values" over a whole partition, each relative to the layer's total."""
        return {part: float(lost.sum()) for part, lost in self._lost(partition).items()}

    @property
    def freedom(self) -> dict[str, str]:
        """By what "keys" and "values" can be told from shared ones."""
        return {part: sharing.freedom for part, sharing in self._sharing.items()}

    def choose(self, kv_heads: int, *, search: bool) -> list[Group]:
        """The best partition into `kv_heads` groups that can be found in reasonable time; never worse than contiguous.

        Where the losses of all groups take too long, a group counts as the sum of its pairs' losses instead.
        """
        size = self._heads // kv_heads
        if not search or comb(self._heads, size) * (size * self._head_dim) ** 3 <= WORK:
            return best_partition(self, self._heads, kv_heads, search=search)
        pairs = list(combinations(range(self._heads), 2))
        known = dict(zip(pairs, self._losses(pairs), strict=True))
        found = best_partition(
            lambda group: sum(known[pair] for pair in combinations(group, 2)), self._heads, kv_heads, search=True
        )
        contiguous = best_partition(self, self._heads, kv_heads, search=False)
        return found if _total(self, found) < _total(self, contiguous) else contiguous

    def _losses(self, groups: Sequence[Group]) -> list[float]:
        lost = self._lost(groups)
        total: list[float] = sum(self._shares[part] * each for part, each in lost.items()).tolist()  # type: ignore[union-attr]
        return total

    def _lost(self, groups: Sequence[Group]) -> dict[str, Tensor]:
        """[groups], each relative to the layer's total; in portions, as every group needs matrices of its own."""
        portions = torch.split(torch.tensor(groups, device=self._device), PORTION)
        return {
            part: torch.cat([sharing.lost(portion) for portion in portions]) / (sharing.energy or 1.0)
            for part, sharing in self._sharing.items()
        }


def permute(weights: AttentionWeights, order: Sequence[int]) -> AttentionWeights:
    """The same layer with its K/V heads in another order: head j is this one's `order[j]`.

    Query heads and all that belongs to them move along (rows of q and bias_q, columns of o, gates, gains,
    per_query_head), so that the layer computes what it did. Not with ALiBi, whose slopes belong to positions in the
    list of query heads. Tensors keep their dtype.
    """
    by_head = ("q", "k", "v", "o", "gate", "query_gains", "key_gains", "bias_q", "bias_k", "bias_v", "bias_gate")
    held = {name: w for name in by_head if (w := getattr(weights, name)) is not None}
    moved: dict[str, Any] = {name: reorder_heads(w, order) for name, w in held.items()}
    beside = {name: reorder_heads(heads, order) for name, heads in weights.per_query_head.items()}
    return replace(weights, **moved, per_query_head=beside)
