"""Gemma 4: layers with heads of their own, values that are keys, layers that read the keys and values of others."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers

from headpool import geometry, planning
from headpool.checkpoint import read_config
from headpool.convert.run import convert_checkpoint
from headpool.errors import RequestError

pytestmark = pytest.mark.usefixtures("quick_check")

HEADS, LOCAL, GLOBAL = 12, 12, 6
SIZES: dict[str, Any] = {
    "num_hidden_layers": 6, "num_attention_heads": HEADS, "num_key_value_heads": LOCAL, "hidden_size": 96,
    "head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": GLOBAL, "intermediate_size": 64,
    "vocab_size": 300, "vocab_size_per_layer_input": 300, "hidden_size_per_layer_input": 8, "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 3, "attention_k_eq_v": True,
}  # fmt: skip


def checkpoint(directory: Path, *, released: bool = False, **changes: Any) -> Path:
    """A random model; as released, with fields for all global layers instead of one for each layer."""
    torch.manual_seed(0)
    model = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**SIZES | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(directory)
    if released:
        path = directory / "config.json"
        config = json.loads(path.read_text())
        del config["per_layer_config"]
        own = {name: SIZES[name] for name in ("global_head_dim", "num_global_key_value_heads")}
        path.write_text(json.dumps(config | own))
    return directory


def repeated(tensor: torch.Tensor, kv_heads: int, dims: int) -> torch.Tensor:
    """Every K/V head's rows, in float64, replaced by the mean of its group."""
    groups = tensor.double().view(kv_heads, -1, dims, tensor.shape[1])
    return groups.mean(1, keepdim=True).expand_as(groups).reshape(tensor.shape).float()


def logits(directory: Path) -> torch.Tensor:
    """Past the windows."""
    return tiny.logits(tiny.stock_model(directory), tokens=20)


@pytest.mark.parametrize(
    ("kv_heads", "source_whole", "local", "whole", "released"),
    [(4, 2, 4, 2, False), (3, 6, 3, 3, True), (1, 6, 1, 1, False)],
)
def test_each_kind_of_layer_has_what_it_can(
    tmp_path: Path, kv_heads: int, source_whole: int, local: int, whole: int, *, released: bool
) -> None:
    source = checkpoint(tmp_path / "source", released=released, num_global_key_value_heads=source_whole)
    out = tmp_path / "out"
    convert_checkpoint(str(source), out, kv_heads=kv_heads)
    layers = geometry.layers(read_config(out)[1])
    assert [(one.kv_heads, one.head_dim, one.own_values) for one in layers] == [
        (local, 8, True), (whole, 16, False)
    ] * 3  # fmt: skip
    changes = {}
    for name, tensor in tiny.tensors(source).items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            sliding = int(name.split(".layers.")[1][0]) % 2 == 0
            changes[name] = repeated(tensor, local if sliding else whole, 8 if sliding else 16)
    assert len(changes) == 9, "global layers have no projection for values"
    before = logits(source)
    tiny.rewrite(source, changes)
    torch.testing.assert_close(logits(out), logits(source), rtol=1e-4, atol=1e-4)
    assert (logits(source) - before).abs().max() > 1e-2


def test_the_config_changes_where_it_says_so(tmp_path: Path) -> None:
    for released, fields in ((True, {"num_global_key_value_heads": 3}), (False, {})):
        source = checkpoint(tmp_path / f"source{released}", released=released)
        out = tmp_path / f"out{released}"
        convert_checkpoint(str(source), out, kv_heads=3)
        before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, out))
        expected = before | {"num_key_value_heads": 3} | fields
        if not released:
            expected["per_layer_config"] = {str(one): {"head_dim": 16, "num_key_value_heads": 3} for one in (1, 3, 5)}
        assert after == expected


def test_layers_that_read_the_keys_and_values_of_others_keep_their_weights(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source", num_kv_shared_layers=2)
    out = tmp_path / "out"
    convert_checkpoint(str(source), out, kv_heads=2)
    before, after = tiny.tensors(source), tiny.tensors(out)
    changed = {name for name in before if before[name].shape != after[name].shape}
    assert {name.split(".layers.")[1][0] for name in changed} == set("0123")
    assert len(changed) == 6
    assert torch.isfinite(logits(out)).all()
    plan = planning.plan(source)
    per_token = 4 * 2 * (2 * LOCAL * 8 + 2 * GLOBAL * 16)
    assert plan.options[0].cache_bytes_per_token == per_token, "the last two keep nothing"


def test_method_aligned_leaves_it_alone(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="its values are normed, and can be its keys; use method mean"):
        convert_checkpoint(str(checkpoint(tmp_path / "source")), tmp_path / "out", kv_heads=2, method="aligned")
