"""A recipe for others to read: no path, host or account of this machine, and every file by a name of its own."""

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from headpool.portable import portable
from headpool.recipe import Recipe


def shown(**uptrain: Any) -> tuple[str, dict[str, Any], dict[str, str]]:
    """The text for a recipe with this uptrain section, its values, and the hashes on top."""
    recipe = Recipe.model_validate({"model": "some/model", "output": "/srv/me/out", "uptrain": uptrain})
    text = portable(recipe, {})
    return text, yaml.safe_load(text), dict(re.findall(r"(?m)^#   (\S+)  ([0-9a-f]{64})$", text))


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_launch_settings_name_no_path_host_or_account(tmp_path: Path) -> None:
    config = write(tmp_path / "a" / "ds.json", "{}")
    (tmp_path / "logs").mkdir()
    launch = {
        "num_processes": 2,
        "mixed_precision": "bf16",
        "multi_gpu": True,
        "deepspeed_config_file": str(config),
        "log_dir": str(tmp_path / "logs"),
        "deepspeed_hostfile": "/job/gone/hosts",
        "offload_param_nvme_path": "~/nvme",
        "main_process_ip": "10.1.2.3",
        "main-process-ip": "10.1.2.3",
        "aws_secret_access_key": "hush",
    }
    text, values, hashes = shown(data="a/b", tokens=64, launch=launch)
    assert values["uptrain"]["launch"] == {
        "num_processes": 2,
        "mixed_precision": "bf16",
        "multi_gpu": True,
        "deepspeed_config_file": "ds.json",
        "log_dir": "logs",
        "deepspeed_hostfile": "hosts",
        "offload_param_nvme_path": "nvme",
    }
    assert hashes == {"ds.json": sha256(config)}
    for private in (str(tmp_path), "/job", "/srv", "10.1.2.3", "hush"):
        assert private not in text
    _, values, _ = shown(data="a/b", tokens=64, launch={"main_process_ip": "10.1.2.3"})
    Recipe.model_validate(values)
    assert not values["uptrain"]["launch"]


def test_files_of_one_name_keep_apart(tmp_path: Path) -> None:
    one, two = write(tmp_path / "x" / "en" / "a.txt", "one"), write(tmp_path / "y" / "en" / "a.txt", "two")
    other = write(tmp_path / "x" / "b.txt", "three")
    _, values, hashes = shown(data=[str(one), str(two), str(other)], validation=str(other), tokens=64)
    assert [source["path"] for source in values["uptrain"]["data"]] == ["x/en/a.txt", "y/en/a.txt", "b.txt"]
    assert values["uptrain"]["validation"]["path"] == "b.txt"
    assert hashes == {"x/en/a.txt": sha256(one), "y/en/a.txt": sha256(two), "b.txt": sha256(other)}


def test_files_behind_patterns_keep_apart(tmp_path: Path) -> None:
    one, two = write(tmp_path / "en" / "a.txt", "one"), write(tmp_path / "de" / "a.txt", "two")
    _, values, hashes = shown(data=[str(tmp_path / "en" / "*.txt"), str(tmp_path / "de" / "*.txt")], tokens=64)
    assert [source["path"] for source in values["uptrain"]["data"]] == ["en/*.txt", "de/*.txt"]
    assert hashes == {"en/a.txt": sha256(one), "de/a.txt": sha256(two)}


@pytest.mark.parametrize("data", ["a/b", "wikitext"])
def test_what_the_hub_has_stays_as_it_is(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, values, hashes = shown(data=data, tokens=64, launch={"num_processes": 2, "machine_rank": ""})
    assert values["uptrain"]["data"][0]["path"] == data
    assert values["uptrain"]["launch"] == {"num_processes": 2, "machine_rank": ""}
    assert hashes == {}
