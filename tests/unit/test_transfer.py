"""Bytes arrive where they should, past the page cache or through it, whatever the alignment."""

import errno
import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headpool.convert import transfer
from headpool.convert.transfer import BLOCK, Buffers, Reader, Writer, piece_of
from headpool.errors import RequestError

SIZE = 5 * BLOCK + 123
CONTENT = bytes(i * 31 % 251 for i in range(SIZE))


def refusing(call: Any) -> Any:
    """A system call that refuses what direct I/O asks of it, as some file systems do only when it comes to it."""

    def refused(descriptor: int, *arguments: Any) -> Any:
        import fcntl

        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return call(descriptor, *arguments)

    return refused


@pytest.fixture(params=["direct", "no O_DIRECT", "refused when used"])
def files(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    if request.param == "no O_DIRECT":
        monkeypatch.setattr(transfer, "_DIRECT", 0)
    if request.param == "refused when used":
        monkeypatch.setattr(os, "preadv", refusing(os.preadv))
        monkeypatch.setattr(os, "pwrite", refusing(os.pwrite))
    (tmp_path / "source").write_bytes(CONTENT)
    yield tmp_path
    if request.param == "direct":
        with Reader(tmp_path / "source") as reader:
            assert reader._direct is not None, "this file system has no direct I/O: the test has lost its subject"


offsets = st.integers(0, SIZE) | st.sampled_from([0, BLOCK, 2 * BLOCK, BLOCK - 1, BLOCK + 1])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(begin=offsets, end=offsets, to=st.integers(0, 3 * BLOCK), reuse=st.booleans())
def test_any_range_to_any_place(files: Path, begin: int, end: int, to: int, reuse: bool) -> None:
    begin, end = min(begin, end), max(begin, end)
    target = files / "target"
    before = bytes(251) * (to + SIZE)
    target.write_bytes(before)
    buffers = Buffers()
    if reuse:
        buffers.take(SIZE)[:] = bytes(7 for _ in range(SIZE + 2 * BLOCK))
        buffers.recycle()
    with Reader(files / "source") as reader, Writer(target) as writer:
        piece = reader.read(begin, end - begin, buffers)
        assert bytes(piece.view) == CONTENT[begin:end]
        writer.write(to, piece, buffers)
        assert sum(len(kept) for _, kept in writer._kept) < 2 * BLOCK, "only what does not fill a block is held back"
        writer.flush()
    expected = before[:to] + CONTENT[begin:end] + before[to + end - begin :]
    assert target.read_bytes() == expected


def test_neighbours_written_from_several_threads(files: Path) -> None:
    target = files / "target"
    content = CONTENT * 40
    with target.open("wb") as stream:
        stream.truncate(len(content))
    cuts = [0, *range(777, len(content), 9001), len(content)]
    with Writer(target) as writer, ThreadPoolExecutor(8) as pool:
        pieces = [(a, content[a:b]) for a, b in itertools.pairwise(cuts)]
        list(
            pool.map(
                lambda one: writer.write(one[0], piece_of(memoryview(one[1]), one[0] % 7, Buffers()), Buffers()), pieces
            )
        )
        writer.flush()
    assert target.read_bytes() == content


def test_a_file_that_is_too_short(files: Path) -> None:
    with Reader(files / "source") as reader:
        for begin, count in [(SIZE - 5, 6), (SIZE + BLOCK, 1), (0, SIZE + 1)]:
            with pytest.raises(RequestError, match="source became shorter"):
                reader.read(begin, count, Buffers())
        assert bytes(reader.read(SIZE - 5, 5, Buffers()).view) == CONTENT[-5:]


def test_other_errors_come_through(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (files / "target").write_bytes(bytes(3 * BLOCK))
    monkeypatch.setattr(os, "pwrite", full)
    with Writer(files / "target") as writer, pytest.raises(OSError, match="No space"):
        writer.write(0, piece_of(memoryview(bytes(2 * BLOCK)), 0, Buffers()), Buffers())
        writer.flush()


def test_buffers_are_shared_out_once_and_used_again() -> None:
    buffers = Buffers()
    first, second = buffers.take(100), buffers.take(100)
    assert first is not second
    buffers.recycle()
    again = [buffers.take(100), buffers.take(50), buffers.take(10)]
    assert {id(first), id(second)} == {id(one) for one in again[:2]}
    assert len(buffers.take(10 * BLOCK)) >= 10 * BLOCK
