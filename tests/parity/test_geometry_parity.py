"""Geometry told from a config against what transformers makes of it: configs, weights, caches."""

import json
from typing import Any

import pytest
import tiny
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from headpool import families, family_data, geometry
from headpool.geometry import Layer

NAMED = (*tiny.FAMILIES, "gemma2")
KNOWN = tuple(
    name
    for name, family in families.families().items()
    if family.geometry
    and family.kv_rules is None
    and family.cross_attention is None
    and (name in NAMED or transformers.__version__ == family_data.data()["transformers"])
)
"""On a version of transformers other than the measured one only the families that are tested by name. Those that hold
the count in a way of their own are in test_told_families.py, those that attend to pictures in test_mllama.py.
"""

CONVERTING = tuple(
    name
    for name in KNOWN
    if (family := families.families()[name]).reason is None and family.fused is None and family.within is None
)

NAMED_AS_SAVED = tuple(name for name in CONVERTING if "names" not in (families.families()[name].unaligned or ""))
"""Families whose classes have the names for attention that their checkpoints have."""

VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_hidden_layers": 7},
    {"num_hidden_layers": 26, "num_key_value_heads": None},
    {"num_hidden_layers": 7, "sliding_window": 33},
    {"num_hidden_layers": 7, "sliding_window": None},
    {"num_hidden_layers": 9, "use_sliding_window": True, "max_window_layers": 5, "sliding_window": 11},
    {"num_hidden_layers": 9, "use_sliding_window": False, "sliding_window": 11},
    {"num_hidden_layers": 14, "sliding_window_pattern": 5},
    {"num_hidden_layers": 11, "full_attention_interval": 3},
    {"num_hidden_layers": 9, "attn_layer_indices": [2, 5]},
    {"num_hidden_layers": 9, "attn_layer_period": 4, "attn_layer_offset": 1},
    {"num_hidden_layers": 9, "block_types": ["attention", "recurrent"]},
    {"num_hidden_layers": 7, "hybrid_override_pattern": "M*-EM*-"},
    {"num_hidden_layers": 8, "global_head_dim": 48, "num_global_key_value_heads": 2},
    {"num_hidden_layers": 13, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    {
        "num_hidden_layers": 3,
        "sliding_window": 12,
        "use_sliding_window": True,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96},
    {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96, "head_dim": 40},
)


OWN: dict[str, dict[str, Any]] = {
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "nemotron": {"num_key_value_heads": 8},
    "glm4_moe": {"head_dim": 128},
    "glm4v_moe_text": {"hidden_size": 12288},
    "qwen3_omni_moe_text": {"hidden_size": 3584},
}
"""What these classes need for a model to come of their defaults."""


KINDS = {
    "DynamicLayer": "full", "DynamicSlidingWindowLayer": "sliding", "LinearAttentionLayer": "none",
    "DummyLayer": "none", "LinearAttentionAndFullAttentionLayer": "full",
}  # fmt: skip


def told(config: Any, head_dim_read: bool) -> list[Layer]:
    """What transformers says: the cache's layers by its own cache, the heads by the config's attributes, or those of
    the config that it has for the layer.
    """
    heads = config.num_attention_heads
    layers = []
    for index, cached in enumerate(transformers.DynamicCache(config=config).layers):
        own = config.per_layer_config[index] if getattr(config, "is_heterogeneous", False) else config
        head_dim = (head_dim_read and getattr(own, "head_dim", None)) or config.hidden_size / heads
        window = getattr(cached, "sliding_window", None)
        kind = KINDS[type(cached).__name__]
        one_projection = kind == "full" and hasattr(type(config), "attention_k_eq_v") and config.attention_k_eq_v
        values = not one_projection
        layers.append(Layer(kind, heads, own.num_key_value_heads, head_dim, window, own_values=values))  # type: ignore[arg-type]
    return layers


def usable(config: Any) -> bool:
    """Whether a class could build a model of what it made of a config."""
    kinds = getattr(config, "layer_types", None) or ()
    config = config.per_layer_config[0] if getattr(config, "is_heterogeneous", False) else config
    return (
        config.num_key_value_heads is not None
        and (config.hidden_size % config.num_attention_heads == 0 or getattr(config, "head_dim", None) is not None)
        and not ("sliding_attention" in kinds and config.sliding_window is None)
    )


@pytest.mark.parametrize("model_type", KNOWN)
def test_layers_are_what_transformers_makes_of_the_same_config(model_type: str) -> None:
    family = families.families()[model_type]
    compared = 0
    for variant in VARIANTS:
        fields = OWN.get(model_type, {}) | variant
        try:
            config = CONFIG_MAPPING[model_type](**fields)
        except Exception:
            continue  # the class itself refuses this one
        overruled = any(fields.get(name, default) != default for name, default in family.layer_fields.items())
        if not usable(config) or (overruled and "layer_types" not in fields):
            continue
        expected = told(config, family.head_dim_read)
        if family.window is not None or "layer_types" in fields:
            assert list(geometry.layers({"model_type": model_type} | fields)) == expected, variant
        saved = json.loads(json.dumps(config.to_dict(), default=str))
        assert list(geometry.layers(saved)) == expected, variant
        compared += 1
    assert compared >= 4


def test_enough_families_are_compared() -> None:
    assert set(NAMED) <= set(KNOWN)
    if transformers.__version__ == family_data.data()["transformers"]:
        assert len(KNOWN) >= 70
        assert len(CONVERTING) >= 60


def shapes(model_type: str, **fields: Any) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**fields))
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


HYBRIDS = tuple(
    name
    for name in CONVERTING
    if (window := families.families()[name].window) is None or window.get("type") == "linear_attention"
    if "window" not in family_data.told().get(name, {})
)
"""Of two layers, one has to be told to attend."""

NEEDED: dict[str, dict[str, Any]] = {
    **OWN,
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "head_dim": 32},
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["full_attention"] * 2},
    "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention"]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    **{name: {"layer_types": ["linear_attention", "full_attention"]} for name in HYBRIDS},
    "zamba": {"layers_block_type": ["hybrid", "hybrid"]},
    "ministral": {"head_dim": 32},
    "hunyuan_v1_dense": {"head_dim": 32},
    "hunyuan_v1_moe": {"head_dim": 32},
    "gemma3n_text": {"num_kv_shared_layers": 0, "num_hidden_layers": 5},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")
        }
    },
}
"""What these classes need beyond their defaults to be built."""


@pytest.mark.parametrize("model_type", NAMED_AS_SAVED)
def test_weights_have_the_shapes_and_the_names_that_the_family_says(model_type: str) -> None:
    """With the class's own dimensions, other than those of the small models that the data were measured
    on.
    """
    family = families.families()[model_type]
    fields = {"num_hidden_layers": 2} | NEEDED.get(model_type, {})
    layers = geometry.layers({"model_type": model_type} | fields)
    found = shapes(model_type, **fields)
    seen = set()
    for name, shape in found.items():
        held = families.attention_tensor(family, name)
        if held is None:
            assert "k_proj" not in name or ".linear_attn." in name
            continue
        _, index, suffix = held
        if layers[index].kind == "none":
            continue  # what such layers do has the name of attention in some classes
        assert suffix in family.attention_tensors
        seen.add((index, suffix))
        rows = {
            "q_proj": layers[index].heads * family.query_parts,
            "k_proj": layers[index].kv_heads,
            "v_proj": layers[index].kv_heads,
        }
        if suffix.split(".")[0] in rows:
            assert shape[0] == rows[suffix.split(".")[0]] * layers[index].head_dim
    for index in (index for index, layer in enumerate(layers) if layer.kind != "none"):
        assert {(index, f"{part}.weight") for part in ("q_proj", "k_proj", "v_proj", family.output)} <= seen


@pytest.mark.parametrize("model_type", NAMED)
@pytest.mark.parametrize("kv_heads", [12, 4, 1])
def test_cache_bytes_are_those_of_a_cache_that_a_model_filled(model_type: str, kv_heads: int) -> None:
    model = tiny.model(model_type, num_key_value_heads=kv_heads, num_hidden_layers=4, sliding_window=16)
    layers = geometry.layers({"model_type": model_type} | model.config.to_dict())
    for tokens in (5, 15, 40):
        cache = model(torch.zeros(3, tokens, dtype=torch.long), use_cache=True).past_key_values
        held = [layer.keys.nbytes + layer.values.nbytes for layer in cache.layers]
        # transformers drops the one token of a full window that the next step will not see
        kept = [Layer(l.kind, l.heads, l.kv_heads, l.head_dim, l.window and l.window - 1) for l in layers]
        assert sum(held) == geometry.cache_bytes(kept, tokens=tokens, batch=3, itemsize=4)
        assert sum(held) <= geometry.cache_bytes(layers, tokens=tokens, batch=3, itemsize=4)
        if tokens < 16:
            assert sum(held) == 3 * tokens * geometry.cache_bytes_per_token(layers, 4)


@pytest.mark.skipif("gemma3n_text" not in KNOWN, reason="tested on the measured version")
@pytest.mark.parametrize("shared", [0, 3, 5])
def test_layers_that_share_keep_nothing_of_their_own(shared: int) -> None:
    config = CONFIG_MAPPING["gemma3n_text"](num_hidden_layers=10, num_kv_shared_layers=shared)
    layers = geometry.layers({"model_type": "gemma3n_text", "num_hidden_layers": 10, "num_kv_shared_layers": shared})
    cached = [type(layer).__name__ for layer in transformers.DynamicCache(config=config).layers]
    assert [layer.shares is not None for layer in layers] == [name == "DummyLayer" for name in cached]
    assert sum(layer.shares is not None for layer in layers) == shared
