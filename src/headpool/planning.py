"""What each possible number of K/V heads would save: the table behind `headpool plan`.

Reads config.json and, where there are any, the headers of safetensors files; never weights, and neither torch
nor transformers is imported.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headpool import checkpoint, families, geometry, headers, hub, opening
from headpool.errors import RequestError
from headpool.family import Family
from headpool.geometry import Layer

if TYPE_CHECKING:
    from rich.console import RenderableType

TUNED_GROUP_SIZES = (1, 2, 4, 8)

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
"""Tensor name → dtype in safetensors' words, shape."""


@dataclass(frozen=True)
class TensorParallel:
    """A tensor-parallel size that vLLM accepts, and what each GPU then holds; K/V heads fewer than GPUs
    are replicated.
    """

    size: int
    kv_heads_per_gpu: int
    cache_bytes_per_gpu: int


@dataclass(frozen=True)
class Option:
    """One possible K/V-head count.

    cache_bytes is for the plan's context and batch, saved the fraction by which it is less than the model's
    own. parameters and weight_bytes are those of the converted model, None without headers or where it does
    not convert; sequences is how many of `context` tokens fit beside the weights, None without a memory size
    as well.
    """

    kv_heads: int
    group_size: int
    cache_bytes_per_token: int
    cache_bytes: int
    saved: float
    parameters: int | None
    weight_bytes: int | None
    sequences: int | None
    tensor_parallel: tuple[TensorParallel, ...]
    note: str | None


@dataclass(frozen=True)
class Plan:
    """A model's geometry and its options. heads, kv_heads and head_dim are those of the layers with the
    most K/V heads; sliding is how many layers hold no more than `window` tokens. transcode: converting takes
    --transcode; warnings: what to know of converted models of this class.
    """

    model: str
    model_type: str
    convertible: bool
    transcode: bool
    reason: str | None
    warnings: tuple[str, ...]
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    sliding: int
    window: int | None
    dtype: str
    parameters: int | None
    weight_bytes: int | None
    context: int
    batch: int
    memory: int | None
    options: tuple[Option, ...]

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON has it."""
        return asdict(self)


def plan(
    model: str | Path,
    *,
    context: int | None = None,
    batch: int = 1,
    memory: int | None = None,
    revision: str | None = None,
) -> Plan:
    """What each K/V-head count of a model would take and save, for `batch` sequences of `context` tokens.

    model: a directory or a hub id; context: the config's max_position_embeddings where None; memory: bytes
    for weights and cache. Raises RequestError for a model whose layers cannot be told, or that contradicts
    itself.
    """
    config, shapes = _read(str(model), revision)
    family = families.find_family(config)
    layers = geometry.layers(config)
    if context is None:
        context = families.get(config, family, "max_position_embeddings")
    if not isinstance(context, int):
        raise RequestError("config.json has no max_position_embeddings; give a context")
    if context < 1 or batch < 1:
        raise RequestError(f"context {context} and batch {batch} must be 1 or more")
    counts = [count for count in geometry.options(layers) if families.can_hold(config, family, count)]
    if not counts:
        raise RequestError("no layer of the model keeps keys and values")
    widest = next(layer for layer in layers if layer.kind != "none" and layer.kv_heads == counts[0])
    reason = families.refusal(config, family)
    transcode = family.transcodes and reason == family.reason
    dtype = _dtype(config, shapes)
    sliding = [layer for layer in layers if layer.window is not None]
    weights = _Weights(shapes, family if reason is None else None, layers) if shapes else None
    request = _Request(context, batch, memory, headers.BITS[headers.FLOAT_DTYPES[dtype]] // 8)
    return Plan(
        model=str(model),
        model_type=family.model_type,
        convertible=reason is None or transcode,
        transcode=transcode,
        reason=None if transcode else reason,
        warnings=tuple(_warnings(config, family, counts)) if reason is None else (),
        layers=len(layers),
        heads=widest.heads,
        kv_heads=widest.kv_heads,
        head_dim=widest.head_dim,
        sliding=len(sliding),
        window=max((layer.window for layer in sliding if layer.window is not None), default=None),
        dtype=dtype,
        parameters=weights.parameters if weights else None,
        weight_bytes=weights.nbytes if weights else None,
        context=context,
        batch=batch,
        memory=memory,
        options=tuple(_option(layers, count, request, weights) for count in counts),
    )


def _warnings(config: Mapping[str, Any], family: Family, counts: Sequence[int]) -> Iterator[str]:
    """What is to be known of the model, or of some conversion of it that gives its class another switch."""
    configs = [config]
    if family.kv_rules is not None:
        configs += [{**config, **families.kv_heads_changes(config, count)} for count in counts[1:]]
    yield from dict.fromkeys(warning for one in configs for warning in opening.warnings(one))


TABULATED = (8192, 32768)
"""Lengths at which the cache of one sequence is told; the longest there is where a model does not reach them."""


def cache_facts(config: Mapping[str, Any], shapes: Shapes | None, dtype: str | None = None) -> dict[str, Any]:
    """A model's K/V cache by the formula, in JSON's types: dtype (the given one, else the model's), kv_heads (a number,
    or a list where layers differ), bytes_per_token, and bytes_at: those of one sequence by its length in tokens, for
    the lengths of `geometry.cache_curve`.
    """
    layers = geometry.layers(config)
    dtype = dtype or _dtype(config, shapes)
    itemsize = headers.BITS[headers.FLOAT_DTYPES[dtype]] // 8
    positions = families.get(config, families.find_family(config), "max_position_embeddings")
    curve = geometry.cache_curve(layers, itemsize=itemsize, positions=positions)
    counts = [layer.kv_heads for layer in layers if layer.kind != "none"]
    return {
        "dtype": dtype,
        "kv_heads": counts[0] if len(set(counts)) == 1 else counts,
        "bytes_per_token": geometry.cache_bytes_per_token(layers, itemsize),
        "bytes_at": {str(length): size for length, size in curve},
    }


def tabulated(lengths: Iterable[int]) -> list[int]:
    """Those of TABULATED that are among the lengths of a cache curve, else its longest."""
    reached = sorted(lengths)
    return [length for length in TABULATED if length in reached] or reached[-1:]


@dataclass(frozen=True)
class _Request:
    context: int
    batch: int
    memory: int | None
    itemsize: int

    def cache_bytes(self, layers: Sequence[Layer], batch: int | None = None) -> int:
        return geometry.cache_bytes(
            layers, tokens=self.context, batch=self.batch if batch is None else batch, itemsize=self.itemsize
        )


class _Weights:
    """The sizes of a checkpoint's tensors, and what pooling makes of them; `family` is None where none pools.

    Raises RequestError where a tensor contradicts the config.
    """

    def __init__(self, shapes: Shapes, family: Family | None, layers: Sequence[Layer]) -> None:
        self.parameters = sum(math.prod(shape) for _, shape in shapes.values())
        self.nbytes = sum(_nbytes(dtype, math.prod(shape)) for dtype, shape in shapes.values())
        self._layers = layers
        self._heads = list(_pooled_heads(shapes, family, layers)) if family else None

    def after(self, layers: Sequence[Layer]) -> tuple[int, int] | None:
        """Parameters and bytes once the layers are `layers`; None where pooling does not lead there."""
        if self._heads is None:
            return (self.parameters, self.nbytes) if layers == self._layers else None
        gone = [
            (dtype, elements * (self._layers[index].kv_heads - layers[index].kv_heads))
            for index, dtype, elements in self._heads
        ]
        return self.parameters - sum(n for _, n in gone), self.nbytes - sum(_nbytes(*one) for one in gone)


def _pooled_heads(shapes: Shapes, family: Family, layers: Sequence[Layer]) -> Iterator[tuple[int, str, int]]:
    """For every tensor that pooling shrinks: its layer, its dtype and the elements of one K/V head in it."""
    for name, (dtype, shape) in shapes.items():
        held = families.attention_tensor(family, name)
        if held and held.layer < len(layers) and held.suffix in family.pooled:
            index, layer = held.layer, layers[held.layer]
            if held.suffix == family.key_gains:
                if "*" not in held.suffix or name.endswith(held.suffix.replace("*", "0")):
                    yield index, dtype, layer.head_dim
                continue
            heads = layer.kv_heads if family.fused is None else layer.heads + 2 * layer.kv_heads
            rows = heads * layer.head_dim
            if shape[0] != rows:
                raise RequestError(
                    f"weights and config contradict each other: tensor {name!r} is {list(shape)}, "
                    f"the config gives it {rows} rows"
                )
            yield index, dtype, math.prod(shape) // heads * (1 if family.fused is None else 2)


def _nbytes(dtype: str, elements: int) -> int:
    if dtype not in headers.BITS:
        raise RequestError(f"the weights hold an unknown dtype {dtype!r}")
    return elements * headers.BITS[dtype] // 8


def _option(layers: Sequence[Layer], kv_heads: int, request: _Request, weights: _Weights | None) -> Option:
    after = geometry.regroup(layers, kv_heads)
    group_size = next(layer.group_size for layer in after if layer.kind != "none" and layer.kv_heads == kv_heads)
    now, then = request.cache_bytes(layers), request.cache_bytes(after)
    parameters, nbytes = (weights.after(after) if weights else None) or (None, None)
    sequences = None
    if request.memory is not None and nbytes is not None:
        sequences = max(0, request.memory - nbytes) // request.cache_bytes(after, batch=1)
    return Option(
        kv_heads=kv_heads,
        group_size=group_size,
        cache_bytes_per_token=geometry.cache_bytes_per_token(after, request.itemsize),
        cache_bytes=then,
        saved=(now - then) / now,
        parameters=parameters,
        weight_bytes=nbytes,
        sequences=sequences,
        tensor_parallel=tuple(_tensor_parallel(after, kv_heads, request)),
        note=None if group_size in TUNED_GROUP_SIZES else "attention kernels are tuned for group sizes 1, 2, 4, 8",
    )


def _tensor_parallel(layers: Sequence[Layer], kv_heads: int, request: _Request) -> Iterator[TensorParallel]:
    """vLLM's rule: the size divides the query heads, and the K/V heads divide by it or it by them (then
    they are replicated).
    """
    attending = [layer for layer in layers if layer.kind != "none"]
    for size in range(1, min(layer.heads for layer in attending) + 1):
        if all(
            layer.heads % size == 0 and (layer.kv_heads % size == 0 or size % layer.kv_heads == 0)
            for layer in attending
        ):
            on_gpu = [replace(layer, kv_heads=max(1, layer.kv_heads // size)) for layer in attending]
            yield TensorParallel(size, max(1, kv_heads // size), request.cache_bytes(on_gpu))


def _dtype(config: Mapping[str, Any], shapes: Shapes | None) -> str:
    """The dtype of the cache, as a config names it: the config's, else that of most weights, else float32."""
    named = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    if named in headers.FLOAT_DTYPES:
        return named
    held = {
        name: sum(_nbytes(d, math.prod(s)) for d, s in (shapes or {}).values() if d == headers.FLOAT_DTYPES[name])
        for name in headers.FLOAT_DTYPES
    }
    most = max(held, key=lambda name: held[name])
    return most if held[most] else "float32"


def _read(model: str, revision: str | None) -> tuple[Mapping[str, Any], Shapes | None]:
    """A model's config, and its tensors' dtypes and shapes where it has safetensors files."""
    if re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", model) and not Path(model).exists():
        return _read_hub(model, revision)
    return _read_directory(checkpoint.locate(model, revision, weights=False))


def _read_directory(directory: Path) -> tuple[Mapping[str, Any], Shapes | None]:
    if not any((directory / name).is_file() for name in headers.WEIGHT_FILES[0]):
        return checkpoint.read_config(directory)[1], None
    source = checkpoint.open_source(str(directory), weights=False)
    return source.config, {name: (record.dtype, record.shape) for name, record in source.tensors.items()}


def _read_hub(model: str, revision: str | None) -> tuple[Mapping[str, Any], Shapes | None]:
    """From the hub: config.json, and the headers alone of weight files that are not on this machine."""
    from huggingface_hub import errors, get_safetensors_metadata

    directory = hub.download(model, revision, (), weights=False)
    config, shapes = _read_directory(directory)
    if shapes is not None:
        return config, shapes
    try:
        with hub.hub_errors(model, revision):
            files = get_safetensors_metadata(model, revision=revision).files_metadata.values()
    except errors.NotASafetensorsRepoError:
        return config, None
    return config, {name: (str(info.dtype), tuple(info.shape)) for file in files for name, info in file.tensors.items()}


def format_bytes(count: float) -> str:
    """Bytes for people: four significant figures at most, in binary units."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def plan_table(plan: Plan) -> "RenderableType":
    """The plan for people: a line of facts, a table of options, and why the model does not convert where
    it doesn't.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    facts = [
        f"{plan.model_type}: {plan.layers} layers",
        f"{plan.heads} query heads, {plan.kv_heads} K/V heads of {plan.head_dim}",
        plan.dtype,
    ]
    if plan.sliding:
        facts.insert(1, f"{plan.sliding} of them hold at most {plan.window:,} tokens")
    if plan.weight_bytes is not None:
        facts.append(f"{plan.parameters:,} parameters ({format_bytes(plan.weight_bytes)})")
    fits = any(option.sequences is not None for option in plan.options)
    sizes = sorted({one.size for option in plan.options for one in option.tensor_parallel if 1 < one.size <= 8})
    table = Table()
    for column in (
        "K/V heads", "group size", "per token", f"cache: {plan.batch} x {plan.context:,} tokens", "saved",
        *([f"fit in {format_bytes(plan.memory or 0)}"] if fits else []), *(f"TP {size}" for size in sizes),
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for option in plan.options:
        per_gpu = {one.size: format_bytes(one.cache_bytes_per_gpu) for one in option.tensor_parallel}
        table.add_row(
            str(option.kv_heads),
            f"{option.group_size}{' *' if option.note else ''}",
            format_bytes(option.cache_bytes_per_token),
            format_bytes(option.cache_bytes),
            f"{option.saved:.1%}",
            *(["" if option.sequences is None else f"{option.sequences:,}"] if fits else []),
            *(per_gpu.get(size, "-") for size in sizes),
        )
    notes = sorted({f"* {option.note}" for option in plan.options if option.note})
    if sizes:
        notes.append("TP n: cache on each of n GPUs in vLLM, which replicates K/V heads fewer than GPUs")
    notes += plan.warnings
    if plan.transcode:
        notes.append("convert takes --transcode: it writes the model as one of another class, which can hold fewer")
    if not plan.convertible:
        notes.append(f"headpool does not convert this model: {plan.reason}")
    return Group(Text(", ".join(facts)), table, *map(Text, notes))
