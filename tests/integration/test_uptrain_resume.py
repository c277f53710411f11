"""Interrupted training: killed, stopped, out of disk; and what goes on from there."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import here
import pytest
import tiny
import torch
import training

from headpool.errors import HeadpoolError, Interrupted, RequestError
from headpool.uptrain import loop
from headpool.uptrain.run import uptrain
from headpool.uptrain.state import Shelf, seconds

pytestmark = pytest.mark.usefixtures("quick_check")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a finished, never interrupted run in `out`."""
    with pytest.MonkeyPatch.context() as patched:
        here.check_here(patched)
        path = training.recipe_file(tmp_path_factory.mktemp("resume"))
        uptrain(training.load(path))
        return path


def elsewhere(recipe: Path, output: str, *overrides: str) -> Any:
    """The same recipe with another output, which holds the converted checkpoint only."""
    folder = recipe.parent / output
    folder.mkdir()
    (folder / "converted").symlink_to(recipe.parent / "out" / "converted")
    return training.load(recipe, f"output={folder}", *overrides)


def check_as_if_never_interrupted(recipe: Path, output: str, never: str = "out") -> None:
    exact = ("step", "tokens", "loss", "cross_entropy", "learning_rate", "gradient_norm", "validation_perplexity")
    lines, wanted = (
        [{key: line.get(key) for key in exact} for line in training.metrics(recipe, one)] for one in (output, never)
    )
    assert lines == wanted
    weights, expected = (tiny.tensors(recipe.parent / one / "uptrained") for one in (output, never))
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, expected[name]), name


def test_killed_at_random_moments_it_ends_as_if_never_interrupted(recipe: Path) -> None:
    elsewhere(recipe, "killed")
    program = [sys.executable, str(tiny.ROOT / "tests" / "training.py"), str(recipe), "4,2,3"]
    environment = os.environ | {"PYTHONPATH": str(tiny.ROOT / "tests")}
    done = subprocess.run(
        [*program, f"output={recipe.parent / 'killed'}"], env=environment, capture_output=True, text=True, check=True
    )
    *killed, last = (json.loads(line) for line in done.stdout.splitlines())
    assert [one["status"] for one in killed] == [-signal.SIGKILL] * 3
    assert last["status"] == 0
    check_as_if_never_interrupted(recipe, "killed")
    every = training.SECTION["save_every"]
    reached = [one["made"][-1] for one in killed]
    for one, before in zip([*killed[1:], last], reached, strict=True):
        assert 0 <= before - one["made"][0] + 1 < every + 1, "more was done again than lay between two checkpoints"
        assert one["made"] == list(range(one["made"][0], one["made"][-1] + 1))
    assert last["resumed_from"] == last["made"][0] - 1 > 0
    assert last["made"][-1] == training.STEPS


VARIANTS = {
    "distilled": "distill={weight: 0.5, temperature: 2.0, blocks: 0.1}",
    "bf16": "precision=bf16",
    "adafactor": "optimizer=adafactor",
    "checkpointed": "gradient_checkpointing=true",
    "isolated": "document_attention=true",
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_kind_of_training_resumes_exactly(recipe: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    uptrain(elsewhere(recipe, name, f"uptrain.{VARIANTS[name]}"))
    interrupted = elsewhere(recipe, f"{name}-interrupted", f"uptrain.{VARIANTS[name]}")
    update = loop._update
    for last in (4, 8):  # steps made before the attempt dies, one after a checkpoint and two after one

        def die(run: loop.Run, norm: float, last: int = last) -> None:
            if run.state.step == last:
                raise KeyboardInterrupt
            update(run, norm)

        with monkeypatch.context() as patched:
            patched.setattr(loop, "_update", die)
            with pytest.raises(KeyboardInterrupt):
                uptrain(interrupted)
    assert uptrain(interrupted).resumed_from == 8 - 8 % training.SECTION["eval_every"]
    check_as_if_never_interrupted(recipe, f"{name}-interrupted", name)
    losses = [[line["loss"] for line in training.metrics(recipe, one)[1:]] for one in (name, "out")]
    assert (losses[0] == losses[1]) == (name == "checkpointed"), "checkpointing alone changes nothing"


def test_a_signal_saves_and_says_how_to_go_on(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = elsewhere(recipe, "stopped")
    update = loop._update

    def stop_after_step_four(run: loop.Run, norm: float) -> None:
        update(run, norm)
        if run.state.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "_update", stop_after_step_four)
        with pytest.raises(Interrupted, match=r"stopped after step 5, saved in .*step-00000005; .*goes on") as caught:
            uptrain(stopped)
    assert caught.value.exit_code == 128 + signal.SIGTERM
    result = uptrain(stopped)
    assert result.resumed_from == 5
    check_as_if_never_interrupted(recipe, "stopped")


def test_the_last_checkpoints_and_the_best_are_kept(recipe: Path) -> None:
    state = recipe.parent / "out" / "work" / "uptrain" / "state"
    perplexities = {
        line["step"]: line["validation_perplexity"]
        for line in training.metrics(recipe)
        if "validation_perplexity" in line
    }
    best = min(perplexities, key=lambda step: perplexities[step])
    assert {path.name for path in state.iterdir()} == {f"step-{step:08d}" for step in {9, 12, best}}


def test_what_is_not_finite_stops_before_the_optimizer(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = elsewhere(recipe, "broken")
    accumulate, stepped = loop._accumulate, []
    with monkeypatch.context() as patched:

        def spoil(run: loop.Run, batch: Any) -> torch.Tensor:
            losses = accumulate(run, batch)
            if run.state.step == 7:
                next(run.workers.objective.parameters()).grad[0] = torch.nan
            return losses

        patched.setattr(loop, "_accumulate", spoil)
        update = loop._update
        patched.setattr(loop, "_update", lambda run, norm: (stepped.append(run.state.step), update(run, norm)))
        with pytest.raises(
            HeadpoolError, match=r"step 8: the gradient norm is not finite .*good checkpoint is .*step-00000006"
        ) as caught:
            uptrain(broken)
    assert caught.value.exit_code == 1
    assert stepped == list(range(7))
    assert uptrain(broken).resumed_from == 6
    check_as_if_never_interrupted(recipe, "broken")


def test_a_full_disk_keeps_the_previous_checkpoint_and_says_so(recipe: Path) -> None:
    full = elsewhere(recipe, "full")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    save = loop.Shelf.save

    def save_on_a_full_disk(shelf: Any, state: Any) -> Path:
        if state.step == 6:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
        return save(shelf, state)

    update = loop._update

    def update_and_fill_the_disk(run: loop.Run, norm: float) -> None:
        update(run, norm)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))

    for name, replaced, what in (
        ("Shelf.save", save_on_a_full_disk, "step-00000006"),
        ("_update", update_and_fill_the_disk, "figures of step [45]"),
    ):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(f"headpool.uptrain.loop.{name}", replaced)
            says = rf"{what} could not be written .*last good checkpoint is .*step-0000000[34].* goes on from there"
            try:
                with pytest.raises(HeadpoolError, match=says):
                    uptrain(full)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    state = recipe.parent / "full" / "work" / "uptrain" / "state"
    assert not [path.name for path in state.iterdir() if path.name.startswith(".")]
    assert uptrain(full).resumed_from in (3, 4)
    check_as_if_never_interrupted(recipe, "full")


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_good(recipe: Path) -> None:
    damaged = elsewhere(recipe, "damaged")
    work = recipe.parent / "damaged" / "work" / "uptrain"
    shutil.copytree(recipe.parent / "out" / "work" / "uptrain", work)
    last = work / "state" / f"step-{training.STEPS:08d}"
    facts, tensors = last / "state.json", next(last.glob("*.distcp"))
    whole = facts.read_text()
    says = r"step-00000012 cannot be restored \({}.*\); .* remove it to go on from the one before, or pass --fresh"
    for text, why in (
        (whole[:50], "JSONDecodeError"),
        ("{}", "KeyError: 'settings'"),
        (whole.replace('"step": 12', '"step": 11'), "ValueError: state.json is that of another checkpoint"),
    ):
        facts.write_text(text)
        with pytest.raises(HeadpoolError, match=says.format(why)):
            uptrain(damaged)
    facts.write_text(whole)
    tensors.write_bytes(tensors.read_bytes()[:1000])
    with pytest.raises(HeadpoolError, match=says.format("")):
        uptrain(damaged)
    shutil.rmtree(last)
    (work / "original.json").write_text("")  # a disk that was full
    resumed = uptrain(damaged)
    assert resumed.resumed_from == 9
    assert resumed.original_perplexity == json.loads((work / "original.json").read_text())["perplexity"]
    check_as_if_never_interrupted(recipe, "damaged")
    facts.write_text("")
    Shelf(work / "state", keep=2, settings={}).clear(fresh=True, finished=True)
    assert not (work / "state").exists()


def test_other_settings_do_not_go_on_from_this_state(recipe: Path) -> None:
    changed = "uptrain.learning_rate=0.5"
    half = recipe.parent / "out" / "work" / "uptrain" / "state" / ".step-00000005.partial"
    half.mkdir()
    with pytest.raises(RequestError, match=r"another learning_rate; .*--fresh"):
        uptrain(training.load(recipe, changed))
    assert not half.exists(), "what a killed process has left takes room"
    check_as_if_never_interrupted(recipe, "out")
    assert uptrain(training.load(recipe, "uptrain.save_every=5", "uptrain.micro_batch=2")).resumed_from == 12


def test_text_that_has_changed_is_not_gone_on_with(recipe: Path) -> None:
    """Also where it has kept its size, and streams: nothing but its contents tells."""
    folder = recipe.parent
    for name in ("train", "valid"):
        (folder / f"{name}-mine.txt").write_text((folder / f"{name}.txt").read_text())
    given = elsewhere(
        recipe, "changed", "uptrain.data={path: train-mine.txt, streaming: true}", "uptrain.validation=valid-mine.txt",
        "uptrain.tokens=512",
    )  # fmt: skip
    first = uptrain(given)
    for name in ("train", "valid"):
        (folder / f"{name}-mine.txt").write_text((folder / f"{name}.txt").read_text().swapcase())
    with pytest.raises(RequestError, match=r"another data, validation; .*--fresh"):
        uptrain(given)
    again = uptrain(given, replace=True)  # as `headpool run` does: what was finished is made anew
    assert (first.steps, again.steps, again.resumed_from) == (2, 2, None)
    assert again.loss != first.loss
    assert again.original_perplexity != first.original_perplexity


def test_time_between_checkpoints() -> None:
    interval = loop.Interval("0.01s")
    assert not interval.due(3)
    time.sleep(0.011)
    assert interval.due(3)
    interval.restart()
    assert not interval.due(3)
    assert [loop.Interval(6).due(step) for step in (5, 6, 12)] == [False, True, True]
    assert [seconds(text) for text in ("90s", "10min", "1.5h")] == [90, 600, 5400]
