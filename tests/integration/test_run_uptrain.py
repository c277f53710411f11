"""`headpool run` with an uptrain section: convert, evaluate, train, evaluate all three."""

import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import training

from headpool.errors import Interrupted, RequestError
from headpool.pipeline import run_recipe
from headpool.recipe import Recipe
from headpool.uptrain import loop

pytestmark = pytest.mark.usefixtures("quick_check")

STAGES = ["convert", "eval before uptraining", "uptrain", "eval"]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = training.recipe_file(tmp_path)
    path.write_text(path.read_text() + "eval: {data: valid.txt, window: 64}\n")
    return path


def load(recipe: Path, *overrides: str) -> Recipe:
    return training.load(
        recipe, f"output={recipe.parent / 'run'}", "uptrain.tokens=1024", "uptrain.eval_every=2", *overrides
    )


def skipped(recipe: Recipe) -> list[bool]:
    result = run_recipe(recipe)
    assert [stage.name for stage in result.stages] == STAGES
    return [stage.skipped for stage in result.stages]


def report(recipe: Path) -> Any:
    return json.loads((recipe.parent / "run" / "report" / "report.json").read_text())


def test_without_a_conversion_the_original_is_trained_and_measured(recipe: Path) -> None:
    result = run_recipe(load(recipe, "convert=null"))
    assert [stage.name for stage in result.stages] == ["uptrain", "eval"]
    assert [model["label"] for model in report(recipe)["models"]] == [None, "uptrained"]
    card = (recipe.parent / "run" / "uptrained" / "README.md").read_text()
    assert "| uptrained |" in card
    assert "converted" not in card.split("## How to load it")[0]


def test_all_the_way_and_again_only_what_changed(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert skipped(load(recipe)) == [False] * 4
    held = report(recipe)
    assert [(Path(model["path"]).name, model["label"]) for model in held["models"]] == [
        ("model", None),
        ("converted", "converted, not yet uptrained"),
        ("uptrained", "converted and uptrained"),
    ]
    lines = training.metrics(recipe, "run")
    assert held["training"]["metrics"] == lines
    assert (held["training"]["steps"], held["training"]["tokens"]) == (4, 1024)
    original = held["models"][0]["perplexity"]
    assert held["training"]["original_perplexity"] == pytest.approx(original, rel=0.2), "the same text, other windows"
    assert skipped(load(recipe)) == [True] * 4
    assert skipped(load(recipe, "uptrain.save_every=2", "uptrain.micro_batch=4")) == [True] * 4
    # A finished training with other settings is replaced; one that was stopped half-way is not lost.
    update = loop._update
    with monkeypatch.context() as patched:
        patched.setattr(loop, "_update", lambda run, norm: (update(run, norm), signal.raise_signal(signal.SIGTERM)))
        with pytest.raises(Interrupted):
            run_recipe(load(recipe, "uptrain.learning_rate=0.002"))
    with pytest.raises(RequestError, match="another learning_rate"):
        run_recipe(load(recipe, "uptrain.learning_rate=0.003"))
    assert report(recipe) == held, "what an interrupted run would have replaced is still there"
    assert skipped(load(recipe, "uptrain.learning_rate=0.002")) == [True, True, False, False]
    first = 0.002 * (0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert training.metrics(recipe, "run")[1]["learning_rate"] == pytest.approx(first)


def test_fresh_trains_again(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = load(recipe, "eval=null")
    run_recipe(given)
    steps: list[int] = []
    update = loop._update
    monkeypatch.setattr(loop, "_update", lambda run, norm: (update(run, norm), steps.append(run.state.step)))
    run_recipe(given, fresh=True)
    assert steps == [0, 1, 2, 3]


def test_without_a_convert_section_the_model_itself_is_trained(recipe: Path) -> None:
    given = load(recipe, "convert=null", "eval=null", "uptrain.validation=null", "uptrain.eval_every=null")
    result = run_recipe(given)
    assert [stage.name for stage in result.stages] == ["uptrain"]
    config = json.loads((recipe.parent / "run" / "uptrained" / "config.json").read_text())
    assert config == json.loads((recipe.parent / "model" / "config.json").read_text())
    held = json.loads((recipe.parent / "run" / "uptrained" / "headpool.json").read_text())
    assert (held["source"]["model"], held["source"]["revision"]) == ("model", None)
    assert held["uptrain"]["steps"] == 4


def test_what_training_would_refuse_is_refused_before_the_conversion(recipe: Path) -> None:
    for override, says in (
        ("uptrain.data=nowhere.txt", "no such file"),
        ("uptrain.launch={num_processes: 3}", "no multiple of sequence_length 32 x 3 processes"),
        ("uptrain.launch={num_proceses: 2}", "launch.num_proceses: .*; did you mean num_processes?"),
        ("uptrain.launch={num_processes: two}", "launch.num_processes: a number of processes .* found 'two'"),
    ):
        with pytest.raises(RequestError, match=says):
            run_recipe(load(recipe, override))
    assert not (recipe.parent / "run").exists()
