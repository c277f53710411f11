"""Write the planned files: raw bytes copied inside the kernel, pooled projections computed beside it.

Source pages are never mapped: pread and copy_file_range keep them out of this process's resident memory.
"""

import errno
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from headpool.convert.plan import OutputTensor, Plan, Shard, Unit
from headpool.convert.pool import Setting, round_once
from headpool.errors import RequestError
from headpool.headers import BITS, TensorRecord

TORCH = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PIECE = 1 << 24
"""Bytes moved at a time: what a copy reports progress by, and what a cast holds in memory."""

_CANNOT_COPY_IN_KERNEL = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)

Progress = Callable[[int, int], None]
"""Called with the source bytes dealt with so far and in all, from either thread, one call at a time."""


class Stopped(Exception):
    """The other thread failed or was interrupted; there is no use in going on."""


class Files:
    """The open files of a conversion, and the flag that ends it early. Close by leaving the `with` block."""

    def __init__(self, staging: Path, total: int, progress: Progress) -> None:
        self._staging = staging
        self._progress = progress
        self._done, self._total = 0, total
        self._stack = ExitStack()
        self._lock = threading.Lock()
        self._descriptors: dict[Path, int] = {}
        self.stop = threading.Event()

    def __enter__(self) -> "Files":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def source(self, record: TensorRecord) -> int:
        return self._open(record.path, os.O_RDONLY)

    def output(self, file: str) -> int:
        return self._open(self._staging / file, os.O_RDWR | os.O_CREAT)

    def moved(self, nbytes: int) -> None:
        if self.stop.is_set():
            raise Stopped
        with self._lock:
            self._done += nbytes
            self._progress(self._done, self._total)

    def _open(self, path: Path, flags: int) -> int:
        with self._lock:
            if path not in self._descriptors:
                self._descriptors[path] = os.open(path, flags, 0o644)
                self._stack.callback(os.close, self._descriptors[path])
            return self._descriptors[path]


class _Tensors(Mapping[str, Tensor]):
    """The source's tensors by name, each read when it is asked for; a non-finite one is refused."""

    def __init__(self, records: Mapping[str, TensorRecord], files: Files) -> None:
        self._records = records
        self._files = files

    def __getitem__(self, name: str) -> Tensor:
        record = self._records[name]
        tensor = _read(self._files.source(record), record.offset, record.nbytes, record).view(record.shape)
        if tensor.numel() and not all(bound.isfinite() for bound in torch.aminmax(tensor)):
            raise RequestError(f"tensor {name!r} holds NaN or infinity")
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, name: object) -> bool:
        return name in self._records


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

    Copies run in a thread of their own and flush each file when it is done, while this one pools. Raises RequestError
    naming a tensor that holds NaN or infinity, or that does not fit the output dtype.
    """
    total = sum(record.nbytes for record in plan.source.tensors.values())
    with Files(staging, total, progress) as files, ThreadPoolExecutor(2) as pool:
        copying = pool.submit(_copy_all, plan.shards, files, pool)
        try:
            with _stopping(files):
                outputs = {t.name: (shard.file, t) for shard in plan.shards for t in shard.tensors if t.computed}
                tensors = _Tensors(plan.source.tensors, files)
                for unit in plan.units:
                    setting = Setting(unit.layer, seed, plan.initializer_range)
                    _convert(unit, plan, tensors, setting, outputs, files)
        except Stopped:
            pass
        copying.result()


@contextmanager
def _stopping(files: Files) -> Iterator[None]:
    try:
        yield
    except BaseException:
        files.stop.set()
        raise


def _convert(
    unit: Unit,
    plan: Plan,
    tensors: Mapping[str, Tensor],
    setting: Setting,
    outputs: Mapping[str, tuple[str, OutputTensor]],
    files: Files,
) -> None:
    weights = plan.layout.read(tensors, unit.layer, unit.parts)
    converted = plan.method.apply(weights, unit.kv_heads, setting)
    for name, tensor in plan.layout.write(converted, unit.layer).items():
        file, output = outputs[name]
        if tuple(tensor.shape) != output.shape:
            raise AssertionError(f"{name}: planned {output.shape}, computed {tuple(tensor.shape)}")
        _write(files.output(file), output.offset, _rounded(tensor, output))
        files.moved(output.source.nbytes)


def _copy_all(shards: tuple[Shard, ...], files: Files, pool: ThreadPoolExecutor) -> None:
    """Copy or cast every tensor that is not computed; a second thread flushes the files that are done."""
    with _stopping(files):
        flushes = []
        for shard in shards:
            target = files.output(shard.file)
            for run in _runs(shard):
                if run[0].dtype == run[0].source.dtype:
                    _copy(run, target, files)
                else:
                    _cast(run[0], target, files)
            flushes.append(pool.submit(os.fsync, target))
        for flush in flushes:
            flush.result()


def _runs(shard: Shard) -> Iterator[list[OutputTensor]]:
    """Neighbours in both files, so that one call copies them; a tensor to cast stands alone."""
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


def _copy(run: list[OutputTensor], target: int, files: Files) -> None:
    source, begin, to = files.source(run[0].source), run[0].source.offset, run[0].offset
    total = sum(tensor.nbytes for tensor in run)
    done = 0
    while done < total:
        moved = _copy_piece(source, begin + done, target, to + done, min(PIECE, total - done))
        if moved == 0:
            raise RequestError(f"{run[0].source.path.name} became shorter while it was read")
        done += moved
        files.moved(moved)


def _copy_piece(source: int, begin: int, target: int, to: int, count: int) -> int:
    if hasattr(os, "copy_file_range"):
        try:
            return os.copy_file_range(source, target, count, begin, to)
        except OSError as error:
            if error.errno not in _CANNOT_COPY_IN_KERNEL:
                raise
    piece = os.pread(source, count, begin)
    _write_all(target, to, memoryview(piece))
    return len(piece)


def _cast(output: OutputTensor, target: int, files: Files) -> None:
    record = output.source
    width, source = BITS[record.dtype] // 8, files.source(record)
    for begin in range(0, record.nbytes, PIECE):
        count = min(PIECE, record.nbytes - begin)
        piece = _read(source, record.offset + begin, count, record)
        _write(target, output.offset + begin // width * (BITS[output.dtype] // 8), _rounded(piece, output))
        files.moved(count)


def _rounded(values: Tensor, output: OutputTensor) -> Tensor:
    """In the output dtype. RequestError when a finite value does not fit it."""
    result = round_once(values, TORCH[output.dtype])
    if output.dtype != output.source.dtype and bool((result.isinf() & values.isfinite()).any()):
        raise RequestError(
            f"tensor {output.name!r} has values up to {values.abs().max().item():g}, which {result.dtype} cannot hold"
        )
    return result


def _read(source: int, begin: int, count: int, record: TensorRecord) -> Tensor:
    buffer = bytearray(count)
    view, done = memoryview(buffer), 0
    while done < count:
        got = os.preadv(source, [view[done:]], begin + done)
        if got == 0:
            raise RequestError(f"{record.path.name} became shorter while it was read (tensor {record.name!r})")
        done += got
    return torch.frombuffer(buffer, dtype=TORCH[record.dtype]) if count else torch.empty(0, dtype=TORCH[record.dtype])


def _write(target: int, to: int, tensor: Tensor) -> None:
    flat = tensor.contiguous().flatten()
    _write_all(target, to, memoryview(flat.view(torch.uint8).numpy()))


def _write_all(target: int, to: int, view: memoryview) -> None:
    while view:
        written = os.pwrite(target, view, to)
        view, to = view[written:], to + written
