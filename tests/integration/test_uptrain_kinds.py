"""Uptraining models that hold a language model beside others, and hybrids whose other layers have no attention."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fused
import pytest
import registry
import tiny
import torch
import training
import transcoded
import transformers
import yaml
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from headpool import families, geometry
from headpool.checkpoint import Source, open_source
from headpool.convert.run import convert_checkpoint
from headpool.errors import RequestError
from headpool.loading import load_model
from headpool.sections import UptrainSection
from headpool.uptrain import parallel
from headpool.uptrain.objective import Objective, attention_blocks
from headpool.uptrain.optimizer import choose_trainable
from headpool.uptrain.output import _trained
from headpool.uptrain.plan import plan_uptraining
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


UNREACHED = re.compile("vision|projector|cross_attn|layers.3.(mlp|input_layernorm|post_attention_layernorm)")
"""What text tells nothing: the eyes, and of Llama 3.2 Vision the one layer that attends to pictures."""


@pytest.mark.parametrize(("model_type", "attending"), [("mllama", 3), ("zamba2", 2)])
def test_it_learns_from_text_and_from_the_original(model_type: str, attending: int, tmp_path: Path) -> None:
    result, before, after = trained(tmp_path, model_type, **DISTILLED)
    assert result.steps == 2
    assert result.loss > 0
    unreached = {name for name in before if model_type == "mllama" and UNREACHED.search(name)}
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert not changed & unreached
    attention = {name for name in before if re.search(r"[kv]_proj\.weight", name)} - unreached
    assert len(attention) == 2 * attending, "weights that layers share stand in the file once"
    assert attention <= changed
    out = tmp_path / "out" / "uptrained"
    model_class = getattr(transformers, json.loads((out / "config.json").read_text())["architectures"][0])
    model, info = model_class.from_pretrained(out, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    if model_type == "zamba2":
        blocks = [model.model.layers[index].shared_transformer.self_attn.k_proj.weight for index in (1, 2, 3)]
        assert blocks[0] is blocks[2]
        assert not torch.equal(blocks[0], blocks[1])


RENAMED = [name for name, one in families.families().items() if "other names" in (one.unaligned or "")]
"""Families whose checkpoints call attention, or parts of it, otherwise than their classes do."""


@pytest.mark.parametrize("model_type", ["llava", "jamba", "nemotron_h", "zamba2", *RENAMED])
def test_every_block_of_attention_is_known_and_no_other(model_type: str) -> None:
    fields = fused.SARVAM | {"num_key_value_heads": fused.HEADS}
    model = tiny.model(model_type, **fields) if model_type == "sarvam_moe" else registry.built(model_type)
    config = model.config.to_dict()
    family = families.find_family(config)
    heard = attention_blocks(model, family, len(geometry.layers(config)))
    named = {name: module for name, module in model.named_modules() if "vision" not in name}
    attention = {name: module for name, module in named.items() if type(module).__name__.endswith("Attention")}
    assert heard == list(attention.values())
    choose_trainable(model, family, "kv")
    train = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    inside = [name for name, _ in model.named_parameters() if name.startswith(tuple(f"{one}." for one in attention))]
    assert train == {name for name in inside if re.search(r"\.[kv]_proj\.", name)}


def written(model: Any, source: Source) -> dict[str, torch.Tensor]:
    """What is written of a model in which something has trained."""
    accelerator = SimpleNamespace(is_main_process=True)
    workers: Any = SimpleNamespace(objective=SimpleNamespace(student=model), accelerator=accelerator)
    return _trained(workers, source)


@pytest.mark.parametrize("model_type", ["nemotron_h", "exaone"])
def test_what_trained_is_written_by_the_names_that_the_files_have(model_type: str, tmp_path: Path) -> None:
    registry.built(model_type).save_pretrained(tmp_path)
    source = open_source(str(tmp_path))
    found = written(load_model(source, torch.float32, "cpu"), source)
    held = {name: one for name, one in tiny.tensors(tmp_path).items() if "correction_bias" not in name}  # a buffer
    assert held.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in held.items())


def test_a_tensor_of_which_a_part_trains_is_written_whole(tmp_path: Path) -> None:
    """Sarvam's files hold queries, keys and values in one, and its class holds each by itself."""
    source = open_source(str(fused.checkpoint(tmp_path, "sarvam_moe", grouped=True)))
    model = load_model(source, torch.float32, "cpu")
    choose_trainable(model, families.find_family(source.config), "kv")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1)
    found, held = written(model, source), tiny.tensors(tmp_path)
    queries = fused.HEADS * fused.HEAD_DIM
    for name in (name for name in held if ".query_key_value." in name):
        expected = torch.cat([held[name][:queries], held[name][queries:] + 1])
        torch.testing.assert_close(found[name], expected, rtol=0, atol=0)
    beside = {name: one for name, one in found.items() if name in held and ".query_key_value." not in name}
    assert all(torch.equal(one, held[name]) for name, one in beside.items())


def test_weights_that_layers_share_are_not_sharded(tmp_path: Path) -> None:
    """PyTorch cannot, and ends in a traceback."""
    transformers.Zamba2Config(layers_block_type=["mamba", "hybrid"] * 27).save_pretrained(tmp_path / "model")
    section = {"data": "train.txt", "tokens": 1, "sharding": "full"}
    recipe = {"model": "model", "output": str(tmp_path / "out"), "uptrain": section}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(RequestError, match=r"layers of zamba2 share their weights, .* with sharding"):
        plan_uptraining(training.load(tmp_path / "my.yaml"), made=False)
    assert not (tmp_path / "out").exists()


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
