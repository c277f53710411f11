"""What the README shows is what its commands print."""

import io
import re
from pathlib import Path

import tiny
import yaml
from rich.console import Console

from headpool.planning import plan, plan_table
from headpool.recipe import Recipe

README = (tiny.ROOT / "README.md").read_text(encoding="utf-8")


def test_the_plan_of_a_7b_model(tmp_path: Path) -> None:
    match = re.search(r"echo '(\{.*\})' > llama-7b/config.json\nheadpool plan llama-7b (.*)\n", README)
    assert match is not None
    assert match[2] == "--context 4096 --batch 16"
    folder = tmp_path / "llama-7b"
    folder.mkdir()
    (folder / "config.json").write_text(match[1])
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(plan_table(plan(str(folder), context=4096, batch=16)))
    printed = "\n".join(line.rstrip() for line in console.export_text().splitlines())
    assert printed.strip() in README


def test_the_recipe_has_only_keys_that_exist() -> None:
    match = re.search(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert match is not None
    Recipe.model_validate(yaml.safe_load(match[1]))
