"""What has to be computed on the way: projections with fewer heads, and values in another dtype."""

from collections.abc import Iterator, Mapping

import torch
from safetensors.torch import load_file
from torch import Tensor

from headpool.convert.plan import OutputTensor, Plan, Unit
from headpool.convert.pool import APPLY, Setting
from headpool.convert.shards import Job, Move, layer_file
from headpool.convert.transfer import BLOCK, PIECE, Buffers, Writer, piece_of
from headpool.errors import RequestError
from headpool.headers import FLOAT_DTYPES
from headpool.rounding import round_once
from headpool.tensors import TORCH


def run(task: Unit | Move, job: Job, buffers: Buffers) -> None:
    """Do a task of a conversion in the calling thread.

    Raises RequestError naming a tensor that holds NaN or infinity, or that does not fit the output dtype.
    """
    if isinstance(task, Unit):
        _convert(task, job, buffers)
    else:
        _cast(task, job, buffers)


def _convert(unit: Unit, job: Job, buffers: Buffers) -> None:
    converted = _prepared(unit, job) if job.plan.method.aligned else _pooled(unit, job, buffers)
    for name, tensor in converted.items():
        writer, output = job.outputs[name]
        if tuple(tensor.shape) != output.shape:
            raise AssertionError(f"{name}: planned {output.shape}, computed {tuple(tensor.shape)}")
        _write(tensor, writer, output, buffers)
        job.advance(output.source.nbytes)


def _pooled(unit: Unit, job: Job, buffers: Buffers) -> dict[str, Tensor]:
    plan = job.plan
    weights = plan.layout.read(_Tensors(job, buffers), unit.layer, unit.parts)
    pooled = APPLY[plan.method.name](weights, unit.kv_heads, setting_of(plan, unit.layer, job.seed))
    calibrated = job.prepared is not None and "k" in unit.parts and unit.layer in plan.gained
    return plan.layout.write(pooled, unit.layer) | (_prepared(unit, job) if calibrated else {})


def setting_of(plan: Plan, layer: int, seed: int) -> Setting:
    """What a data-free method may know of a layer besides its weights."""
    dtype = TORCH[FLOAT_DTYPES[plan.output_dtype]] if plan.output_dtype else None
    return Setting(layer, seed, plan.initializer_range, dtype)


def _prepared(unit: Unit, job: Job) -> dict[str, Tensor]:
    assert job.prepared is not None
    tensors: dict[str, Tensor] = load_file(job.prepared / layer_file(unit.layer))
    return tensors


class _Tensors(Mapping[str, Tensor]):
    """The source's tensors by name, each read when it is asked for; a non-finite one is refused."""

    def __init__(self, job: Job, buffers: Buffers) -> None:
        self._records = job.plan.source.tensors
        self._job = job
        self._buffers = buffers

    def __getitem__(self, name: str) -> Tensor:
        record = self._records[name]
        piece = self._job.reader(record.path).read(record.offset, record.nbytes, self._buffers)
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


def _cast(move: Move, job: Job, buffers: Buffers) -> None:
    assert move.cast is not None
    piece = job.reader(move.path).read(move.begin, move.count, buffers)
    values = _rounded(_tensor(piece.view, move.cast.source.dtype), move.cast)
    job.writers[move.file].write(move.to, piece_of(_bytes(values), move.to % BLOCK, buffers), buffers)
    job.advance(move.count)


def _write(tensor: Tensor, writer: Writer, output: OutputTensor, buffers: Buffers) -> None:
    """Round what is not rounded yet, and write, in pieces: what rounding needs on the way stays small."""
    to = output.offset
    for values in torch.split(tensor.contiguous().flatten(), PIECE // tensor.element_size()):
        view = _bytes(_rounded(values, output))
        writer.write(to, piece_of(view, to % BLOCK, buffers), buffers)
        to += len(view)


def _rounded(values: Tensor, output: OutputTensor) -> Tensor:
    """In the output dtype. RequestError when a finite value, or one that was computed, does not fit it."""
    result = round_once(values, TORCH[output.dtype])
    if result.dtype != values.dtype and bool((result.isinf() & (values.isfinite() | output.computed)).any()):
        raise RequestError(
            f"tensor {output.name!r} has values that {str(result.dtype).removeprefix('torch.')} cannot hold"
        )
    return result


def _tensor(view: memoryview, dtype: str) -> Tensor:
    return torch.frombuffer(view, dtype=TORCH[dtype]) if view else torch.empty(0, dtype=TORCH[dtype])


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.flatten().view(torch.uint8).numpy().data
