"""The shape of a model's K/V cache, told from its config: one record per layer, and the arithmetic on them.

Nothing here reads weights or imports torch or transformers. What a config leaves out is its class's default
(families).
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

from headpool import families
from headpool.composite import text_config
from headpool.errors import RequestError
from headpool.family import Family

if TYPE_CHECKING:
    from pathlib import Path

    from headpool.planning import Plan

Kind = Literal["full", "sliding", "cross", "none"]

KINDS: Mapping[str, Kind] = {
    "full_attention": "full", "sliding_attention": "sliding", "chunked_attention": "sliding",
    "attention": "full", "hybrid": "full", "linear_attention": "none", "conv": "none", "mamba": "none", "moe": "none",
    "mlp": "none", "cross_attention": "cross",
}  # fmt: skip
"""transformers' words in `layer_types`; a chunked layer holds no more than its chunk, as a sliding one its
window, and a hybrid one attends beside a state-space model. A cross-attention layer is headpool's own word.
"""

WINDOW_FIELDS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


@dataclass(frozen=True)
class Layer:
    """One layer of a model, as far as its cache goes.

    kind: "full" attends to every token, "sliding" to the last `window`, "cross" to another input (a picture), of which
    alone it keeps keys and values, "none" keeps none.
    heads, kv_heads, head_dim: counts and elements, the same for keys and values. shares: the index of the
    layer whose K/V this one reads instead of keeping its own. own_values is false where one projection gives keys and
    values.
    """

    kind: Kind
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    shares: int | None = None
    own_values: bool = True

    @property
    def group_size(self) -> int:
        return self.heads // self.kv_heads


def layers(config: Mapping[str, Any]) -> tuple[Layer, ...]:
    """The layers of the model that `config` (the object in config.json) describes, in order.

    Raises RequestError for a family whose layers cannot be told, and for a config that contradicts itself:
    heads that do not divide by K/V heads, synonyms that disagree, lists of the wrong length. Explicit
    `layer_types` and `head_dim` win over what would be computed.
    """
    return layers_of(config, families.find_family(config))


def layers_of(config: Mapping[str, Any], family: Family) -> tuple[Layer, ...]:
    """`layers` for a config whose family is known."""
    count = _count(config, family)
    families.kv_heads_fields(config, family)
    listed = families.get_kv_heads(config, family)
    if isinstance(listed, list) and len(listed) != count:
        raise RequestError(f"{families.KV_HEADS} lists {len(listed)} layers, num_hidden_layers is {count}")
    kinds = _kinds(config, family, count)
    sharing = families.get(config, family, "num_kv_shared_layers") or 0
    own = kinds[: count - _whole(sharing, "num_kv_shared_layers", least=0)]
    result = []
    for index, (layer_type, window) in enumerate(kinds):
        layer = _layer(config, family, index, layer_type, window)
        if index >= len(own):  # it reads what the last layer of its type with K/V of its own has kept
            alike = [i for i, (other, _) in enumerate(own) if other == layer_type]
            layer = replace(layer, shares=alike[-1] if alike else None)
        result.append(layer)
    return tuple(result)


def _count(config: Mapping[str, Any], family: Family) -> int:
    """How many layers there are: as many as have a word of their own, where a class counts those alone."""
    rule = family.window or {}
    words = families.get(config, family, "layer_types")
    if rule.get("word_each"):
        words = words or families.get(config, family, rule["repeated"]) or rule["default"]
    held = None if rule.get("word_each") else families.get(config, family, "num_hidden_layers")
    return _whole(len(words) if held is None and words else held, "num_hidden_layers")


def _layer(config: Mapping[str, Any], family: Family, index: int, layer_type: str, window: int | None) -> Layer:
    heads = _whole(families.get(config, family, "num_attention_heads"), "num_attention_heads")
    own = families.layer_overrides(config, family, index, layer_type)
    held = own.get(families.KV_HEADS, families.get_kv_heads(config, family))
    kv_heads = _whole(held[index] if isinstance(held, list) else held, families.KV_HEADS)
    if heads % kv_heads:
        raise RequestError(
            f"layer {index}: num_attention_heads {heads} does not divide by {families.KV_HEADS} {kv_heads}"
        )
    head_dim = own.get("head_dim", families.get(config, family, "head_dim")) if family.head_dim_read else None
    if head_dim is None:
        hidden = family.input_parts * _whole(families.get(config, family, "hidden_size"), "hidden_size")
        if hidden % heads:
            raise RequestError(f"hidden_size {hidden} does not divide by num_attention_heads {heads}")
        head_dim = hidden // heads
    kind: Kind = KINDS[layer_type]
    if kind == "sliding" and window is None:
        kind = "full"
    own_values = not (kind == "full" and family.keys_as_values and families.get(config, family, family.keys_as_values))
    return Layer(kind, heads, kv_heads, _whole(head_dim, "head_dim"), window, own_values=own_values)


def _kinds(config: Mapping[str, Any], family: Family, count: int) -> list[tuple[str, int | None]]:
    """Each layer's word in `layer_types` and its window in tokens."""

    def get(field: str) -> Any:
        return families.get(config, family, field)

    config = text_config(config)
    listed = family.aliases.get("layer_types", "layer_types")
    explicit = config.get(listed, config.get("layer_types"))
    if explicit is None:
        own = family.layer_fields
        overruled = next((field for field in own if config.get(field, own[field]) != own[field]), None)
        if family.window is None or overruled:
            raise RequestError(
                f"config.json has no {listed}, and how {family.class_name} computes them"
                + (f" from {overruled}" if overruled else "")
                + " is not known here; save its config once with a recent transformers, which writes them"
            )
        return kinds_by_rule(family.window, count, get)
    if not isinstance(explicit, list) or len(explicit) != count:
        raise RequestError(f"{listed} must be a list of {count}, which num_hidden_layers says")
    unknown = next((kind for kind in explicit if not isinstance(kind, str) or kind not in KINDS), None)
    if unknown is not None:
        raise RequestError(f"{listed} holds {unknown!r}; known are {', '.join(KINDS)}")
    windows = {kind: _window(family.window or {}, kind, get) for kind in set(explicit)}
    return [(kind, windows[kind]) for kind in explicit]


def _window(rule: Mapping[str, Any], layer_type: str | None, get: Callable[[str], Any]) -> int | None:
    """The window of layers of one type, None where nothing bounds what they hold."""
    field = WINDOW_FIELDS.get(layer_type or "")
    switched_off = "enabled_by" in rule and not get(rule["enabled_by"])
    window = None if field is None or switched_off else get(field)
    return _whole(window, str(field)) if window else None


def kinds_by_rule(rule: Mapping[str, Any], count: int, get: Callable[[str], Any]) -> list[tuple[str, int | None]]:
    """What a family's rule makes of a config without layer_types.

    The rule (families' data) says which `type` layers with a window have, or those without attention, and `enabled_by`
    which field they have none without. Full are the layers below the field `below`, the `first` many, the `last`, those
    that the field `listed` lists, and one in `every` (a number, or a field with its `default`), at position `at` (a
    number or a field) of each run. Or all are full but those that the field `only` lists, or the `default`. Or the
    field `repeated` holds words (in a string, letters) for the layers, over and over if need be, which `words`
    translates; with `word_each` there are as many layers as words.
    """
    if "repeated" in rule:
        return _by_words(rule, count, get)
    layer_type = rule.get("type")
    window = _window(rule, layer_type, get)
    if window is None and (layer_type is None or layer_type in WINDOW_FIELDS):
        return [("full_attention", None)] * count
    only = _positions(get(rule["only"]), rule) if "only" in rule else None
    first = _whole(get(rule["below"]) or 0, rule["below"], least=0) if "below" in rule else rule.get("first", 0)
    every = rule.get("every")
    if isinstance(every, str):
        held = get(every)
        every = _whole(rule.get("default") if held is None else held, every)
    at = rule.get("at", -1)
    at = _whole(get(at), at, least=0) if isinstance(at, str) else at
    listed = (get(rule["listed"]) if "listed" in rule else None) or ()

    def full(index: int) -> bool:
        if only is not None:
            return index not in only
        periodic = every is not None and index % every == at % every
        return index < first or periodic or index in listed or (index == count - 1 and rule.get("last", False))

    return [("full_attention", None) if full(index) else (str(layer_type), window) for index in range(count)]


def _by_words(rule: Mapping[str, Any], count: int, get: Callable[[str], Any]) -> list[tuple[str, int | None]]:
    field, words = rule["repeated"], rule["words"]
    held = get(field) or rule.get("default")
    unknown = [word for word in held or () if word not in words]
    if not held or unknown:
        raise RequestError(f"config.json: {field} must hold {', '.join(words)}, found {(unknown or [held])[0]!r}")
    kinds = [words[held[index % len(held)]] for index in range(count)]
    return [(kind, _window(rule, kind, get)) for kind in kinds]


def _positions(held: Any, rule: Mapping[str, Any]) -> Collection[int]:
    """The layers that the field `only` of a rule lists."""
    listed = rule["default"] if held is None else held
    if not isinstance(listed, list) or not all(type(one) is int for one in listed):
        raise RequestError(f"config.json: {rule['only']} must be a list of layers' numbers, found {listed!r}")
    return listed


def _whole(value: Any, field: str, *, least: int = 1) -> int:
    if type(value) is not int or value < least:
        raise RequestError(f"config.json: {field} must be a whole number of {least} or more, found {value!r}")
    return value


def cache_bytes_per_token(layers: Sequence[Layer], itemsize: int) -> int:
    """Bytes of keys and values that one more token of one sequence takes while it is within every window.

    2 x layers x kv_heads x head_dim x itemsize, over the layers that keep K/V of their own and of text.
    """
    return sum(2 * layer.kv_heads * layer.head_dim * itemsize for layer in layers if _keeps(layer))


def cache_bytes(layers: Sequence[Layer], *, tokens: int, batch: int, itemsize: int) -> int:
    """Bytes of the K/V cache of `batch` sequences of `tokens` tokens; a sliding layer holds at most its
    window.
    """
    return batch * sum(
        2 * layer.kv_heads * layer.head_dim * itemsize * min(tokens, layer.window or tokens)
        for layer in layers
        if _keeps(layer)
    )


LONGEST_CURVE = 2**17
"""Tokens at which `cache_curve` ends where the model's positions do not end it."""


def cache_curve(layers: Sequence[Layer], *, itemsize: int, positions: int | None) -> tuple[tuple[int, int], ...]:
    """Tokens, and bytes of the K/V cache of one sequence of so many: at each power of two up to the model's positions
    (None: no limit) and LONGEST_CURVE.
    """
    last = min(LONGEST_CURVE, positions or LONGEST_CURVE)
    lengths = [2**power for power in range(last.bit_length())]
    return tuple((tokens, cache_bytes(layers, tokens=tokens, batch=1, itemsize=itemsize)) for tokens in lengths)


def _keeps(layer: Layer) -> bool:
    return layer.kind not in ("none", "cross") and layer.shares is None


def options(layers: Sequence[Layer]) -> list[int]:
    """Every K/V-head count that can be asked for, from the model's own (the largest) down to 1."""
    most = max((layer.kv_heads for layer in layers if layer.kind != "none"), default=0)
    return [count for count in range(most, 0, -1) if all(_divides(layer, count) for layer in layers)]


def _divides(layer: Layer, kv_heads: int) -> bool:
    return layer.kind == "none" or layer.kv_heads <= kv_heads or layer.kv_heads % kv_heads == 0


def regroup(layers: Sequence[Layer], kv_heads: int) -> tuple[Layer, ...]:
    """The layers with `kv_heads` K/V heads in each that has more; the others stay.

    Raises RequestError for a count below 1, one that no layer reaches, one that does not divide a layer's, and where no
    layer has any.
    """
    possible = options(layers)
    if not possible:
        raise RequestError("no layer of the model keeps keys and values")
    most = max(possible)
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


UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGTP", start=1)
}
"""Units of memory and their bytes: GB is 10^9, GiB 2^30."""


def plan(
    model: "str | Path",
    *,
    context: int | None = None,
    batch: int = 1,
    memory: int | None = None,
    revision: str | None = None,
) -> "Plan":
    """What each K/V-head count of a model would take and save, for `batch` sequences of `context` tokens.

    model: a directory or a hub id, of which config and headers are read, at `revision`; context: the model's positions
    where None; memory: bytes for weights and cache. Raises RequestError for a model whose layers cannot be told. It is
    headpool.planning's, which imports this module.
    """
    from headpool.planning import plan as make_plan

    return make_plan(model, context=context, batch=batch, memory=memory, revision=revision)


def parse_size(text: str) -> int:
    """Bytes of a size such as "80GiB", "1.5 TB" or "4096". Raises RequestError for anything else, zero
    included.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = {name.lower(): size for name, size in UNITS.items()}.get(match[2].lower()) if match else None
    size = int(Fraction(match[1]) * unit) if match and unit else 0
    if size < 1:
        raise RequestError(f"{text!r} is no size; write it as 80GiB, 500MB or a number of bytes")
    return size
