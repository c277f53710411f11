"""`headpool schema`: the JSON Schema of recipes agrees with what recipes are."""

import re
from pathlib import Path
from typing import Any, ClassVar

import jsonschema
import pytest
import yaml
from tiny import ROOT

from headpool.errors import RequestError
from headpool.recipe import load_recipe, recipe_schema, shipped_recipes

SHIPPED = list(shipped_recipes().values())
assert len(SHIPPED) > 4

BASE: dict[str, Any] = {"model": "m", "convert": {"kv_heads": 2}, "uptrain": {"data": "a.txt", "tokens": 100}}


def fits(values: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(recipe_schema()).is_valid(values))


def test_it_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(recipe_schema())


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_shipped_recipes_fit(path: Path) -> None:
    jsonschema.validate(yaml.safe_load(path.read_text()), recipe_schema())


class Editor(yaml.SafeLoader):
    """YAML 1.2's core schema, by which editors read (its section 10.3.2), instead of PyYAML's 1.1."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}


for kind, pattern, first in (
    ("null", "null|Null|NULL|~|", ["n", "N", "~", ""]),
    ("bool", "true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", "[-+]?[0-9]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
):
    Editor.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", re.compile(f"^(?:{pattern})$"), first)


def test_an_editor_reads_numbers_otherwise() -> None:
    text = "[2_000, 1e-4, on]"
    assert yaml.load(text, Loader=Editor) == ["2_000", 1e-4, "on"]
    assert yaml.safe_load(text) == [2000, "1e-4", True]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_shipped_recipes_fit_in_an_editor(path: Path) -> None:
    jsonschema.validate(yaml.load(path.read_text(), Loader=Editor), recipe_schema())


def test_the_readme_s_recipe_fits_in_an_editor() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (text,) = (one for one in blocks if "\nmodel:" in one)
    jsonschema.validate(yaml.load(text, Loader=Editor), recipe_schema())


@pytest.mark.parametrize(("tokens", "is_number"), [("2_000", True), ("soon", False), ("_1", False), ("-2_000", False)])
def test_a_text_is_a_number_only_as_grouped_digits(tokens: str, is_number: bool, tmp_path: Path) -> None:
    assert fits(changed("uptrain", tokens=tokens)) == is_number
    assert (load(changed("uptrain", tokens=tokens), tmp_path) is None) == is_number


def test_an_editor_can_say_what_every_key_means() -> None:
    schema = recipe_schema()
    for section in (schema, *schema["$defs"].values()):
        for key, one in section["properties"].items():
            assert one.get("description"), key


def changed(section: str, **values: Any) -> dict[str, Any]:
    return {**BASE, section: {**BASE.get(section, {}), **values}}


@pytest.mark.parametrize(
    "values",
    [
        BASE,
        {"model": "m", "convert": {"kv_heads": 1, "method": "aligned", "heal": 0}, "seed": 3},
        changed("uptrain", data=["a.txt", {"path": "b.jsonl", "weight": 0.5}]),
        changed("uptrain", data={"path": "x/y", "streaming": True}),
        changed("uptrain", schedule="wsd", save_every="10min"),
        changed("uptrain", schedule={"shape": "wsd", "decay": 0.5}, save_every=7),
        changed("uptrain", launch={"num_processes": 8, "multi_gpu": True}, betas=[0.9, 0.99]),
        changed("eval", data="x", contexts=[8, 16], prompts=["a"]),
    ],
)
def test_what_a_recipe_may_say_fits(values: Any, tmp_path: Path) -> None:
    assert load(values, tmp_path) is None
    assert fits(values)


@pytest.mark.parametrize(
    "values",
    [
        {**BASE, "modle": "m"},
        {"convert": {"kv_heads": 2}},
        changed("convert", kv_heads=0),
        changed("convert", method="median"),
        changed("convert", heads=4),
        changed("uptrain", data=[]),
        changed("uptrain", data=[{"weight": 1.0}]),
        changed("uptrain", schedule="linear"),
        changed("uptrain", save_every="soon"),
        changed("uptrain", learning_rate=-1),
        changed("eval", window=8),
    ],
)
def test_what_a_recipe_may_not_say_does_not_fit(values: Any, tmp_path: Path) -> None:
    assert load(values, tmp_path) is not None
    assert not fits(values)


def load(values: Any, folder: Path) -> str | None:
    """What is wrong with a recipe, None where nothing is."""
    (folder / "a.yaml").write_text(yaml.safe_dump(values))
    try:
        load_recipe(str(folder / "a.yaml"))
    except RequestError as error:
        return str(error)
    return None
