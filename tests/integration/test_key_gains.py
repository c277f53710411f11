"""Norms with gains for every key head, or across all of them, shrink with the heads."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from headpool import reference
from headpool.convert.run import convert_checkpoint
from headpool.errors import RequestError

pytestmark = pytest.mark.usefixtures("quick_check")

HEADS, KV = 12, 4
KINDS: dict[str, dict[str, Any]] = {
    "olmo2": {},
    "cohere": {"use_qk_norm": True},
    "stablelm": {"qk_layernorm": True},
}
"""One norm across all key heads, `[k * d]`; a norm for each head with gains in one tensor, `[k, d]`, or in tensors of
their own.
"""


def grouped(name: str) -> bool:
    return any(part in name for part in ("k_proj", "v_proj", "k_norm", "k_layernorm"))


def heads_of(tensors: dict[str, torch.Tensor], count: int) -> dict[str, torch.Tensor]:
    """What belongs to key and value heads, heads first [count, ...]; StableLM's gains together as one."""
    found = {name: w.unflatten(0, (count, -1)) for name, w in tensors.items() if grouped(name) and "norms." not in name}
    listed = sorted({name.rpartition("norms.")[0] for name in tensors if "k_layernorm.norms." in name})
    return found | {
        stem: torch.stack([tensors[f"{stem}norms.{head}.weight"] for head in range(count)]) for stem in listed
    }


def spread(family: str) -> dict[str, torch.Tensor]:
    """Every tensor of a model with gains that differ from head to head."""
    state = tiny.model(family, **KINDS[family]).state_dict()
    return {name: w + 0.3 * torch.randn_like(w) if "norm" in name else w for name, w in state.items()}


@pytest.fixture(params=KINDS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def source(family: str, tmp_path: Path) -> Path:
    folder = tiny.checkpoint(tmp_path / "source", family, **KINDS[family])
    tiny.rewrite(folder, dict(spread(family)) if family != "cohere" else {
        name: w for name, w in spread(family).items() if name != "lm_head.weight"
    })  # fmt: skip
    return folder


def test_gains_are_pooled_like_their_heads(family: str, source: Path, tmp_path: Path) -> None:
    result = convert_checkpoint(str(source), tmp_path / "out", kv_heads=KV)
    assert result.warnings == ()
    before, after = tiny.tensors(source), tiny.tensors(tmp_path / "out")
    theirs, ours = heads_of(before, HEADS), heads_of(after, KV)
    assert len(ours) == len(theirs) >= 6
    for name, held in theirs.items():
        mean = torch.from_numpy(reference.mean_heads(held.double().numpy(), KV)).float()
        assert torch.equal(ours[name].flatten(1), mean.flatten(1)), name
    kept = {name for name in before if not grouped(name)}
    assert all(torch.equal(before[name], after[name]) for name in kept)
    assert {name for name in after if not grouped(name)} == kept
    layers = json.loads((tmp_path / "out" / "headpool.json").read_text())["layers"]
    assert all(layer["key_gains"] == "mean of the group's" for layer in layers)


def test_the_result_is_the_model_whose_heads_and_gains_are_their_means(
    family: str, source: Path, tmp_path: Path
) -> None:
    convert_checkpoint(str(source), tmp_path / "out", kv_heads=KV)
    before, after = tiny.tensors(source), tiny.tensors(tmp_path / "out")
    expanded = dict(before)
    for name, w in heads_of(after, KV).items():
        repeated = w.repeat_interleave(HEADS // KV, 0)
        if name in before:
            expanded[name] = repeated.reshape(before[name].shape)
        else:
            expanded |= {f"{name}norms.{head}.weight": gain for head, gain in enumerate(repeated)}
    original = tiny.logits(tiny.load(source))
    tiny.rewrite(source, expanded)
    mha, pooled = tiny.logits(tiny.load(source)), tiny.logits(tiny.load(tmp_path / "out"))
    torch.testing.assert_close(pooled, mha, rtol=1e-6, atol=1e-6)
    assert (mha - original).abs().max() > 1e-3
    convert_checkpoint(str(source), tmp_path / "back", kv_heads=KV)
    back = tiny.tensors(tmp_path / "back")
    assert back.keys() == after.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in after.items())


def test_aligned_says_that_it_cannot(family: str, source: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"cannot go past '.*norm.*use method mean"):
        convert_checkpoint(str(source), tmp_path / "out", kv_heads=KV, method="aligned")


def test_gains_that_do_not_fit_the_heads_are_named(family: str, source: Path, tmp_path: Path) -> None:
    name = next(name for name in tiny.tensors(source) if "k_norm" in name or "k_layernorm" in name)
    tiny.rewrite(source, {name: torch.ones(5)})
    with pytest.raises(RequestError, match=rf"'{name}' is \[5\], the config makes it \["):
        convert_checkpoint(str(source), tmp_path / "out", kv_heads=KV)
    assert not (tmp_path / "out").exists()
