"""Families as data: who converts, who is refused and why, and which fields hold the K/V-head count."""

from typing import Any

import pytest

from headpool import attention, families
from headpool.errors import RequestError
from headpool.family import PROJECTIONS, family_from

LLAMA = {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 8}


@pytest.mark.parametrize(
    ("model_type", "suffixes"),
    [
        ("llama", {"k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias"}),
        ("mistral", {"k_proj.weight", "v_proj.weight"}),
        ("qwen2", {"k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias"}),
        ("qwen3", {"k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias"}),
        ("gemma", {"k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias"}),
    ],
)
def test_what_is_pooled_in_the_families_converted_by_name(model_type: str, suffixes: set[str]) -> None:
    family = families.family_of({"model_type": model_type})
    assert set(family.pooled) == suffixes
    assert family.attention == "model.layers.{}.self_attn"
    assert family.rotary == "half-split"


def test_what_the_other_attention_tensors_follow() -> None:
    held = families.families()
    assert held["gpt_oss"].attention_tensors["sinks"] == "heads"
    assert held["qwen3"].attention_tensors["k_norm.weight"] == "fixed"
    assert held["llama"].attention_tensors["o_proj.weight"] == "heads"
    assert held["llama"].attention_tensors["o_proj.bias"] == "fixed"
    assert held["cohere"].attention_tensors["k_norm.weight"] == "kv_heads"
    assert held["cohere"].key_gains == held["olmo2"].key_gains == "k_norm.weight"
    assert held["stablelm"].key_gains == "k_layernorm.norms.*.weight"
    assert held["qwen3"].key_gains is None
    assert held["phi"].output == "dense"
    assert (held["cohere"].rotary, held["glm"].rotary) == ("interleaved", "interleaved")


LLAVA: dict[str, Any] = {"model_type": "llava", "text_config": LLAMA, "vision_config": {"num_attention_heads": 16}}


def test_a_composite_model_is_its_language_model_under_its_own_stems() -> None:
    family = families.family_of(LLAVA)
    assert (family.model_type, family.class_name) == ("llama", "LlavaForConditionalGeneration")
    suffix = "3.self_attn.k_proj.weight"
    for stem in ("language_model.model.layers.", "model.language_model.layers."):
        assert families.attention_tensor(family, stem + suffix) == (stem, 3, "k_proj.weight")
    for stem in ("vision_tower.vision_model.encoder.layers.", "model.layers."):
        assert families.attention_tensor(family, stem + suffix) is None


def test_a_field_of_a_composite_model_is_its_language_models() -> None:
    family = families.find_family(LLAVA)
    assert families.get(LLAVA, family, "num_attention_heads") == 8
    assert families.get(LLAVA, family, "hidden_size") == 4096, "llama's default"
    unnamed = LLAVA | {"text_config": {"num_key_value_heads": 2}}
    assert families.find_family(unnamed).model_type == "llama", "what llava takes for a language model by default"


def test_a_composite_models_count_changes_where_it_stands() -> None:
    assert families.kv_heads_changes(LLAVA, 2) == {"text_config": {"num_key_value_heads": 2}}
    both = LLAVA | {"num_key_value_heads": 8}
    assert families.kv_heads_changes(both, 2) == {
        "num_key_value_heads": 2,
        "text_config": {"num_key_value_heads": 2},
    }
    flat = {"model_type": "qwen2_vl", "num_attention_heads": 28, "num_key_value_heads": 4, "vision_config": {}}
    assert families.find_family(flat).model_type == "qwen2_vl_text"
    assert families.kv_heads_changes(flat, 1) == {"num_key_value_heads": 1}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "deepseek_v3"}, "multi-head latent attention (MLA)"),
    ({"model_type": "bloom"}, "no num_key_value_heads"),
    ({"model_type": "gpt2"}, "--transcode"),
    ({"model_type": "mamba"}, "a recurrent or state-space model"),
    ({"model_type": "dory"}, "its cache is not of the shape"),
    ({"model_type": "gemma3n", "text_config": {}}, "comes from the package timm"),
    ({"model_type": "t5"}, "encoder-decoder"),
    ({"model_type": "bart"}, "encoder-decoder"),
    ({"model_type": "llama", "is_encoder_decoder": True}, "encoder-decoder"),
    ({"model_type": "gemma3"}, "no text_config, where its language model's fields stand"),
    ({"model_type": "new-vlm", "text_config": {"model_type": "llama"}}, "is known that holds a language model so"),
    ({"model_type": "llava", "text_config": {"model_type": "bloom"}}, "its language model 'bloom': its config has no"),
    (
        {"model_type": "granite4_vision", "text_config": {}},
        "no model of its class that is small enough to test could be built",
    ),
    (
        LLAMA | {"per_layer_config": {"1": {"num_key_value_heads": 2}}},
        "fields of their own (per_layer_config)",
    ),
    ({"model_type": "llamma"}, "unknown; did you mean llama"),
    ({"model_type": "llamma", "auto_map": {"AutoConfig": "x.Y"}}, "remote code is never run"),
    ({"model_type": None}, "no model_type"),
    ({}, "no model_type"),
    (LLAMA | {"quantization_config": {"quant_method": "gptq"}}, "quantized (gptq)"),
    (LLAMA | {"quantization_config": {"bits": 4}}, "quantized (quantization_config)"),
]


@pytest.mark.parametrize(("config", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_what_is_refused_and_why(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError) as error:
        families.family_of(config)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 2


def test_every_refused_family_says_why_and_every_other_is_complete() -> None:
    held = families.families().values()
    refused = [family for family in held if family.reason is not None]
    converting = [family for family in held if family.reason is None]
    assert len(refused) > 30
    assert len(converting) > 70
    assert all(family.reason for family in refused)
    for family in converting:
        assert family.geometry
        assert f"{family.output}.weight" in family.attention_tensors
        if family.fused is not None:
            assert {name.split(".")[0] for name in family.pooled} == {family.fused.projection}
            continue
        assert {"k_proj.weight", "v_proj.weight"} <= set(family.pooled) <= {*PROJECTIONS, family.key_gains}
        assert family.attention_tensors["q_proj.weight"] == "heads"
        assert family.attention.count("{}") == 1


def test_an_unknown_key_in_the_data_is_an_error() -> None:
    with pytest.raises(ValueError, match="'x' hold unknown keys: attend, pooled"):
        family_from("x", {"class": "X", "defaults": {}, "pooled": [], "attend": "layers.{}.attn"})


def test_adapters_that_give_a_key_for_every_query_head_stand_against_fewer() -> None:
    config = {"model_type": "zamba2", "use_shared_attention_adapter": True}
    with pytest.raises(RequestError, match="4 K/V heads asked for: the adapters of its attention"):
        families.kv_heads_changes(config, 4)
    config["use_shared_attention_adapter"] = False
    assert families.kv_heads_changes(config, 4) == {"num_key_value_heads": 4}


def test_remote_code_is_ignored_beside_a_stock_model_type() -> None:
    assert families.family_of(LLAMA | {"auto_map": {"AutoConfig": "x.Y"}}).class_name == "LlamaForCausalLM"


def test_a_mistral_config_with_layer_types_is_read_as_ministral_as_transformers_does() -> None:
    config = {"model_type": "mistral", "layer_types": ["full_attention"] * 32}
    assert families.family_of(config).class_name == "MinistralForCausalLM"
    assert families.family_of({"model_type": "mistral"}).class_name == "MistralForCausalLM"


@pytest.mark.parametrize(
    ("model_type", "held", "dims"),
    [
        ("llama", {}, 64),
        ("phi", {}, 32),
        ("phi", {"partial_rotary_factor": 0.75}, 48),
        ("phi", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.4}}, 25),
        ("llama", {"rope_scaling": None, "rope_parameters": {"rope_type": "default"}}, 64),
    ],
)
def test_partial_rotation_wherever_a_config_holds_it(model_type: str, held: dict[str, Any], dims: int) -> None:
    family = families.families()[model_type]
    assert attention.rotary_dims({"model_type": model_type} | held, family, 64) == dims


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.11.self_attn.k_proj.weight", ("model.layers.", 11, "k_proj.weight")),
        ("layers.0.self_attn.k_proj.weight", ("layers.", 0, "k_proj.weight")),
        (
            "language_model.model.layers.2.self_attn.x.norms.4.weight",
            ("language_model.model.layers.", 2, "x.norms.*.weight"),
        ),
        ("model.layers.11.mlp.k_proj.weight", None),
        ("model.embed_tokens.weight", None),
        ("model.sublayers.0.self_attn.k_proj.weight", None),
    ],
)
def test_attention_tensors_are_found_by_name(name: str, expected: tuple[str, int, str] | None) -> None:
    assert families.attention_tensor(families.families()["llama"], name) == expected


def test_get_prefers_the_config_then_the_class_and_takes_null_for_a_value() -> None:
    entry = {
        "class": "X",
        "defaults": {"head_dim": 64, "sliding_window": 4096},
        "aliases": {"head_dim": "kv_channels"},
    }
    family = family_from("x", entry)
    assert families.get({}, family, "head_dim") == 64
    assert families.get({"kv_channels": 32}, family, "head_dim") == 32
    assert families.get({"head_dim": 16}, family, "head_dim") == 16
    assert families.get({"sliding_window": None}, family, "sliding_window") is None
    assert families.get({}, family, "sliding_window") == 4096
    assert families.get({}, family, "max_window_layers") is None


def test_all_fields_with_the_count_are_found_and_changed_together() -> None:
    config = LLAMA | {"num_kv_heads": 8, "n_head_kv": 8, "multi_query": False}
    assert families.kv_heads_fields(config) == {
        "num_key_value_heads": 8, "num_kv_heads": 8, "n_head_kv": 8, "multi_query": False,
    }  # fmt: skip
    assert families.kv_heads_changes(config, 2) == {
        "num_key_value_heads": 2, "num_kv_heads": 2, "n_head_kv": 2, "multi_query": False,
    }  # fmt: skip
    changes = families.kv_heads_changes(config, 1)
    assert changes["multi_query"] is True
    families.kv_heads_fields(config | changes)


def test_a_count_that_the_config_leaves_out_is_written() -> None:
    assert families.kv_heads_changes({"model_type": "llama"}, 4) == {"num_key_value_heads": 4}
    null = {"model_type": "llama", "num_key_value_heads": None}
    assert families.kv_heads_changes(null, 4) == {"num_key_value_heads": 4}


def test_only_layers_with_more_heads_change() -> None:
    listed = LLAMA | {"num_key_value_heads": [8, 2, 8]}
    assert families.kv_heads_changes(listed, 4) == {"num_key_value_heads": [4, 2, 4]}


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_kv_heads", 4), ("n_head_kv", 1), ("multi_query", True), ("num_kv_heads", [8, 8])],
)
def test_contradicting_counts_are_refused_with_both_named(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=rf"num_key_value_heads is 8, {field} is ") as error:
        families.kv_heads_fields(LLAMA | {field: value})
    assert str(value) in str(error.value)


def test_a_count_under_a_foreign_name_alone_contradicts_the_class_default() -> None:
    with pytest.raises(RequestError, match="num_key_value_heads is 32, num_kv_heads is 8"):
        families.kv_heads_fields({"model_type": "llama", "num_attention_heads": 32, "num_kv_heads": 8})
