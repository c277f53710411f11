"""The checked-in class defaults are what transformers' classes say."""

import inspect
import json

import class_defaults
import pytest
import tiny
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from headpool import families, family_data

MEASURED = family_data.data()["transformers"]


@pytest.mark.skipif(transformers.__version__ != MEASURED, reason=f"the file was measured on {MEASURED}")
def test_the_data_file_is_what_its_generator_writes() -> None:
    """Where the weights of composites lie around a measured language model is held by test_every_family, on models."""
    text = (tiny.ROOT / "src" / "headpool" / "class_defaults.json").read_text(encoding="utf-8")
    held = json.loads(text)
    written = class_defaults.render(held["composites"])
    made = json.loads(written)
    assert made["others"] == held["others"]
    for name in made["families"].keys() | held["families"].keys():
        assert made["families"].get(name) == held["families"].get(name), name
    assert written == text


@pytest.mark.parametrize("model_type", tiny.FAMILIES)
def test_defaults_of_the_families_converted_by_name_hold_in_every_version(model_type: str) -> None:
    parameters = inspect.signature(CONFIG_MAPPING[model_type].__init__).parameters
    held = families.families()[model_type].defaults
    assert held
    for field in families.FIELDS:
        default = parameters[field].default if field in parameters else None
        assert held.get(field) == default, field
