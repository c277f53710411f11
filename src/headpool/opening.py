"""Where checkpoints with fewer K/V heads have been opened: only what was tried.

In transformers that is every family that converts, by a test of each at the version of the data. Servers' results are
kept by hand in served.json, from `make serving`.
"""

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from headpool.composite import composites, text_config
from headpool.family_data import data

SILENT = "its class takes no text without its other input, and only its language model was tested with text"


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
    ran = "" if composite is None or not composite.silent else " (loaded; it takes no text alone there)"
    return [f"transformers {data()['transformers']}{ran}", *served().get(model_type, ())]


def warnings(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What to know of a converted checkpoint of this class before it is taken elsewhere."""
    if config.get("model_type") == "falcon" and config.get("new_decoder_architecture"):
        version = data()["transformers"]
        return (f"transformers {version} caches Falcon's keys and values for each query head: it saves no cache there",)
    composite = composites().get(str(config.get("model_type")))
    if opens_in(config):
        if composite is not None and composite.silent:
            return (f"{composite.model_type} with fewer K/V heads was loaded and never run: {SILENT}",)
        return ()
    inside = text_config(config)["model_type"]
    untried = f"{config['model_type']} around a language model of type {inside}, with fewer K/V heads, was never run"
    return (f"{untried}: try it in transformers first",)
