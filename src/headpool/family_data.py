"""The data on model families as they lie in the package."""

import json
from functools import cache
from importlib import resources
from typing import Any


@cache
def data() -> dict[str, Any]:
    """The checked-in data file: `transformers` (the version measured), `families`, `composites`, and `others`
    (refused by reason).
    """
    text = resources.files("headpool").joinpath("class_defaults.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


@cache
def told() -> dict[str, Any]:
    """What is told by hand of families, over what was measured: one projection for queries, keys and values, and counts
    of K/V heads in fields of their own, layers that their configs tell in ways of their own. `like` names an entry with
    the rest. A test holds it against their classes.
    """
    text = resources.files("headpool").joinpath("told_families.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return {name: loaded.get(entry.get("like"), {}) | entry for name, entry in loaded.items()}
