"""A work directory: what a killed run left of itself, if it was the same run."""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from headpool.errors import RequestError

_RUN = "run.json"


class Work:
    """A directory that belongs to one run, told by what it depends on (`run`: JSON values).

    What lies there of another run is cleared. One process at a time: RequestError for a second one, as long as the
    first lives, and for a directory that holds anything else.
    """

    def __init__(self, directory: Path, run: Mapping[str, Any]) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise RequestError(f"another process is working in {directory}") from None
        digest = hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()
        if self._read_run() != digest:
            if any(directory.iterdir()) and not any(self.path(name).exists() for name in (_RUN, f"{_RUN}.partial")):
                os.close(self._lock)
                raise RequestError(f"{directory} holds something else; choose another work directory")
            self._clear()
            with self.replacing(_RUN) as path:
                path.write_text(json.dumps({"sha256": digest, "run": dict(run)}, indent=2, sort_keys=True) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    def path(self, name: str) -> Path:
        return self.directory / name

    @contextlib.contextmanager
    def replacing(self, name: str) -> Iterator[Path]:
        """A path to write to; what was written is on the disk under `name` once the block ends well."""
        partial = self.directory / f"{name}.partial"
        yield partial
        self.publish(name)

    def publish(self, name: str) -> None:
        """Have `name`.partial on the disk, and then call it `name`."""
        partial = self.directory / f"{name}.partial"
        with partial.open("rb") as stream:
            os.fsync(stream.fileno())
        partial.rename(self.directory / name)
        os.fsync(self._lock)

    def save(self, name: str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Keep tensors, and facts (JSON values) about them, under `name`."""
        held = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        with self.replacing(name) as path:
            save_file(held, path, metadata={"facts": json.dumps(facts)})

    def facts(self, name: str) -> dict[str, Any] | None:
        """The facts that were kept under `name`, without its tensors; None where nothing was."""
        if not self.path(name).is_file():
            return None
        with safe_open(self.path(name), framework="pt") as file:
            facts: dict[str, Any] = json.loads(file.metadata()["facts"])
            return facts

    def load(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """What was kept under `name`; None where nothing was."""
        facts = self.facts(name)
        if facts is None:
            return None
        with safe_open(self.path(name), framework="pt") as file:
            return {key: file.get_tensor(key).clone() for key in file.keys()}, facts  # noqa: SIM118

    def _read_run(self) -> str | None:
        try:
            held = json.loads(self.path(_RUN).read_text())
        except (OSError, ValueError):
            return None
        return held.get("sha256") if isinstance(held, dict) else None

    def _clear(self) -> None:
        for entry in self.directory.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()


class Rows:
    """A float array [N, ...] of which rows are read and written, in memory or in a file.

    A file is read and written without mapping it: mapped pages would count as this process's memory.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, path: Path | None = None, *, new: bool = True
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self._memory = torch.empty(shape, dtype=dtype) if path is None else None
        self._row_bytes = dtype.itemsize * torch.Size(shape[1:]).numel()
        self._file: int | None = None
        if path is not None:
            self._file = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_TRUNC if new else 0), 0o644)

    def __getitem__(self, rows: slice) -> Tensor:
        if self._memory is not None:
            return self._memory[rows]
        assert self._file is not None
        held = torch.empty((rows.stop - rows.start, *self.shape[1:]), dtype=self.dtype)
        view = _bytes(held)
        at = rows.start * self._row_bytes
        while view:
            count = os.preadv(self._file, [view], at)
            if not count:
                raise RequestError("a file of the work directory became shorter while it was read")
            view, at = view[count:], at + count
        return held

    def __setitem__(self, rows: slice, values: Tensor) -> None:
        if self._memory is not None:
            self._memory[rows] = values
            return
        assert self._file is not None
        view = _bytes(values.to("cpu", self.dtype).contiguous())
        at = rows.start * self._row_bytes
        while view:
            count = os.pwrite(self._file, view, at)
            view, at = view[count:], at + count

    def close(self) -> None:
        self._memory = None
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.flatten().view(torch.uint8).numpy().data
