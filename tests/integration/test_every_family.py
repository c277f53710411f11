"""Every family that is said to convert does: files written by transformers, pooled, opened again, compared."""

import json
from pathlib import Path
from typing import Any

import pytest
import registry
import steps
import tiny
import torch
from registry import HEADS, KV, MEASURED
from torch import Tensor
from transformers.models.auto import modeling_auto
from walking import stock

from headpool import geometry, opening, reference
from headpool.checkpoint import open_source, read_config
from headpool.composite import composites, text_config
from headpool.convert.aligned.observe import MomentsObserver, observing
from headpool.convert.aligned.run import check_attention
from headpool.convert.aligned.walk import Walk
from headpool.convert.layouts import Rotary
from headpool.convert.plan import plan_conversion
from headpool.convert.run import convert_checkpoint
from headpool.errors import RequestError
from headpool.families import families, family_of
from headpool.loading import load_model

pytestmark = pytest.mark.usefixtures("quick_check")

IDS = torch.arange(3, 15)[None]

NO_WALK = {
    "gemma3n_text": "not one hidden state per token",
    "paligemma": "attends in a way that is not known here",
    "pp_chart2table": "no class of transformers is this model without its head",
    "lighton_ocr": "is missing, or of another shape",
}
"""Models that aligned cannot go through layer by layer, and what it says."""

SHARED = {"zamba": 1, "zamba2": 2}
"""Families whose layers share their attention's weights, and how many sets of these the small model has."""

NO_GENERATION = {"qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"}
"""Classes that only generate as a part of another."""

SILENT = {name for name in registry.COMPOSITE if composites()[name].silent}
"""Composites whose classes fail on text: what is run of them is the language model inside."""

ONCE = {composites()[name].text: name for name in reversed(registry.COMPOSITE) if name not in SILENT}
"""For each language model, the composite in which it is gone through as thoroughly as by itself."""


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(IDS).logits
    return result


def loaded(model: Any, directory: Path) -> Any:
    """The checkpoint in the class that `model` is of, with nothing left over and nothing made up."""
    held, info = type(model).from_pretrained(directory, output_loading_info=True, dtype=torch.float32)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return held.eval()


def check_walk(model: Any, directory: Path) -> None:
    """Layer by layer the checkpoint computes what the whole model does, and its attention can be observed; the steps of
    aligned, with one head in each group, change nothing in the first layer that has attention.
    """
    with torch.no_grad():
        expected = loaded(model, directory)(IDS, output_hidden_states=True).hidden_states
    walk = Walk(stock(directory), IDS, batch=1)
    attending = [index for index, layer in enumerate(walk.stock.layout.layers) if layer.kind != "none"]
    for layer in walk:
        torch.testing.assert_close(walk.hidden(layer.index, slice(0, 1)), expected[layer.index], rtol=1e-5, atol=1e-5)
        if layer.index in attending:
            with observing(layer.attention, MomentsObserver(Rotary("half-split", 2))):
                layer.advance()
        if layer.index == attending[0]:
            check_attention(plan_conversion(open_source(str(directory)), kv_heads=KV, method="aligned"))
            steps.check(layer)


def check_cache(model: Any) -> None:
    """Eight tokens come out the same whether keys and values are kept or computed anew."""
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    kept, anew = (
        model.generate(IDS, max_new_tokens=8, min_new_tokens=8, do_sample=False, use_cache=use) for use in (True, False)
    )
    assert kept.shape == (1, IDS.shape[1] + 8)
    assert torch.equal(kept, anew)


@pytest.mark.parametrize("model_type", [*registry.LANGUAGE, *registry.COMPOSITE])
def test_a_family_converts(model_type: str, tmp_path: Path) -> None:
    model = registry.built(model_type)
    source, out, back = (tmp_path / name for name in ("source", "out", "back"))
    model.save_pretrained(source)
    config = read_config(source)[1]
    attending = sum(layer.kind != "none" for layer in geometry.layers(config))
    thorough = model_type in {*registry.LANGUAGE, *ONCE.values()}
    unaligned = families()[text_config(config)["model_type"]].unaligned
    if unaligned is not None:
        with pytest.raises(RequestError, match=f"{unaligned}; use method mean"):
            convert_checkpoint(str(source), out, kv_heads=KV, method="aligned")
    elif model_type in NO_WALK:
        with pytest.raises(RequestError, match=NO_WALK[model_type]):
            check_walk(model, source)
    elif thorough:
        check_walk(model, source)
    result = convert_checkpoint(str(source), out, kv_heads=KV)
    assert any(opening.SILENT in warning for warning in result.warnings) == (model_type in SILENT)
    before, after = tiny.tensors(source), tiny.tensors(out)
    assert set(before) == set(after)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    weights = {name for name in changed if name.endswith(("k_proj.weight", "v_proj.weight"))}
    assert len(weights) == 2 * SHARED.get(model_type, attending)
    assert all(name.endswith(("k_proj.bias", "v_proj.bias", "k_norm.weight")) for name in changed - weights)
    overwritten = {}
    for name in changed:
        mean = reference.mean_heads(before[name].double().unflatten(0, (HEADS, -1)).numpy(), KV)
        assert torch.equal(after[name], torch.from_numpy(mean).float().reshape(after[name].shape))
        overwritten[name] = torch.from_numpy(reference.repeat_heads(mean, HEADS)).float().reshape(before[name].shape)
    if not thorough and model_type not in SILENT:  # its language model is gone through below, by itself or in another
        loaded(model, out)
        return
    tiny.rewrite(source, overwritten)
    pooled, mha = (loaded(model, folder) for folder in (out, source))
    if model_type in SILENT:
        with pytest.raises(RequestError, match="fails on text in transformers"):
            load_model(open_source(str(out)), torch.float32, "cpu")
        model, pooled, mha = (one.language_model for one in (model, pooled, mha))
    torch.testing.assert_close(logits(pooled), logits(mha), rtol=1e-4, atol=1e-4)
    assert (logits(mha) - logits(model)).abs().max() > 1e-3, "pooling must show"
    if model_type not in NO_GENERATION:
        check_cache(pooled)
    convert_checkpoint(str(source), back, kv_heads=KV)
    returned = tiny.tensors(back)
    assert all(torch.equal(returned[name], tensor) for name, tensor in after.items()), "expanded and pooled: itself"


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text"])
def test_a_hybrid_that_only_says_how_often_it_attends(model_type: str, tmp_path: Path) -> None:
    """Layers 1 and 3 of 4, told by an interval of 2, as releases of such models have it."""
    folders = [tmp_path / name for name in ("listed", "told")]
    for folder in folders:
        registry.built(model_type, layer_types=["linear_attention", "full_attention"] * 2).save_pretrained(folder)
    config = json.loads((folders[1] / "config.json").read_text())
    del config["layer_types"]
    (folders[1] / "config.json").write_text(json.dumps(config | {"full_attention_interval": 2}))
    for folder in folders:
        convert_checkpoint(str(folder), folder.with_suffix(".out"), kv_heads=KV)
    listed, told = (tiny.tensors(folder.with_suffix(".out")) for folder in folders)
    assert listed.keys() == told.keys()
    assert all(torch.equal(listed[name], tensor) for name, tensor in told.items())
    changed = {
        name.split(".layers.")[1][0]
        for name, tensor in tiny.tensors(folders[1]).items()
        if told[name].shape != tensor.shape
    }
    assert changed == {"1", "3"}
    result = json.loads((folders[1].with_suffix(".out") / "config.json").read_text())
    assert (result["full_attention_interval"], result["num_key_value_heads"]) == (2, KV)
    assert "layer_types" not in result


@pytest.mark.skipif(not MEASURED, reason="counted at the version that was measured")
def test_there_are_many_and_every_other_model_type_says_why_not() -> None:
    """All that transformers lists for generating text: converted above, in test_fused.py, or refused with a reason."""
    covered = {*registry.LANGUAGE, *registry.COMPOSITE}
    assert len(registry.LANGUAGE) >= 60
    assert len(covered) >= 110
    assert set(tiny.FAMILIES) <= covered
    assert {"llava", "gemma3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "mistral3", "internvl", "idefics3"} <= covered
    everything = {
        *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }
    fused = {name for name, family in families().items() if family.reason is None and family.fused is not None}
    for model_type in everything - covered - fused:
        composite = composites().get(model_type)
        with pytest.raises(RequestError) as refused:
            family_of({"model_type": model_type} | ({"text_config": {}} if composite else {}))
        assert len(str(refused.value).split(": ", 1)[1]) > 10, model_type
