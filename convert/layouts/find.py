"""The layout of a checkpoint, told from its family and held against its headers."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from headpool import attention, families
from headpool.composite import text_config
from headpool.convert.layouts.base import Layout
from headpool.convert.layouts.fused import Fused
from headpool.convert.layouts.separate import Separate
from headpool.convert.layouts.weights import PARTS, Part, Rotary
from headpool.errors import RequestError
from headpool.families import AttentionTensor
from headpool.family import Family
from headpool.geometry import Layer
from headpool.headers import FLOATS, TensorRecord


def find_layout(
    tensors: Mapping[str, TensorRecord], config: Mapping[str, Any], family: Family, layers: tuple[Layer, ...]
) -> Layout:
    """The layout of a checkpoint, once its headers agree with its config.

    Raises RequestError naming the tensor, the shape found and the shape expected where they contradict each other: a
    projection missing or of another shape, a layer too many, an attention tensor that this family is not known to have,
    a projection that is no floating-point tensor.
    """
    drafting = range(len(layers), len(layers) + families.drafting_layers(config))
    named = ((name, families.attention_tensor(family, name)) for name in tensors)
    found = {name: held for name, held in named if held is not None and held.layer not in drafting}
    stems = {held.stem for held in found.values()}
    if len(stems) > 1 and (own := family.attention.partition("{}")[0]) in stems:  # others are of towers beside it
        found, stems = {name: held for name, held in found.items() if held.stem == own}, {own}
    gains = [name for name, held in found.items() if held.suffix == family.key_gains]
    layout = replace(
        _layout(next(iter(stems), ""), config, family, layers),
        gains_by_head=any(len(tensors[name].shape) > 1 for name in gains),
    )
    hidden = families.get(config, family, "hidden_size")
    if not stems:
        raise RequestError(
            f"the weights hold no attention tensors named {family.attention.format('N')}.*, which the config makes "
            f"{_listed(layout, hidden)}"
        )
    if len(stems) > 1:
        firsts = (next((name, tensors[name]) for name, held in found.items() if held.stem == one) for one in stems)
        sets = sorted(f"{name!r} {list(record.shape)}" for name, record in firsts)
        raise RequestError(
            f"the weights hold several sets of attention tensors, such as {' and '.join(sets)}; one is expected"
        )
    for name, held in found.items():
        if not (held.layer < len(layers) and layers[held.layer].kind == "none"):  # others may be named like attention
            _check_known(tensors[name], held, family, layout, hidden)
    stored = sorted({held.layer for held in found.values()}) if family.shared_weights else range(len(layers))
    for index in (index for index in stored if layers[index].kind != "none"):
        _check_shapes(tensors, layout, index, hidden)
        _check_gains(tensors, layout, index)
    return layout


def _layout(stem: str, config: Mapping[str, Any], family: Family, layers: tuple[Layer, ...]) -> Layout:
    dims = attention.rotary_dims(config, family, layers[0].head_dim)
    projections: dict[Part, str] = {"q": "q_proj", "k": "k_proj", "v": "v_proj"}
    if family.fused is not None:
        projections = dict.fromkeys(projections, family.fused.projection)
    projections["o"] = family.output
    common: dict[str, Any] = {
        "stem": stem,
        "attention": family.attention.rpartition("{}.")[2],
        "cross_attention": family.cross_attention,
        "projections": projections,
        "layers": layers,
        "rotary": Rotary(family.rotary, dims) if family.rotary else None,
        "per_query_head": tuple(
            suffix
            for suffix, follows in family.attention_tensors.items()
            if follows == "heads"
            and suffix.split(".")[0] not in projections.values()
            and suffix[1:] != (family.key_gains or "")[1:]  # gains of the query heads, named after the key heads'
        ),
        "norms": _norms(family),
        "input_norms": family.input_norms,
        "key_gains": family.key_gains,
        "query_parts": family.query_parts,
        "input_parts": family.input_parts,
        "bare_norms": frozenset(attention.bare_norms(config, family, len(layers))),
        "normed_values": family.normed_values,
        "clipped": attention.clipped(config),
        "alibi": bool(text_config(config).get("alibi")),
    }
    return Separate(**common) if family.fused is None else Fused(**common, order=family.fused.order)


def _check_gains(tensors: Mapping[str, TensorRecord], layout: Layout, index: int) -> None:
    """All gains of the key heads are there, or none, and fit the heads."""
    layer = layout.layers[index]
    names = layout.gain_names(index, layer.kv_heads)
    held = [name for name in names if name in tensors]
    whole = layer.kv_heads * layer.head_dim
    for name in names if held else ():
        if name not in tensors:
            raise RequestError(_missing(name, (whole // len(names),)))
        if math.prod(tensors[name].shape) * len(names) != whole:
            raise RequestError(_misfit(tensors[name], (whole // len(names),)))


def _norms(family: Family) -> tuple[str, str]:
    """The names of the family's query and key norm in its attention module; names that no tensor has where it has
    none.
    """
    beside = {suffix for suffix, follows in family.attention_tensors.items() if follows == "fixed" and "norm" in suffix}
    found = {suffix.rpartition(".")[0] for suffix in beside}
    query, key = (sorted(name for name in found if name.startswith(letter)) for letter in ("q", "k"))
    return (query or ["q_norm"])[0], (key or ["k_norm"])[0]


_BUFFERS = re.compile(r"rotary_emb\.inv_freq|(masked_)?bias")
"""Buffers that old checkpoints carry in their attention modules and no class reads."""


def _check_known(record: TensorRecord, held: AttentionTensor, family: Family, layout: Layout, hidden: int) -> None:
    found = f"tensor {record.name!r} {list(record.shape)}"
    if held.layer >= len(layout.layers):
        raise RequestError(f"{found} belongs to layer {held.layer}, the config has {len(layout.layers)} layers")
    here = record.name.startswith(layout.tensor(held.layer, ""))
    if not (here and held.suffix in family.attention_tensors) and not _BUFFERS.fullmatch(held.suffix):
        raise RequestError(
            f"{found} is not known in the attention of {family.model_type}, which the config makes "
            f"{_listed(layout, hidden)}"
        )


def _listed(layout: Layout, hidden: int) -> str:
    """The projections of the first layer with attention, for a message."""
    index = next((index for index, layer in enumerate(layout.layers) if layer.kind != "none"), 0)
    shapes = {layout.names(index, part)[0]: _shape(layout, index, part, hidden) for part in PARTS}
    inside = layout.tensor(index, "")
    return ", ".join(f"{name.removeprefix(inside)} {list(shape)}" for name, shape in shapes.items())


def _shape(layout: Layout, index: int, part: Part, hidden: int) -> tuple[int, int]:
    """What the config makes of the weight that holds a part."""
    layer = layout.layers[index]
    if part == "o":
        return hidden, layer.heads * layer.head_dim
    return layout.rows(index, part, layer.kv_heads), layout.input_parts * hidden


def _missing(name: str, shape: Sequence[int]) -> str:
    return f"weights and config contradict each other: tensor {name!r} is missing, the config makes it {list(shape)}"


def _misfit(record: TensorRecord, shape: Sequence[int]) -> str:
    found = f"tensor {record.name!r} is {list(record.shape)}"
    return f"weights and config contradict each other: {found}, the config makes it {list(shape)}"


def _check_shapes(tensors: Mapping[str, TensorRecord], layout: Layout, index: int, hidden: int) -> None:
    for part in PARTS:
        weight, bias = layout.names(index, part)
        shape = _shape(layout, index, part, hidden)
        held = layout.layers[index]
        own = held.shares is None and (part == "k" or held.own_values)
        if weight not in tensors and (part in ("q", "o") or own):
            raise RequestError(_missing(weight, shape))
        for name, expected in ((weight, shape), (bias, shape[:1])):
            record = tensors.get(name)
            if record is not None and record.shape != expected:
                raise RequestError(_misfit(record, expected))
            if record is not None and record.dtype not in FLOATS:
                raise RequestError(f"tensor {name!r} is {record.dtype}: a quantized projection cannot be pooled")
