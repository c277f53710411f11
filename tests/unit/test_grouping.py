"""Step 3, the choice of groups: against all partitions, written out; and moving heads, against the specification."""

from collections.abc import Iterator
from dataclasses import replace

import heads
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headpool.convert.aligned import grouping
from headpool.convert.aligned.grouping import Group, GroupLoss, best_partition, is_exact, permute
from headpool.convert.aligned.keys import KeySharing, share_keys
from headpool.convert.aligned.moments import data_free
from headpool.convert.aligned.values import ValueSharing, share_values
from headpool.convert.layouts import Rotary

X = heads.normal(7, 40, 7)


def partitions(free: tuple[int, ...], size: int) -> Iterator[list[Group]]:
    """All partitions, by choosing members one by one."""
    if not free:
        yield []
        return
    grown = [free[:1]]
    for _ in range(size - 1):
        grown = [(*group, head) for group in grown for head in free if head > group[-1]]
    for group in grown:
        for rest in partitions(tuple(head for head in free if head not in group), size):
            yield [group, *rest]


class Table:
    """A loss for each group, drawn when it is first asked for, and counted."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.known: dict[Group, float] = {}
        self.asked: list[Group] = []

    def __call__(self, group: Group) -> float:
        self.asked.append(group)
        return self.loss(group)

    def loss(self, group: Group) -> float:
        return self.known.setdefault(group, float(self._rng.uniform()))

    def total(self, partition: list[Group]) -> float:
        return sum(self.loss(group) for group in partition)


def contiguous(count: int, groups: int) -> list[Group]:
    size = count // groups
    return [tuple(range(j * size, (j + 1) * size)) for j in range(groups)]


@given(st.sampled_from([(2, 1), (4, 2), (6, 2), (6, 3), (8, 4), (8, 2), (9, 3), (5, 5), (5, 1)]), st.integers(0, 1000))
@settings(max_examples=60)
def test_the_search_finds_the_best_of_all_partitions(counts: tuple[int, int], seed: int) -> None:
    count, groups = counts
    table = Table(seed)
    found = best_partition(table, count, groups, search=True)
    every = list(partitions(tuple(range(count)), count // groups))
    assert found in every
    assert table.total(found) == pytest.approx(min(table.total(one) for one in every), rel=1e-12)
    assert len(table.asked) == len(set(table.asked)), "each group is asked for once"


@given(st.sampled_from([(32, 8), (24, 3), (20, 10), (16, 2)]), st.integers(0, 100))
@settings(max_examples=15)
def test_too_many_partitions_are_searched_by_swaps(counts: tuple[int, int], seed: int) -> None:
    count, groups = counts
    assert not is_exact(count, groups)
    table = Table(seed)
    found = best_partition(table, count, groups, search=True)
    assert sorted(sum(found, ())) == list(range(count))
    assert found == sorted(tuple(sorted(group)) for group in found)
    assert {len(group) for group in found} == {count // groups}
    assert table.total(found) <= table.total(contiguous(count, groups))
    assert len(table.asked) == len(set(table.asked))
    for a in range(groups):  # no swap helps
        for b in range(a):
            for x in found[a]:
                for y in found[b]:
                    one = tuple(sorted({*found[a], y} - {x}))
                    other = tuple(sorted({*found[b], x} - {y}))
                    assert table.total([one, other]) > table.total([found[a], found[b]]) - 1e-9


def test_swaps_find_what_is_plainly_there() -> None:
    """32 heads, alike where they agree modulo 8."""
    found = best_partition(lambda group: len({head % 8 for head in group}) - 1.0, 32, 8, search=True)
    assert found == [tuple(range(j, 32, 8)) for j in range(8)]


def test_contiguous_groups_win_ties_and_stay_without_search() -> None:
    assert best_partition(lambda group: 1.0, 8, 4, search=True) == contiguous(8, 4)
    assert best_partition(lambda group: 1.0, 32, 8, search=True) == contiguous(32, 8)
    assert best_partition(lambda group: -float(group[-1] - group[0]), 8, 4, search=False) == contiguous(8, 4)


def test_what_is_searched_exactly() -> None:
    for count, groups in ((8, 4), (8, 2), (9, 3), (12, 4), (12, 6), (12, 2), (16, 8), (16, 4)):
        assert is_exact(count, groups), (count, groups)
    for count, groups in ((16, 2), (32, 16), (32, 8), (40, 8), (64, 8)):
        assert not is_exact(count, groups), (count, groups)


SINKS = heads.normal(1, 8)
GATES = heads.normal(2, 16, 3)


@pytest.mark.parametrize("rotary", heads.ROTARIES)
def test_moving_heads_changes_nothing(rotary: Rotary) -> None:
    weights = heads.layer(rotary, heads=8, per_query_head={"sinks": SINKS, "gate": GATES})
    order = [2, 0, 3, 1]
    moved = permute(weights, order)
    np.testing.assert_allclose(heads.attention(moved, X), heads.attention(weights, X), rtol=0, atol=1e-12)
    queries = [4, 5, 0, 1, 6, 7, 2, 3]
    assert torch.equal(moved.per_query_head["sinks"], SINKS[queries])
    assert torch.equal(moved.per_query_head["gate"], GATES.view(8, 2, 3)[queries].view(16, 3))
    assert weights.k is not None and moved.k is not None
    assert torch.equal(moved.k, weights.k[order])
    # And the moments of what was moved are the moments, moved.
    from_moved, from_source = heads.moments(moved, X), heads.moments(weights, X).permuted(order)
    for name in ("keys", "queries", "flat_keys", "flat_queries", "values", "value_means"):
        torch.testing.assert_close(getattr(from_source, name), getattr(from_moved, name), rtol=0, atol=1e-12)


@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("rotary", [heads.PARTIAL, heads.INTERLEAVED])
def test_the_loss_of_a_partition_is_what_its_conversion_loses(rotary: Rotary, fold: bool) -> None:
    weights = heads.layer(rotary, heads=8)
    moments = heads.moments(weights, X)
    loss = GroupLoss(weights, moments, keys=2.0, values=3.0, fold_mean=fold)
    found = loss.choose(2, search=True)
    order = sum(found, ())
    moved, seen = permute(weights, order), moments.permuted(order)
    keys, values = KeySharing(moved, seen), ValueSharing(moved, seen, fold_mean=fold)
    together = torch.arange(4).view(2, 2)
    lost = loss.lost(found)
    assert lost["keys"] == pytest.approx(float(keys.lost(together).sum()) / keys.energy, rel=1e-9)
    assert lost["values"] == pytest.approx(float(values.lost(together).sum()) / values.energy, rel=1e-9)
    assert 0 < lost["keys"] < 1 and 0 < lost["values"] < 1
    assert sum(loss(group) for group in found) == pytest.approx(2 * lost["keys"] + 3 * lost["values"], rel=1e-9)
    total = {tuple(one): sum(loss(group) for group in one) for one in partitions((0, 1, 2, 3), 2)}
    assert total[tuple(found)] == min(total.values())


def test_where_all_losses_take_too_long_those_of_pairs_count(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = heads.layer(heads.PARTIAL, heads=9, kv_heads=9)
    loss = GroupLoss(weights, heads.moments(weights, X))
    exactly = loss.choose(3, search=True)
    monkeypatch.setattr(grouping, "WORK", 0)
    assert loss.choose(3, search=False) == contiguous(9, 3)
    found = loss.choose(3, search=True)

    def of_pairs(partition: list[Group]) -> float:
        return sum(loss((a, b)) for group in partition for a in group for b in group if a < b)

    assert of_pairs(found) == pytest.approx(min(of_pairs(one) for one in partitions(tuple(range(9)), 3)), rel=1e-9)

    def total(partition: list[Group]) -> float:
        return sum(loss(group) for group in partition)

    assert total(exactly) <= total(found) < total(contiguous(9, 3))
    worse = GroupLoss(weights, heads.moments(weights, X))  # whose pairs mislead: contiguous groups stay
    monkeypatch.setattr(
        worse, "_losses", lambda groups: [-1.0 if len(g) == 2 and g[1] - g[0] > 3 else 0.0 for g in groups]
    )
    assert worse.choose(3, search=True) == contiguous(9, 3)


def test_heads_that_belong_together_are_found() -> None:
    """Heads 0 and 2, 1 and 3 are copies of each other but for a factor: the only partition without loss."""
    weights = heads.layer(heads.HALF_SPLIT)
    k, v, bias_k, bias_v = weights.k, weights.v, weights.bias_k, weights.bias_v
    assert k is not None and v is not None and bias_k is not None and bias_v is not None
    twice = [0, 1, 0, 1]
    copied = replace(weights, k=k[twice], bias_k=bias_k[twice], v=v[twice] * 2, bias_v=bias_v[twice] * 2)
    for moments in (heads.moments(copied, X), data_free(copied, torch.ones(7))):
        found = best_partition(GroupLoss(copied, moments), 4, 2, search=True)
        assert found == [(0, 2), (1, 3)]
        order = sum(found, ())
        moved, seen = permute(copied, order), moments.permuted(order)
        made = share_keys(moved, 2, seen)
        made = share_values(made, 2, seen.value_groups(2), seen.value_means, fold_mean=False)
        np.testing.assert_allclose(heads.attention(made, X), heads.attention(copied, X), rtol=0, atol=1e-9)
