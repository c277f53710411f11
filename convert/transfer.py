"""Move bytes between files past the page cache, where the system allows it.

A checkpoint is read once and written once, so caching it buys nothing, and filling the cache can cost more than the
disk does: on a virtual machine whose memory is handed out on first touch, `cp` spends its time there.

Direct I/O wants whole blocks: offsets, lengths and addresses in multiples of BLOCK. `Writer` therefore keeps the odd
bytes at the ends of what it is given until it is flushed, and `Piece` holds bytes at the same distance from a block's
start in memory as in their file. Where a file system refuses direct I/O, plain reads and writes are used.
"""

import contextlib
import errno
import mmap
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from headpool.errors import RequestError

BLOCK = 4096
PIECE = 1 << 23
"""Bytes moved at a time."""

_DIRECT = getattr(os, "O_DIRECT", 0)
_PROBE = getattr(os, "RWF_NOWAIT", 0)


@dataclass(frozen=True)
class Piece:
    """`count` bytes of a block-aligned buffer, from `phase` (less than BLOCK) on."""

    buffer: mmap.mmap
    phase: int
    count: int

    @property
    def view(self) -> memoryview:
        return memoryview(self.buffer)[self.phase : self.phase + self.count]

    def shifted(self, phase: int, buffers: "Buffers") -> "Piece":
        """The same bytes at another distance from a block's start."""
        return self if phase == self.phase else piece_of(self.view, phase, buffers)


class Buffers:
    """Block-aligned memory that one thread uses again and again: memory that is new to the process is slow on its
    first touch.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._used: list[mmap.mmap] = []

    def take(self, count: int) -> mmap.mmap:
        """A buffer that holds `count` bytes at any phase, the caller's until `recycle`."""
        fitting = next((one for one in self._free if len(one) >= count + 2 * BLOCK), None)
        if fitting is None:
            fitting = mmap.mmap(-1, count + 2 * BLOCK)
        else:
            self._free.remove(fitting)
        self._used.append(fitting)
        return fitting

    def recycle(self) -> None:
        """Everything taken so far is free again."""
        self._free = sorted(self._free + self._used, key=len)
        self._used = []


def piece_of(view: memoryview, phase: int, buffers: Buffers) -> Piece:
    """A copy of any bytes as a piece."""
    piece = Piece(buffers.take(len(view)), phase, len(view))
    piece.view[:] = view
    return piece


class _File:
    """A file that is open twice: plainly, and past the page cache where that works."""

    def __init__(self, path: Path, flags: int) -> None:
        self.path = path
        self._plain = os.open(path, flags)
        self._direct: int | None = None
        if _DIRECT:
            with contextlib.suppress(OSError):
                self._direct = os.open(path, flags | _DIRECT)

    def close(self) -> None:
        os.close(self._plain)
        if self._direct is not None:
            os.close(self._direct)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Reader(_File):
    """A source file. Reads from any thread."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, os.O_RDONLY)
        if _PROBE:
            os.posix_fadvise(self._plain, 0, 0, os.POSIX_FADV_RANDOM)  # a probe must not start reading ahead

    def read(self, begin: int, count: int, buffers: Buffers) -> Piece:
        """The bytes [begin, begin + count), in memory from `buffers`.

        Raises RequestError when the file has become too short for that.
        """
        piece = Piece(buffers.take(count), begin % BLOCK, count)
        if not self._read_direct(begin, piece) and not _fill(self._plain, piece.view, begin):
            raise RequestError(f"{self.path.name} became shorter while it was read")
        return piece

    def _read_direct(self, begin: int, piece: Piece) -> bool:
        """Read whole blocks; false where that is refused or comes to the file's end too early."""
        if self._direct is None or self._is_cached(begin, piece.count):
            return False
        wanted = piece.phase + piece.count
        blocks = memoryview(piece.buffer)[: -(-wanted // BLOCK) * BLOCK]
        try:
            return os.preadv(self._direct, [blocks], begin - piece.phase) >= wanted
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False

    def _is_cached(self, begin: int, count: int) -> bool:
        """Whether the page cache seems to hold a range, told by its first and last byte: then the disk need not be
        asked.
        """
        byte = bytearray(1)
        try:
            return all(os.preadv(self._plain, [byte], at, _PROBE) for at in (begin, begin + count - 1) if _PROBE)
        except OSError:
            return False


class Writer(_File):
    """A file of the result, of its full size already. Writes from any thread; `flush` puts it on the disk."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, os.O_RDWR)
        self._kept: list[tuple[int, bytes]] = []
        self._lock = threading.Lock()

    def write(self, to: int, piece: Piece, buffers: Buffers) -> None:
        """Put a piece's bytes at offset `to`.

        Direct and cached writes to neighbouring blocks at one time are not safe on every file system: what does not
        fill a block is kept for `flush`.
        """
        head = min(-to % BLOCK, piece.count)
        tail = head + (piece.count - head) // BLOCK * BLOCK
        if self._direct is not None and tail > head:
            piece = piece.shifted(to % BLOCK, buffers)
        if not self._write_direct(to + head, piece.view[head:tail]):
            _write_all(self._plain, to, piece.view)
            return
        with self._lock:
            self._kept += [(to, bytes(piece.view[:head])), (to + tail, bytes(piece.view[tail:]))]

    def _write_direct(self, to: int, blocks: memoryview) -> bool:
        """Write whole blocks; false where the file system refuses that."""
        if self._direct is None:
            return False
        try:
            _write_all(self._direct, to, blocks)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        return True

    def flush(self) -> None:
        """Write what was kept, and have everything on the disk. Only when no other thread writes any more."""
        for to, kept in self._kept:
            _write_all(self._plain, to, memoryview(kept))
        self._kept.clear()
        os.fsync(self._plain)


def _fill(descriptor: int, view: memoryview, begin: int) -> bool:
    while view:
        piece = os.pread(descriptor, len(view), begin)
        if not piece:
            return False
        view[: len(piece)] = piece
        view, begin = view[len(piece) :], begin + len(piece)
    return True


def _write_all(descriptor: int, to: int, view: memoryview) -> None:
    while view:
        written = os.pwrite(descriptor, view, to)
        view, to = view[written:], to + written
