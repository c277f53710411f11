"""Buckets of positions against a loop over tokens."""

import math
from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headpool.eval.positions import Bucket, by_position
from headpool.score import Score, sliding_windows


def bucket_of(position: int) -> tuple[int, int]:
    low, high = 0, 15
    while position > high:
        low, high = high + 1, 2 * high + 1
    return low, high


@given(lengths=st.lists(st.integers(0, 200), min_size=1, max_size=3), window=st.integers(1, 100), data=st.data())
def test_every_scored_token_is_in_the_bucket_of_its_position(
    lengths: list[int], window: int, data: st.DataObject
) -> None:
    if max(lengths) < 2:
        lengths.append(2)
    stride = data.draw(st.integers(1, window))
    windows = [sliding_windows(n, window, stride) for n in lengths]
    generator = torch.Generator().manual_seed(0)
    nats = tuple(
        tuple(torch.rand(one.end - one.first, generator=generator, dtype=torch.float64) for one in of_text)
        for of_text in windows
    )
    sums: dict[tuple[int, int], list[float]] = defaultdict(list)
    furthest = 0
    for of_text, of_nats in zip(windows, nats, strict=True):
        for one, values in zip(of_text, of_nats, strict=True):
            for t, value in zip(range(one.first, one.end), values.tolist(), strict=True):
                position = t - 1 - one.start  # of the token before t, where t is predicted
                sums[bucket_of(position)].append(value)
                furthest = max(furthest, position)
    total = sum(lengths) - len([n for n in lengths if n])
    found = by_position(windows, Score(0.0, total, nats))
    assert [(one.first, one.last) for one in found] == [
        (low, min(high, furthest)) for low, high in sorted(sums) if low <= furthest
    ]
    assert [one.tokens for one in found] == [len(sums[key]) for key in sorted(sums)]
    assert [one.nats for one in found] == pytest.approx([math.fsum(sums[key]) for key in sorted(sums)], rel=1e-12)


def test_perplexity_of_a_bucket() -> None:
    assert Bucket(0, 15, 4, 4 * math.log(7)).perplexity == pytest.approx(7)
