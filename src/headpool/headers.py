"""What a weight file holds, read from its header alone: safetensors, shard indexes, PyTorch zip archives.

Nothing here trusts its input: a header that lies about sizes, overlaps or leaves the directory is refused with
the file and the tensor named. Format: https://huggingface.co/docs/safetensors (an 8-byte little-endian length, a
JSON object, then the tensors' bytes without gaps).
"""

import json
import math
import os
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headpool.errors import RequestError, first_line

BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
"""Size of an element in bits, by safetensors' dtype names."""

FLOAT_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""The dtypes of tensors that can be pooled or cast, by PyTorch's names and in safetensors' words."""

FLOATS = tuple(FLOAT_DTYPES.values())

WEIGHT_FILES = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
"""One file or the index of several, in transformers' own order of preference."""

MAX_HEADER_BYTES = 100_000_000
"""The safetensors library's own limit."""

MAX_RANK = 64
"""More dimensions than PyTorch's tensors can have."""

TORCH_DTYPES = FLOAT_DTYPES | {
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
"""PyTorch's dtype names, without the `torch.` in front, in safetensors' words."""


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """Where a tensor lies: `nbytes` bytes of `path` from byte `offset` on, row-major and little-endian."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BITS[self.dtype] // 8


def read_json_object(raw: bytes, where: str) -> dict[str, Any]:
    """A JSON object from untrusted bytes. RequestError names `where` for anything else, duplicate keys included."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise RequestError(f"{where}: the key {twice!r} stands twice")
        return result

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise RequestError(f"{where}: a JSON object was expected, found {type(value).__name__}")
    return value


def read_safetensors_header(path: Path) -> tuple[TensorRecord, ...]:
    """The tensors of one .safetensors file, in the order of their bytes.

    Raises RequestError when the file is truncated or its header is not one: sizes that contradict shape and dtype,
    gaps, overlaps, bytes past the end, unknown dtypes.
    """
    file = path.name
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > size - 8:
                raise RequestError(
                    f"{file}: truncated or not safetensors: its header claims {length} bytes, the file has {size}"
                )
            if length > MAX_HEADER_BYTES:
                raise RequestError(f"{file}: its header claims {length} bytes, the limit is {MAX_HEADER_BYTES}")
            raw = stream.read(length)
    except OSError as error:
        raise RequestError(f"{file}: cannot be read ({error.strerror or error})") from error
    header = read_json_object(raw, f"{file}: header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise RequestError(f"{file}: header: __metadata__ is no object")
    data_start = 8 + length
    records = sorted(
        (_record(path, name, entry, data_start) for name, entry in header.items()),
        key=lambda record: (record.offset, record.nbytes),
    )
    end = data_start
    for record in records:
        if record.offset != end:
            kind = "overlaps the tensor before it" if record.offset < end else "leaves a gap before it"
            raise RequestError(f"{file}: tensor {record.name!r} {kind} (byte {record.offset}, expected {end})")
        end += record.nbytes
    if end != size:
        last = records[-1].name if records else "the header"
        state = "truncated" if end > size else "longer than its header says"
        raise RequestError(f"{file}: {state}: tensor {last!r} ends at byte {end}, the file has {size}")
    return tuple(records)


def _record(path: Path, name: str, entry: Any, data_start: int) -> TensorRecord:
    where = f"{path.name}: tensor {reprlib.repr(name)}"
    if not name.isprintable():  # a lone surrogate, say, which no result could be written with
        raise RequestError(f"{where}: its name holds characters that cannot be printed")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise RequestError(f"{where}: its entry must hold dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise RequestError(f"{where}: unknown dtype {reprlib.repr(dtype)}")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise RequestError(
            f"{where}: shape {reprlib.repr(shape)} and data_offsets {reprlib.repr(offsets)} must be natural numbers, "
            f"{MAX_RANK} at most"
        )
    begin, end = offsets
    if math.prod(shape) * BITS[dtype] != 8 * (end - begin):
        raise RequestError(f"{where}: {dtype} {reprlib.repr(shape)} does not fill bytes {begin} to {end}")
    return TensorRecord(name, dtype, tuple(shape), path, data_start + begin)


def _naturals(values: Any) -> bool:
    return (
        isinstance(values, list)
        and len(values) <= MAX_RANK
        and all(type(value) is int and 0 <= value < 1 << 63 for value in values)
    )


def read_index(path: Path) -> dict[str, str]:
    """The `weight_map` of a shard index: tensor name → file name.

    Raises RequestError for anything malformed and for a file name that is not a plain name, since such a path could
    leave the directory.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise RequestError(f"{path.name}: cannot be read ({error.strerror or error})") from error
    weight_map = read_json_object(raw, path.name).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise RequestError(f"{path.name}: it has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or file in ("", ".", "..") or any(mark in file for mark in "/\\\0"):
            raise RequestError(f"{path.name}: tensor {name!r} points to {file!r}, not a file of this directory")
    return weight_map


def read_pickle_header(path: Path) -> tuple[TensorRecord, ...]:
    """The tensors of a pytorch_model*.bin (torch.save's zip format), in the order of their bytes.

    Only the pickle of the archive is read, by PyTorch's restricted unpickler (`weights_only`) onto fake tensors; the
    tensors' bytes are found by their offsets in the archive, where they lie uncompressed. Raises RequestError for what
    that unpickler refuses, and for tensors that are not stored row-major.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    file = path.name
    _check_archive(path)
    try:
        with FakeTensorMode():
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler raises whatever the bytes lead it to
        raise RequestError(f"{file}: PyTorch's weights_only loader refuses it ({first_line(error)})") from error
    if not isinstance(state, dict):
        raise RequestError(f"{file}: a dictionary of tensors was expected, found {type(state).__name__}")
    size = path.stat().st_size
    records: list[TensorRecord] = []
    for name, tensor in state.items():
        where = f"{file}: tensor {name!r}"
        if not isinstance(tensor, torch.Tensor):
            raise RequestError(f"{where}: it is a {type(tensor).__name__}, not a tensor")
        if tensor.layout is not torch.strided or not tensor.is_contiguous():
            raise RequestError(f"{where}: it is not stored row-major; save the model as safetensors first")
        dtype = TORCH_DTYPES.get(str(tensor.dtype).removeprefix("torch."))
        start = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
        if dtype is None or start is None:
            raise RequestError(f"{where}: {tensor.dtype} cannot be read")
        record = TensorRecord(
            str(name),
            dtype,
            tuple(tensor.shape),
            path,
            start + tensor.storage_offset() * tensor.element_size(),
        )
        if record.offset + record.nbytes > size:
            raise RequestError(f"{where}: it ends at byte {record.offset + record.nbytes}, the file has {size}")
        records.append(record)
    return tuple(sorted(records, key=lambda record: record.offset))


def _check_archive(path: Path) -> None:
    import zipfile

    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                if entry.compress_type != zipfile.ZIP_STORED:
                    raise RequestError(f"{path.name}: its entry {entry.filename!r} is compressed")
                if entry.filename.endswith("/byteorder") and archive.read(entry) != b"little":
                    raise RequestError(f"{path.name}: it was written on a big-endian machine")
    except (OSError, zipfile.BadZipFile, NotImplementedError) as error:
        raise RequestError(
            f"{path.name}: truncated, or not in torch.save's zip format ({error}); save the model as safetensors first"
        ) from error


def weight_files(count: int) -> list[str]:
    """What `count` files of weights are called."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def weights_index(places: Iterable[tuple[str, int, str]]) -> bytes:
    """model.safetensors.index.json of tensors, each with its bytes and the file that holds it."""
    tensors = sorted(places)
    index = {
        "metadata": {"total_size": sum(nbytes for _, nbytes, _ in tensors)},
        "weight_map": {name: file for name, _, file in tensors},
    }
    return json.dumps(index, indent=2).encode() + b"\n"
