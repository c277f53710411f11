"""A tiny recipe to train by, and a program that trains by it and dies. Used by the tests of uptraining.

    python training.py RECIPE MOMENTS [KEY=VALUE ...]

Forks a training child for each of MOMENTS (comma-separated), and one more. A child is killed by SIGKILL when it has
made so many optimizer steps, plus a random part of one; the last one may finish. Prints one JSON line for each: its
exit status, the optimizer steps that it made, and what the last one returned.

    python training.py RECIPE FILE.pt [KEY=VALUE ...]

Trains, under torchrun or not, and saves the gradients of the first step.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import here
import pytest
import tiny
import torch
import yaml

from headpool.convert.run import convert_checkpoint
from headpool.recipe import Recipe, load_recipe
from headpool.uptrain import loop
from headpool.uptrain.run import uptrain

STEPS, SEQUENCE, BATCH = 12, 32, 8

SECTION: dict[str, Any] = {
    "data": "train.txt", "tokens": STEPS * SEQUENCE * BATCH, "sequence_length": SEQUENCE,
    "batch_tokens": SEQUENCE * BATCH, "micro_batch": 8, "learning_rate": 1e-3, "weight_decay": 0.1,
    "validation": "valid.txt", "validation_tokens": 200, "eval_every": 4, "save_every": 3,
}  # fmt: skip


def recipe_file(folder: Path, family: str = "llama", *, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A recipe with its model, already converted, and text; `changes` are to its uptrain section."""
    model = tiny.checkpoint(folder / "model", family, tokenizer=True, vocab_size=2048, dtype=dtype)
    (model / "LICENSE").write_text("a licence")
    paragraphs = [one for one in tiny.NOVEL.read_text().splitlines() if len(one) > 300]
    documents = [one[: 40 + 37 * number % 200] for number, one in enumerate(paragraphs[:140])]  # some end in mid-block
    (folder / "train.txt").write_text("\n\n".join(documents))
    (folder / "valid.txt").write_text("\n".join(paragraphs[140:144]))
    recipe = {"model": "model", "output": str(folder / "out"), "convert": {"kv_heads": 4}, "uptrain": SECTION | changes}
    (folder / "my.yaml").write_text(yaml.safe_dump(recipe))
    convert_checkpoint(str(model), folder / "out" / "converted", kv_heads=4)
    return folder / "my.yaml"


def load(path: Path, *overrides: str) -> Recipe:
    return load_recipe(str(path), [f"output={path.parent / 'out'}", *overrides])


def metrics(path: Path, output: str = "out") -> list[dict[str, Any]]:
    file = path.parent / output / "work" / "uptrain" / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def note_gradients(patched: pytest.MonkeyPatch, file: Path) -> None:
    """Save the first step's gradients, as they are before clipping."""
    accumulate = loop._accumulate

    def accumulate_and_save(run: loop.Run, batch: Any) -> torch.Tensor:
        share = accumulate(run, batch)
        if run.state.step == 0 and run.workers.accelerator.is_main_process:
            student = run.workers.objective.student
            torch.save({name: parameter.grad.clone() for name, parameter in student.named_parameters()}, file)
        return share

    patched.setattr(loop, "_accumulate", accumulate_and_save)


def train_and_note_gradients(recipe: Recipe, file: Path) -> None:
    patched = pytest.MonkeyPatch()
    here.check_here(patched)
    note_gradients(patched, file)
    uptrain(recipe)


def _child(recipe: Recipe, note: Path, made: Path) -> None:
    update = loop._update

    def update_and_tell(of: loop.Run, norm: float) -> None:
        update(of, norm)
        with made.open("a") as file:
            file.write(f"{of.state.step + 1}\n")

    loop._update = update_and_tell
    here.check_here(pytest.MonkeyPatch())
    note.write_text(json.dumps(uptrain(recipe).to_dict()))


def main(path: Path, moments: list[int], overrides: list[str]) -> None:
    recipe = load_recipe(str(path), overrides)
    note, made = path.parent / "result.json", path.parent / "made"
    for moment in [*moments, None]:
        note.unlink(missing_ok=True)
        made.unlink(missing_ok=True)
        pid = os.fork()
        if pid == 0:
            _child(recipe, note, made)
            os._exit(0)
        while moment is not None and len(_lines(made)) < moment:
            time.sleep(0.002)
        if moment is not None:
            time.sleep(random.random() * 0.05)
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        held = json.loads(note.read_text()) if note.exists() else {}
        print(json.dumps({"status": os.waitstatus_to_exitcode(status), "made": _lines(made), **held}), flush=True)


def _lines(made: Path) -> list[int]:
    return [int(line) for line in made.read_text().split("\n")[:-1]] if made.exists() else []


if __name__ == "__main__":
    path, second, given = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    if second.endswith(".pt"):
        train_and_note_gradients(load_recipe(str(path), given), Path(second))
    else:
        main(path, [int(one) for one in second.split(",")], given)
