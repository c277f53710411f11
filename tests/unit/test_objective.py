"""Student and teacher: logits by chunk, block outputs, what is frozen, isolation of documents."""

import numpy as np
import pytest
import tiny
import torch

from headpool import families
from headpool.errors import RequestError
from headpool.uptrain import models
from headpool.uptrain.loss import Distillation
from headpool.uptrain.objective import Objective, Teacher, block_distance, squared_norms
from headpool.uptrain.optimizer import choose_trainable
from headpool.uptrain.stream import IGNORED

LAYERS = 2


def batch(rows: int = 3, tokens: int = 12) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 300, (rows, tokens + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[0, :4] = IGNORED
    return {"input_ids": ids[:, :-1], "labels": labels, "position_ids": torch.arange(tokens).expand(rows, -1)}


@pytest.mark.parametrize("family", [*tiny.FAMILIES, "gemma2", "cohere", "granite", "phi"])
def test_a_teachers_logits_come_in_chunks_as_the_class_makes_them(family: str) -> None:
    """gemma2 caps its logits, cohere and granite scale them, phi has a bias there."""
    options = {"attn_logit_softcapping": None} if family == "gemma2" else {}
    built = tiny.model(family, **options)
    inputs = {name: batch()[name] for name in ("input_ids", "position_ids")}
    with torch.no_grad():
        wanted = built(**inputs).logits.flatten(0, 1)
    teacher = Teacher(built, families.families()[family], LAYERS)
    blocks = teacher.read(inputs)
    found = torch.cat([teacher.logits(at, min(at + 7, 36)) for at in range(0, 36, 7)])
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert [one.shape for one in blocks] == [torch.Size([3, 12, built.config.hidden_size])] * LAYERS
    with torch.no_grad():
        torch.testing.assert_close(built(**inputs).logits.flatten(0, 1), wanted, msg="the class is itself again")


def test_block_distance_is_relative_to_the_teachers_size() -> None:
    rng = np.random.default_rng(0)
    student, teacher = (rng.normal(size=(2, 3, 4, 5)) for _ in range(2))
    counted = np.array([[True, True, False, True], [True] * 4, [False] * 4])
    norms = [(block[counted] ** 2).sum() / counted.sum() for block in teacher]
    wanted = sum(((s - t)[counted] ** 2).sum() / norm for s, t, norm in zip(student, teacher, norms, strict=True))
    as_tensors = [[torch.tensor(block) for block in blocks] for blocks in (student, teacher)]
    mask = torch.tensor(counted)
    scales = (squared_norms(as_tensors[1], mask) / mask.sum()).tolist()
    assert scales == pytest.approx(norms)
    assert block_distance(*as_tensors, scales, mask).item() == pytest.approx(wanted, rel=1e-6)


def test_a_model_that_is_its_own_teacher_has_nothing_to_learn_from_it() -> None:
    built, same = tiny.model("llama"), tiny.model("llama")
    family = families.families()["llama"]
    objective = Objective(built, family, LAYERS, Teacher(same, family, LAYERS), Distillation(1.0, 1.0), blocks=1.0)
    objective.block_scales = [1.0] * LAYERS
    found = objective.train()(**batch())
    assert found["sums"][0] > 1
    assert found["sums"][1:].abs().max() < 1e-4
    assert objective.eval()(**batch())["sums"][1:].abs().max() == 0
    found["loss"].backward()
    assert all(parameter.grad is None for parameter in same.parameters())


def test_gradient_checkpointing_changes_no_gradient_of_block_distillation() -> None:
    family = families.families()["llama"]
    gradients = []
    for checkpointing in (False, True):
        built = tiny.model("llama", seed=1)
        if checkpointing:
            models.recompute_activations(built)
        teacher = Teacher(tiny.model("llama"), family, LAYERS)
        objective = Objective(built, family, LAYERS, teacher, Distillation(0.5, 1.0), blocks=2.0)
        objective.block_scales = [0.5, 2.0]
        objective.train()(**batch())["loss"].backward()
        gradients.append([parameter.grad for parameter in built.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("train", "parts"),
    [
        ("kv", {"k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias"}),
        ("attention", {f"{p}_proj.{kind}" for p in "qkv" for kind in ("weight", "bias")} | {"o_proj.weight"}),
    ],
)
def test_what_does_not_train_is_frozen(train: str, parts: set[str]) -> None:
    built = tiny.model("qwen2")
    choose_trainable(built, families.families()["qwen2"], train)
    held = {name for name, parameter in built.named_parameters() if parameter.requires_grad}
    assert held == {f"model.layers.{layer}.self_attn.{part}" for layer in range(LAYERS) for part in parts}


def test_documents_are_isolated_by_their_positions_or_the_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    built = tiny.model("llama")
    models.check_isolation(built, rows=2)
    forward = built.forward
    monkeypatch.setattr(built, "forward", lambda **options: forward(**{**options, "position_ids": None}))
    with pytest.raises(RequestError, match="looks across documents"):
        models.check_isolation(built, rows=2)
