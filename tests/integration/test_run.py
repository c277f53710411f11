"""`headpool run`: stages in order, skipped when done, done again when what they stand on changed."""

import json
from pathlib import Path
from typing import Any

import lm_eval.tasks
import pytest
import tiny
import yaml

from headpool.errors import HeadpoolError, RequestError
from headpool.pipeline import run_recipe
from headpool.recipe import Recipe, load_recipe

pytestmark = pytest.mark.usefixtures("quick_check")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    tiny.checkpoint(tmp_path / "model", "llama", tokenizer=True, vocab_size=2048)
    (tmp_path / "text.txt").write_text(tiny.NOVEL.read_text()[:3000])
    path = tmp_path / "my.yaml"
    path.write_text("model: model\nconvert: {kv_heads: 4}\neval: {data: text.txt, window: 64}\n")
    return path


def load(recipe: Path, *overrides: str) -> Recipe:
    return load_recipe(str(recipe), [f"output={recipe.parent / 'out'}", *overrides])


def skipped(recipe: Recipe, **options: Any) -> list[bool]:
    result = run_recipe(recipe, **options)
    assert [stage.name for stage in result.stages] == ["convert", "eval"]
    return [stage.skipped for stage in result.stages]


def report(recipe: Path) -> Any:
    return json.loads((recipe.parent / "out" / "report" / "report.json").read_text())


def test_a_stage_runs_again_only_when_what_it_stands_on_changed(recipe: Path) -> None:
    assert skipped(load(recipe)) == [False, False]
    first = report(recipe)
    assert [model["kv_heads"] for model in first["models"]] == [12, 4]
    assert first["models"][1]["label"] == "converted, not yet uptrained"
    assert skipped(load(recipe)) == [True, True]
    assert report(recipe) == first
    assert skipped(load(recipe, "eval.window=32")) == [True, False]
    assert report(recipe)["settings"]["window"] == 32
    assert skipped(load(recipe, "eval.window=32", "convert.kv_heads=2")) == [False, False]
    assert [model["kv_heads"] for model in report(recipe)["models"]] == [12, 2]
    (recipe.parent / "text.txt").write_text("Another text. " * 50)
    assert skipped(load(recipe, "eval.window=32", "convert.kv_heads=2")) == [True, False]
    tiny.checkpoint(recipe.parent / "model", "llama", seed=1, tokenizer=True, vocab_size=2048)
    assert skipped(load(recipe, "eval.window=32", "convert.kv_heads=2")) == [False, False]
    assert skipped(load(recipe, "eval.window=32", "convert.kv_heads=2"), fresh=True) == [False, False]


def test_a_killed_run_goes_on_where_it_was(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headpool import pipeline

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "_evaluate", die)
        with pytest.raises(KeyboardInterrupt):
            run_recipe(load(recipe))
    assert skipped(load(recipe)) == [True, False]
    # Killed while it converts for other options: the old output must not pass for the new one.
    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "_convert", die)
        with pytest.raises(KeyboardInterrupt):
            run_recipe(load(recipe, "convert.kv_heads=2"))
    assert skipped(load(recipe)) == [True, True], "what an interrupted run would have replaced is still there"
    assert skipped(load(recipe, "convert.kv_heads=2")) == [False, False]
    assert report(recipe)["models"][1]["kv_heads"] == 2


def test_what_the_eval_section_asks_for_is_in_the_report_with_the_recipe(recipe: Path) -> None:
    run_recipe(load(recipe, "eval.contexts=[8, 32]", "eval.batches=[2]", "eval.prompts=[It was]", "convert.kv_heads=2"))
    values = report(recipe)
    for model in values["models"]:
        assert [(one["context"], one["batch"]) for one in model["decode"]] == [(8, 2), (32, 2)]
        assert [one["prompt"] for one in model["samples"]] == ["It was"]
    again = yaml.safe_load(values["recipe"])
    assert again["convert"] == {"kv_heads": 2}
    assert again["eval"]["contexts"] == [8, 32]
    (recipe.parent / "again.yaml").write_text(values["recipe"])
    assert skipped(load_recipe(str(recipe.parent / "again.yaml"))) == [True, True], "the same run, from any folder"


def test_without_an_eval_section_there_is_no_report(recipe: Path) -> None:
    result = run_recipe(load(recipe, "eval=null"))
    assert result.report is None
    assert [stage.name for stage in result.stages] == ["convert"]


def test_what_a_run_did_not_make_is_not_removed(recipe: Path) -> None:
    mine = recipe.parent / "out" / "converted"
    mine.mkdir(parents=True)
    (mine / "precious").write_text("mine")
    for fresh in (False, True):
        with pytest.raises(RequestError, match="was not made by a run"):
            run_recipe(load(recipe), fresh=fresh)
    assert (mine / "precious").exists()


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("convert.kv_heads=5", "do not divide"),
        ("model=./nowhere", "no such directory"),
        ("eval.data=nowhere.txt", "no such file: nowhere.txt"),
        ("output={folder}/model", "inside one another"),
        ("eval.window=4096", "window 4096 is larger than the 128 positions"),
        ("eval.contexts=[64, 256]", "context 256 is larger than the 128 positions"),
        ("eval.tasks=[nothing.yaml]", "no task 'nothing.yaml'"),
    ],
)
def test_impossible_recipes_leave_nothing_behind(
    recipe: Path, override: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(recipe.parent.iterdir())
    manager = lm_eval.tasks.TaskManager(include_defaults=False)  # the harness's own index takes many seconds to read
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", lambda **_: manager)
    with pytest.raises(RequestError, match=says):
        run_recipe(load(recipe, override.format(folder=recipe.parent)))
    assert sorted(recipe.parent.iterdir()) == before


def test_what_a_failed_run_did_not_make_is_not_removed_later(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headpool import pipeline

    def fail(*_: Any) -> None:
        raise HeadpoolError("x")

    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "_convert", fail)
        with pytest.raises(HeadpoolError):
            run_recipe(load(recipe))
    mine = recipe.parent / "out" / "converted"
    mine.mkdir()
    (mine / "precious").write_text("mine")
    with pytest.raises(RequestError, match="was not made by a run"):
        run_recipe(load(recipe))
    assert (mine / "precious").exists()


def test_an_output_that_was_tampered_with_is_made_again(recipe: Path) -> None:
    run_recipe(load(recipe))
    (recipe.parent / "out" / "converted" / "tokenizer.json").unlink()
    assert skipped(load(recipe)) == [False, False]
    assert (recipe.parent / "out" / "converted" / "tokenizer.json").exists()


def test_a_second_run_is_refused_while_the_first_lives(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headpool import pipeline

    def again(*_: Any) -> None:
        with pytest.raises(RequestError, match="another run"):
            run_recipe(load(recipe))
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "_convert", again)
    with pytest.raises(KeyboardInterrupt):
        run_recipe(load(recipe))
