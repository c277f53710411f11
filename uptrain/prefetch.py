"""The next batches are made while the step runs."""

import queue
import threading
from collections.abc import Mapping
from typing import Any, Self

from headpool.uptrain.stream import Batch, Stream

_PATIENCE_SECONDS = 10.0
"""How long the end of the process waits for a thread that is reading."""


class Prefetcher:
    """A Stream whose next batches are made by a thread while the step runs. Its state is that of the batches handed
    out, not of those made ahead. A context manager; what the thread raises comes out of `next`.
    """

    def __init__(self, stream: Stream, *, depth: int = 2) -> None:
        self._stream = stream
        self._depth = depth
        self._state = stream.state_dict()
        self._worker: _Worker | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._worker is not None:
            self._worker.stop(_PATIENCE_SECONDS)

    def next(self) -> Batch:
        """As Stream.next."""
        if self._worker is None:
            self._worker = _Worker(self._stream, self._depth)
        batch, self._state = self._worker.take()
        return batch

    def state_dict(self) -> dict[str, Any]:
        """As Stream.state_dict, as if nothing had been made ahead."""
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As Stream.load_state_dict; drops what was made ahead."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None
        self._stream.load_state_dict(state)
        self._state = self._stream.state_dict()


class _Worker:
    """A thread that keeps up to `depth` batches ready, each with the stream's state after it."""

    def __init__(self, stream: Stream, depth: int) -> None:
        self._stream = stream
        self._made: queue.SimpleQueue[tuple[Batch, dict[str, Any]] | BaseException] = queue.SimpleQueue()
        self._room = threading.Semaphore(depth)
        self._stopped = False
        # A daemon: reading that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def take(self) -> tuple[Batch, dict[str, Any]]:
        """The next batch and the state after it. Raises what the thread died of."""
        made = self._made.get()
        if isinstance(made, BaseException):
            self._made.put(made)  # for whoever asks again
            raise made
        self._room.release()
        return made

    def stop(self, timeout: float | None = None) -> None:
        """Wait until the thread has let go of the stream, at most `timeout` seconds."""
        self._stopped = True
        self._room.release()
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            while self._room.acquire() and not self._stopped:
                batch = self._stream.next()
                self._made.put((batch, self._stream.state_dict()))
        except BaseException as error:  # comes out of `take`, in the thread that can act on it
            self._made.put(error)
