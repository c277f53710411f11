"""Write the planned files: threads copy raw bytes while this one pools projections."""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from headpool.convert.plan import OutputTensor, Plan, Shard, Unit
from headpool.convert.pool import Setting, round_once
from headpool.convert.transfer import BLOCK, PIECE, Reader, Writer, allocate, piece_of
from headpool.errors import RequestError
from headpool.headers import BITS, TensorRecord

TORCH = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

COPIERS = 2
"""Threads that copy: while one waits for a read, the other's write keeps the disk busy."""

Progress = Callable[[int, int], None]
"""Called with the source bytes dealt with so far and in all, from any thread, one call at a time."""


class Stopped(Exception):
    """Another thread failed or was interrupted; there is no use in going on."""


@dataclass(frozen=True, slots=True)
class Move:
    """Bytes of a source file to put into a file of the result; `cast` names the tensor whose values change their dtype on the way."""

    path: Path
    begin: int
    count: int
    file: str
    to: int
    cast: OutputTensor | None = None


class Job:
    """A conversion under way: its open files, how far it is, and whether to stop. Leaving the `with` block closes the files."""

    def __init__(self, plan: Plan, staging: Path, progress: Progress) -> None:
        self._stack = ExitStack()
        self._readers: dict[Path, Reader] = {}
        self._lock = threading.Lock()
        self._progress = progress
        self._done, self._total = 0, sum(record.nbytes for record in plan.source.tensors.values())
        self._stop = threading.Event()
        self.writers = {shard.file: self._stack.enter_context(Writer(staging / shard.file)) for shard in plan.shards}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def reader(self, path: Path) -> Reader:
        with self._lock:
            if path not in self._readers:
                self._readers[path] = self._stack.enter_context(Reader(path))
            return self._readers[path]

    def advance(self, nbytes: int) -> None:
        """Note that so many more source bytes are dealt with. Raises Stopped when another thread has called `stop`."""
        if self._stop.is_set():
            raise Stopped
        with self._lock:
            self._done += nbytes
            self._progress(self._done, self._total)

    def stop(self) -> None:
        self._stop.set()


def write_headers(plan: Plan, staging: Path) -> None:
    """Create every weight file at its full size with its header in place, and the index."""
    for shard in plan.shards:
        with (staging / shard.file).open("wb") as stream:
            stream.write(shard.header)
            stream.truncate(shard.nbytes)
    if (index := plan.index()) is not None:
        (staging / "model.safetensors.index.json").write_bytes(index)


def write_tensors(plan: Plan, staging: Path, *, seed: int, progress: Progress) -> None:
    """Fill the files that `write_headers` made.

    Raises RequestError naming a tensor that holds NaN or infinity, or that does not fit the output dtype.
    """
    moves: queue.SimpleQueue[Move] = queue.SimpleQueue()
    for move in _moves(plan.shards):
        moves.put(move)
    with Job(plan, staging, progress) as job, ThreadPoolExecutor(COPIERS) as pool:
        copying = [pool.submit(_copy, moves, job) for _ in range(COPIERS)]
        try:
            _convert(plan, seed, job)
            for copier in copying:
                copier.result()
        except Stopped:
            for copier in copying:
                copier.result()
        except BaseException:
            job.stop()
            raise
        for writer in job.writers.values():
            writer.flush()


def _convert(plan: Plan, seed: int, job: Job) -> None:
    outputs = {t.name: (job.writers[shard.file], t) for shard in plan.shards for t in shard.tensors if t.computed}
    tensors = _Tensors(plan.source.tensors, job)
    for unit in plan.units:
        weights = plan.layout.read(tensors, unit.layer, unit.parts)
        converted = plan.method.apply(weights, unit.kv_heads, Setting(unit.layer, seed, plan.initializer_range))
        for name, tensor in plan.layout.write(converted, unit.layer).items():
            writer, output = outputs[name]
            if tuple(tensor.shape) != output.shape:
                raise AssertionError(f"{name}: planned {output.shape}, computed {tuple(tensor.shape)}")
            _write(tensor, writer, output)
            job.advance(output.source.nbytes)


class _Tensors(Mapping[str, Tensor]):
    """The source's tensors by name, each read when it is asked for; a non-finite one is refused."""

    def __init__(self, records: Mapping[str, TensorRecord], job: Job) -> None:
        self._records = records
        self._job = job

    def __getitem__(self, name: str) -> Tensor:
        record = self._records[name]
        piece = self._job.reader(record.path).read(record.offset, record.nbytes)
        tensor = _tensor(piece.view, record.dtype).view(record.shape)
        if tensor.numel() and not all(bound.isfinite() for bound in torch.aminmax(tensor)):
            raise RequestError(f"tensor {name!r} holds NaN or infinity")
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, name: object) -> bool:
        return name in self._records


def _copy(moves: "queue.SimpleQueue[Move]", job: Job) -> None:
    buffer = allocate(PIECE)
    try:
        for move in _taken(moves):
            piece = job.reader(move.path).read(move.begin, move.count, buffer)
            if move.cast is not None:
                values = _rounded(_tensor(piece.view, move.cast.source.dtype), move.cast)
                piece = piece_of(_bytes(values), move.to % BLOCK)
            job.writers[move.file].write(move.to, piece)
            job.advance(move.count)
    except BaseException:
        job.stop()
        raise


def _taken(moves: "queue.SimpleQueue[Move]") -> Iterator[Move]:
    """Moves off the shared queue until it is empty."""
    with contextlib.suppress(queue.Empty):
        while True:
            yield moves.get_nowait()


def _moves(shards: tuple[Shard, ...]) -> Iterator[Move]:
    """Everything that is copied or cast, in pieces."""
    for shard in shards:
        for run in _runs(shard):
            first, count = run[0], sum(tensor.source.nbytes for tensor in run)
            cast = first if first.dtype != first.source.dtype else None
            for begin in range(0, count, PIECE):
                to = first.offset + begin * BITS[first.dtype] // BITS[first.source.dtype]
                yield Move(
                    first.source.path, first.source.offset + begin, min(PIECE, count - begin), shard.file, to, cast
                )


def _runs(shard: Shard) -> Iterator[list[OutputTensor]]:
    """Tensors that are neighbours in both files move together; one to cast moves alone."""
    run: list[OutputTensor] = []
    for tensor in shard.tensors:
        if tensor.computed:
            continue
        if run and not _continues(run[-1], tensor):
            yield run
            run = []
        run.append(tensor)
    if run:
        yield run


def _continues(last: OutputTensor, tensor: OutputTensor) -> bool:
    return (
        tensor.source.path == last.source.path
        and tensor.source.offset == last.source.offset + last.source.nbytes
        and tensor.offset == last.offset + last.nbytes
        and last.dtype == last.source.dtype
        and tensor.dtype == tensor.source.dtype
    )


def _write(tensor: Tensor, writer: Writer, output: OutputTensor) -> None:
    """Round and write in pieces, so that what rounding needs on the way stays small."""
    to = output.offset
    for values in tensor.contiguous().flatten().split(PIECE // tensor.element_size()):
        view = _bytes(_rounded(values, output))
        writer.write(to, piece_of(view, to % BLOCK))
        to += len(view)


def _rounded(values: Tensor, output: OutputTensor) -> Tensor:
    """In the output dtype. RequestError when a finite value does not fit it."""
    result = round_once(values, TORCH[output.dtype])
    if output.dtype != output.source.dtype and bool((result.isinf() & values.isfinite()).any()):
        raise RequestError(
            f"tensor {output.name!r} has values up to {values.abs().max().item():g}, which {result.dtype} cannot hold"
        )
    return result


def _tensor(view: memoryview, dtype: str) -> Tensor:
    return torch.frombuffer(view, dtype=TORCH[dtype]) if view else torch.empty(0, dtype=TORCH[dtype])


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.flatten().view(torch.uint8).numpy())
