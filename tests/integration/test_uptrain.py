"""Uptraining in one process: against a bare PyTorch loop, and what it leaves behind."""

import json
import shutil
from pathlib import Path
from typing import Any, ClassVar

import here
import pytest
import tiny
import torch
import training
from accelerate import tracking
from accelerate.utils import LoggerType
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from headpool.uptrain.run import Uptraining, uptrain
from headpool.uptrain.stream import IGNORED, Batch, Stream

pytestmark = pytest.mark.usefixtures("quick_check")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patched:
        here.check_here(patched)
        return training.recipe_file(tmp_path_factory.mktemp("uptrain"))


class Noted(tracking.GeneralTracker):
    """A tracker in the place of TensorBoard's."""

    name = "tensorboard"
    requires_logging_directory = True
    tracker = None
    held: ClassVar[dict[str, Any]] = {}

    def __init__(self, run: str, folder: str) -> None:
        super().__init__()
        self.held.update(folder=folder, lines=[])

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.held["config"] = values

    def log(self, values: dict[str, Any], step: int, **_: Any) -> None:
        self.held["lines"].append({"step": step, **values})

    def finish(self) -> None:
        self.held["finished"] = True


@pytest.fixture(scope="module")
def result(recipe: Path) -> Uptraining:
    with pytest.MonkeyPatch.context() as patched:
        here.check_here(patched)
        patched.setattr(tracking, "_available_trackers", [LoggerType.TENSORBOARD])
        patched.setitem(tracking.LOGGER_TYPE_TO_CLASS, "tensorboard", Noted)
        return uptrain(training.load(recipe, "uptrain.trackers=[tensorboard]"))


def batches(recipe: Path, start: Path, steps: int) -> list[Batch]:
    section = training.load(recipe).uptrain
    assert section is not None
    stream = Stream(
        section.data,
        AutoTokenizer.from_pretrained(start),
        sequence_length=training.SEQUENCE,
        lanes=training.BATCH,
        seed=0,
    )
    return [stream.next() for _ in range(steps)]


def bare_loop(recipe: Path, start: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same training in twenty lines of PyTorch: losses, and the weights at the end."""
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    matrices = [one for one in model.parameters() if one.ndim > 1]
    vectors = [one for one in model.parameters() if one.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    losses = []
    for step, batch in enumerate(batches(recipe, start, training.STEPS)):
        for group in optimizer.param_groups:
            group["lr"] = training_rate(step)
        logits = model(input_ids=batch.input_ids).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def training_rate(step: int) -> float:
    """Cosine to a tenth after one step of warm-up (5% of 12)."""
    if step == 0:
        return 1e-3
    progress = torch.tensor((step - 1 + 1) / (training.STEPS - 1), dtype=torch.float64)
    return 1e-3 * (0.1 + 0.9 * (1 + torch.cos(torch.pi * progress).item()) / 2)


def test_it_trains_as_a_bare_loop_does(recipe: Path, result: Uptraining) -> None:
    losses, weights = bare_loop(recipe, recipe.parent / "out" / "converted")
    lines = training.metrics(recipe)
    assert [line["step"] for line in lines] == list(range(training.STEPS + 1))
    assert [line["loss"] for line in lines[1:]] == pytest.approx(losses, abs=2e-5)
    assert losses[-1] < losses[0] - 0.2, "the loop learns nothing: the comparison would be empty"
    assert [line["learning_rate"] for line in lines[1:]] == pytest.approx(
        [training_rate(step) for step in range(training.STEPS)], rel=1e-9
    )
    for name, tensor in tiny.tensors(Path(result.output)).items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-3, atol=2e-5, msg=name)


def test_the_result_says_what_was_done(recipe: Path, result: Uptraining) -> None:
    lines = training.metrics(recipe)
    assert (result.tokens, result.steps, result.resumed_from) == (12 * 256, 12, None)
    assert result.loss == lines[-1]["loss"]
    assert result.validation_perplexity == lines[-1]["validation_perplexity"]
    assert [line["step"] for line in lines if "validation_perplexity" in line] == [0, 4, 8, 12]
    assert [line["tokens"] for line in lines] == [256 * step for step in range(13)]
    assert (recipe.parent / "out" / "work" / "uptrain" / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_tracker_gets_what_the_metrics_file_gets(recipe: Path, result: Uptraining) -> None:
    lines = [{key: value for key, value in line.items() if value is not None} for line in training.metrics(recipe)]
    assert Noted.held["lines"] == lines
    assert Noted.held["config"]["learning_rate"] == "0.001"
    assert (Noted.held["folder"], Noted.held["finished"]) == (str(recipe.parent / "out" / "work" / "uptrain"), True)


def test_validation_is_perplexity_over_all_tokens(recipe: Path, result: Uptraining) -> None:
    """Of the model as it is on the disk, in blocks: the stock class's losses, summed and divided once."""
    text = (recipe.parent / "valid.txt").read_text()
    for path, found in (
        (Path(result.output), result.validation_perplexity),
        (recipe.parent / "model", result.original_perplexity),
    ):
        ids = AutoTokenizer.from_pretrained(path)(text, add_special_tokens=False)["input_ids"]
        ids = [0, *ids][:201]
        model = tiny.load(path, torch.float32)
        nats = 0.0
        for at in range(0, 200, training.SEQUENCE):
            inputs, labels = torch.tensor([ids[at : at + 32]]), torch.tensor(ids[at + 1 : at + 33])
            logits = model(inputs[:, : len(labels)]).logits[0]
            nats += functional.cross_entropy(logits, labels, reduction="sum").item()
        assert found == pytest.approx(torch.tensor(nats / 200).exp().item(), rel=1e-4)


def test_the_output_keeps_the_contract_of_a_checkpoint(recipe: Path, result: Uptraining) -> None:
    start, out = recipe.parent / "out" / "converted", Path(result.output)
    before, after = tiny.tensors(start), tiny.tensors(out)
    assert {name: (one.shape, one.dtype) for name, one in before.items()} == {
        name: (one.shape, one.dtype) for name, one in after.items()
    }
    assert not any(torch.equal(before[name], after[name]) for name in before)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "LICENSE", "generation_config.json"):
        assert (start / name).read_bytes() == (out / name).read_bytes(), name
    assert {path.name for path in start.iterdir()} == {path.name for path in out.iterdir()}
    assert (out / "model.safetensors").stat().st_mode == (out / "config.json").stat().st_mode
    held, source = (json.loads((folder / "headpool.json").read_text()) for folder in (out, start))
    assert {key: value for key, value in held.items() if key != "uptrain"} == source
    done = held["uptrain"]
    assert (done["tokens"], done["steps"]) == (12 * 256, 12)
    assert done["options"]["learning_rate"] == 1e-3
    assert len(done["data"]["data[0]"]["sha256"]) == 64
    assert str(recipe.parent) not in (out / "headpool.json").read_text()


def changed(recipe: Path, result: Uptraining) -> set[str]:
    before, after = tiny.tensors(recipe.parent / "out" / "converted"), tiny.tensors(Path(result.output))
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_only_what_trains_changes_and_only_that_has_optimizer_state(tmp_path: Path) -> None:
    recipe = training.recipe_file(tmp_path, "qwen2", train="kv", tokens=512, validation=None, eval_every=None)
    made: list[Any] = []
    with pytest.MonkeyPatch.context() as patched:
        from headpool.uptrain import parallel

        build = parallel.build_optimizer
        patched.setattr(parallel, "build_optimizer", lambda *given: made.append(build(*given)) or made[0])
        result = uptrain(training.load(recipe))
    parts = ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias")
    kv = {f"model.layers.{layer}.self_attn.{part}" for layer in range(2) for part in parts}
    assert changed(recipe, result) == kv
    assert len(made[0].state) == len(kv)


def test_a_bf16_checkpoint_moves_at_a_rate_that_bf16_weights_would_not_notice(tmp_path: Path) -> None:
    """Each step changes a weight of 0.05 by 1e-5 at most, bf16 numbers there are 2e-4 apart: only float32 adds up."""
    options = {"learning_rate": 1e-5, "schedule": {"shape": "constant", "warmup": 0}, "weight_decay": 0.0}
    recipe = training.recipe_file(tmp_path, dtype=torch.bfloat16, validation=None, eval_every=None, **options)
    result = uptrain(training.load(recipe, "uptrain.tokens=10240"))
    assert len(changed(recipe, result)) > 10
    start = recipe.parent / "out" / "converted"
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0)
    weight = model.model.layers[0].self_attn.q_proj.weight
    large = weight.abs() > 0.03
    before = weight.detach().clone()
    for batch in batches(recipe, start, 5):
        logits = model(input_ids=batch.input_ids).logits.float()
        functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(weight[large], before[large]), "bf16 weights would have moved, too: the rate is not small enough"
    trained = tiny.tensors(Path(result.output))["model.layers.0.self_attn.q_proj.weight"]
    assert (trained[large] != before[large]).float().mean() > 0.05


def test_tied_tensors_that_the_source_holds_twice_are_written_twice(tmp_path: Path) -> None:
    recipe = training.recipe_file(tmp_path, tokens=512, validation=None, eval_every=None)
    folder = tmp_path / "tied"
    shutil.copytree(tmp_path / "model", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    embedding = "model.embed_tokens.weight"
    tiny.rewrite(folder, {"lm_head.weight": tiny.tensors(folder)[embedding].clone()})
    uptrain(training.load(recipe, f"model={folder}", "convert=null"))
    before, after = tiny.tensors(folder), tiny.tensors(tmp_path / "out" / "uptrained")
    assert before.keys() == after.keys()
    assert torch.equal(after["lm_head.weight"], after[embedding])
    assert not torch.equal(after[embedding], before[embedding])
