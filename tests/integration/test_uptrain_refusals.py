"""What uptraining refuses before it starts, and the dry run that refuses the same."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import here
import pytest
import tiny
import torch
import training
from typer.testing import CliRunner

from headpool import cli
from headpool.errors import RequestError
from headpool.recipe import load_recipe
from headpool.uptrain.estimate import estimate
from headpool.uptrain.plan import plan_uptraining
from headpool.uptrain.run import uptrain


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patched:
        here.check_here(patched)
        path = training.recipe_file(tmp_path_factory.mktemp("refusals"))
    folder = path.parent
    (folder / "empty.txt").write_text("\n \n")
    (folder / "nothing.txt").write_text("")
    (folder / "rows.jsonl").write_text('{"txt": "a", "title": "b"}\n')
    other = tiny.checkpoint(folder / "other", "llama", tokenizer=True, vocab_size=2048, num_hidden_layers=1)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    first, second = sorted(vocabulary, key=lambda token: vocabulary[token])[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    tiny.checkpoint(folder / "small", "llama", tokenizer=True, vocab_size=300)
    tiny.checkpoint(folder / "shallow", "llama", tokenizer=True, vocab_size=2048, num_hidden_layers=1)
    return path


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["uptrain.data=empty.txt"], "empty.txt"),
        (["uptrain.data=nowhere.txt"], "no such file: nowhere.txt"),
        (["uptrain.data=rows.jsonl"], "no column 'text'; there are: txt, title"),
        (["uptrain.sequence_length=256"], "sequence_length 256 is longer than the 128 positions"),
        (["uptrain.batch_tokens=100"], "batch_tokens 100 is no multiple of sequence_length 32"),
        (["uptrain.teacher=small"], "has vocab_size 300, the model 2048"),
        (["uptrain.teacher=other"], "has another vocabulary: 2048 tokens against 2048, of which 2 differ"),
        (["uptrain.teacher=shallow", "uptrain.distill={blocks: 1}"], "has 1 layers, the model 2"),
        (["uptrain.teacher=nowhere/at-all/here"], "no such directory"),
        (["uptrain.validation=nowhere.txt"], "no such file: nowhere.txt"),
        (["uptrain.validation=nothing.txt"], "nothing.txt holds no text"),
        (["output={folder}/model"], "not there|inside one another"),
    ],
)
@pytest.mark.parametrize("verb", [uptrain, estimate])
def test_what_is_impossible_is_refused_before_training(
    recipe: Path, verb: Any, overrides: list[str], says: str
) -> None:
    folder = recipe.parent
    given = [f"output={folder / 'out'}", *(one.replace("{folder}", str(folder)) for one in overrides)]
    with pytest.raises(RequestError, match=says):
        verb(load_recipe(str(recipe), given))
    assert not (folder / "out" / "uptrained").exists()
    assert not (folder / "out" / "work" / "uptrain" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("trackers=[paper]", "trackers: paper: not installed"),
        ("precision=fp16", "precision fp16 needs a GPU"),
        ("attention=flex_attention", "has gradients on GPUs only"),
        ("attention=flash_attention_2", r"attention flash_attention_2 needs flash_attn: pip install 'headpool\[gpu\]'"),
        ("liger=true", "liger: true needs liger-kernel"),
    ],
)
def test_what_this_machine_has_not_is_refused(
    recipe: Path, override: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU with none of the kernels, wherever this runs."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match=says):
        plan_uptraining(training.load(recipe, f"uptrain.{override}"))


def test_without_a_converted_checkpoint_it_says_what_to_do(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="converted is not there: `headpool run` converts"):
        uptrain(load_recipe(str(recipe), [f"output={tmp_path}"]))


def test_what_training_did_not_make_is_not_replaced(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "converted").symlink_to(recipe.parent / "out" / "converted")
    (tmp_path / "uptrained").mkdir()
    (tmp_path / "uptrained" / "precious").write_text("mine")
    with pytest.raises(RequestError, match="was not made by uptraining"):
        uptrain(load_recipe(str(recipe), [f"output={tmp_path}"]))
    assert (tmp_path / "uptrained" / "precious").exists()
    (tmp_path / "uptrained" / "headpool.json").write_text("{")
    with pytest.raises(RequestError, match=r"headpool\.json: not valid JSON"):
        uptrain(load_recipe(str(recipe), [f"output={tmp_path}"]))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["uptrain.tokens=null"], "give either tokens, or alpha with pretraining_tokens"),
        (["uptrain.alpha=0.1"], "give either tokens, or alpha"),
        (["uptrain.tokens=null", "uptrain.alpha=0.1"], "alpha is a share of pretraining_tokens, which is missing"),
        (["uptrain.validation=null"], "eval_every needs text to validate on"),
        (["uptrain.save_every=10 minutes"], "'10 minutes' is neither a number of steps nor a time"),
        (["uptrain.save_every=2.5"], r"1 error.*\n.*uptrain.save_every: 2.5 is neither a number of steps nor a time"),
        (["uptrain.save_every=true"], "uptrain.save_every: True is neither"),
        (["uptrain.betas=[0.9, 1]"], r"uptrain.betas\[1\]: input should be less than 1"),
        (["uptrain.weight_decay=.inf"], "uptrain.weight_decay: input should be a finite number"),
        (["uptrain.learning_rat=1"], "unknown key uptrain.learning_rat; did you mean learning_rate?"),
        (["uptrain.distill={weights: 1}"], "unknown key uptrain.distill.weights; did you mean weight?"),
        (["uptrain.schedule=linear"], "uptrain.schedule.shape: input should be 'constant', 'cosine' or 'wsd'"),
        (["uptrain.sharding=full", "uptrain.optimizer=adafactor"], "Adafactor does not work on sharded weights"),
        (["uptrain=null", "convert=null"], "nothing to run"),
    ],
)
def test_recipes_that_make_no_sense(recipe: Path, overrides: list[str], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        load_recipe(str(recipe), overrides)


def test_budgets(recipe: Path) -> None:
    section = load_recipe(
        str(recipe), ["uptrain.tokens=null", "uptrain.alpha=0.05", "uptrain.pretraining_tokens=16000000"]
    )
    assert section.uptrain is not None
    assert section.uptrain.budget == 800_000


def test_the_dry_run_counts_what_is_known_and_trains_nothing(recipe: Path, tmp_path: Path) -> None:
    """Without a converted checkpoint, on the config that it is going to have."""
    given = [f"output={tmp_path}", "uptrain.train=kv", "uptrain.distill={weight: 0.5}"]
    found = estimate(load_recipe(str(recipe), given))
    built = tiny.model("llama", vocab_size=2048, num_key_value_heads=4)
    assert found.parameters == sum(one.numel() for one in built.parameters())
    assert found.trainable == 2 * 2 * 4 * 8 * 96
    assert (found.steps, found.tokens) == (12, 12 * 256)
    assert found.memory["weights (float32)"] == 4 * found.parameters
    assert found.memory["optimizer (adamw)"] == 8 * found.trainable
    assert found.memory_total == sum(found.memory.values())
    assert set(found.seconds) >= {"A100 (40% MFU)", "H100 (40% MFU)"}
    assert list(tmp_path.iterdir()) == []


def test_the_verb_shows_the_dry_run(recipe: Path) -> None:
    shown = CliRunner().invoke(
        cli.app, ["uptrain", str(recipe), f"output={recipe.parent / 'out'}", "--dry-run", "--json"]
    )
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["steps"] == 12
