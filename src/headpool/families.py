"""Model families as data: what a config that omits a field means, which tensors pooling changes, and what is
refused.

The data are `class_defaults.json`, measured on transformers' own classes by `tools/class_defaults.py`; what a
reader of configs must know beyond that stands here. Nothing here imports torch or transformers.
"""

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

from headpool import kv_fields
from headpool.composite import composites, inside, text_config
from headpool.errors import RequestError, did_you_mean
from headpool.family import Family, family_from
from headpool.family_data import data, told
from headpool.instead import Refusal

KV_HEADS = "num_key_value_heads"

FIELDS = (
    "num_hidden_layers", "num_attention_heads", KV_HEADS, "hidden_size", "head_dim", "vocab_size",
    "max_position_embeddings", "initializer_range", "tie_word_embeddings", "attention_bias", "sliding_window",
    "use_sliding_window", "max_window_layers", "sliding_window_pattern", "attention_chunk_size",
    "layer_types", "num_kv_shared_layers", "partial_rotary_factor", "attn_layer_indices", "attn_layer_period",
    "attn_layer_offset", "block_types", "attention_k_eq_v", "cross_attention_layers",
)  # fmt: skip
"""The config fields that headpool reads, in transformers' words; the data hold each class's defaults for
them.
"""

SYNONYMS = ("num_kv_heads", "n_head_kv", "multi_query")
"""Other keys for the K/V head count that servers read when a config holds them, whatever its family."""

ENCODER_DECODER = "encoder-decoder models are not supported"
PER_LAYER = "its layers have fields of their own (per_layer_config), which is not supported yet"

RETYPED = {("mistral", "layer_types"): "ministral"}
"""transformers reads a config of this model_type that holds this key as one of another model_type."""


@cache
def families() -> dict[str, Family]:
    """Every family whose class has a K/V-head field in the language model's config, or is known to hold the count
    otherwise, by that config's model_type. What is told of one goes before what was measured.
    """
    measured = data()["families"]
    entries = measured | {name: measured.get(name, {}) | entry for name, entry in told().items()}
    return {name: family_from(name, entries[name]) for name in sorted(entries)}


def get(config: Mapping[str, Any], family: Family, field: str) -> Any:
    """What `config` holds for a field of FIELDS, under its own name or its class's; the class's default where
    it is absent.

    An explicit null is a value: it switches a window off, and makes a count or head_dim follow from the
    others. Of a composite model it is the language model's field.
    """
    config = text_config(config)
    for key in (family.aliases.get(field, field), field):
        if key in config:
            return config[key]
    return family.defaults.get(field)


def get_kv_heads(config: Mapping[str, Any], family: Family) -> Any:
    """The config's K/V-head count, a list where it says one for each layer: that of the query heads where
    it is null.
    """
    if family.kv_rules is not None:
        return kv_fields.read(family.kv_rules["read"], text_config(config), partial(get, config, family))
    held = get(config, family, KV_HEADS)
    return get(config, family, "num_attention_heads") if held is None else held


PER_LAYER_CONFIG = "per_layer_config"
"""The field under which transformers writes what single layers have instead of the config's own fields, by number."""


def layer_overrides(config: Mapping[str, Any], family: Family, layer: int, layer_type: str) -> Mapping[str, Any]:
    """What a layer has instead of the config's num_key_value_heads and head_dim: as per_layer_config says, else by the
    family's fields for layers of its type.
    """
    text = text_config(config)
    if PER_LAYER_CONFIG in text:
        held = text[PER_LAYER_CONFIG] or {}  # by number, which is "05" where there are tens of layers
        return next((one for number, one in held.items() if int(number) == layer), {})
    fields = _fields_in_force(config, family, layer_type)
    return {name: text.get(one["field"], one.get("default")) for name, one in fields.items()}


def _fields_in_force(config: Mapping[str, Any], family: Family, layer_type: str) -> dict[str, Mapping[str, Any]]:
    """What layers of a type have instead of the config's own fields → the field that says so, where it holds anything
    and the config has what it takes to be heeded.
    """
    text = text_config(config)
    return {
        name: one
        for name, one in family.by_type.get(layer_type, {}).items()
        if text.get(one["field"], one.get("default")) is not None
        and ("when" not in one or get(config, family, one["when"]))
    }


class AttentionTensor(NamedTuple):
    """A tensor's name taken apart: `stem` up to the layer's number, `suffix` inside the attention module, with * for
    numbers.
    """

    stem: str
    layer: int
    suffix: str


def attention_tensor(family: Family, name: str) -> AttentionTensor | None:
    """The name of an attention tensor of a checkpoint taken apart; None for every other tensor.

    A prefix of its own in front of the layers, or none, does not matter: checkpoints of bare models lack "model.". In
    composite models it must be the language model's. What drafts is another model.
    """
    if _DRAFTING.search(name):
        return None
    before, found, after = family.attention.rpartition("{}.")
    if not found:
        return None
    layers = "|".join(map(re.escape, family.stems)) or rf"(?:.*\.)?{re.escape(before.split('.')[-2])}\."
    modules = "|".join(re.escape(one) for one in (after, family.cross_attention) if one is not None)
    match = re.fullmatch(rf"({layers})(\d+)\.(?:{modules})\.(.+)", name)
    return AttentionTensor(match[1], int(match[2]), re.sub(r"\d+", "*", match[3])) if match else None


def in_class(family: Family) -> Family:
    """The family that tells how attention is called in the class, for one that tells how it is called in files."""
    return family if family.in_class is None else replace(families()[family.in_class], stems=family.stems)


_DRAFTING = re.compile(r"(^|\.)mtp\w*\.")
"""What checkpoints call layers that draft further tokens (multi-token prediction) where they do not number them on."""

_DRAFTING_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")
"""Fields that say how many there are."""


def drafting_layers(config: Mapping[str, Any]) -> int:
    """How many layers that draft further tokens may be numbered on after the model's own, and are none of its class."""
    held = (text_config(config).get(field) for field in _DRAFTING_LAYERS)
    return max((count for count in held if type(count) is int), default=0)


def drafts(config: Mapping[str, Any], family: Family, layers: int, name: str) -> bool:
    """Whether a tensor gives keys or values in a layer that drafts, of a model of so many layers."""
    module = family.attention.rpartition("{}.")[2]
    if not name.endswith(tuple(f".{module}.{suffix}" for suffix in family.pooled)):
        return False
    held = attention_tensor(family, name)
    numbered_on = held is not None and 0 <= held.layer - layers < drafting_layers(config)
    return numbered_on or _DRAFTING.search(name) is not None


def find_family(config: Mapping[str, Any]) -> Family:
    """The family of a config whose layers can be told from its fields, converted or not; that of the language model in
    a composite one, with the class and the stems that its checkpoints have there.

    Raises RequestError with the reason for every other config.
    """
    return _accepted(_known(config))


def _accepted(found: Family | Refusal) -> Family:
    if isinstance(found, Refusal):
        raise RequestError(str(found))
    return found


def _known(config: Mapping[str, Any]) -> Family | Refusal:
    model_type = _model_type(config)
    composite = composites().get(model_type)
    held = config if composite is None else text_config(config)
    text_type = _model_type(held)
    for (found, key), other in RETYPED.items():
        if text_type == found and key in held:
            text_type = other
    family = families().get(text_type)
    alone = family is not None and family.within is None
    reason = (family.reason if composite and alone and family else None) or (composite and composite.reason)
    reason = reason or _unreadable(held, text_type, family)
    if family is None or reason is not None:
        inside = "" if composite is None else f", its language model {text_type!r}"
        converts = family is not None and alone and family.reason is None
        of_composite = composite is not None and reason == composite.reason
        converting = text_type if converts and of_composite else None
        return Refusal(f"model_type {model_type!r}{inside}", str(reason), converting)
    return family if composite is None else replace(family, class_name=composite.class_name, stems=composite.stems)


def _model_type(config: Mapping[str, Any]) -> str:
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise RequestError("config.json has no model_type, which names the model's class")
    return model_type


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a model that can be converted, by its config.

    Raises RequestError with the reason for every other model.
    """
    return _accepted(family_or_refusal(config))


def family_or_refusal(config: Mapping[str, Any]) -> Family | Refusal:
    """The family of a model that can be converted, by its config, or why it cannot."""
    found = _known(config)
    if isinstance(found, Family) and (reason := refusal(config, found)) is not None:
        return Refusal(f"model_type {found.model_type!r}", reason)
    return found


def refusal(config: Mapping[str, Any], family: Family) -> str | None:
    """Why a model of a known family is not converted; None where it is."""
    if (quantized := quantization(config)) is not None:
        return quantized
    if family.within is not None and not family.stems:
        return f"it is a part of models such as {family.within}, and no class holds it alone"
    return family.reason


def quantization(config: Mapping[str, Any]) -> str | None:
    """That a config is of quantized weights, in words; None where it is not."""
    keys = ("quantization_config", "compression_config", "quantization")
    for part, key in itertools.product((config, text_config(config)), keys):
        if held := part.get(key):
            method = held.get("quant_method", key) if isinstance(held, Mapping) else key
            return f"the weights are quantized ({method}); convert the unquantized checkpoint instead"
    return None


def _unreadable(config: Mapping[str, Any], model_type: str, family: Family | None) -> str | None:
    """Why a config's layers cannot be told; None where they can."""
    signs: tuple[tuple[object, str | None], ...] = (
        (config.get("is_encoder_decoder"), ENCODER_DECODER),
        ("text_config" in config, "no class of transformers is known that holds a language model so (text_config)"),
        (config.get(PER_LAYER_CONFIG) and not (family and family.by_type), PER_LAYER),
        (family is not None, None if family is None or family.geometry else family.reason),
        *((model_type in names, reason) for reason, names in data()["others"].items()),
        ("auto_map" in config, "its code comes with the checkpoint (auto_map), and remote code is never run"),
    )
    known = [reason for sign, reason in signs if sign]
    return known[0] if known else _unknown(model_type)


def _unknown(model_type: str) -> str:
    return "unknown" + did_you_mean(model_type, [*families(), *composites()], most=3)


def kv_heads_fields(config: Mapping[str, Any], family: Family | None = None) -> dict[str, Any]:
    """Every field of the language model's config that holds its K/V-head count, with its value.

    Empty where they have rules of their own. Raises RequestError when two of them contradict each other.
    """
    family = family or find_family(config)
    if family.kv_rules is not None:
        return {}
    text = text_config(config)
    names = (family.aliases.get(KV_HEADS, KV_HEADS), KV_HEADS, *SYNONYMS)
    held = {name: text[name] for name in names if text.get(name) is not None}
    expected = get_kv_heads(config, family)
    for name, value in held.items():
        agrees = value == (expected == 1) if isinstance(value, bool) else value == expected
        if not agrees:
            raise RequestError(f"config.json contradicts itself: {KV_HEADS} is {expected}, {name} is {value}")
    return held


def can_hold(config: Mapping[str, Any], family: Family, kv_heads: int) -> bool:
    """Whether the class of a config has a way to say that there are `kv_heads` K/V heads."""
    if family.kv_rules is None or kv_heads == get_kv_heads(config, family):
        return True
    return kv_fields.refusal(family.kv_rules["write"], kv_heads, partial(get, config, family)) is None


def kv_heads_changes(config: Mapping[str, Any], kv_heads: int) -> dict[str, Any]:
    """The fields of a config, with their new values, that give it `kv_heads` K/V heads wherever it has more: the
    language model's where they stand, and at the top where that says the same.

    The family's own field is among them even where the config leaves it out; a mapping changes within a nested
    object. RequestError where the class cannot hold so many.
    """
    family = find_family(config)
    text = text_config(config)
    if family.kv_rules is not None:
        return inside(config, kv_fields.changes(family.kv_rules["write"], kv_heads, text, partial(get, text, family)))

    def fewer(value: Any) -> Any:
        if isinstance(value, bool):
            return kv_heads == 1
        if isinstance(value, list):
            return [fewer(one) for one in value]
        return min(value, kv_heads)

    own = family.aliases.get(KV_HEADS, KV_HEADS)
    held = {own: get_kv_heads(config, family)} | kv_heads_fields(config, family)
    repeated = {name: fewer(config[name]) for name in held if config.get(name) == held[name]}
    changes = {name: fewer(value) for name, value in held.items()}
    return repeated | inside(config, changes | _override_changes(config, family, fewer))


def _override_changes(config: Mapping[str, Any], family: Family, fewer: Callable[[Any], Any]) -> dict[str, Any]:
    """Changes to the K/V-head counts of single layers, or of all of a type, where the config holds any."""
    text = text_config(config)
    if PER_LAYER_CONFIG in text:
        held = {layer: one[KV_HEADS] for layer, one in (text[PER_LAYER_CONFIG] or {}).items() if KV_HEADS in one}
        return {PER_LAYER_CONFIG: {layer: {KV_HEADS: fewer(count)} for layer, count in held.items()}} if held else {}
    fields = (_fields_in_force(config, family, one).get(KV_HEADS) for one in family.by_type)
    return {one["field"]: fewer(text[one["field"]]) for one in fields if one is not None}
