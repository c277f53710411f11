"""Pieces: what lanes take from a source one by one, a whole document, or a part of a long one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

BLOCKS_PER_PIECE = 8
_BYTES_PER_TOKEN = 4
_LOOK_AHEAD = 256
"""Bytes in which white space is looked for, to cut there."""


@dataclass(frozen=True)
class Piece:
    """Text, or a conversation (a list of messages), and whether a document starts and ends with it. `where` names it
    in errors.
    """

    value: Any
    where: str
    starts: bool = True
    ends: bool = True


def piece_bytes(sequence_length: int) -> int:
    """Longer documents are cut, so that the lanes share them: into pieces of some BLOCKS_PER_PIECE blocks."""
    return sequence_length * BLOCKS_PER_PIECE * _BYTES_PER_TOKEN


def piece_count(length: int, limit: int) -> int:
    """Into how many pieces of at most about `limit` bytes a document of `length` bytes is cut."""
    return max(1, -(-length // limit))


def piece(raw: memoryview | bytes, number: int, count: int, where: str) -> Piece:
    """Piece `number` of `count` equal ones of a document in UTF-8, cut before white space where there is some.

    All pieces together are the document. Only bytes near the piece are looked at.
    """
    start, end = _cut(raw, number, count), _cut(raw, number + 1, count)
    return Piece(bytes(raw[start:end]).decode("utf-8"), where, starts=number == 0, ends=number == count - 1)


def pieces(text: str, limit: int, where: str) -> Iterator[Piece]:
    """All pieces of a document."""
    raw = text.encode()
    count = piece_count(len(raw), limit)
    return (piece(raw, number, count, where) for number in range(count))


def _cut(raw: memoryview | bytes, number: int, count: int) -> int:
    length = len(raw)
    if number in (0, count):
        return (0, length)[number == count]
    nominal = length * number // count
    window = bytes(raw[nominal : min(nominal + _LOOK_AHEAD, length * (number + 1) // count)])
    spaces: Sequence[int] = [at for at in map(window.find, (b" ", b"\n")) if at >= 0]
    if spaces:
        return nominal + min(spaces)
    # Inside a word as long as that: before the next byte that is no continuation of a character.
    return nominal + next((at for at, byte in enumerate(window) if byte & 0xC0 != 0x80), len(window))
