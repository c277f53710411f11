"""Where checkpoints with fewer K/V heads have been opened: only what was tried.

In transformers that is every family that converts, by a test of each at the version of the data. Servers' results are
kept by hand in served.json, from `make serving`.
"""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any

from headpool import families
from headpool.composite import composites, text_config
from headpool.family_data import data

SILENT = "its class fails on text, and only the language model inside it was run"


@cache
def served() -> dict[str, list[str]]:
    """The servers, with their versions, in which a converted model of a model_type gave what transformers gives."""
    text = resources.files("headpool").joinpath("served.json").read_text(encoding="utf-8")
    loaded: dict[str, list[str]] = json.loads(text)
    return loaded


def opens_in(config: Mapping[str, Any]) -> list[str]:
    """What has opened a checkpoint of this class with fewer K/V heads, for a config whose model converts."""
    model_type = str(config["model_type"])
    composite = composites().get(model_type)
    if composite is not None and text_config(config)["model_type"] != composite.text:
        return []
    ran = "" if composite is None or not composite.silent else " (its language model; the whole fails on text there)"
    return [f"transformers {data()['transformers']}{ran}", *served().get(model_type, ())]


def warnings(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What to know of a converted checkpoint of this class before it is taken elsewhere."""
    return (*_own_code(config), *_told(config), *_untried(config))


def _own_code(config: Mapping[str, Any]) -> Iterator[str]:
    if config.get("auto_map"):
        yield "config.json names code of its own (auto_map), which is not copied: open it without trust_remote_code"


def _told(config: Mapping[str, Any]) -> Iterator[str]:
    """What the family's data say of models with this config."""
    family = families.find_family(config)
    for one in family.warnings:
        if all(families.get(config, family, name) == held for name, held in one.get("when", {}).items()):
            yield one["says"].format(version=data()["transformers"])


def _untried(config: Mapping[str, Any]) -> Iterator[str]:
    composite = composites().get(str(config.get("model_type")))
    if composite is not None and not opens_in(config):
        inside = text_config(config)["model_type"]
        untried = f"{composite.model_type} around a language model of type {inside}, with fewer K/V heads,"
        yield f"{untried} was never run: try it in transformers first"
    elif composite is not None and composite.silent:
        yield f"{composite.model_type} with fewer K/V heads was loaded and never run as a whole: {SILENT}"
