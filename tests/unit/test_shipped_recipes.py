"""What lies under recipes/: every recipe parses, its model converts, and its comment's figures are those computed."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser

from headpool import families
from headpool.errors import RequestError
from headpool.recipe import copy_recipe, load_recipe, shipped_recipes
from headpool.uptrain import estimate

RECIPES = tiny.ROOT / "recipes"
FOUND = {name: path for name, path in shipped_recipes().items() if not name.startswith("quickstart/")}
ACCELERATE = sorted((RECIPES / "accelerate").glob("*.yaml"))

CONFIGS: dict[str, dict[str, Any]] = {
    "llama-2-7b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
    "qwen1.5-0.5b": {
        "model_type": "qwen2", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24,
        "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 151936, "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "olmo-1b": {
        "model_type": "olmo", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 50304, "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    "phi-2": {
        "model_type": "phi", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 51200, "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
"""The geometry of the models, which are not here."""

HOURS = {"hours": 1.0, "days": 24.0}


def test_every_file_is_a_recipe_that_opens_with_its_command_or_a_config_of_accelerate() -> None:
    assert sorted(RECIPES.rglob("*.yaml")) == sorted([*shipped_recipes().values(), *ACCELERATE])
    for path in shipped_recipes().values():
        parsed = load_recipe(str(path))
        assert path.read_text().startswith(f"# headpool run {path.relative_to(tiny.ROOT)}\n")
        if path.parent.name == "quickstart":
            assert Path(parsed.model).is_dir()
            assert parsed.eval is not None and Path(parsed.eval.data).is_file()


def test_each_model_has_a_grouped_and_a_multi_query_recipe() -> None:
    assert {Path(name).parts[0] for name in FOUND} == set(CONFIGS)
    outputs = {load_recipe(name).output for name in shipped_recipes()}
    assert len(outputs) == len(shipped_recipes())
    for folder in CONFIGS:
        heads = {
            convert.kv_heads for name in FOUND if name.startswith(folder) if (convert := load_recipe(name).convert)
        }
        assert 1 in heads and heads & {4, 8}


@pytest.mark.parametrize("name", FOUND)
def test_the_figures_in_the_comment_are_those_that_a_dry_run_prints(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate, "open_inputs", lambda plan: None)  # tokenizer and data are on the hub
    config = CONFIGS[name.split("/", maxsplit=1)[0]]
    assert families.find_family(config).reason is None
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    made = estimate.estimate(load_recipe(name, [f"model={tmp_path / 'model'}", f"output={tmp_path / 'out'}"]))

    comment = FOUND[name].read_text().split("\nmodel:")[0].replace("\n#", "")
    memory, *times = re.findall(r"about ([\d.]+) GiB|(?:about|or) ([\d.]+) (hours|days)", comment)
    assert made.memory_total / 2**30 == pytest.approx(float(memory[0]), abs=1)
    assert made.memory_total < 0.9 * 80e9
    for gpu, (_, figure, unit) in zip(("H100", "A100"), times, strict=True):
        (seconds,) = (value for device, value in made.seconds.items() if device.startswith(f"{gpu} ("))
        assert seconds / 3600 / HOURS[unit] == pytest.approx(float(figure), rel=0.05)


@pytest.mark.parametrize("path", ACCELERATE, ids=lambda path: path.stem)
def test_accelerate_reads_its_configs_and_knows_every_option(path: Path) -> None:
    config = load_config_from_file(str(path))  # refuses unknown keys
    options = {action.dest for action in launch_command_parser()._actions}
    assert set(config.fsdp_config) <= options
    assert f"--config_file {path.relative_to(tiny.ROOT)}" in path.read_text()
    assert config.mixed_precision == "bf16"
    for name in FOUND:
        section = load_recipe(name).uptrain
        assert section is not None and section.batch_tokens and section.sequence_length
        assert section.batch_tokens // section.sequence_length % config.num_processes == 0


def test_there_is_a_config_for_each_way_to_launch() -> None:
    held = {path.stem: load_config_from_file(str(path)) for path in ACCELERATE}
    ways = {name: (config.distributed_type.value, config.num_machines) for name, config in held.items()}
    assert ways == {
        "one_gpu": ("NO", 1), "ddp": ("MULTI_GPU", 1), "fsdp2": ("FSDP", 1), "two_nodes": ("FSDP", 2),
    }  # fmt: skip
    assert [held[name].fsdp_config["fsdp_version"] for name in ("fsdp2", "two_nodes")] == [2, 2]


def test_a_folder_is_copied_whole(tmp_path: Path) -> None:
    assert copy_recipe("llama-2-7b", tmp_path) == tmp_path / "llama-2-7b"
    assert (tmp_path / "llama-2-7b" / "mqa.yaml").is_file()
    assert copy_recipe("accelerate", tmp_path) == tmp_path / "accelerate"
    assert (tmp_path / "accelerate" / "ddp.yaml").is_file()
    assert copy_recipe("phi-2/mqa", tmp_path) == tmp_path / "phi-2" / "mqa.yaml"
    with pytest.raises(RequestError, match=r"no recipe '\.\./src'"):
        copy_recipe("../src", tmp_path)
