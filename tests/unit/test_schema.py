"""`headpool schema`: the JSON Schema of recipes agrees with what recipes are."""

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

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
