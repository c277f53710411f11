"""One family of models, and how it comes of its entry in the data. Nothing here imports torch or transformers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from headpool import kv_fields

TRANSCODED = "its class cannot hold fewer K/V heads; with --transcode, convert writes it as one that can"

PROJECTIONS = ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias")
"""What separate key and value projections are called inside an attention module."""

Order = Literal["blocks", "groups"]
"""How heads follow each other in a fused projection: all queries, all keys, all values; or by K/V head: its query
heads, its key, its value.
"""


@dataclass(frozen=True)
class FusedProjection:
    """One projection for queries, keys and values: its name in the attention module, and the order of its heads."""

    projection: str
    order: Order


@dataclass(frozen=True)
class Family:
    """One model_type of transformers.

    reason: why its checkpoints are not converted, None where they are. transcodes: they are, once they are written as
        models of another class. like: the family that tells what the entry of this one leaves out.
    within: a composite model that the family is only known inside. stems: the names of its layers there.
    defaults: the class's, of FIELDS. aliases: fields of other names in the class. geometry: whether its layers can be
        told from the config's top-level fields. head_dim_read: whether the class heeds an explicit head_dim.
    window: the rule for configs that hold no layer_types (see geometry), None where there is none. layer_fields: the
        class's own fields that overrule it, with their defaults.
    by_type: layers' types → the fields in which the config holds what they have instead of num_key_value_heads and
        head_dim (see layer_overrides). kv_rules: how configs hold the K/V-head count ("read") and are given another
        ("write") where no field of FIELDS does.
    attention: the attention module's name with `{}` for the layer's number. cross_attention: what stands in its place
        inside layers that attend to another input than text. output: the output projection's name.
    attention_tensors: every tensor that can stand in the module (numbers as `*`) → what its size follows. pooled: those
        that pooling changes; a checkpoint that has others which follow the K/V heads is not converted.
    fused: how queries, keys and values lie in one projection, None where each has its own. query_parts: how many rows
        the query projection has for each dimension of a head (2: queries and gates). input_parts: how many times
        hidden_size attention takes in (2: the embedding besides). keys_as_values: the field that leaves full attention
        without a projection for values. shared_weights: layers may share theirs, which files hold once, in the first.
    in_class: the family whose names attention has once it is loaded, where files have others.
    rotary: how the dimensions of a head pair (None: no telling).
    key_gains: the tensor with the gains of a norm across all key heads, or of one for each (see layouts). bare_norms:
        fields that are all true of layers whose queries and keys pass norms without gains (none: of all layers), None
        where there are no such norms. normed_values: values pass norms without gains.
    input_norms: the names that the norm before attention has inside the layer. gains_less_one: it stores its gains so.
    unaligned: why method aligned leaves the family alone, None where nothing but its tensors can stand against it.
    warnings: what is to be known of converted models: {"when": fields with their values, "says": words}, in which
        {version} stands for transformers'.
    """

    model_type: str
    class_name: str
    defaults: Mapping[str, Any]
    reason: str | None = None
    geometry: bool = True
    aliases: Mapping[str, str] = field(default_factory=dict)
    window: Mapping[str, Any] | None = None
    layer_fields: Mapping[str, Any] = field(default_factory=dict)
    attention: str = ""
    cross_attention: str | None = None
    pooled: tuple[str, ...] = ()
    attention_tensors: Mapping[str, Literal["heads", "kv_heads", "fixed"]] = field(default_factory=dict)
    rotary: Literal["half-split", "interleaved"] | None = None
    output: str = "o_proj"
    head_dim_read: bool = True
    key_gains: str | None = None
    within: str | None = None
    query_parts: int = 1
    input_parts: int = 1
    shared_weights: bool = False
    fused: FusedProjection | None = None
    input_norms: tuple[str, ...] = ("input_layernorm",)
    gains_less_one: bool = False
    bare_norms: tuple[str, ...] | None = None
    normed_values: bool = False
    kv_rules: Mapping[str, Sequence[kv_fields.Rule]] | None = None
    stems: tuple[str, ...] = ()
    by_type: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    keys_as_values: str | None = None
    unaligned: str | None = None
    transcodes: bool = False
    warnings: tuple[Mapping[str, Any], ...] = ()
    like: str | None = None
    in_class: str | None = None


_NAMES = {"class": "class_name", "kv_heads": "kv_rules"}
"""Keys of an entry that are called otherwise in Family."""

_DERIVED = {"model_type", "class_name", "pooled", "key_gains", "kv_rules", "stems"}
"""What no entry says by these names."""

_KEYS = {one.name for one in fields(Family)} - _DERIVED | set(_NAMES)


def family_from(model_type: str, entry: Mapping[str, Any]) -> Family:
    """A family from its entry in the data. ValueError for a key that no entry has."""
    if unknown := sorted(entry.keys() - _KEYS):
        raise ValueError(f"the data on {model_type!r} hold unknown keys: {', '.join(unknown)}")
    told: dict[str, Any] = {
        _NAMES.get(key, key): tuple(held) if isinstance(held, list) else held for key, held in entry.items()
    }
    if "fused" in told:
        told["fused"] = FusedProjection(**told["fused"])
    if told.get("transcodes"):
        told["reason"] = TRANSCODED
    tensors = entry.get("attention_tensors", {})
    gains = [name for name, follows in tensors.items() if follows == "kv_heads" and "norm" in name]
    pooled = (*_projections(told.get("fused")), *gains)
    return Family(
        model_type=model_type,
        pooled=tuple(name for name, follows in tensors.items() if follows == "kv_heads" and name in pooled),
        key_gains=gains[0] if gains else None,
        **told,
    )


def _projections(fused: FusedProjection | None) -> tuple[str, ...]:
    """The tensors that give keys and values, inside an attention module."""
    return PROJECTIONS if fused is None else (f"{fused.projection}.weight", f"{fused.projection}.bias")
