"""Llama 3.2 Vision: layers that attend to text and layers that attend to a picture have as many K/V heads."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers

from headpool import geometry, planning, reference
from headpool.checkpoint import read_config
from headpool.convert.run import convert_checkpoint
from headpool.errors import RequestError

pytestmark = pytest.mark.usefixtures("quick_check")

HEADS, KV, HEAD_DIM, CROSS = 12, 4, 8, (1, 4)
TEXT: dict[str, Any] = {
    "num_hidden_layers": 5, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "hidden_size": HEADS * HEAD_DIM,
    "intermediate_size": 64, "vocab_size": 128, "max_position_embeddings": 64, "cross_attention_layers": list(CROSS),
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 16, "attention_heads": 4, "num_hidden_layers": 2, "num_global_layers": 1, "intermediate_size": 32,
    "image_size": 28, "patch_size": 14, "intermediate_layers_indices": [0, 1], "vision_output_dim": 48,
}  # fmt: skip
CONFIG = transformers.MllamaConfig(vision_config=VISION, text_config=TEXT)
PICTURE_TOKENS = 4 * ((28 // 14) ** 2 + 1)
"""Of four tiles."""


def checkpoint(directory: Path) -> Path:
    """A random model, gates of its cross-attention open."""
    torch.manual_seed(0)
    model = transformers.MllamaForConditionalGeneration(CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(directory)
    return directory


def loaded(directory: Path) -> Any:
    model, info = transformers.MllamaForConditionalGeneration.from_pretrained(directory, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def inputs(*, pictured: bool) -> dict[str, Any]:
    """Ten tokens, which may look at a picture of four tiles from the third on."""
    ids = torch.arange(3, 13)[None]
    if not pictured:
        return {"input_ids": ids}
    seen = torch.ones(1, 10, 1, 4, dtype=torch.long)
    seen[:, :2] = 0
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(1, 1, 4, 3, 28, 28, generator=torch.Generator().manual_seed(1)),
        "aspect_ratio_ids": torch.tensor([[6]]),
        "aspect_ratio_mask": torch.ones(1, 1, 4, dtype=torch.long),
        "cross_attention_mask": seen,
    }


@torch.no_grad()
def test_both_kinds_of_layer_are_pooled(tmp_path: Path) -> None:
    source, out, back = checkpoint(tmp_path / "source"), tmp_path / "out", tmp_path / "back"
    convert_checkpoint(str(source), out, kv_heads=KV)
    before, after = tiny.tensors(source), tiny.tensors(out)
    changed = {name for name in before if before[name].shape != after[name].shape}
    stem = "language_model.model.layers."
    modules = ["cross_attn" if index in CROSS else "self_attn" for index in range(5)]
    assert changed == {
        f"{stem}{index}.{module}.{part}_proj.weight" for index, module in enumerate(modules) for part in "kv"
    }
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items() if name not in changed)
    original = loaded(source)
    overwritten = {}
    for name in changed:
        mean = reference.mean_heads(before[name].double().unflatten(0, (HEADS, HEAD_DIM)).numpy(), KV)
        repeated = torch.from_numpy(reference.repeat_heads(mean, HEADS)).float()
        overwritten[name] = repeated.reshape(before[name].shape)
    tiny.rewrite(source, overwritten)
    pooled, mha = loaded(out), loaded(source)
    for given in (inputs(pictured=False), inputs(pictured=True)):
        expected = mha(**given).logits
        torch.testing.assert_close(pooled(**given).logits, expected, rtol=1e-4, atol=1e-4)
        assert (original(**given).logits - expected).abs().max() > 1e-2, "pooling must show"
        kept, anew = (
            pooled.generate(**given, max_new_tokens=8, min_new_tokens=8, do_sample=False, use_cache=use)
            for use in (True, False)
        )
        assert kept.shape == (1, 18)
        assert torch.equal(kept, anew)
    seen, unseen = (mha(**inputs(pictured=pictured)).logits for pictured in (True, False))
    assert (seen - unseen)[:, 2:].abs().max() > 1e-2, "the picture must show"
    convert_checkpoint(str(source), back, kv_heads=KV)
    assert all(torch.equal(tensor, after[name]) for name, tensor in tiny.tensors(back).items())


@torch.no_grad()
def test_the_cache_told_of_is_that_of_text_and_pictures_come_on_top(tmp_path: Path) -> None:
    source, out = checkpoint(tmp_path / "source"), tmp_path / "out"
    result = convert_checkpoint(str(source), out, kv_heads=KV)
    layers = geometry.layers(read_config(out)[1])
    assert [layer.kind for layer in layers] == ["cross" if index in CROSS else "full" for index in range(5)]
    for pictured in (False, True):
        cache = loaded(out)(**inputs(pictured=pictured)).cache.layers
        held = [None if one.keys is None else tuple(one.keys.shape) for one in cache]
        picture = (1, KV, PICTURE_TOKENS, HEAD_DIM) if pictured else None
        assert held == [picture if index in CROSS else (1, KV, 10, HEAD_DIM) for index in range(5)]
    plan = planning.plan(source)
    by_count = {option.kv_heads: option.cache_bytes_per_token for option in plan.options}
    assert (by_count[HEADS], by_count[KV]) == (4 * 3 * 2 * HEADS * HEAD_DIM, 4 * 3 * 2 * KV * HEAD_DIM)
    for warnings in (plan.warnings, result.warnings):
        assert [warning[:25] for warning in warnings] == ["cache sizes are those of ", "text neither trains nor m"]
    told = json.loads((out / "headpool.json").read_text())
    assert told["cache"]["output"]["bytes_per_token"] == by_count[KV]
    assert [one["kv_heads"] for one in told["layers"]] == [KV] * 5


def test_the_released_config_leaves_its_layers_to_the_class() -> None:
    config = {"model_type": "mllama", "text_config": {"model_type": "mllama_text_model"}}
    layers = geometry.layers(config)
    assert len(layers) == 40
    assert [index for index, layer in enumerate(layers) if layer.kind == "cross"] == list(range(3, 40, 5))
    wrong = {"model_type": "mllama", "text_config": {"cross_attention_layers": 3}}
    with pytest.raises(RequestError, match="cross_attention_layers must be a list of layers' numbers, found 3"):
        geometry.layers(wrong)


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source")
    stem = "language_model.model.layers."
    name = f"{stem}4.cross_attn.v_proj.weight"
    other = f"{stem}4.self_attn.v_proj.weight"
    held = tiny.tensors(source)[name]
    for changes, message in (
        ({name: torch.zeros(5, 96)}, rf"'{name}' is \[5, 96\], the config makes it \[96, 96\]"),
        ({name: None}, rf"'{name}' is missing, the config makes it \[96, 96\]"),
        ({name: held, other: held.clone()}, rf"'{other}' \[96, 96\] is not known"),
    ):
        tiny.rewrite(source, changes)
        with pytest.raises(RequestError, match=message):
            convert_checkpoint(str(source), tmp_path / "out", kv_heads=KV)
    assert not (tmp_path / "out").exists()


def test_method_aligned_leaves_it_alone(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="some layers attend to pictures, and the method knows text alone; use"):
        convert_checkpoint(str(checkpoint(tmp_path / "source")), tmp_path / "out", kv_heads=KV, method="aligned")
