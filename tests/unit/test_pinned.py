"""What a recipe's defaults became, from what headpool.json and report.json say."""

from typing import Any

import pytest
import yaml

from headpool.pinned import evaluation, pinned
from headpool.portable import evaluated
from headpool.recipe import Recipe

RECIPE: dict[str, Any] = {
    "model": "some/model", "output": "out",
    "convert": {"kv_heads": 2, "method": "aligned", "calibration": "/data/text.txt", "device": "cuda:1"},
    "eval": {"data": "test.txt", "device": "cuda:1"},
    "uptrain": {"data": {"path": "/data/train.txt", "weight": 2.0}, "alpha": 0.1, "pretraining_tokens": 10_000},
}  # fmt: skip
NOTED = {"kv_heads": 2, "method": "aligned", "groups": "search", "calibration": "text.txt", "calibration_window": 64}
OPTIONS = {
    "data": [{"path": "train.txt", "weight": 2.0}], "validation": None, "model": ["converted", "c0ffee"],
    "teacher": ["model", "c0ffee"], "distill": None, "seed": 3, "sequence_length": 128, "batch_tokens": 1024,
    "steps": 1, "eval_every": None, "precision": "bf16", "clip": None, "learning_rate": 1e-4,
}  # fmt: skip
DONE: dict[str, Any] = {
    "source": {"model": "some/model", "revision": "c0ffee"}, "recipe": yaml.safe_dump({"convert": NOTED}),
    "uptrain": {"options": OPTIONS},
}  # fmt: skip
REPORT = {"settings": {"window": 512, "stride": 256, "batch_size": 4, "dtype": "auto", "device": "cuda"}}


def recipe(**changes: Any) -> Recipe:
    return Recipe.model_validate({**RECIPE, "seed": 3, **changes})


def test_all_that_was_run() -> None:
    values = pinned(recipe(), DONE, REPORT)
    assert values == {
        "model": "some/model", "revision": "c0ffee", "output": "out", "seed": 3,
        "convert": {**NOTED, "calibration": "/data/text.txt"},
        "eval": {"data": "test.txt", "window": 512, "stride": 256, "batch_size": 4, "dtype": "auto"},
        "uptrain": {
            "data": [{"path": "/data/train.txt", "weight": 2.0}], "alpha": 0.1, "pretraining_tokens": 10_000,
            "sequence_length": 128, "batch_tokens": 1024, "micro_batch": 8, "learning_rate": 1e-4, "clip": None,
            "precision": "bf16",
        },
    }  # fmt: skip
    again = Recipe.model_validate(values)
    assert pinned(again, DONE, REPORT) == values, "it is a recipe, and pinned already"


def test_a_training_that_comes_later_is_left_out_and_an_evaluation_that_was_not_run_is_as_it_was() -> None:
    values = pinned(recipe(), {key: value for key, value in DONE.items() if key != "uptrain"}, None)
    assert "uptrain" not in values
    assert values["eval"] == {"data": "test.txt"}


@pytest.mark.parametrize(
    ("model", "given", "commit"),
    [("some/model", "main", "c0ffee"), ("gqa", None, None), ("other/model", "v2", "v2")],
)
def test_the_commit_is_that_of_the_recipe_s_own_model(model: str, given: str | None, commit: str | None) -> None:
    """A local checkpoint that was made from a model of the hub has no commit there."""
    assert pinned(recipe(model=model, revision=given), DONE, None).get("revision") == commit


def test_batches_count_where_decoding_is_timed() -> None:
    values = pinned(recipe(eval={"data": "test.txt", "contexts": [8]}), DONE, REPORT)
    assert values["eval"]["batches"] == [1]


DATA = {"name": "test.jsonl", "sha256": "0" * 64, "column": "body"}
DECODE = [{"context": context, "batch": batch} for context in (512, 64) for batch in (1, 8)]


def test_an_evaluation_without_a_recipe_becomes_one() -> None:
    report = {"data": DATA, "models": [{"decode": DECODE}], **REPORT}
    section = evaluation(report)
    assert section == {
        "data": "test.jsonl", "text_column": "body", "window": 512, "stride": 256, "batch_size": 4, "dtype": "auto",
        "contexts": [64, 512], "batches": [1, 8],
    }  # fmt: skip
    Recipe.model_validate({**RECIPE, "eval": section})


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("big/text:en:test", {"data": "big/text", "data_config": "en", "split": "test"}),
        ("big/text:validation", {"data": "big/text", "split": "validation"}),
        ("a:b.txt", {"data": "a:b.txt"}),
    ],
)
def test_data_of_an_evaluation_are_found_again_by_their_name(name: str, place: dict[str, str]) -> None:
    section = evaluation({"data": {"name": name, "sha256": "0" * 64}, "models": [{}], **REPORT})
    assert {key: section[key] for key in section if key not in REPORT["settings"]} == place


def test_a_recipe_gets_the_evaluation_and_the_hash_of_its_data() -> None:
    report = {"data": DATA, "models": [{}], **REPORT}
    text = evaluated(f"# headpool run recipe.yaml\n#   my model  {'1' * 64}\nmodel: my model\nuptrain: 1\n", report)
    assert yaml.safe_load(text) == {"model": "my model", "eval": evaluation(report), "uptrain": 1}
    assert f"#   my model  {'1' * 64}\n#   test.jsonl  {'0' * 64}\n" in text
    other = f"#   test.jsonl  {'1' * 64}\nmodel: m\n"
    assert evaluated(other, report) == other, "two files of one name cannot lie side by side"
