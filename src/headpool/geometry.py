"""The shape of a model's K/V cache, told from its config: one record per layer, and the arithmetic on them.

Nothing here reads weights or imports torch or transformers. What a config leaves out is its class's default (families).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from headpool import families
from headpool.errors import RequestError
from headpool.families import Family

Kind = Literal["full", "sliding", "none"]

KINDS: Mapping[str, Kind] = {
    "full_attention": "full", "sliding_attention": "sliding", "chunked_attention": "sliding",
    "linear_attention": "none", "conv": "none", "mamba": "none", "moe": "none", "mlp": "none",
}  # fmt: skip
"""transformers' words in `layer_types`; a chunked layer holds no more than its chunk, as a sliding one its window."""

WINDOW_FIELDS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


@dataclass(frozen=True)
class Layer:
    """One layer of a model, as far as its cache goes.

    kind: "full" attends to every token, "sliding" to the last `window`, "none" keeps no keys and values. heads,
    kv_heads, head_dim: counts and elements, the same for keys and values. shares: the index of the layer whose K/V
    this one reads instead of keeping its own.
    """

    kind: Kind
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    shares: int | None = None

    @property
    def group_size(self) -> int:
        return self.heads // self.kv_heads


def layers(config: Mapping[str, Any]) -> tuple[Layer, ...]:
    """The layers of the model that `config` (the object in config.json) describes, in order.

    Raises RequestError for a family whose layers cannot be told, and for a config that contradicts itself: heads that
    do not divide by K/V heads, synonyms that disagree, lists of the wrong length. Explicit `layer_types` and `head_dim`
    win over what would be computed.
    """
    return layers_of(config, families.find_family(config))


def layers_of(config: Mapping[str, Any], family: Family) -> tuple[Layer, ...]:
    """`layers` for a config whose family is known."""
    count = _natural(families.get(config, family, "num_hidden_layers"), "num_hidden_layers")
    families.kv_heads_fields(config, family)
    kinds = _kinds(config, family, count)
    shared = families.get(config, family, "num_kv_shared_layers") or 0
    result = []
    for index, (layer_type, window) in enumerate(kinds):
        own = _overridden(config, index)
        layer = _layer(own, family, index, layer_type, window)
        if index >= count - shared > 0:
            shares = max((i for i in range(count - shared) if kinds[i][0] == layer_type), default=None)
            layer = replace(layer, shares=shares)
        result.append(layer)
    return tuple(result)


def _overridden(config: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    """The config as layer `index` has it, with transformers' `per_layer_config` applied."""
    overrides = config.get(families.PER_LAYER) or {}
    merged = {**config, **next((own for key, own in overrides.items() if int(key) == index), {})}
    if isinstance(merged.get(families.KV_HEADS), list):
        counts = merged[families.KV_HEADS]
        if index >= len(counts):
            raise RequestError(
                f"{families.KV_HEADS} lists {len(counts)} layers, but the model has a layer {index}: contradiction"
            )
        merged[families.KV_HEADS] = counts[index]
    return merged


def _layer(
    config: Mapping[str, Any], family: Family, index: int, layer_type: str, window: int | None
) -> Layer:
    heads = _natural(families.get(config, family, "num_attention_heads"), "num_attention_heads")
    kv_heads = _natural(families.kv_heads(config, family) or heads, families.KV_HEADS)
    if heads % kv_heads:
        raise RequestError(
            f"layer {index}: num_attention_heads {heads} does not divide by {families.KV_HEADS} {kv_heads}"
        )
    head_dim = families.get(config, family, "head_dim") if family.head_dim_read else None
    if head_dim is None:
        hidden = _natural(families.get(config, family, "hidden_size"), "hidden_size")
        if hidden % heads:
            raise RequestError(f"hidden_size {hidden} does not divide by num_attention_heads {heads}")
        head_dim = hidden // heads
    skipped = "attention" in str(config.get("skip", "")) and families.PER_LAYER in config
    kind: Kind = "none" if skipped else KINDS[layer_type]
    return Layer(kind, heads, kv_heads, _natural(head_dim, "head_dim"), window if kind == "sliding" else None)


def _kinds(config: Mapping[str, Any], family: Family, count: int) -> list[tuple[str, int | None]]:
    """Each layer's word in `layer_types` and its window in tokens."""

    def get(field: str) -> Any:
        return families.get(config, family, field)

    explicit = config.get("layer_types")
    if explicit is None:
        own = family.layer_fields
        overruled = next((field for field in own if config.get(field, own[field]) != own[field]), None)
        if family.window is None or overruled:
            raise RequestError(
                f"config.json has no layer_types, and how {family.class_name} computes them"
                + (f" from {overruled}" if overruled else "")
                + " is not known here; save its config once with a recent transformers, which writes them"
            )
        return kinds_by_rule(family.window, count, get)
    if not isinstance(explicit, list) or len(explicit) < count:
        raise RequestError(f"layer_types must list the model's {count} layers: contradiction")
    unknown = next((kind for kind in explicit if kind not in KINDS), None)
    if unknown is not None:
        raise RequestError(f"layer_types holds {unknown!r}; known are {', '.join(KINDS)}")
    return [(kind, get(WINDOW_FIELDS[kind]) if kind in WINDOW_FIELDS else None) for kind in explicit[:count]]


def kinds_by_rule(rule: Mapping[str, Any], count: int, get: Any) -> list[tuple[str, int | None]]:
    """What a family's rule makes of a config without layer_types.

    The rule (families' data): `type` and its window's field; `enabled_by`: a field without which no layer has a
    window; which layers are full: those below the field `below`, `first` many, the `last`, and one in `every` (a
    number or a field, with `default`), at position `at` of each run.
    """
    layer_type = rule.get("type")
    window = get(WINDOW_FIELDS[layer_type]) if layer_type else None
    if not window or ("enabled_by" in rule and not get(rule["enabled_by"])):
        return [("full_attention", None)] * count
    below = get(rule["below"]) if "below" in rule else rule.get("first", 0)
    every = rule.get("every")
    if isinstance(every, str):
        every = get(every)
        every = rule.get("default") if every is None else every
    at = rule.get("at", -1)

    def full(index: int) -> bool:
        return (
            index < below
            or (every is not None and (every == 0 or index % every == at % every))
            or (index == count - 1 and rule.get("last", False))
        )

    return [("full_attention", None) if full(index) else (str(layer_type), window) for index in range(count)]


def _natural(value: Any, field: str) -> int:
    if type(value) is not int or value < 1:
        raise RequestError(f"config.json: {field} must be a whole number of 1 or more, found {value!r}")
    return value


def cache_bytes_per_token(layers: Sequence[Layer], itemsize: int) -> int:
    """Bytes of keys and values that one more token of one sequence takes while it is within every window.

    2 x layers x kv_heads x head_dim x itemsize, over the layers that keep K/V of their own.
    """
    return sum(2 * layer.kv_heads * layer.head_dim * itemsize for layer in layers if _keeps(layer))


def cache_bytes(layers: Sequence[Layer], *, tokens: int, batch: int, itemsize: int) -> int:
    """Bytes of the K/V cache of `batch` sequences of `tokens` tokens; a sliding layer holds at most its window."""
    return batch * sum(
        2 * layer.kv_heads * layer.head_dim * itemsize * min(tokens, layer.window or tokens)
        for layer in layers
        if _keeps(layer)
    )


def _keeps(layer: Layer) -> bool:
    return layer.kind != "none" and layer.shares is None


def options(layers: Sequence[Layer]) -> list[int]:
    """Every K/V-head count that can be asked for, from the model's own (the largest) down to 1."""
    most = max((layer.kv_heads for layer in layers if layer.kind != "none"), default=0)
    return [count for count in range(most, 0, -1) if all(_divides(layer, count) for layer in layers)]


def _divides(layer: Layer, kv_heads: int) -> bool:
    return layer.kind == "none" or layer.kv_heads <= kv_heads or layer.kv_heads % kv_heads == 0


def regroup(layers: Sequence[Layer], kv_heads: int) -> tuple[Layer, ...]:
    """The layers with `kv_heads` K/V heads in each that has more; the others stay.

    Raises RequestError for a count below 1, one that no layer reaches, and one that does not divide a layer's.
    """
    possible = options(layers)
    most = max(possible, default=0)
    listed = ", ".join(map(str, possible))
    if kv_heads < 1 or kv_heads > most:
        bound = "at least 1 is needed" if kv_heads < 1 else f"the model has {most}"
        raise RequestError(f"{kv_heads} K/V heads asked for, {bound}; possible are {listed}")
    for index, layer in enumerate(layers):
        if not _divides(layer, kv_heads):
            raise RequestError(
                f"layer {index} has {layer.kv_heads} K/V heads, which do not divide into {kv_heads}; "
                f"possible are {listed}"
            )
    return tuple(
        layer if layer.kind == "none" else replace(layer, kv_heads=min(layer.kv_heads, kv_heads)) for layer in layers
    )
