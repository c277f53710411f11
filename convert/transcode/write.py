"""Write a transcoded checkpoint, tensor by tensor, for a conversion to read."""

import contextlib
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from headpool.convert.transcode.evaluate import Evaluation, evaluate
from headpool.convert.transcode.expressions import Held
from headpool.convert.transcode.plan import Target, Transcript
from headpool.destination import locked, reporting_os_errors
from headpool.errors import RequestError
from headpool.headers import FLOAT_DTYPES, TensorRecord
from headpool.tensors import TORCH, read_tensor

Progress = Callable[[int, int], None]
"""Called with the bytes written so far and in all."""

_KEPT = 2
"""Source tensors that are held on to: queries, keys and values lie in one, and come one after the other."""


@contextlib.contextmanager
def written(transcript: Transcript, directory: Path, progress: Progress) -> Iterator[None]:
    """While the block runs, the transcript's files lie in `directory`, which is gone afterwards.

    Nothing there can be loaded: it has no config. Raises RequestError naming a tensor that holds NaN or infinity, and
    HeadpoolError where the disk fills up.
    """
    with locked(directory, f"another process is writing {directory}"):
        try:
            with reporting_os_errors(directory):
                _write(transcript, directory, progress)
            yield
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def _write(transcript: Transcript, directory: Path, progress: Progress) -> None:
    """Files are as old as the source's newest, so that an alignment that was killed knows them again."""
    newest = max(record.path.stat().st_mtime_ns for record in transcript.source.tensors.values())
    reader = _Reader(transcript)
    done, total = 0, sum(record.nbytes for record in transcript.planned.tensors.values())
    for file, header in transcript.headers.items():
        with (directory / file).open("wb") as stream:
            stream.write(header)
            for target in transcript.targets[file]:
                stream.write(_bytes(reader.evaluated(target)))
                done += target.record.nbytes
                progress(done, total)
        os.utime(directory / file, ns=(newest, newest))


class _Reader:
    """Computes targets from the source's tensors, the last few of which it keeps."""

    def __init__(self, transcript: Transcript) -> None:
        self._transcript = transcript
        self._kept: OrderedDict[str, Tensor] = OrderedDict()

    def evaluated(self, target: Target) -> Tensor:
        transcript, get = self._transcript, self._transcript.get
        evaluation = Evaluation(
            read=lambda held: self._read(held, target.layer),
            shape=transcript.shape,
            switched=lambda field: bool(get(field)),
            layer=target.layer,
            heads=transcript.transcoding.number("num_attention_heads", get),
            rotary=transcript.transcoding.rotary(get),
            dtype=TORCH[FLOAT_DTYPES[transcript.dtype]],
        )
        tensor = evaluate(evaluation, target.value).to(TORCH[target.record.dtype])
        if tuple(tensor.shape) != target.record.shape:
            raise AssertionError(f"{target.record.name}: planned {target.record.shape}, made {tuple(tensor.shape)}")
        return tensor

    def _read(self, held: Held, layer: int | None) -> Tensor | None:
        record = self._transcript.find(held, layer)
        if record is None:
            return None
        if record.name not in self._kept:
            self._kept[record.name] = _finite(record)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return self._kept[record.name]


def _finite(record: TensorRecord) -> Tensor:
    tensor = read_tensor(record)
    if tensor.numel() and not all(bound.isfinite() for bound in torch.aminmax(tensor)):
        raise RequestError(f"tensor {record.name!r} holds NaN or infinity")
    return tensor


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data
