"""Every family that is said to convert does: files written by transformers, pooled, opened again, compared."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from class_probe import NotMeasuredError, Probe
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from walking import stock

from headpool import reference
from headpool.convert.aligned.observe import MomentsObserver, observing
from headpool.convert.aligned.walk import Walk
from headpool.convert.layouts import Rotary
from headpool.convert.run import convert_checkpoint
from headpool.errors import RequestError
from headpool.families import KV_HEADS, data, families

pytestmark = pytest.mark.usefixtures("quick_check")

CONVERTING = [
    name
    for name, family in families().items()
    if family.reason is None and family.fused is None and name in CONFIG_MAPPING
    if hasattr(transformers, family.class_name)
]
"""Those that this version of transformers has, but for fused projections, which test_fused.py is about."""
HEADS, KV = 12, 4


def built(model_type: str) -> Any:
    """A small random model of 12 query and 12 K/V heads."""
    probe = Probe(model_type, families()[model_type].class_name)
    probe.fields |= {"num_attention_heads": HEADS, KV_HEADS: HEADS, "hidden_size": 192}
    try:
        probe.settle()
    except NotMeasuredError as error:
        if transformers.__version__ == data()["transformers"]:
            raise
        pytest.skip(f"transformers {transformers.__version__} cannot build its own class: {error}")
    torch.manual_seed(0)
    model = probe.model("cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    return model


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        result: torch.Tensor = model(ids).logits
    return result


def check_walk(directory: Path) -> None:
    """Layer by layer the checkpoint computes what the whole model does, and its attention can be observed."""
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        expected = tiny.stock_model(directory)(ids, output_hidden_states=True).hidden_states
    walk = Walk(stock(directory), ids, batch=1)
    for layer in walk:
        torch.testing.assert_close(walk.hidden(layer.index, slice(0, 1)), expected[layer.index], rtol=1e-5, atol=1e-5)
        with observing(layer.attention, MomentsObserver(Rotary("half-split", 2))):
            layer.advance()


@pytest.mark.parametrize("model_type", CONVERTING)
def test_a_family_converts(model_type: str, tmp_path: Path) -> None:
    model = built(model_type)
    model.save_pretrained(tmp_path / "source")
    if model_type == "gemma3n_text":
        with pytest.raises(RequestError, match="not one hidden state per token"):
            check_walk(tmp_path / "source")
    else:
        check_walk(tmp_path / "source")
    result = convert_checkpoint(str(tmp_path / "source"), tmp_path / "out", kv_heads=KV)
    assert result.warnings == ()
    before, after = tiny.tensors(tmp_path / "source"), tiny.tensors(tmp_path / "out")
    assert set(before) == set(after)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    layers = model.config.get_text_config().num_hidden_layers
    weights = {name for name in changed if name.endswith(("k_proj.weight", "v_proj.weight"))}
    assert len(weights) == 2 * layers
    assert all(name.endswith(("k_proj.bias", "v_proj.bias")) for name in changed - weights)
    overwritten = {}
    for name in changed:
        mean = reference.mean_heads(before[name].double().unflatten(0, (HEADS, -1)).numpy(), KV)
        assert torch.equal(after[name], torch.from_numpy(mean).float().reshape(after[name].shape))
        overwritten[name] = torch.from_numpy(reference.repeat_heads(mean, HEADS)).float().reshape(before[name].shape)
    tiny.rewrite(tmp_path / "source", overwritten)
    pooled, mha = (type(model).from_pretrained(tmp_path / folder).eval() for folder in ("out", "source"))
    torch.testing.assert_close(logits(pooled), logits(mha), rtol=1e-4, atol=1e-4)
    assert (logits(mha) - logits(model)).abs().max() > 1e-2, "pooling must show"


def test_there_are_many_and_the_named_ones_among_them() -> None:
    assert len(CONVERTING) >= (60 if transformers.__version__ == data()["transformers"] else 30)
    assert set(tiny.FAMILIES) <= set(CONVERTING)
