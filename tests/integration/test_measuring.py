"""Several models beside a baseline: one table, each with its comparison, decode times, positions and samples."""

import json
import math
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from headpool.errors import RequestError
from headpool.eval import samples
from headpool.eval.measure import Report, evaluate
from headpool.eval.models import ModelSpec
from headpool.eval.report import as_json, read_report, write_report
from headpool.eval.tables import table
from headpool.text import TextData

TEXT = tiny.NOVEL.read_text(encoding="utf-8")[:6000]
DATA = TextData([TEXT], "0" * 64, "novel")
KV_HEADS = (12, 4, 1)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("checkpoints")
    paths = [
        tiny.checkpoint(root / f"kv{count}", num_key_value_heads=count, tokenizer=True, vocab_size=2048)
        for count in KV_HEADS
    ]
    (paths[1] / "headpool.json").write_text('{"method": "mean", "layers": [{"layer": 0, "kv_heads": 4}]}')
    return list(map(str, paths))


def specs(paths: list[str]) -> list[ModelSpec]:
    return [ModelSpec("baseline", paths[0]), *(ModelSpec("model", path) for path in paths[1:])]


@pytest.fixture(scope="module")
def report(checkpoints: list[str]) -> Report:
    return evaluate(specs(checkpoints), DATA, window=100, contexts=(16, 64), batches=(1, 3), device="cpu")


@pytest.fixture(scope="module")
def values(report: Report) -> dict[str, Any]:
    return as_json(report)


def test_each_model_is_compared_with_the_baseline(values: dict[str, Any]) -> None:
    baseline, *others = values["models"]
    assert values["comparison"] is None, "with several models there is no one comparison"
    assert baseline["comparison"] is None
    for model, kv_heads in zip(others, KV_HEADS[1:], strict=True):
        speedups = [
            theirs["seconds_per_token"] / ours["seconds_per_token"]
            for ours, theirs in zip(model["decode"], baseline["decode"], strict=True)
        ]
        assert model["comparison"] == {
            "perplexity_ratio": pytest.approx(model["perplexity"] / baseline["perplexity"]),
            "bits_per_byte_ratio": pytest.approx(model["bits_per_byte"] / baseline["bits_per_byte"]),
            "cache_ratio": pytest.approx(kv_heads / 12),
            "decode_speedup": pytest.approx(math.prod(speedups) ** (1 / 4)),
        }
        assert [one["speedup"] for one in model["decode"]] == pytest.approx(speedups)
    assert [one["speedup"] for one in baseline["decode"]] == [None] * 4


def test_decoding_is_reported_for_every_context_and_batch(values: dict[str, Any]) -> None:
    for model, kv_heads in zip(values["models"], KV_HEADS, strict=True):
        decode = model["decode"]
        assert [(one["context"], one["batch"], one["steps"]) for one in decode] == [
            (16, 1, 8), (16, 3, 8), (64, 1, 32), (64, 3, 32),
        ]  # fmt: skip
        for one in decode:
            assert one["cache_bytes"] == 2 * 2 * kv_heads * 8 * 4 * one["context"] * one["batch"]
            assert one["bandwidth"] == pytest.approx(one["bytes_per_token"] / one["seconds_per_token"])
            assert one["prefill_spread"][0] <= one["prefill_seconds"] <= one["prefill_spread"][1]
            low, high = one["seconds_per_token_spread"]
            assert 0 < low <= one["seconds_per_token"] <= high
            assert one["preallocated"] is one["kernel"]["grouped"] is True
    assert any("not the prefill" in note for note in values["notes"])


def test_positions_add_up_to_the_whole(values: dict[str, Any]) -> None:
    for model in values["models"]:
        buckets = model["positions"]
        assert [(one["first"], one["last"]) for one in buckets] == [(0, 15), (16, 31), (32, 63), (64, 99)]
        assert sum(one["tokens"] for one in buckets) == model["tokens"]
        assert sum(one["nats"] for one in buckets) == pytest.approx(model["nats"])


def test_samples_are_the_same_prompts_for_every_model(values: dict[str, Any], checkpoints: list[str]) -> None:
    prompts = [[one["prompt"] for one in model["samples"]] for model in values["models"]]
    assert len(prompts[0]) == 3
    assert prompts == [prompts[0]] * 3
    assert all(prompt in TEXT for prompt in prompts[0])
    model = AutoModelForCausalLM.from_pretrained(checkpoints[1])
    tokenizer = AutoTokenizer.from_pretrained(checkpoints[1])
    tokens = [0, *tokenizer(prompts[0][1])["input_ids"]]
    expected = samples.continue_greedily(model, tokenizer, tokens)
    assert values["models"][1]["samples"][1]["text"] == expected


def test_what_headpool_made_is_labelled_and_described(values: dict[str, Any]) -> None:
    assert [model["label"] for model in values["models"]] == [None, "converted, not yet uptrained", None]
    assert values["models"][1]["conversion"] == {"method": "mean", "layers": [{"layer": 0, "kv_heads": 4}]}
    assert any("not yet uptrained" in note for note in values["notes"])


def test_the_tables_hold_every_model_and_figure(values: dict[str, Any]) -> None:
    console = Console(file=StringIO(), width=400)
    console.print(table(values))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for model in values["models"]:
        assert text.count(model["path"]) >= 5
        assert f"{model['perplexity']:.3f}" in text
    for model in values["models"][1:]:
        assert f"{model['comparison']['perplexity_ratio']:.4f}x" in text
        assert all(f"{one['speedup']:.2f}x" in text for one in model["decode"])
    assert text.count("not yet uptrained") >= 5


def test_recipe_and_training_stand_in_the_report(report: Report, tmp_path: Path) -> None:
    training = {"metrics": [], "original_perplexity": 3.0, "tokens": 10, "steps": 1}
    path = write_report(report, tmp_path, recipe="model: m\n", training=training)
    written = json.loads(path.read_text())
    assert written == as_json(report) | {"recipe": "model: m\n", "training": training}
    assert read_report(path) == written
    assert "training" not in read_report(write_report(report, tmp_path))


def test_models_of_another_tokenizer_are_compared_in_bits_per_byte_only(checkpoints: list[str], tmp_path: Path) -> None:
    other = tiny.checkpoint(tmp_path / "other", num_key_value_heads=2, tokenizer=True, vocab_size=2048)
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["Fanny"])
    tokenizer.save_pretrained(other)
    (other / "config.json").write_text((other / "config.json").read_text().replace("2048", "2049"))
    tensors = {
        name: torch.cat([tensor, tensor[:1]]).clone()
        for name, tensor in tiny.tensors(other).items()
        if tensor.shape[0] == 2048
    }
    tiny.rewrite(other, tensors)
    found = as_json(evaluate(specs([checkpoints[0], str(other), checkpoints[1]]), DATA, window=64, prompts=[]))
    baseline, different, same = found["models"]
    assert different["tokens"] < baseline["tokens"] == same["tokens"]
    assert different["comparison"]["perplexity_ratio"] is None
    assert different["comparison"]["bits_per_byte_ratio"] == pytest.approx(different["nats"] / baseline["nats"])
    assert same["comparison"]["perplexity_ratio"] == pytest.approx(same["perplexity"] / baseline["perplexity"])
    assert any("compare them in bits per byte" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"contexts": [64, 129]}, "context 129 is larger than the 128 positions of "),
        ({"contexts": [1]}, "context 1: one token is prefilled and one decoded at least"),
        ({"contexts": [8], "batches": [2, 0]}, "batch 0: one sequence at least"),
        ({"contexts": [8], "batches": []}, "no batch size to decode at"),
        ({"prompts": ["It was " * 100]}, "prompt 'It was It was .*longer than the models' positions"),
        ({"tasks": ["nothing.yaml"]}, "no task 'nothing.yaml'"),
        ({"device": "meta"}, "device 'meta' cannot be used"),
    ],
)
def test_impossible_requests_are_refused_before_weights_are_read(
    checkpoints: list[str], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    import lm_eval.tasks

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    manager = lm_eval.tasks.TaskManager(include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", lambda **_: manager)
    with pytest.raises(RequestError, match=f"^{message}"):
        evaluate(specs(checkpoints), DATA, **options)


def test_prompts_of_ones_own_are_continued(checkpoints: list[str]) -> None:
    found = as_json(evaluate(specs(checkpoints[:2]), DATA, window=64, prompts=["It was", "She"]))
    for model in found["models"]:
        assert [one["prompt"] for one in model["samples"]] == ["It was", "She"]
    assert found["comparison"] == found["models"][1]["comparison"]
