"""Uptraining models that hold a language model beside others, and hybrids whose other layers have no attention."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import registry
import tiny
import torch
import training
import transcoded
import yaml
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from headpool import families, geometry
from headpool.convert.run import convert_checkpoint
from headpool.errors import RequestError
from headpool.sections import UptrainSection
from headpool.uptrain import parallel
from headpool.uptrain.objective import Objective, attention_blocks
from headpool.uptrain.run import uptrain

pytestmark = pytest.mark.usefixtures("quick_check")


def trained(
    folder: Path, model_type: str, **changes: Any
) -> tuple[Any, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What two steps gave, and the tensors before and after them."""
    registry.built(model_type, vocab_size=2048, max_position_embeddings=256).save_pretrained(folder / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tiny.QUICKSTART / name, folder / "model" / name)
    paragraphs = [one for one in tiny.NOVEL.read_text().splitlines() if len(one) > 300]
    (folder / "train.txt").write_text("\n\n".join(paragraphs[:30]))
    section = {
        "data": "train.txt", "tokens": 2 * 32 * 8, "sequence_length": 32, "batch_tokens": 256, "micro_batch": 8,
        "learning_rate": 1e-3,
    }  # fmt: skip
    recipe = {"model": "model", "output": str(folder / "out"), "convert": {"kv_heads": 4}, "uptrain": section | changes}
    (folder / "my.yaml").write_text(yaml.safe_dump(recipe))
    convert_checkpoint(str(folder / "model"), folder / "out" / "converted", kv_heads=4)
    result = uptrain(training.load(folder / "my.yaml"))
    before, after = (tiny.tensors(folder / "out" / name) for name in ("converted", "uptrained"))
    assert before.keys() == after.keys()
    return result, before, after


DISTILLED = {"teacher": "model", "distill": {"weight": 0.5, "blocks": 1.0}}


@pytest.mark.parametrize("model_type", ["llava", "jamba", "nemotron_h"])
def test_it_learns_from_text_and_from_the_original(model_type: str, tmp_path: Path) -> None:
    result, before, after = trained(tmp_path, model_type, **DISTILLED)
    assert result.steps == 2
    assert result.loss > 0
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    attention = {name for name in before if "vision" not in name and name.endswith(("k_proj.weight", "v_proj.weight"))}
    assert attention
    assert attention <= changed
    assert not any("vision" in name or "projector" in name for name in changed), "text tells these parts nothing"


@pytest.mark.parametrize("model_type", ["llava", "jamba", "nemotron_h"])
def test_every_block_of_attention_is_heard_and_no_other(model_type: str) -> None:
    model = registry.built(model_type)
    config = model.config.to_dict()
    heard = attention_blocks(model, families.find_family(config), len(geometry.layers(config)))
    named = [module for name, module in model.named_modules() if "vision" not in name]
    assert heard == [module for module in named if re.search("Attention$", type(module).__name__)]


def test_several_processes_do_without_the_gradients_of_parts_that_text_does_not_reach(tmp_path: Path) -> None:
    """Otherwise DistributedDataParallel waits for them, and refuses the second step."""
    model = registry.built("llava")
    config = model.config.to_dict()
    objective = Objective(model, families.find_family(config), len(geometry.layers(config))).train()
    section = UptrainSection.model_validate({"data": "train.txt", "tokens": 1})
    accelerator = parallel.start_accelerator(section, str(tmp_path))
    parallel.prepare(objective, section, accelerator)
    tokens = torch.arange(16).reshape(2, 8)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(objective, **accelerator.ddp_handler.to_kwargs())
        for _ in range(2):
            wrapped(tokens, tokens)["loss"].backward()
    finally:
        distributed.destroy_process_group()
    reached = {name for name, one in model.named_parameters() if one.grad is not None}
    assert {name for name, _ in model.named_parameters() if "language_model" in name} <= reached
    assert not any("vision" in name for name in reached)


@pytest.mark.parametrize("kind", ["pythia", "gptj", "codegen", "gpt2", "gpt-sw3", "opt"])
def test_a_teacher_whose_class_cannot_hold_fewer_heads_is_heard(kind: str) -> None:
    model = transcoded.model(kind)
    heard = attention_blocks(model, families.find_family(model.config.to_dict()), 2)
    assert [type(block).__name__.endswith("Attention") for block in heard] == [True, True]


def test_documents_cannot_be_kept_apart_where_a_state_is_carried_along(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"jamba .* looks across documents; .* do without it"):
        trained(tmp_path, "jamba", document_attention=True)
