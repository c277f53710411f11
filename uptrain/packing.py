"""Packing: the pieces of one lane of one source, end to end, cut into blocks."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headpool.uptrain.encode import Encoded, Ints


@dataclass(frozen=True)
class Block:
    """T positions; `documents` numbers the pieces in it from 0."""

    tokens: Ints
    labels: Ints
    documents: Ints

    def positions(self) -> Ints:
        """Positions that restart at every document."""
        index = np.arange(len(self.documents), dtype=np.int64)
        starts = np.flatnonzero(np.diff(self.documents, prepend=-1))
        return index - np.repeat(starts, np.diff(starts, append=len(index)))


class Packer:
    """A place in a lane's pieces, `unit` and the `offset` of the next token in it, and what was encoded from there."""

    def __init__(self) -> None:
        self.unit = 0
        self.offset = 0
        self._ahead: deque[Encoded] = deque()
        self._length = 0

    @property
    def next_unit(self) -> int:
        """The piece to `add` next."""
        return self.unit + len(self._ahead)

    def seek(self, unit: int, offset: int) -> None:
        """Go on from there; what was added is dropped."""
        self.unit, self.offset = unit, offset
        self._ahead.clear()
        self._length = -offset

    def missing(self, length: int) -> int:
        """Tokens to add before a block of `length` can be taken."""
        return max(0, length - self._length)

    def add(self, encoded: Sequence[Encoded]) -> None:
        self._ahead += encoded
        self._length += sum(len(one.tokens) for one in encoded)

    def take(self, length: int) -> Block:
        """The next block, for which nothing may be missing."""
        assert self.missing(length) == 0
        parts: list[Encoded] = []
        numbers: list[int] = []
        left = length
        while left:
            one = self._ahead[0]
            end = min(len(one.tokens), self.offset + left)
            parts.append(Encoded(one.tokens[self.offset : end], one.labels[self.offset : end]))
            numbers.append(end - self.offset)
            left -= end - self.offset
            self.offset = end
            if end == len(one.tokens):
                self._ahead.popleft()
                self.unit, self.offset = self.unit + 1, 0
        self._length -= length
        used = [size for size in numbers if size]
        return Block(
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.labels for part in parts]),
            np.repeat(np.arange(len(used), dtype=np.int64), used),
        )
