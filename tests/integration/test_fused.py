"""Fused projections: split as their class splits them, written back in their own layout, by every method."""

import json
import shutil
from pathlib import Path
from typing import Any

import fused
import pytest
import tiny
import torch
from fused import FUSED, HEADS, KINDS

from headpool import families, geometry
from headpool.checkpoint import open_source
from headpool.convert.aligned.options import Alignment
from headpool.convert.layouts import Layout, find_layout
from headpool.convert.run import convert_checkpoint
from headpool.errors import RequestError
from headpool.text import read_documents

pytestmark = pytest.mark.usefixtures("quick_check")


def layout_of(directory: Path) -> Layout:
    source = open_source(str(directory))
    family = families.family_of(source.config)
    return find_layout(source.tensors, source.config, family, geometry.layers(source.config))


@pytest.mark.parametrize("grouped", [False, True], ids=["12", "fewer"])
@pytest.mark.parametrize("name", KINDS)
def test_every_head_gets_its_own_rows(tmp_path: Path, name: str, *, grouped: bool) -> None:
    """Rows filled with the number of their head: no other split gives these."""
    model_type = KINDS[name][0]
    kv_heads = fused.fewer(name) if grouped else HEADS
    layout = layout_of(fused.checkpoint(tmp_path / "source", name, grouped=grouped))
    number = {"q": 0, "k": 100, "v": 200}
    blocks = [
        torch.full((fused.HEAD_DIM,), float(number[part] + head)) for part, head in fused.owners(model_type, kv_heads)
    ]
    bias = torch.cat(blocks)
    weight, name_of_bias = layout.names(1, "k")
    assert (weight, name_of_bias) == layout.names(1, "q") == layout.names(1, "v")
    tensors = {weight: bias[:, None].expand(-1, fused.HIDDEN).contiguous(), name_of_bias: bias}
    read = layout.read(tensors, 1, ("q", "k", "v"))
    for part, held, of_bias in (("q", read.q, read.bias_q), ("k", read.k, read.bias_k), ("v", read.v, read.bias_v)):
        count = HEADS if part == "q" else kv_heads
        expected = (number[part] + torch.arange(count))[:, None].expand(-1, fused.HEAD_DIM)
        assert held is not None and torch.equal(held, expected[..., None].expand(-1, -1, fused.HIDDEN).float())
        assert of_bias is not None and torch.equal(of_bias, expected.float())
    written = layout.write(read, 1)
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[one], tensors[one]) for one in tensors)


HALVES = [(name, half) for name in ("phi3", "falcon two norms") for half in (torch.bfloat16, torch.float16)]


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float32) for name in KINDS), *HALVES])
def test_expanded_heads_come_back_bit_for_bit(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    model_type, _, full, _ = KINDS[name]
    kv_heads = fused.fewer(name)
    grouped = fused.checkpoint(tmp_path / "grouped", name, grouped=True, dtype=dtype)
    wide = tmp_path / "wide"
    shutil.copytree(grouped, wide)
    fused.rewrite(wide, model_type, kv_heads, HEADS)
    fused.config(wide, **full, **({"new_decoder_architecture": False} if "falcon one norm" in name else {}))
    convert_checkpoint(str(wide), tmp_path / "out", kv_heads=kv_heads)
    expected, found = tiny.tensors(grouped), tiny.tensors(tmp_path / "out")
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[one], found[one]) for one in expected)
    logits = [tiny.logits(tiny.load(one)) for one in (grouped, wide, tmp_path / "out")]
    assert (logits[0] - logits[1]).abs().max() < 1e-10 * logits[0].abs().max()
    assert torch.equal(logits[0], logits[2])


@pytest.mark.parametrize("name", KINDS)
def test_mean_is_the_model_whose_heads_are_their_groups_mean(tmp_path: Path, name: str) -> None:
    model_type = KINDS[name][0]
    kv_heads = fused.fewer(name)
    source = fused.checkpoint(tmp_path / "source", name)
    result = convert_checkpoint(str(source), tmp_path / "out", kv_heads=kv_heads)
    assert (result.source_kv_heads, result.kv_heads) == (HEADS, kv_heads)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    saves_no_cache = model_type == "falcon" and written["new_decoder_architecture"]
    assert ["saves no cache" in one for one in result.warnings] == ([True] if saves_no_cache else [])
    before, after = tiny.tensors(source), tiny.tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    changed = {one for one in before if not torch.equal(before[one], after[one])}
    assert changed == {one for one in before if fused.is_fused(one)}
    assert all(torch.equal(after[o], fused.regrouped(before[o], model_type, HEADS, kv_heads)) for o in changed)
    averaged = tmp_path / "averaged"
    shutil.copytree(source, averaged)
    fused.rewrite(averaged, model_type, HEADS, kv_heads)
    fused.rewrite(averaged, model_type, kv_heads, HEADS)
    expected, found, first = (tiny.logits(tiny.load(one)) for one in (averaged, tmp_path / "out", source))
    assert (found - expected).abs().max() < 1e-10 * expected.abs().max()
    assert (first - expected).abs().max() > 1e-2, "pooling must show"


@pytest.mark.parametrize("name", KINDS)
def test_the_result_generates_the_same_with_a_cache_and_without(tmp_path: Path, name: str) -> None:
    source = fused.checkpoint(tmp_path / "source", name)
    convert_checkpoint(str(source), tmp_path / "out", kv_heads=fused.fewer(name))
    model = tiny.load(tmp_path / "out")
    prompt = torch.arange(3, 15)[None]
    runs = [model.generate(prompt, max_new_tokens=8, do_sample=False, use_cache=cache) for cache in (True, False)]
    assert torch.equal(*runs)


KV_FIELDS = ("num_key_value_heads", "num_kv_heads", "multi_query", "new_decoder_architecture", "attn_config")


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("phi3", {"num_key_value_heads": 4}),
        ("dbrx", {"num_key_value_heads": 4, **fused.attn(4)}),
        ("falcon two norms", {"num_kv_heads": 4, "new_decoder_architecture": True, "multi_query": True}),
        ("falcon one norm", {"num_kv_heads": 4, "new_decoder_architecture": True, "multi_query": False}),
        ("falcon to one", {"num_kv_heads": 1, "new_decoder_architecture": False, "multi_query": True}),
        ("gpt_bigcode", {"num_key_value_heads": 1, "multi_query": True}),
    ],
)
def test_all_fields_that_hold_the_count_say_the_same(tmp_path: Path, name: str, fields: dict[str, Any]) -> None:
    source = fused.checkpoint(tmp_path / "source", name)
    convert_checkpoint(str(source), tmp_path / "out", kv_heads=fused.fewer(name))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    held = {field: config[field] for field in KV_FIELDS if field in config}
    if "attn_config" in held:
        held["attn_config"] = {key: held["attn_config"][key] for key in fields["attn_config"]}
    assert held == fields
    before = json.loads((source / "config.json").read_text())
    assert {key for key in config if config[key] != before.get(key)} <= {*KV_FIELDS, "num_ln_in_parallel_attn"}
    assert {layer.kv_heads for layer in geometry.layers(config)} == {fused.fewer(name)}


@pytest.mark.parametrize("name", ["phi3", "falcon two norms", "gpt_bigcode"])
def test_random_leaves_the_queries_alone(tmp_path: Path, name: str) -> None:
    model_type, kv_heads = KINDS[name][0], fused.fewer(name)
    source = fused.checkpoint(tmp_path / "source", name)
    convert_checkpoint(str(source), tmp_path / "out", kv_heads=kv_heads, method="random")
    before, after = tiny.tensors(source), tiny.tensors(tmp_path / "out")
    for one in (one for one in before if fused.is_fused(one)):
        old, new = fused.split(before[one], model_type, HEADS), fused.split(after[one], model_type, kv_heads)
        assert all(torch.equal(old["q", head], new["q", head]) for head in range(HEADS))
        spread = torch.cat([new[part, head] for part in "kv" for head in range(kv_heads)]).std()
        assert spread == 0 if one.endswith("bias") else 0.015 < spread < 0.025


def aligned(source: Path, out: Path, kv_heads: int, **options: Any) -> list[dict[str, Any]]:
    given = Alignment(device="cpu", **options)
    convert_checkpoint(str(source), out, kv_heads=kv_heads, method="aligned", alignment=given)
    layers: list[dict[str, Any]] = json.loads((out / "headpool.json").read_text())["layers"]
    return layers


@pytest.mark.parametrize("name", ["phi3", "falcon two norms", "falcon to one", "gpt_bigcode"])
def test_aligned_without_text_loses_nothing_of_equal_heads(tmp_path: Path, name: str) -> None:
    model_type, _, full, _ = KINDS[name]
    kv_heads = fused.fewer(name)
    wide = fused.checkpoint(tmp_path / "wide", name, grouped=True)
    fused.rewrite(wide, model_type, kv_heads, HEADS)
    fused.config(wide, **full)
    layers = aligned(wide, tmp_path / "out", kv_heads)
    assert all(sum(layer["lost_energy"].values()) < 1e-9 for layer in layers)
    expected, found = (tiny.logits(tiny.load(one)) for one in (wide, tmp_path / "out"))
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        ("phi3", "layer"),
        ("gpt_bigcode", "attention"),
        ("falcon two norms", "layer"),
        ("falcon one norm", "attention"),
        ("dbrx", "attention"),
        ("falcon one norm, alibi", "attention"),
    ],
)
def test_aligned_on_text_brings_blocks_nearer(tmp_path: Path, name: str, scope: str) -> None:
    source = fused.checkpoint(tmp_path / "source", name, tokenizer=True, vocab_size=2048)
    novel = tmp_path / "novel.txt"
    novel.write_text(tiny.NOVEL.read_text(encoding="utf-8")[:60_000], encoding="utf-8")
    layers = aligned(
        source,
        tmp_path / "out",
        fused.fewer(name),
        calibration=read_documents(novel),
        tokens=4096,
        window=64,
        heal=20,
        heal_scope=scope,
    )
    errors = [layer["block_error"] for layer in layers]
    assert all(error["heal"] <= error["closed"] < 1 for error in errors)
    assert sum(error["heal"] for error in errors) < 0.95 * sum(error["closed"] for error in errors)
    mean = convert_checkpoint(str(source), tmp_path / "mean", kv_heads=fused.fewer(name))
    assert mean.pooled_tensors
    first, pooled, healed = (tiny.logits(tiny.stock_model(tmp_path / one)) for one in ("source", "mean", "out"))
    assert (healed - first).square().sum() < 0.8 * (pooled - first).square().sum()


def test_heads_with_alibi_stay_in_their_places(tmp_path: Path) -> None:
    source = fused.checkpoint(tmp_path / "source", "falcon one norm, alibi")
    layers = aligned(source, tmp_path / "out", fused.KV)
    assert all(layer["partition"] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]] for layer in layers)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gpt_bigcode", "4 K/V heads asked for: its class knows as many K/V heads as query heads, or one"),
        ("falcon alibi", r"4 K/V heads asked for: its attention comes before its MLP \(parallel_attn is false\)"),
    ],
)
def test_counts_that_a_class_cannot_hold_are_refused(tmp_path: Path, name: str, reason: str) -> None:
    source = fused.checkpoint(tmp_path / "source", name)
    with pytest.raises(RequestError, match=reason):
        convert_checkpoint(str(source), tmp_path / "out", kv_heads=4)
    assert {path.name for path in tmp_path.iterdir()} == {"source"}
    assert [option.kv_heads for option in geometry.plan(source, context=8).options] == [12, 1]


@pytest.mark.parametrize("name", ["phi3", "dbrx", "falcon two norms", "gpt_bigcode"])
def test_a_fused_tensor_of_another_shape_is_refused_by_name(tmp_path: Path, name: str) -> None:
    source = fused.checkpoint(tmp_path / "source", name)
    tensor = next(one for one in tiny.tensors(source) if ".1." in one and f"{FUSED[KINDS[name][0]]}.weight" in one)
    tiny.rewrite(source, {tensor: torch.zeros(296, 96)})
    with pytest.raises(RequestError, match=rf"{tensor}' is \[296, 96\], the config makes it \[288, 96\]"):
        convert_checkpoint(str(source), tmp_path / "out", kv_heads=fused.fewer(name))
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


@pytest.mark.parametrize("name", ["phi3", "dbrx", "falcon two norms", "gpt_bigcode"])
def test_plan_tells_the_size_of_the_result(tmp_path: Path, name: str) -> None:
    source = fused.checkpoint(tmp_path / "source", name)
    options = {option.kv_heads: option for option in geometry.plan(source, context=8).options}
    kv_heads = fused.fewer(name)
    convert_checkpoint(str(source), tmp_path / "out", kv_heads=kv_heads)
    for count, folder in ((HEADS, "source"), (kv_heads, "out")):
        assert options[count].parameters == sum(one.numel() for one in tiny.tensors(tmp_path / folder).values())
