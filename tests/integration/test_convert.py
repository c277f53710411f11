"""The contract of a converted checkpoint, on real files: what changes, what does not, what the result computes."""

import json
import shutil
from pathlib import Path

import pytest
import tiny
import torch
import transformers
from pooling import by_head, bytes_of, projections

from headpool import planning, reference
from headpool.checkpoint import open_source
from headpool.convert.aligned.grouping import permute
from headpool.convert.layouts import PARTS, Rotary
from headpool.convert.plan import plan_conversion
from headpool.convert.run import convert_checkpoint

pytestmark = pytest.mark.usefixtures("quick_check")

KEPT = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "LICENSE", "chat_template.jinja")


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_changes_what_it_declares_and_nothing_else(sources: dict[str, Path], family: str, tmp_path: Path) -> None:
    source, out = sources[family], tmp_path / "out"
    result = convert_checkpoint(str(source), out, kv_heads=4)
    before, after = tiny.tensors(source), tiny.tensors(out)
    assert set(after) == set(before)
    changed = {name for name in before if bytes_of(before[name]) != bytes_of(after[name])}
    assert changed == projections(family)
    assert {before[name].dtype for name in before} == {after[name].dtype for name in after}
    for name in changed:
        expected = reference.mean_heads(by_head(before[name], 12), 4)
        assert torch.equal(after[name], torch.from_numpy(expected).float().reshape(after[name].shape)), name
    assert result.pooled_tensors == len(changed)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_files_travel_as_bytes_and_the_config_changes_in_one_value(
    sources: dict[str, Path], family: str, tmp_path: Path
) -> None:
    source, out = sources[family], tmp_path / "out"
    convert_checkpoint(str(source), out, kv_heads=4)
    for name in KEPT:
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert (out / "SOURCE_README.md").read_bytes() == (source / "README.md").read_bytes()
    assert {path.name for path in out.iterdir()} == {
        *KEPT,
        "README.md",
        "SOURCE_README.md",
        "config.json",
        "headpool.json",
        "model.safetensors",
    }
    patched = (source / "config.json").read_text().replace('"num_key_value_heads": 12', '"num_key_value_heads": 4')
    assert (out / "config.json").read_text() == patched


@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_pooled_model_is_the_mha_model_with_its_heads_overwritten_by_their_mean(
    sources: dict[str, Path], family: str, kv_heads: int, tmp_path: Path
) -> None:
    source, out = sources[family], tmp_path / "out"
    convert_checkpoint(str(source), out, kv_heads=kv_heads)
    overwritten = tiny.load(source)
    state = overwritten.state_dict()
    for name in projections(family):
        mean = reference.mean_heads(by_head(tiny.tensors(source)[name], 12), kv_heads)
        stored = torch.from_numpy(mean).float().double()  # what a float32 checkpoint can hold
        state[name].copy_(torch.from_numpy(reference.repeat_heads(stored.numpy(), 12)).reshape(state[name].shape))
    pooled = tiny.load(out)
    torch.testing.assert_close(tiny.logits(pooled), tiny.logits(overwritten), rtol=0, atol=1e-10)
    assert (tiny.logits(pooled) - tiny.logits(tiny.load(source))).abs().max() > 1e-3, "pooling must show"
    cache = pooled(torch.tensor([[1, 2, 3]]), use_cache=True).past_key_values
    assert {layer.keys.shape[1] for layer in cache.layers} == {kv_heads}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(12, 6), (12, 4), (12, 3), (9, 1)])
def test_an_expanded_model_comes_back_bit_for_bit(
    dtype: torch.dtype, heads: int, kv_heads: int, tmp_path: Path
) -> None:
    grouped = tiny.checkpoint(
        tmp_path / "grouped",
        "qwen2",
        dtype=dtype,
        num_attention_heads=heads,
        hidden_size=8 * heads,
        num_key_value_heads=kv_heads,
    )
    expanded = shutil.copytree(grouped, tmp_path / "expanded")
    config = json.loads((grouped / "config.json").read_text())
    (expanded / "config.json").write_text(json.dumps({**config, "num_key_value_heads": heads}))
    held = tiny.tensors(grouped)
    tiny.rewrite(
        expanded,
        {
            name: held[name].unflatten(0, (kv_heads, -1)).repeat_interleave(heads // kv_heads, 0).flatten(0, 1)
            for name in projections("qwen2")
        },
    )
    convert_checkpoint(str(expanded), tmp_path / "back", kv_heads=kv_heads)
    back = tiny.tensors(tmp_path / "back")
    assert {name: bytes_of(tensor) for name, tensor in back.items()} == {
        name: bytes_of(tensor) for name, tensor in held.items()
    }


def test_a_grouped_model_converts_further(tmp_path: Path) -> None:
    source = tiny.checkpoint(tmp_path / "9", "llama", num_attention_heads=9, hidden_size=72, num_key_value_heads=9)
    convert_checkpoint(str(source), tmp_path / "3", kv_heads=3)
    convert_checkpoint(str(tmp_path / "3"), tmp_path / "1", kv_heads=1)
    name = "model.layers.1.self_attn.v_proj.weight"
    three = reference.mean_heads(by_head(tiny.tensors(source)[name], 9), 3)
    one = reference.mean_heads(torch.from_numpy(three).float().double().numpy(), 1)
    assert torch.equal(tiny.tensors(tmp_path / "1")[name], torch.from_numpy(one).float().flatten(0, 1))
    assert json.loads((tmp_path / "1" / "config.json").read_text())["num_key_value_heads"] == 1


@pytest.mark.parametrize("method", ["mean", "first", "random"])
def test_as_many_heads_as_there_are_is_a_copy_and_says_so(
    sources: dict[str, Path], method: str, tmp_path: Path
) -> None:
    source, out = sources["qwen2"], tmp_path / "out"
    result = convert_checkpoint(str(source), out, kv_heads=12, method=method)
    assert result.copied
    assert "a copy" in result.describe()
    assert {name: bytes_of(t) for name, t in tiny.tensors(out).items()} == {
        name: bytes_of(t) for name, t in tiny.tensors(source).items()
    }
    assert (out / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_first_takes_the_first_head_and_random_neither(sources: dict[str, Path], tmp_path: Path) -> None:
    name, bias = "model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.k_proj.bias"
    held = tiny.tensors(sources["qwen2"])
    for method in ("first", "random"):
        convert_checkpoint(str(sources["qwen2"]), tmp_path / method, kv_heads=3, method=method)
    first, random = tiny.tensors(tmp_path / "first"), tiny.tensors(tmp_path / "random")
    assert torch.equal(first[name], held[name].unflatten(0, (12, 8))[[0, 4, 8]].flatten(0, 1))
    assert torch.equal(first[bias], held[bias].unflatten(0, (12, 8))[[0, 4, 8]].flatten())
    # 24 * 96 draws at the default initializer_range 0.02: the deviation's standard error is 0.0003.
    assert abs(random[name].std().item() - 0.02) < 0.0015
    assert torch.equal(random[bias], torch.zeros(24))


def test_the_same_command_gives_the_same_bytes(sources: dict[str, Path], tmp_path: Path) -> None:
    elsewhere = shutil.copytree(sources["llama"], tmp_path / "deep" / "llama")
    convert_checkpoint(str(sources["llama"]), tmp_path / "a", kv_heads=2, method="random", seed=5)
    convert_checkpoint(str(elsewhere), tmp_path / "b", kv_heads=2, method="random", seed=5)
    convert_checkpoint(str(elsewhere), tmp_path / "c", kv_heads=2, method="random", seed=6)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert "headpool.json" in files
    for file in files:
        other = (tmp_path / "b" / file).read_bytes().replace(b'from_pretrained("b")', b'from_pretrained("a")')
        assert (tmp_path / "a" / file).read_bytes() == other, file
    assert (tmp_path / "a" / "model.safetensors").read_bytes() != (tmp_path / "c" / "model.safetensors").read_bytes()
    assert str(tmp_path) not in (tmp_path / "b" / "headpool.json").read_text()


def test_layers_that_share_keys_and_values_may_have_none(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model(
        "gemma3n_text", num_hidden_layers=10, num_kv_shared_layers=5, num_attention_heads=8, num_key_value_heads=8,
        hidden_size=64, head_dim=16, intermediate_size=64, vocab_size=128, vocab_size_per_layer_input=128,
        hidden_size_per_layer_input=16, laurel_rank=8, activation_sparsity_pattern=[0.0] * 10, pad_token_id=0,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "source")
    result = convert_checkpoint(str(tmp_path / "source"), tmp_path / "out", kv_heads=2)
    assert result.warnings == ()
    changed = [
        n for n, t in tiny.tensors(tmp_path / "out").items() if t.shape != tiny.tensors(tmp_path / "source")[n].shape
    ]
    assert {name.split("self_attn.")[1] for name in changed} == {"k_proj.weight", "v_proj.weight"}
    assert len({name.split("layers.")[1].split(".")[0] for name in changed}) == result.pooled_tensors // 2 >= 5


def test_old_buffers_and_unknown_config_keys_survive(tmp_path: Path) -> None:
    source = tiny.checkpoint(tmp_path / "source", "llama")
    buffer = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.rand(4) for i in range(2)}
    tiny.rewrite(source, buffer)
    text = (source / "config.json").read_text().replace("{", '{\n  "my_key": [1e-3, {"num_key_value_heads": 12}],', 1)
    (source / "config.json").write_text(text)
    result = convert_checkpoint(str(source), tmp_path / "out", kv_heads=4)
    after = tiny.tensors(tmp_path / "out")
    for name, tensor in buffer.items():
        assert torch.equal(after[name], tensor)
    assert '"my_key": [1e-3, {"num_key_value_heads": 12}],' in (tmp_path / "out" / "config.json").read_text()
    assert result.warnings == ()


def test_a_config_that_leaves_the_field_out_gets_it(tmp_path: Path) -> None:
    source = tiny.checkpoint(tmp_path / "source", "llama")
    config = json.loads((source / "config.json").read_text())
    del config["num_key_value_heads"]
    (source / "config.json").write_text(json.dumps(config, indent=2))
    convert_checkpoint(str(source), tmp_path / "out", kv_heads=4)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {**config, "num_key_value_heads": 4}
    tiny.load(tmp_path / "out")


def test_greedy_tokens_are_the_same_with_a_cache_and_without(sources: dict[str, Path], tmp_path: Path) -> None:
    convert_checkpoint(str(sources["mistral"]), tmp_path / "out", kv_heads=4)
    built = tiny.load(tmp_path / "out")
    prompt = torch.tensor([[5, 9, 2, 77]])
    with_cache = built.generate(prompt, max_new_tokens=24, do_sample=False, use_cache=True)
    without = built.generate(prompt, max_new_tokens=24, do_sample=False, use_cache=False)
    assert torch.equal(with_cache, without)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_seam_gives_back_what_it_took_and_heads_can_be_permuted(
    sources: dict[str, Path], family: str, tmp_path: Path
) -> None:
    """Permuting heads with all that belongs to them changes no logit; read and write are inverse."""
    source = sources[family]
    layout = plan_conversion(open_source(str(source)), kv_heads=4).layout
    assert layout.rotary == Rotary("half-split", 16 if family in ("qwen3", "gemma") else 8)
    held = tiny.tensors(source)
    permuted = shutil.copytree(source, tmp_path / "permuted")
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    changes: dict[str, torch.Tensor | None] = {}
    for layer in range(2):
        weights = layout.read(held, layer, PARTS)
        assert all(torch.equal(tensor, held[name]) for name, tensor in layout.write(weights, layer).items())
        assert len(layout.write(weights, layer)) == sum(f"layers.{layer}.self_attn" in n for n in held)
        changes |= layout.write(permute(weights, order.tolist()), layer)
    tiny.rewrite(permuted, {name: t.contiguous() for name, t in changes.items() if t is not None})
    moved, original = tiny.load(permuted), tiny.load(source)
    assert not torch.equal(
        moved.model.layers[0].self_attn.o_proj.weight, original.model.layers[0].self_attn.o_proj.weight
    )
    torch.testing.assert_close(tiny.logits(moved), tiny.logits(original), rtol=0, atol=1e-10)


DRAFTING = {
    "numbered on": ({"num_nextn_predict_layers": 1}, "model.layers.2.self_attn"),
    "by a name": ({}, "mtp.layers.0.self_attn"),
}
"""How checkpoints hold a layer that drafts (multi-token prediction): what the config says, and where it attends."""


@pytest.mark.parametrize("kind", DRAFTING)
def test_layers_that_draft_are_left_alone_and_told_of(kind: str, tmp_path: Path) -> None:
    fields, module = DRAFTING[kind]
    source, out = tiny.checkpoint(tmp_path / "source", "llama", **fields), tmp_path / "out"
    option = {one.kv_heads: one for one in planning.plan(source).options}[4]
    own = tiny.tensors(source)
    draft = {f"{module}.{part}_proj.weight": torch.randn(96, 96) for part in "qkvo"}
    tiny.rewrite(source, draft)
    drafting = {one.kv_heads: one for one in planning.plan(source).options}[4]
    assert drafting.parameters == option.parameters + 4 * 96 * 96
    result = convert_checkpoint(str(source), out, kv_heads=4)
    after = tiny.tensors(out)
    assert all(torch.equal(after[name], tensor) for name, tensor in draft.items())
    assert {name for name in own if after[name].shape != own[name].shape} == projections("llama")
    said = f"draft further tokens keep their K/V heads ({module}.k_proj.weight, 2 tensors in all)"
    for warnings in (result.warnings, json.loads((out / "headpool.json").read_text())["warnings"]):
        assert sum(said in one for one in warnings) == 1
