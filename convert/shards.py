"""Write the planned files: a few threads copy raw bytes and compute projections, in the order of the source's bytes."""

import contextlib
import queue
import resource
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from headpool.convert.plan import OutputTensor, Plan, Shard, Unit
from headpool.convert.transfer import PIECE, Buffers, Reader, Writer
from headpool.headers import BITS

WORKERS = 2
"""While one waits for a read or pools, the other's write keeps the disk busy; each holds one unit's weights at most."""

Progress = Callable[[int, int], None]
"""Called with the source bytes dealt with so far and in all, from any thread, one call at a time."""


class Stopped(Exception):  # noqa: N818 - nothing is wrong with the thread that raises it
    """Another thread failed or was interrupted; there is no use in going on."""


@dataclass(frozen=True, slots=True)
class Move:
    """Bytes of a source file to put into a file of the result.

    `cast` is the tensor that they belong to where its values change their dtype on the way.
    """

    path: Path
    begin: int
    count: int
    file: str
    to: int
    cast: OutputTensor | None = None


class Job:
    """A conversion under way: its open files, how far it is, and whether to stop. A `with` block closes the files."""

    def __init__(self, plan: Plan, staging: Path, seed: int, prepared: Path | None, progress: Progress) -> None:
        self.plan = plan
        self.prepared = prepared
        self.seed = seed
        self._stack = ExitStack()
        self._readers: dict[Path, Reader] = {}
        self._lock = threading.Lock()
        self._progress = progress
        self._done, self._total = 0, sum(record.nbytes for record in plan.source.tensors.values())
        self._stop = threading.Event()
        _allow_open_files(4 * len(plan.shards) + 64)
        self.writers = {shard.file: self._stack.enter_context(Writer(staging / shard.file)) for shard in plan.shards}
        self.outputs = {
            t.name: (self.writers[shard.file], t) for shard in plan.shards for t in shard.tensors if t.computed
        }

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


def _allow_open_files(count: int) -> None:
    """Raise this process's limit where it can be: every file is open twice."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        limit = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def write_headers(plan: Plan, staging: Path) -> None:
    """Create every weight file at its full size with its header in place, and the index."""
    for shard in plan.shards:
        with (staging / shard.file).open("wb") as stream:
            stream.write(shard.header)
            stream.truncate(shard.nbytes)
    if (index := plan.index()) is not None:
        (staging / "model.safetensors.index.json").write_bytes(index)


def layer_file(layer: int) -> str:
    """What the changed tensors of a layer are called in the directory `prepared`."""
    return f"layer-{layer:04d}.safetensors"


def write_tensors(plan: Plan, staging: Path, *, seed: int, progress: Progress, prepared: Path | None = None) -> None:
    """Fill the files that `write_headers` made; with `prepared`, from what was computed before and lies there.

    Raises RequestError naming a tensor that holds NaN or infinity, or that does not fit the output dtype.
    """
    tasks: queue.SimpleQueue[Move | Unit] = queue.SimpleQueue()
    for task in _tasks(plan):
        tasks.put(task)
    with Job(plan, staging, seed, prepared, progress) as job, ThreadPoolExecutor(WORKERS) as pool:
        workers = [pool.submit(_work, tasks, job) for _ in range(WORKERS)]
        try:
            wait(workers)
        except BaseException:
            job.stop()
            raise
        for failure in sorted(filter(None, (worker.exception() for worker in workers)), key=_is_stopped):
            raise failure
        for writer in job.writers.values():
            writer.flush()


def _is_stopped(error: BaseException) -> bool:
    return isinstance(error, Stopped)


def _tasks(plan: Plan) -> list[Move | Unit]:
    """All that is to be done, in the order of the source's bytes: computing and copying take turns at the disk."""
    places: list[tuple[Path, int, Move | Unit]] = [(move.path, move.begin, move) for move in _moves(plan.shards)]
    for unit in plan.units:
        first = plan.source.tensors[plan.layout.names(unit.layer, unit.parts[0])[0]]
        places.append((first.path, first.offset, unit))
    return [task for *_, task in sorted(places, key=lambda place: place[:2])]


def _work(tasks: "queue.SimpleQueue[Move | Unit]", job: Job) -> None:
    buffers = Buffers()
    try:
        with contextlib.suppress(queue.Empty):
            while True:
                task = tasks.get_nowait()
                if isinstance(task, Move) and task.cast is None:
                    _copy(task, job, buffers)
                else:
                    from headpool.convert import compute  # torch loads while the other threads copy

                    compute.run(task, job, buffers)
                buffers.recycle()
    except BaseException:
        job.stop()
        raise


def _copy(move: Move, job: Job, buffers: Buffers) -> None:
    piece = job.reader(move.path).read(move.begin, move.count, buffers)
    job.writers[move.file].write(move.to, piece, buffers)
    job.advance(move.count)


def _moves(shards: tuple[Shard, ...]) -> Iterator[Move]:
    """Everything that is copied or cast, in pieces."""
    for shard in shards:
        for run in _runs(shard):
            first, count = run[0], sum(tensor.source.nbytes for tensor in run)
            cast = first if first.dtype != first.source.dtype else None
            for begin in range(0, count, PIECE):
                to = first.offset + begin * BITS[first.dtype] // BITS[first.source.dtype]
                yield Move(
                    first.source.path,
                    first.source.offset + begin,
                    min(PIECE, count - begin),
                    shard.file,
                    to,
                    cast,
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
