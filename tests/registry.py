"""Small random models of every family that is said to convert, of the classes that transformers itself has for them."""

from typing import Any

import pytest
import torch
import transformers
from class_nested import composite_probe
from class_probe import NotMeasuredError, Probe
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from headpool.composite import composites
from headpool.families import KV_HEADS, families
from headpool.family_data import data

HEADS, KV = 12, 4
MEASURED = transformers.__version__ == data()["transformers"]


ALTERNATING = {"layer_types": ["conv", "full_attention", "conv", "full_attention"]}
MIXED: dict[str, Any] = {
    "lfm2": ALTERNATING,
    "lfm2_moe": ALTERNATING,
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid", "hybrid", "hybrid"], "num_mem_blocks": 2},
}
"""Hybrids that were measured with attention in every layer, or in one."""


def _here(model_type: str, class_name: str) -> bool:
    return model_type in CONFIG_MAPPING and hasattr(transformers, class_name)


LANGUAGE = [
    name
    for name, family in families().items()
    if family.reason is None and family.fused is None and _here(name, family.class_name)
    if "within" not in data()["families"].get(name, {})
]
"""Families with a class of their own that this version of transformers has, but for fused projections, which
test_fused.py is about.
"""

COMPOSITE = [
    name
    for name, one in composites().items()
    if one.reason is None and families()[one.text].reason is None and _here(name, one.class_name)
]
"""Classes that hold one of the families beside other models."""


FAINT = {"zamba": 0.2, "zamba2": 0.2}
"""Families in which attention weighs little, and how large their random parameters are instead of 0.1."""


def probe(model_type: str) -> Probe:
    """The class of a model_type, with what it needs to be built small: 12 query heads of 16 dimensions."""
    composite = composites().get(model_type)
    try:
        if composite is not None:
            held = composite_probe(model_type, composite.class_name, silent=composite.silent)
        else:
            held = Probe(model_type, families()[model_type].class_name)
            held.settle()
    except NotMeasuredError as error:
        if MEASURED:
            raise
        pytest.skip(f"transformers {transformers.__version__} cannot build its own class: {error}")
    held.fields |= {"num_attention_heads": HEADS, "hidden_size": 16 * HEADS} | MIXED.get(model_type, {})
    return held


def built(model_type: str, **changes: Any) -> Any:
    """A small model, random in every parameter, of 12 K/V heads unless `changes` say otherwise."""
    torch.manual_seed(0)
    model = probe(model_type).model("cpu", **{KV_HEADS: HEADS} | changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * FAINT.get(model_type, 0.1))
    return model
