"""Perplexity by position in the window: a model that lost its long-range attention shows it at late positions."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from headpool.score import Score, Window, perplexity

FIRST_BUCKET = 16
"""Positions of the first bucket; each later one holds as many as all before it."""


@dataclass(frozen=True)
class Bucket:
    """Tokens predicted from positions `first` to `last` of their window, both included: from so many tokens before
    their predecessor.
    """

    first: int
    last: int
    tokens: int
    nats: float

    @property
    def perplexity(self) -> float:
        """Of these tokens. Raises HeadpoolError as `score.perplexity` does."""
        return perplexity(self.nats, self.tokens)


def by_position(windows: Sequence[Sequence[Window]], score: Score) -> tuple[Bucket, ...]:
    """The scored tokens in buckets of positions 0-15, 16-31, 32-63, 64-127 and so on; empty ones are left out.

    The last bucket ends at the last position that was scored. With a stride smaller than the window, early positions
    are those of first windows only, since every later window scores its end alone.
    """
    pairs = [
        (torch.arange(one.first - 1 - one.start, one.end - 1 - one.start), nats)
        for of_text, of_nats in zip(windows, score.token_nats, strict=True)
        for one, nats in zip(of_text, of_nats, strict=True)
    ]
    positions, nats = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    sums, counts = torch.bincount(positions, weights=nats), torch.bincount(positions)
    edges = [0, FIRST_BUCKET]
    while edges[-1] < len(counts):
        edges.append(edges[-1] * 2)
    buckets = (
        Bucket(first, min(end, len(counts)) - 1, int(counts[first:end].sum()), sums[first:end].sum().item())
        for first, end in pairwise(edges)
    )
    return tuple(one for one in buckets if one.tokens)
