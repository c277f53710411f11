"""Random choices as functions of what they are for: nothing to save, nothing that drifts between processes."""

import hashlib
from collections.abc import Sequence

_ROUNDS = 6


def permuted(position: int, size: int, *key: object) -> int:
    """Where `position` goes in a permutation of range(size) that `key` chooses, in constant memory.

    A Feistel network over the next power of four, walked until it is back inside (Black and Rogaway 2002, "Ciphers
    with arbitrary finite domains").
    """
    assert 0 <= position < size
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    while True:
        left, right = position >> half, position & ((1 << half) - 1)
        for number in range(_ROUNDS):
            left, right = right, left ^ (_hash(number, right, *key) >> (64 - half))
        position = left << half | right
        if position < size:
            return position


def chosen_source(weights: Sequence[float], step: int, lane: int, lanes: int, seed: int) -> int:
    """Which of the sources of a mixture lane `lane` takes its block of `step` from.

    Systematic sampling: every step holds each source within one block of its share, and every lane takes each source
    in proportion to its weight over time.
    """
    if len(weights) == 1:
        return 0
    offset = _hash("offset", step, seed) / 2**64
    point = (permuted(lane, lanes, "mixture", step, seed) + offset) / lanes * sum(weights)
    for number, weight in enumerate(weights):
        point -= weight
        if point < 0:
            return number
    return len(weights) - 1  # where rounding left a remainder


def _hash(*key: object) -> int:
    """64 bits."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big")
