"""Which pieces a lane takes from a source, one after another, endlessly.

Item n of the endless sequence of epochs, each in an order of its own, belongs to reader n mod readers. Where rows can
be had by number the readers are the lanes and the items are pieces; where rows stream, the items are shards, and
a reader's pieces go to its lanes in turn.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from headpool.errors import RequestError
from headpool.sections import DataSource
from headpool.uptrain.encode import conversation
from headpool.uptrain.order import permuted
from headpool.uptrain.pieces import Piece, piece, piece_bytes, pieces
from headpool.uptrain.rows import Mapped, Shards, open_mapped, open_shards

SHUFFLED_PIECES = 8192
"""Pieces that are shuffled at a time when rows stream, over all readers together."""


MOST_READERS = 64
"""Streams that are open at a time, over all ranks together, and so ranks that a source divides over."""


_MOST_EMPTY = 32
"""How often as many empty shards as there are come to a reader in a row before there is taken to be nothing: shuffled,
one that holds something among n has come by then but for exp(-32).
"""


@dataclass(frozen=True)
class Order:
    """What the order of a source's rows depends on; the same on every rank. `name` tells sources apart."""

    name: str
    lanes: int
    seed: int
    shuffle: bool

    def item(self, number: int, count: int) -> tuple[int, int]:
        """Epoch, and which of `count` items is the `number`th of the endless sequence."""
        epoch, position = divmod(number, count)
        return epoch, permuted(position, count, self.name, self.seed, epoch) if self.shuffle else position


class Source(Protocol):
    """The pieces of one source, for the lanes of one rank. Each lane asks for its pieces in order."""

    @property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint can only be resumed with, of JSON types."""

    def piece(self, lane: int, unit: int) -> Piece:
        """The lane's piece number `unit`."""

    def release(self, lane: int, unit: int) -> None:
        """The lane will not ask for pieces before `unit` any more."""

    def place(self, lane: int, unit: int) -> list[int]:
        """What `seek` has to know to find that piece again, which has not been released."""

    def seek(self, places: Mapping[int, tuple[int, list[int]]]) -> None:
        """Find the piece and place of every lane of this rank."""


def open_source(source: DataSource, order: Order, lanes: Iterable[int], sequence_length: int) -> Source:
    """A source for `lanes`, those of this rank. Raises RequestError where nothing can be read."""
    limit = piece_bytes(sequence_length)
    if source.streaming:
        return StreamedSource(open_shards(source, min(order.lanes, MOST_READERS)), order, lanes, limit)
    return MappedSource(open_mapped(source), order, limit, messages_column=source.messages_column)


class MappedSource:
    """Pieces by number: nothing to remember."""

    def __init__(self, rows: Mapped, order: Order, limit: int, *, messages_column: str | None = None) -> None:
        import pyarrow.compute as pc

        self._rows = rows
        self._order = order
        self._messages_column = messages_column
        self._bytes = 0
        counts = np.ones(len(rows.column), dtype=np.int64)
        if messages_column is None:
            lengths = pc.binary_length(rows.column).to_numpy().astype(np.int64)
            self._bytes = int(lengths.sum())
            counts = -(-lengths // limit)  # none where there is no text
        self._ends = np.cumsum(counts)
        if not counts.sum():
            raise RequestError(f"{rows.name} holds no text")

    @property
    def identity(self) -> dict[str, Any]:
        return {"name": self._rows.name, "rows": len(self._ends), "bytes": self._bytes}

    def piece(self, lane: int, unit: int) -> Piece:
        _, item = self._order.item(unit * self._order.lanes + lane, int(self._ends[-1]))
        row = int(np.searchsorted(self._ends, item, side="right"))
        value, where = self._rows.column[row], self._rows.where(row)
        if self._messages_column:
            return Piece(conversation(value.as_py(), where, self._messages_column), where)
        first = int(self._ends[row - 1]) if row else 0
        return piece(memoryview(value.as_buffer()), item - first, int(self._ends[row]) - first, where)

    def release(self, lane: int, unit: int) -> None:
        pass

    def place(self, lane: int, unit: int) -> list[int]:
        return []

    def seek(self, places: Mapping[int, tuple[int, list[int]]]) -> None:
        pass


@dataclass(frozen=True)
class Window:
    """Pieces that are shuffled among themselves: numbers `first`, ... of a reader, read from `start` on."""

    first: int
    start: tuple[int, int, int]
    pieces: tuple[Piece, ...]


class Reader:
    """One reader's windows, one after another: its shards, row by row, piece by piece.

    A window ends with the epoch or after `size` pieces. A place is [first piece of its window, shards finished, rows
    finished in the next, pieces finished of the next row], from where the window is read again.
    """

    def __init__(self, shards: Shards, order: Order, number: int, readers: int, limit: int) -> None:
        self._shards = shards
        self._order = order
        self._number = number
        self._readers = readers
        self._limit = limit
        self._size = max(1, SHUFFLED_PIECES // readers) if order.shuffle else 1
        self._windows: list[Window] = []
        self.seek([0, 0, 0, 0])

    def seek(self, place: list[int]) -> None:
        first, *start = place
        self._windows.clear()
        self._making = self._make(first, self._walk(*start))

    def check(self) -> None:
        """Read the first row, so that what is wrong with the data shows before anything is trained."""
        next(self._walk(0, 0, 0))

    def piece(self, number: int) -> Piece:
        window = self._window(number)
        return window.pieces[number - window.first]

    def place(self, number: int) -> list[int]:
        window = self._window(number)
        return [window.first, *window.start]

    def forget(self, before: int) -> None:
        """Drop the windows that end before piece `before`."""
        while self._windows and self._windows[0].first + len(self._windows[0].pieces) <= before:
            self._windows.pop(0)

    def _window(self, number: int) -> Window:
        while not self._windows or number >= self._windows[-1].first + len(self._windows[-1].pieces):
            self._windows.append(next(self._making))
        return next(one for one in reversed(self._windows) if one.first <= number)

    def _make(self, first: int, walk: Iterator[tuple[int, tuple[int, int, int], Piece]]) -> Iterator[Window]:
        epoch, start, one = next(walk)
        while True:
            window_epoch, window_start = epoch, start
            held: list[Piece] = []
            while epoch == window_epoch and len(held) < self._size:
                held.append(one)
                epoch, start, one = next(walk)
            yield Window(first, window_start, self._shuffled(held, first))
            first += len(held)

    def _shuffled(self, held: list[Piece], first: int) -> tuple[Piece, ...]:
        if not self._order.shuffle:
            return tuple(held)
        key = (self._order.name, self._order.seed, self._number, first)
        return tuple(held[permuted(at, len(held), *key)] for at in range(len(held)))

    def _walk(self, shards: int, row: int, part: int) -> Iterator[tuple[int, tuple[int, int, int], Piece]]:
        """Pieces with their epoch and the place from which each is read."""
        empty = 0
        while empty <= _MOST_EMPTY * self._shards.count:
            epoch, shard = self._shard(self._number + shards * self._readers)
            for value, where in self._shards.read(shard, row):
                for at, one in enumerate(self._cut(value, where)):
                    if at >= part:
                        empty = -1
                        yield epoch, (shards, row, at), one
                row, part = row + 1, 0
            shards, row, part, empty = shards + 1, 0, 0, empty + 1
        raise RequestError(f"{self._shards.name} holds no text")

    def _shard(self, number: int) -> tuple[int, int]:
        epoch, shard = self._order.item(number, self._shards.count)
        # Unshuffled epochs begin one further on each time, so that no reader is left with an empty shard for ever.
        return epoch, shard if self._order.shuffle else (shard + epoch) % self._shards.count

    def _cut(self, value: Any, where: str) -> Iterable[Piece]:
        if not isinstance(value, str):
            return [Piece(value, where)]
        return pieces(value, self._limit, where) if value else ()


class StreamedSource:
    """Pieces in the order in which readers come to them. There are as many readers as divide the lanes and have a
    shard each, up to MOST_READERS; reader n serves the lanes l with l % readers == n, and is read by the ranks that own
    these: by one, unless the files are fewer than the ranks and cannot be divided.
    """

    def __init__(self, shards: Shards, order: Order, lanes: Iterable[int], limit: int) -> None:
        self._shards = shards
        self._order = order
        self._units = dict.fromkeys(lanes, 0)
        self._count = max(one for one in range(1, min(shards.count, MOST_READERS) + 1) if order.lanes % one == 0)
        self._readers = {
            number: Reader(shards, order, number, self._count, limit)
            for number in {l % self._count for l in self._units}
        }
        next(iter(self._readers.values())).check()

    @property
    def identity(self) -> dict[str, Any]:
        return {"name": self._shards.name, "shards": self._shards.count}

    def piece(self, lane: int, unit: int) -> Piece:
        return self._reader(lane).piece(self._number(lane, unit))

    def release(self, lane: int, unit: int) -> None:
        self._units[lane] = unit
        self._reader(lane).forget(min(self._number(one, self._units[one]) for one in self._served(lane)))

    def place(self, lane: int, unit: int) -> list[int]:
        return self._reader(lane).place(self._number(lane, unit))

    def seek(self, places: Mapping[int, tuple[int, list[int]]]) -> None:
        self._units = {lane: unit for lane, (unit, _) in places.items()}
        for number, reader in self._readers.items():
            reader.seek(min(place for lane, (_, place) in places.items() if lane % self._count == number))

    def _reader(self, lane: int) -> Reader:
        return self._readers[lane % self._count]

    def _served(self, lane: int) -> list[int]:
        return [one for one in self._units if one % self._count == lane % self._count]

    def _number(self, lane: int, unit: int) -> int:
        return unit * (self._order.lanes // self._count) + lane // self._count
