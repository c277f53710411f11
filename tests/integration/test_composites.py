"""Models that hold a language model beside others: what changes of them, what is refused, and measuring them."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import registry
import tiny
import torch
from huggingface_hub import ModelCard

from headpool import planning
from headpool.checkpoint import open_source
from headpool.convert.run import convert_checkpoint
from headpool.errors import RequestError
from headpool.eval.measure import evaluate
from headpool.eval.models import ModelSpec, open_candidate
from headpool.eval.report import as_json
from headpool.loading import load_model
from headpool.text import read_texts

pytestmark = pytest.mark.usefixtures("quick_check")

KV = 4


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vision tower of 4 heads in 2 layers, a llama of 12 heads in 4."""
    folder = tmp_path_factory.mktemp("llava")
    registry.built("llava").save_pretrained(folder)
    return folder


def test_the_config_changes_in_its_language_model_alone(llava: Path, tmp_path: Path) -> None:
    convert_checkpoint(str(llava), tmp_path / "out", kv_heads=KV, dtype="bfloat16")
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (llava, tmp_path / "out"))
    assert before["text_config"]["num_key_value_heads"] == 12
    assert after["text_config"].pop("num_key_value_heads") == KV
    before["text_config"].pop("num_key_value_heads")

    def in_bfloat16(held: dict[str, Any]) -> dict[str, Any]:
        return {
            key: in_bfloat16(value) if isinstance(value, dict) else "bfloat16" if key == "dtype" else value
            for key, value in held.items()
        }

    assert after == in_bfloat16(before)
    assert {tensor.dtype for tensor in tiny.tensors(tmp_path / "out").values()} == {torch.bfloat16}


def test_the_vision_tower_stays_bit_for_bit(llava: Path, tmp_path: Path) -> None:
    convert_checkpoint(str(llava), tmp_path / "out", kv_heads=KV)
    before, after = tiny.tensors(llava), tiny.tensors(tmp_path / "out")
    tower = [name for name in before if "vision_tower" in name and ("k_proj" in name or "v_proj" in name)]
    assert len(tower) >= 4
    assert all(torch.equal(before[name], after[name]) for name in tower)
    changed = {name for name in before if before[name].shape != after[name].shape}
    assert len(changed) == 8
    assert all(name.startswith("language_model.model.layers.") for name in changed)


def test_it_opens_in_its_own_class_and_takes_text(llava: Path, tmp_path: Path) -> None:
    convert_checkpoint(str(llava), tmp_path / "out", kv_heads=KV)
    model = load_model(open_source(str(tmp_path / "out")), torch.float32, "cpu")
    assert type(model).__name__ == "LlavaForConditionalGeneration"
    cache = model(torch.arange(3, 9)[None]).past_key_values
    assert [layer.keys.shape for layer in cache.layers] == [(1, KV, 6, 16)] * 4


def test_its_card_opens_it(llava: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert_checkpoint(str(llava), tmp_path / "out", kv_heads=KV)
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.pipeline_tag == "image-text-to-text"
    [snippet] = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    ran: dict[str, Any] = {}
    exec(snippet, ran)
    assert type(ran["model"]).__name__ == "LlavaForConditionalGeneration"


def test_plan_tells_of_the_language_model(llava: Path) -> None:
    plan = planning.plan(llava)
    assert (plan.convertible, plan.layers, plan.heads, plan.kv_heads, plan.head_dim) == (True, 4, 12, 12, 16)
    by_count = {one.kv_heads: one for one in plan.options}
    assert by_count[4].parameters == plan.parameters - 4 * 2 * (12 - 4) * 16 * 192  # type: ignore[operator]


def test_a_language_model_that_is_not_there_is_missed_by_name(llava: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    registry.built("llava").save_pretrained(source)
    name = "language_model.model.layers.2.self_attn.v_proj.weight"
    tiny.rewrite(source, {name: torch.zeros(5, 192)})
    with pytest.raises(RequestError, match=rf"'{name}' is \[5, 192\], the config makes it \[192, 192\]"):
        convert_checkpoint(str(source), tmp_path / "out", kv_heads=KV)
    tiny.rewrite(source, {name: None})
    with pytest.raises(RequestError, match=f"'{name}' is missing"):
        convert_checkpoint(str(source), tmp_path / "out", kv_heads=KV)
    assert not (tmp_path / "out").exists()


def test_another_language_model_than_was_tried_is_warned_of(tmp_path: Path) -> None:
    config = registry.probe("llava").whole_config()
    other = {"model_type": "qwen2", "num_attention_heads": 12, "num_key_value_heads": 12}
    inner = config.text_config.to_dict() | other
    registry.transformers.LlavaForConditionalGeneration(
        type(config)(text_config=inner, vision_config=config.vision_config.to_dict())
    ).save_pretrained(tmp_path / "source")
    result = convert_checkpoint(str(tmp_path / "source"), tmp_path / "out", kv_heads=KV)
    assert len(result.warnings) == 1
    assert "llava around a language model of type qwen2, with fewer K/V heads, was never run" in result.warnings[0]


def test_it_is_measured_by_its_text_beside_its_original(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    vocabulary = json.loads((tiny.QUICKSTART / "config.json").read_text())["vocab_size"]
    registry.built("llava", vocab_size=vocabulary, max_position_embeddings=256).save_pretrained(source)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tiny.QUICKSTART / name, source / name)
    convert_checkpoint(str(source), out, kv_heads=KV)
    (tmp_path / "text.txt").write_text("It was the best of times, it was the worst of times. " * 4)
    specs = [ModelSpec("baseline", str(source)), ModelSpec("model", str(out))]
    data = read_texts(str(tmp_path / "text.txt"))
    report = as_json(evaluate(specs, data, window=128, prompts=[]))
    assert [one["kv_heads"] for one in report["models"]] == [12, KV]
    cache = [one["cache_bytes_per_token"]["allocated"] for one in report["models"]]
    assert cache == [2 * 4 * 12 * 16 * 4, 2 * 4 * KV * 16 * 4]
    ids = torch.tensor([open_candidate(specs[1]).tokenize(data.texts[0])])
    assert 40 < ids.shape[1] < 128
    model = tiny.transformers.LlavaForConditionalGeneration.from_pretrained(out).eval()
    with torch.no_grad():
        nats = torch.nn.functional.cross_entropy(model(ids[:, :-1]).logits[0], ids[0, 1:], reduction="sum")
    assert report["models"][1]["tokens"] == ids.shape[1] - 1
    assert report["models"][1]["nats"] == pytest.approx(float(nats), rel=1e-5)
