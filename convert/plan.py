"""Every name, shape, byte and file of the result, known before anything is written."""

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headpool import families, geometry
from headpool.checkpoint import Source
from headpool.convert.layouts import Layout, Part, find_layout
from headpool.convert.methods import METHODS, Method
from headpool.convert.transfer import BLOCK
from headpool.errors import RequestError
from headpool.geometry import Layer
from headpool.headers import BITS, FLOAT_DTYPES, FLOATS, TensorRecord, weight_files, weights_index
from headpool.jsonpatch import patch_json


@dataclass(frozen=True)
class Unit:
    """A piece of work: these parts of one layer, in memory together, are brought to `kv_heads` K/V heads."""

    layer: int
    parts: tuple[Part, ...]
    kv_heads: int


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One tensor of the result; `offset` counts from the start of its file.

    A `computed` one comes from a Unit, another from the bytes of `source`, cast where the dtypes differ.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    source: TensorRecord
    computed: bool

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BITS[self.dtype] // 8


@dataclass(frozen=True)
class Shard:
    """One .safetensors file of the result: its header, then its tensors without gaps."""

    file: str
    header: bytes
    tensors: tuple[OutputTensor, ...]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class Plan:
    """A conversion, whole, before it starts. No units means that the source has `kv_heads` already: a plain copy."""

    source: Source
    method: Method
    kv_heads: int
    layout: Layout
    before: tuple[Layer, ...]
    after: tuple[Layer, ...]
    units: tuple[Unit, ...]
    shards: tuple[Shard, ...]
    config_text: str
    initializer_range: float
    output_dtype: str | None

    @property
    def source_kv_heads(self) -> int:
        return max(layer.kv_heads for layer in self.before)

    @property
    def changed(self) -> list[str]:
        """The tensors that the conversion declares to change, in the order of the result."""
        return [tensor.name for shard in self.shards for tensor in shard.tensors if tensor.computed]

    def changed_in(self, layer: int) -> list[str]:
        """Those of a layer."""
        return [name for name in self.changed if name.startswith(f"{self.layout.stem}{layer}.")]

    @property
    def gained(self) -> set[int]:
        """The layers in which gains of norms for every key head are pooled."""
        return {
            unit.layer
            for unit in self.units
            if any(name in self.source.tensors for name in self.layout.gain_names(unit.layer, unit.kv_heads))
        }

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What there is to know of the result, its class aside."""
        config, layers = self.source.config, len(self.before)
        family = families.find_family(config)
        kept = [name for name in self.source.tensors if families.drafts(config, family, layers, name)]
        if not (kept and self.units):
            return ()
        such = f"{kept[0]}, {len(kept)} tensors in all"
        return (f"layers that draft further tokens keep their K/V heads ({such}): use it without drafting",)

    def index(self) -> bytes | None:
        """model.safetensors.index.json of the result, None for a single file."""
        if len(self.shards) == 1:
            return None
        return weights_index((one.name, one.nbytes, shard.file) for shard in self.shards for one in shard.tensors)


def plan_conversion(
    source: Source,
    *,
    kv_heads: int,
    method: str = "mean",
    dtype: str | None = None,
    max_shard_size: int | None = None,
    whole_layers: bool = False,
) -> Plan:
    """Plan the conversion of `source` to `kv_heads` K/V heads in each layer that has more; with `whole_layers` other
    tensors of those layers change, too, but for experts.

    Raises RequestError for an unknown method or dtype, a family that cannot be converted, head counts that do not fit,
    and weights that contradict the config.
    """
    family = families.family_of(source.config)
    if method not in METHODS:
        raise RequestError(f"unknown method {method!r}; there are {', '.join(METHODS)}")
    if dtype is not None and dtype not in FLOAT_DTYPES:
        raise RequestError(f"unknown dtype {dtype!r}; there are {', '.join(FLOAT_DTYPES)}")
    before = geometry.layers(source.config)
    after = geometry.regroup(before, kv_heads)
    _refuse_quantized(source)
    layout = find_layout(source.tensors, source.config, family, before)
    units = tuple(_units(METHODS[method], layout, source.tensors, before, after))
    return Plan(
        source=source,
        method=METHODS[method],
        kv_heads=kv_heads,
        layout=layout,
        before=before,
        after=after,
        units=units,
        shards=tuple(
            _shards(
                source,
                _declare(layout, units, source, whole_layers=whole_layers),
                _removed(layout, units),
                FLOAT_DTYPES.get(dtype or ""),
                max_shard_size,
            )
        ),
        config_text=patch_json(source.config_text, _config_changes(source, kv_heads, units, dtype)),
        initializer_range=families.get(source.config, family, "initializer_range") or 0.02,
        output_dtype=dtype,
    )


_QUANTIZED = re.compile(
    r".*(qweight|qzeros|g_idx|SCB|absmax|quant_map|quant_state.*|weight_packed|weight_scale\w*|_scale_inv)"
)
"""What quantizers (GPTQ, AWQ, bitsandbytes, compressed-tensors, FP8) name the tensors that they add."""


def _refuse_quantized(source: Source) -> None:
    for record in source.tensors.values():
        narrow = record.name.endswith(".weight") and record.dtype not in FLOATS
        if narrow or record.dtype.startswith(("F8_", "F6_", "F4")) or _QUANTIZED.fullmatch(record.name):
            raise RequestError(
                f"tensor {record.name!r} ({record.dtype}) is of a quantized checkpoint; convert the unquantized one"
            )


def _units(
    method: Method,
    layout: Layout,
    tensors: Mapping[str, TensorRecord],
    before: Sequence[Layer],
    after: Sequence[Layer],
) -> Iterator[Unit]:
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        together = dict.fromkeys(layout.together(parts) for parts in method.units)
        for parts in together if old.kv_heads != new.kv_heads else ():
            if layout.names(index, parts[0])[0] in tensors:  # a layer that shares another's K/V may have none
                yield Unit(index, parts, new.kv_heads)


_EXPERTS = re.compile(r"\b(experts?|router|block_sparse_moe|moe|gate)\.")
"""What the mixture of a layer is made of."""


def _declare(
    layout: Layout, units: tuple[Unit, ...], source: Source, *, whole_layers: bool
) -> dict[str, tuple[int, ...]]:
    """The tensors that change, with their new shapes."""
    changed: dict[str, tuple[int, ...]] = {}
    for stem in {f"{layout.stem}{unit.layer}." for unit in units if whole_layers}:
        changed |= {
            name: record.shape
            for name, record in source.tensors.items()
            if name.startswith(stem) and record.dtype in FLOATS and not _EXPERTS.search(name)
        }
    for unit in units:
        rows = {
            name: layout.rows(unit.layer, part, unit.kv_heads)
            for part in unit.parts
            for name in layout.names(unit.layer, part)
            if part != "o"
        }
        before = layout.gain_names(unit.layer, layout.layers[unit.layer].kv_heads)
        after = layout.gain_names(unit.layer, unit.kv_heads)
        if len(before) == len(after):  # one tensor for all heads, which shrinks
            fewer = layout.layers[unit.layer].kv_heads // unit.kv_heads
            rows |= {name: source.tensors[name].shape[0] // fewer for name in after if name in source.tensors}
        for name in layout.changed(unit.layer, unit.parts):
            if name in source.tensors and name not in set(before) - set(after):
                shape = source.tensors[name].shape
                changed[name] = (rows.get(name, shape[0]), *shape[1:])
    return changed


def _removed(layout: Layout, units: tuple[Unit, ...]) -> set[str]:
    """The tensors that the result lacks: gains of key heads that are tensors of their own."""
    return {
        name
        for unit in units
        if "k" in unit.parts
        for name in layout.gain_names(unit.layer, layout.layers[unit.layer].kv_heads)
        if name not in layout.gain_names(unit.layer, unit.kv_heads)
    }


def _config_changes(source: Source, kv_heads: int, units: tuple[Unit, ...], dtype: str | None) -> dict[str, Any]:
    changes = families.kv_heads_changes(source.config, kv_heads) if units else {}
    if dtype is None:
        return changes
    return _merged(changes, _dtype_changes(source.config, dtype) or {"torch_dtype": dtype})


def _dtype_changes(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Every field of a config that names a dtype, with this one: parts of a model may name their own."""
    inside = {key: _dtype_changes(value, dtype) for key, value in config.items() if isinstance(value, Mapping)}
    named = [key for key in ("dtype", "torch_dtype") if key in config]
    return {key: held for key, held in inside.items() if held} | dict.fromkeys(named, dtype)


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Both of two changes of an object; within an object that both change, both."""
    both = {key for key in one.keys() & other.keys() if isinstance(one[key], Mapping)}
    return {**one, **other, **{key: _merged(one[key], other[key]) for key in both}}


def _shards(
    source: Source,
    changed: Mapping[str, tuple[int, ...]],
    removed: Collection[str],
    dtype: str | None,
    max_shard_size: int | None,
) -> Iterator[Shard]:
    """The source's shards one for one, or cut anew to `max_shard_size` bytes of tensors each."""
    groups = [[record for record in records if record.name not in removed] for records in source.shards.values()]
    if max_shard_size is not None:
        groups = _cut([record for group in groups for record in group], changed, dtype, max_shard_size)
    for file, records in zip(weight_files(len(groups)), groups, strict=True):
        yield _shard(file, records, changed, dtype)


def _cut(
    records: list[TensorRecord], changed: Mapping[str, tuple[int, ...]], dtype: str | None, limit: int
) -> list[list[TensorRecord]]:
    groups: list[list[TensorRecord]] = [[]]
    room = limit
    for record in records:
        size = _output(record, changed, dtype, 0).nbytes
        if groups[-1] and size > room:
            groups.append([])
            room = limit
        groups[-1].append(record)
        room -= size
    return groups


def _output(
    record: TensorRecord, changed: Mapping[str, tuple[int, ...]], dtype: str | None, offset: int
) -> OutputTensor:
    target = dtype if dtype is not None and record.dtype in FLOATS else record.dtype
    return OutputTensor(
        record.name, target, changed.get(record.name, record.shape), offset, record, record.name in changed
    )


def _shard(file: str, records: list[TensorRecord], changed: Mapping[str, tuple[int, ...]], dtype: str | None) -> Shard:
    """Lay out one file: wider elements first, so that each tensor is aligned, otherwise in the source's order."""
    outputs = [_output(record, changed, dtype, 0) for record in records]
    outputs.sort(key=lambda output: -BITS[output.dtype])
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for output in outputs:
        begin, end = end, end + output.nbytes
        entries[output.name] = {"dtype": output.dtype, "shape": output.shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * _padding(8 + len(text), outputs, entries)
    header = len(text).to_bytes(8, "little") + text
    placed = [replace(output, offset=len(header) + entries[output.name]["data_offsets"][0]) for output in outputs]
    return Shard(file, header, tuple(placed))


def _padding(length: int, outputs: list[OutputTensor], entries: Mapping[str, Any]) -> int:
    """Spaces to add to a header of `length` bytes.

    Tensors must begin at multiples of 8. Beyond that, the largest tensor to be copied is brought to the same distance
    from a block's start as it has in its source: whole blocks can then go from disk to disk as they are (see
    transfer).
    """
    copied = [output for output in outputs if not output.computed and output.dtype == output.source.dtype]
    largest = max(copied, key=lambda output: output.nbytes, default=None)
    if largest is not None:
        padding = (largest.source.offset - entries[largest.name]["data_offsets"][0] - length) % BLOCK
        if (length + padding) % 8 == 0:
            return int(padding)
    return -length % 8
