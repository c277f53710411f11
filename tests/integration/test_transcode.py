"""`convert --transcode`: another class, the same function, to the last bits of float64; then pooled like any other."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import transcoded
from torch import Tensor
from transcoded import HEADS, KINDS
from typer.testing import CliRunner

from headpool.cli import app
from headpool.convert.aligned.options import Alignment
from headpool.convert.run import Conversion, convert_checkpoint
from headpool.errors import RequestError
from headpool.eval.models import ModelSpec, open_candidate
from headpool.pipeline import run_recipe
from headpool.recipe import load_recipe
from headpool.text import read_documents

pytestmark = pytest.mark.usefixtures("quick_check")

HEAD_DIM = 8


def convert(source: Path, out: Path, kv_heads: int = HEADS, **options: Any) -> Conversion:
    return convert_checkpoint(str(source), out, kv_heads=kv_heads, transcode=True, **options)


def facts(out: Path) -> dict[str, Any]:
    held: dict[str, Any] = json.loads((out / "headpool.json").read_text())
    return held


@pytest.mark.parametrize("name", KINDS)
def test_the_host_computes_the_same_function(tmp_path: Path, name: str) -> None:
    model_type, host, _ = KINDS[name]
    model = transcoded.model(name)
    source = transcoded.saved(tmp_path / "source", model, model_type)
    result = convert(source, tmp_path / "out")
    assert result.transcoded == {"from": model_type, "to": host} == facts(tmp_path / "out")["transcoded"]
    assert result.warnings == ()
    made = tiny.load(tmp_path / "out")
    assert made.config.model_type == host
    expected, found = tiny.logits(model), tiny.logits(made)
    assert expected.std() > 0.5
    assert (found - expected).abs().max() < 1e-10
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}


def mean_heads(rows: Tensor, kv_heads: int) -> Tensor:
    """Each group's mean, in the place of every head of it."""
    heads = rows.numpy().reshape(kv_heads, HEADS // kv_heads, HEAD_DIM, -1)
    return torch.from_numpy(np.broadcast_to(heads.mean(1, keepdims=True), heads.shape).reshape(rows.shape).copy())


def overwrite_heads(model: Any, kv_heads: int) -> None:
    """In an MHA model of a host class: K/V heads become their group's mean."""
    for name, parameter in model.named_parameters():
        if any(f".{part}_proj." in name for part in "kv"):
            parameter.data = mean_heads(parameter.data, kv_heads)
        elif ".c_attn." in name:  # query, key, value of each head in turn
            parts = parameter.data.view(HEADS, 3, HEAD_DIM, -1).clone()
            for part in (1, 2):
                averaged = mean_heads(parts[:, part].reshape(HEADS * HEAD_DIM, -1), kv_heads)
                parts[:, part] = averaged.view(HEADS, HEAD_DIM, -1)
            parameter.data = parts.view(parameter.shape)


@pytest.mark.parametrize("name", ["pythia", "redpajama", "sequential, partial rotary", "codegen", "gpt2", "opt"])
def test_pooled_is_the_host_with_averaged_heads(tmp_path: Path, name: str) -> None:
    kv_heads = transcoded.fewer(name)
    source = transcoded.saved(tmp_path / "source", transcoded.model(name))
    convert(source, tmp_path / "whole")
    convert(source, tmp_path / "out", kv_heads)
    whole, out = tiny.load(tmp_path / "whole"), tiny.load(tmp_path / "out")
    before = tiny.logits(whole)
    overwrite_heads(whole, kv_heads)
    expected = tiny.logits(whole)
    assert (tiny.logits(out) - expected).abs().max() < 1e-10
    assert (before - expected).abs().max() > 0.1, "pooling must show"
    prompt = torch.arange(3, 15)[None]
    runs = [out.generate(prompt, max_new_tokens=8, do_sample=False, use_cache=cache) for cache in (True, False)]
    assert torch.equal(*runs)


def test_folded_numbers_are_rounded_once(tmp_path: Path) -> None:
    """Folding and averaging in float64, and one rounding to float16, which NumPy does at once."""
    source = transcoded.saved(tmp_path / "source", transcoded.model("pythia", torch.float16))
    convert(source, tmp_path / "whole")
    convert(source, tmp_path / "out", 4)
    old = {name: tensor.numpy() for name, tensor in tiny.tensors(source).items()}
    layer = "gpt_neox.layers.1."
    gain, shift = (old[f"{layer}input_layernorm.{one}"].astype(np.float64) for one in ("weight", "bias"))
    qkv = old[f"{layer}attention.query_key_value.weight"].astype(np.float64).reshape(HEADS, 3, HEAD_DIM, 96)
    bias = old[f"{layer}attention.query_key_value.bias"].astype(np.float64).reshape(HEADS, 3, HEAD_DIM)
    for index, part in enumerate("qkv"):
        weight = qkv[:, index] * gain
        moved = bias[:, index] + np.array([head @ shift for head in qkv[:, index]])
        for folder, pooled in (("whole", False), ("out", part != "q")):
            made = tiny.tensors(tmp_path / folder)
            name = f"model.layers.1.self_attn.{part}_proj"
            w, b = (x.reshape(4, 3, *x.shape[1:]).sum(1) / 3 if pooled else x for x in (weight, moved))
            assert np.array_equal(made[f"{name}.weight"].numpy(), w.reshape(-1, 96).astype(np.float16))
            np.testing.assert_allclose(made[f"{name}.bias"].numpy(), b.reshape(-1), rtol=2**-10)
    after = tiny.tensors(tmp_path / "out")
    assert {tensor.dtype for tensor in after.values()} == {torch.float16}
    assert np.array_equal(after["model.embed_tokens.weight"].numpy(), old["gpt_neox.embed_in.weight"])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "float16"
    assert facts(tmp_path / "out")["source_kv_heads"] == 12


def test_another_dtype_may_be_asked_for(tmp_path: Path) -> None:
    source = transcoded.saved(tmp_path / "source", transcoded.model("pythia", torch.float32))
    convert(source, tmp_path / "out", 4, dtype="bfloat16")
    assert {tensor.dtype for tensor in tiny.tensors(tmp_path / "out").values()} == {torch.bfloat16}
    assert tiny.stock_model(tmp_path / "out").config.dtype is not None


OLD: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "pythia": (
        "gpt_neox.layers.{}.attention.",
        {"lm_head.weight": "embed_out.weight"},
        {"bias": torch.ones(1, 1, 8, 8, dtype=torch.bool), "masked_bias": torch.tensor(-1e9),
         "rotary_emb.inv_freq": torch.ones(1)},
    ),
    "gpt2": (
        "h.{}.attn.", {"transformer.": ""},
        {"bias": torch.ones(1, 1, 8, 8), "masked_bias": torch.tensor(-1e4)},
    ),
    "codegen": ("transformer.h.{}.attn.", {}, {"causal_mask": torch.ones(1, 1, 8, 8, dtype=torch.bool)}),
}  # fmt: skip
"""What old checkpoints name otherwise, and the buffers that they carry."""


@pytest.mark.parametrize("name", OLD)
def test_old_checkpoints_have_other_names_and_buffers(tmp_path: Path, name: str) -> None:
    where, renamed, buffers = OLD[name]
    model = transcoded.model(name)
    source = transcoded.saved(tmp_path / "source", model)
    changes: dict[str, Tensor | None] = {}
    for key, tensor in tiny.tensors(source).items():
        own = next((key.replace(old, new, 1) for old, new in renamed.items() if key.startswith(old)), key)
        changes |= {key: None} | {own: tensor}
    changes |= {where.format(layer) + key: one.clone() for layer in range(2) for key, one in buffers.items()}
    tiny.rewrite(source, changes)
    if name == "pythia":
        config = json.loads((source / "config.json").read_text())
        assert config.pop("rope_parameters")["partial_rotary_factor"] == 0.25
        own = {"rotary_pct": 0.25, "rotary_emb_base": 5000}
        (source / "config.json").write_text(json.dumps(config | own))
    convert(source, tmp_path / "out")
    assert (tiny.logits(tiny.load(tmp_path / "out")) - tiny.logits(model)).abs().max() < 1e-10


def test_a_pickle_whose_output_embedding_is_an_alias(tmp_path: Path) -> None:
    model = transcoded.model("opt")
    source = transcoded.saved(tmp_path / "source", model)
    (source / "model.safetensors").unlink()
    torch.save(dict(model.state_dict()), source / "pytorch_model.bin")
    convert(source, tmp_path / "out")
    assert (tiny.logits(tiny.load(tmp_path / "out")) - tiny.logits(model)).abs().max() < 1e-10
    assert "lm_head.weight" not in tiny.tensors(tmp_path / "out")


def test_shards_and_files_beside_them_go_along(tmp_path: Path) -> None:
    model = transcoded.model("pythia", torch.float32, num_hidden_layers=3, eos_token_id=7, bos_token_id=6)
    model.save_pretrained(tmp_path / "source", max_shard_size="200KB")
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    (tmp_path / "source" / "README.md").write_text("a card")
    count = len(list((tmp_path / "source").glob("*.safetensors")))
    assert count > 1
    result = convert(tmp_path / "source", tmp_path / "out", 4)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == count
    weights = [tmp_path / "out" / f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    assert sum(one.stat().st_size for one in weights) == result.output_bytes
    assert (tmp_path / "out" / "SOURCE_README.md").read_text() == "a card"
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (6, 7, None)
    assert config["architectures"] == ["PhiForCausalLM"]
    assert (config["num_key_value_heads"], config["torch_dtype"]) == (4, "float32")


def test_a_dry_run_writes_nothing_and_knows_everything(tmp_path: Path) -> None:
    source = transcoded.saved(tmp_path / "source", transcoded.model("pythia", torch.float32))
    told = convert(source, tmp_path / "out", 4, dry_run=True)
    assert {path.name for path in tmp_path.iterdir()} == {"source"}
    done = convert(source, tmp_path / "out", 4)
    assert (told.output_bytes, told.pooled_tensors, told.transcoded) == (
        done.output_bytes,
        done.pooled_tensors,
        done.transcoded,
    )


def test_a_model_that_holds_fewer_heads_itself_is_converted_as_it_is(tmp_path: Path, sources: dict[str, Path]) -> None:
    assert convert(sources["llama"], tmp_path / "out", 4).transcoded is None


@pytest.mark.parametrize("calibrated", [False, True])
def test_aligned_comes_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, calibrated: bool) -> None:
    """Killed in the middle and started again, it goes on where it was."""
    model = transcoded.model("pythia", torch.float32, vocab_size=2048)
    source = transcoded.saved(tmp_path / "source", model)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tiny.QUICKSTART / file, source / file)
    on_text: dict[str, Any] = {"calibration": read_documents(tiny.NOVEL), "tokens": 2048, "window": 64, "heal": 5}
    given = Alignment(device="cpu", **(on_text if calibrated else {}))
    convert(source, tmp_path / "mean", 4)
    convert(source, tmp_path / "whole", 4, method="aligned", alignment=given)
    with monkeypatch.context() as patch:
        patch.setattr("headpool.convert.run.write_tensors", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            convert(source, tmp_path / "out", 4, method="aligned", alignment=given)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "mean", "whole", ".out.aligning"}
    fitted: list[int] = []
    patched = "headpool.convert.aligned.run.share_without_text"
    monkeypatch.setattr(patched, lambda *arguments, **_: fitted.append(arguments[2]))
    monkeypatch.setattr("headpool.convert.aligned.fit.Fit.run", lambda self: fitted.append(self.layer.index))
    convert(source, tmp_path / "out", 4, method="aligned", alignment=given)
    assert fitted == []
    for file in ("model.safetensors", "headpool.json"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    pooled, aligned = (tiny.logits(tiny.stock_model(tmp_path / one)) for one in ("mean", "out"))
    expected = tiny.logits(model)
    assert (aligned - expected).square().sum() < (pooled - expected).square().sum()


PADDED = torch.cat((torch.full((1, 4), 5), torch.arange(10, 20)[None]), 1)
MASK = (torch.arange(14) >= 4).long()[None]


@pytest.mark.parametrize("name", ["pythia", "redpajama", "sequential, partial rotary", "gptj", "codegen", "gpt2"])
def test_padding_on_the_left_is_the_same(tmp_path: Path, name: str) -> None:
    model = transcoded.model(name)
    convert(transcoded.saved(tmp_path / "source", model), tmp_path / "out")
    with torch.no_grad():
        expected, found = (
            one(PADDED, attention_mask=MASK).logits[:, 4:] for one in (model, tiny.load(tmp_path / "out"))
        )
    assert (found - expected).abs().max() < 1e-10


def test_what_padding_without_positions_changes(tmp_path: Path) -> None:
    """OPT tells positions from the mask, GPT-BigCode counts from the first token: given positions, they agree."""
    model = transcoded.model("opt")
    convert(transcoded.saved(tmp_path / "source", model), tmp_path / "out")
    made = tiny.load(tmp_path / "out")
    positions = (MASK.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = model(PADDED, attention_mask=MASK).logits[:, 4:]
        told = made(PADDED, attention_mask=MASK, position_ids=positions).logits[:, 4:]
        counted = made(PADDED, attention_mask=MASK).logits[:, 4:]
    assert (told - expected).abs().max() < 1e-10
    assert (counted - expected).abs().max() > 0.1
    runs = [
        one.generate(PADDED, attention_mask=MASK, max_new_tokens=8, do_sample=False, pad_token_id=5)
        for one in (model, made)
    ]
    assert torch.equal(*runs)


def test_a_run_transcodes_and_learns_from_the_original(tmp_path: Path) -> None:
    source = transcoded.saved(tmp_path / "source", transcoded.model("pythia", torch.float32, vocab_size=2048))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tiny.QUICKSTART / file, source / file)
    (tmp_path / "text.txt").write_text(tiny.NOVEL.read_text()[:4000])
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: source\n"
        "convert: {kv_heads: 4, transcode: true}\n"
        "uptrain: {data: text.txt, tokens: 512, sequence_length: 32, batch_tokens: 256, distill: {blocks: 1.0}}\n"
    )
    out = tmp_path / "run"
    with pytest.raises(RequestError, match="--transcode"):
        run_recipe(load_recipe(str(recipe), [f"output={out}", "convert.transcode=false"]))
    run_recipe(load_recipe(str(recipe), [f"output={out}"]))
    opened = [open_candidate(ModelSpec("model", str(one))) for one in (source, out / "converted", out / "uptrained")]
    assert [one.kv_heads for one in opened] == [12, 4, 4]
    assert facts(out / "uptrained")["transcoded"] == {"from": "gpt_neox", "to": "phi"}
    assert not list(tmp_path.glob("**/.*.transcoded"))
    card = (out / "converted" / "README.md").read_text()
    assert "source, a `gpt_neox` model, written as `phi`, another class that computes the same function and" in card


def test_from_the_command_line(tmp_path: Path) -> None:
    source = transcoded.saved(tmp_path / "source", transcoded.model("gpt2", torch.float32))
    command = ["convert", str(source), str(tmp_path / "out"), "--kv-heads", "1", "--transcode", "--json"]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0
    told = json.loads(done.stdout)
    assert told["transcoded"] == {"from": "gpt2", "to": "gpt_bigcode"}
    assert (told["source_kv_heads"], told["kv_heads"]) == (12, 1)
    assert tiny.stock_model(tmp_path / "out").config.multi_query is True
