"""The transcoded checkpoint, every name, shape, dtype and byte of it, before anything is written."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from headpool import geometry
from headpool.checkpoint import Source
from headpool.convert.transcode.expressions import (
    ByDepth,
    Expression,
    Filled,
    Folded,
    FoldedBias,
    Held,
    LessOne,
    Row,
    Shape,
    parts,
)
from headpool.convert.transcode.find import SOURCES, transcoding_of
from headpool.convert.transcode.table import Get, Transcoding
from headpool.errors import RequestError
from headpool.headers import BITS, FLOAT_DTYPES, FLOATS, TensorRecord, weight_files

_WIDE = (Folded, FoldedBias, LessOne)
"""What is computed in float64, and kept so until it is rounded at the end."""


@dataclass(frozen=True)
class Target:
    """A tensor to write, what it is made of, and the layer that it belongs to (None: outside the layers)."""

    record: TensorRecord
    value: Expression
    layer: int | None


@dataclass(frozen=True)
class Transcript:
    """A transcoding of one checkpoint. `planned` is the result as a source, once it lies in its directory.

    `dtype` is the widest of the source, which the result of a conversion has unless another is asked for.
    """

    transcoding: Transcoding
    source: Source
    planned: Source
    headers: Mapping[str, bytes]
    targets: Mapping[str, tuple[Target, ...]]
    dtype: str

    @property
    def nbytes(self) -> int:
        tensors = sum(record.nbytes for record in self.planned.tensors.values())
        return tensors + sum(map(len, self.headers.values()))

    @property
    def get(self) -> Get:
        return self.transcoding.getter(self.source.config)

    @cached_property
    def _tensors(self) -> "_Tensors":
        return _Tensors(self.transcoding, self.source)

    def find(self, held: Held, layer: int | None) -> TensorRecord | None:
        """The source's tensor for an expression; None where the config says that there is none."""
        return self._tensors.find(held, layer)

    def shape(self, letters: Shape) -> tuple[int, ...]:
        return self._tensors.shape(letters)


def work_directory(out: Path) -> Path:
    """Where a transcoded checkpoint waits to be converted into `out`: beside it, or where it will be made."""
    parent = next(one for one in out.absolute().parents if one.exists())
    return parent / f".{out.name}.transcoded"


def transcribe(source: Source, directory: Path, *, wanted: bool) -> Transcript | None:
    """The transcript without which a model cannot be converted, into `directory`; None where none is needed.

    Raises RequestError where it is not `wanted`, where there is none, and as `plan_transcoding` does.
    """
    if source.config.get("model_type") in SOURCES:
        geometry.layers(source.config)  # a config that contradicts itself says nothing
    transcoding = transcoding_of(source.config, wanted=wanted)
    return None if transcoding is None else plan_transcoding(transcoding, source, directory)


def plan_transcoding(transcoding: Transcoding, source: Source, directory: Path) -> Transcript:
    """Plan to write `source` as the transcoding's host class into `directory`.

    Raises RequestError naming the tensor, the shape found and the shape expected, where weights and config contradict
    each other, a tensor is missing, or one is there that the class does not know.
    """
    tensors = _Tensors(transcoding, source)
    made = [
        (row, layer, tensors.dtype(row.value, layer))
        for row in transcoding.rows
        if row.unless is None or not tensors.get(row.unless)
        for layer in (range(tensors.sizes["layers"]) if "{}" in row.target else (None,))
    ]
    tensors.check_all_known()
    dtype = tensors.widest()
    files: dict[str, list[tuple[Row, int | None, str]]] = {file: [] for file in source.shards}
    file = next(iter(files))
    for row, layer, own in made:
        file = tensors.file(row.value, layer) or file
        files[file].append((row, layer, own or FLOAT_DTYPES[dtype]))
    groups = [group for group in files.values() if group]
    headers, targets = {}, {}
    for name, group in zip(weight_files(len(groups)), groups, strict=True):
        headers[name], targets[name] = _file(directory / name, group, tensors)
    config = _config(transcoding, tensors.get, dtype)
    planned = Source(
        model=source.model,
        revision=source.revision,
        directory=source.directory,
        config_text=json.dumps(config, indent=2) + "\n",
        config=config,
        shards={name: tuple(target.record for target in group) for name, group in targets.items()},
        origin=source,
    )
    return Transcript(transcoding, source, planned, headers, targets, dtype)


def _config(transcoding: Transcoding, get: Get, dtype: str) -> dict[str, Any]:
    """In the words of transformers 4, which version 5 and others read as well."""
    fields = {name: get(own) if isinstance(own, str) else own(get) for name, own in transcoding.config.items()}
    return {
        "architectures": [transcoding.host_class],
        "model_type": transcoding.host,
        **fields,
        "torch_dtype": dtype,
    }


class _Tensors:
    """The source's tensors as a transcoding asks for them, checked one by one."""

    def __init__(self, transcoding: Transcoding, source: Source) -> None:
        self.get = transcoding.getter(source.config)
        self._transcoding = transcoding
        self._records = source.tensors
        self._used: set[str] = set()
        hidden = transcoding.number("hidden_size", self.get)
        self.sizes = {
            "D": hidden, "3D": 3 * hidden, "V": transcoding.number("vocab_size", self.get),
            "F": transcoding.number("width", self.get), "layers": transcoding.number("num_hidden_layers", self.get),
        }  # fmt: skip
        if "positions" in transcoding.names:
            positions = transcoding.number("positions", self.get)
            self.sizes |= {"P": positions, "P+2": positions + 2}

    def shape(self, letters: Shape) -> tuple[int, ...]:
        return tuple(self.sizes[one] for one in letters)

    def find(self, held: Held, layer: int | None) -> TensorRecord | None:
        if held.switch is not None and not self.get(held.switch):
            return None
        name = held.name if layer is None else held.name.format(layer)
        names = [name, name.removeprefix(self._transcoding.prefix)]
        names += [self._transcoding.renamed[name]] if name in self._transcoding.renamed else []
        found = next((self._records[one] for one in names if one in self._records), None)
        if found is None:
            raise RequestError(
                f"weights and config contradict each other: tensor {name!r} is missing from the weights, "
                f"the config makes it {list(self.shape(held.shape))}"
            )
        if found.shape != self.shape(held.shape):
            raise RequestError(
                f"weights and config contradict each other: tensor {found.name!r} is {list(found.shape)}, "
                f"the config makes it {list(self.shape(held.shape))}"
            )
        if found.dtype not in FLOATS:
            raise RequestError(f"tensor {found.name!r} is {found.dtype}: a quantized one cannot be transcoded")
        self._used.add(found.name)
        return found

    def dtype(self, value: Expression, layer: int | None) -> str | None:
        """Of a target, in safetensors' words; None where it is that of the whole."""
        inner = list(parts(value))
        found = [self.find(one, layer) for one in inner if isinstance(one, Held)]
        if any(isinstance(one, _WIDE) or (isinstance(one, ByDepth) and self.get(one.switch)) for one in inner):
            return "F64"
        held = {record.dtype for record in found if record is not None}
        return None if isinstance(value, Filled) or not held else max(held, key=_width)

    def file(self, value: Expression, layer: int | None) -> str | None:
        """The source's file in which the first tensor of a target lies."""
        found = (self.find(one, layer) for one in parts(value) if isinstance(one, Held))
        return next((record.path.name for record in found if record is not None), None)

    def widest(self) -> str:
        """The widest dtype of all that is used, by PyTorch's name."""
        held = {self._records[name].dtype for name in self._used}
        return next(name for name, own in FLOAT_DTYPES.items() if own == max(held, key=_width))

    def check_all_known(self) -> None:
        tied = {"lm_head.weight", *self._transcoding.renamed.values()} if self.get("tie_word_embeddings") else set()
        for name in self._records:
            known = name in self._used or name in tied or re.fullmatch(self._transcoding.buffers, name)
            if not known:
                raise RequestError(f"tensor {name!r} is not known in {self._transcoding.source}")


def _width(dtype: str) -> tuple[int, bool]:
    """What holds more: more bits, and of the halves bfloat16, into whose range everything fits."""
    return BITS[dtype], dtype == "BF16"


def _file(path: Path, group: list[tuple[Row, int | None, str]], tensors: _Tensors) -> tuple[bytes, tuple[Target, ...]]:
    """One file's header and its tensors, wider elements first, so that each is aligned."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    placed: list[tuple[Row, int | None, TensorRecord]] = []
    for row, layer, dtype in sorted(group, key=lambda one: -BITS[one[2]]):
        name = row.target if layer is None else row.target.format(layer)
        begin = placed[-1][2].offset + placed[-1][2].nbytes if placed else 0
        record = TensorRecord(name, dtype, tensors.shape(row.shape), path, begin)
        entries[name] = {"dtype": dtype, "shape": record.shape, "data_offsets": [begin, begin + record.nbytes]}
        placed.append((row, layer, record))
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, tuple(_targets(placed, len(header)))


def _targets(placed: list[tuple[Row, int | None, TensorRecord]], begin: int) -> Iterator[Target]:
    for row, layer, held in placed:
        record = TensorRecord(held.name, held.dtype, held.shape, held.path, begin + held.offset)
        yield Target(record, row.value, layer)
