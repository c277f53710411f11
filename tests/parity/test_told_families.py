"""What is told of families by hand is what transformers' classes say."""

import inspect
import json
import re
from typing import Any

import fused
import pytest
import registry
import tiny
import torch
import transcoded
import transformers
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from headpool import families, family_data, geometry


def model(model_type: str) -> Any:
    family = families.families()[model_type]
    if family.fused is not None:
        _, what, full, _ = next(kind for kind in fused.KINDS.values() if kind[0] == model_type)
        return tiny.model(model_type, **what | full)
    if family.transcodes:
        return tiny.model(model_type, **next(k[2] for k in transcoded.KINDS.values() if k[0] == model_type))
    return registry.built(family.within or model_type)


@pytest.mark.parametrize("model_type", family_data.told())
def test_defaults_are_those_of_the_class(model_type: str) -> None:
    told = family_data.told()[model_type]
    parameters = inspect.signature(CONFIG_MAPPING[model_type].__init__).parameters
    if "aliases" not in told and "defaults" not in told:
        return  # they were measured
    for field, default in told.get("defaults", {}).items():
        own = told["aliases"].get(field, field) if "aliases" in told else field
        if own in parameters:
            assert parameters[own].default == default, field
    aliases = {name: own for name, own in CONFIG_MAPPING[model_type].attribute_map.items() if name in families.FIELDS}
    assert told.get("aliases", {}) == aliases


NAMED_AS_SAVED = [
    name
    for name, one in families.told().items()
    if "attention" in one and "names" not in (families.families()[name].unaligned or "")
]


@pytest.mark.parametrize("model_type", NAMED_AS_SAVED)
def test_every_layer_has_its_attention_there(model_type: str) -> None:
    family = families.families()[model_type]
    built = model(model_type)
    assert type(built).__name__ == family.class_name
    layers = geometry.layers(built.config.to_dict())
    own = [index for index, layer in enumerate(layers) if layer.kind in ("full", "sliding")]
    assert len(own) >= 2
    modules = [built.get_submodule(family.attention.format(index)) for index in own]
    for index in (index for index, layer in enumerate(layers) if layer.kind == "cross"):
        stem = family.attention.partition("{}")[0]
        modules.append(built.get_submodule(f"{stem}{index}.{family.cross_attention}"))
    assert all("Attention" in type(one).__name__ for one in modules)


@pytest.mark.parametrize("model_type", [name for name, one in families.families().items() if one.fused])
def test_attention_tensors_are_those_of_the_class(model_type: str) -> None:
    family = families.families()[model_type]
    built = model(model_type)
    written = revert_weight_conversion(built, built.state_dict())
    held = {name: families.attention_tensor(family, name) for name in written}
    stem = family.attention.partition("{}")[0]
    found = [one for one in held.values() if one and one.stem == stem]
    assert {one.suffix for one in found} == set(family.attention_tensors)
    assert {one.layer for one in found} == {0, 1}
    norms = {f"{stem}0.{norm}.weight" for norm in family.input_norms} & set(built.state_dict())
    assert len(norms) == 1
    arrived = []
    built.get_submodule(norms.pop().removesuffix(".weight")).register_forward_hook(lambda *_: arrived.append("norm"))
    layer = built.get_submodule(stem + "0")
    attention = next(one for one in layer.modules() if type(one).__name__.endswith("Attention"))
    attention.register_forward_pre_hook(lambda *_: arrived.append("attention"))
    with torch.no_grad():
        built(torch.arange(3, 15)[None])
    assert arrived == ["norm", "attention"], "the norm is right before the attention"


LESS_ONE = [name for name, one in families.families().items() if one.gains_less_one]


@pytest.mark.parametrize("model_type", [*LESS_ONE, "llama", "gemma3n_text", "nemotron_h", "cohere", "apertus", "lfm2"])
def test_which_norms_store_their_gains_less_one(model_type: str) -> None:
    """With zeros for gains these norms give their inputs, and others nothing."""
    family = families.families()[model_type]
    layer = registry.built(model_type).get_submodule(family.attention.partition("{}")[0] + "1")
    norm = next(getattr(layer, name) for name in family.input_norms if hasattr(layer, name))
    for parameter in norm.parameters():
        parameter.data.zero_()
    assert bool(norm(torch.arange(192.0)[None, None]).any()) == family.gains_less_one


def test_every_family_that_was_refused_for_a_fused_projection_is_told_of() -> None:
    fused_before = {
        name
        for name, entry in json.loads((tiny.ROOT / "src/headpool/class_defaults.json").read_text())["families"].items()
        if re.search(r"qkv\w*\.weight", entry.get("reason", ""))
    }
    assert fused_before <= set(family_data.told())
    assert all(hasattr(transformers, one["class"]) for one in family_data.told().values())


@pytest.mark.parametrize("grouped", [False, True], ids=["12", "fewer"])
@pytest.mark.parametrize("name", fused.KINDS)
def test_layers_are_those_of_the_cache(name: str, *, grouped: bool) -> None:
    """But for Falcon's new decoder architecture: its class caches the keys of a group once for each query head."""
    model_type, own, full, less = fused.KINDS[name]
    built = tiny.model(model_type, **{**own, **(less if grouped else full)})
    layers = geometry.layers(built.config.to_dict())
    assert [layer.kv_heads for layer in layers] == [fused.fewer(name) if grouped else fused.HEADS] * 2
    with torch.no_grad():
        cached = built(torch.arange(3, 15)[None], use_cache=True).past_key_values.layers
    shapes = {tuple(one.keys.shape[1::2]) for one in cached} | {tuple(one.values.shape[1::2]) for one in cached}
    repeats = model_type == "falcon" and built.config.new_decoder_architecture
    assert shapes == {(fused.HEADS if repeats else layers[0].kv_heads, fused.HEAD_DIM)}


@pytest.mark.parametrize(
    ("config", "kv_heads"),
    [
        ({"model_type": "falcon"}, 1),
        ({"model_type": "falcon", "num_attention_heads": 8, "multi_query": True, "num_kv_heads": 8}, 1),
        ({"model_type": "falcon", "num_attention_heads": 8, "multi_query": False}, 8),
        ({"model_type": "falcon", "num_attention_heads": 8, "new_decoder_architecture": True}, 8),
        ({"model_type": "falcon", "num_attention_heads": 8, "new_decoder_architecture": True, "num_kv_heads": 2}, 2),
        ({"model_type": "gpt_bigcode"}, 1),
        ({"model_type": "gpt_bigcode", "n_head": 16, "n_embd": 128, "multi_query": False}, 16),
        ({"model_type": "gpt_neox", "num_attention_heads": 8}, 8),
        ({"model_type": "gptj"}, 16),
        ({"model_type": "codegen", "n_head": 4}, 4),
        ({"model_type": "gpt2"}, 12),
        ({"model_type": "opt"}, 12),
        ({"model_type": "dbrx"}, 1),
        ({"model_type": "dbrx", "attn_config": {"kv_n_heads": 8}}, 8),
        ({"model_type": "dbrx", "attn_config": None}, 1),
        ({"model_type": "dbrx", "attn_config": "none"}, 1),
    ],
)
def test_counts_are_read_as_the_class_reads_them(config: dict[str, Any], kv_heads: int) -> None:
    sized = "n_embd" if config["model_type"] in ("gptj", "codegen", "gpt2") else "hidden_size"
    heads = config.get("num_attention_heads", config.get("n_head"))
    config = config | ({} if heads is None else {sized: 8 * heads})
    assert {layer.kv_heads for layer in geometry.layers(config)} == {kv_heads}
