"""Norms with gains for every key head, or across all of them, shrink with the heads."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import registry
import steps
import tiny
import torch
from walking import WINDOWS, stock

from headpool import reference
from headpool.checkpoint import open_source
from headpool.convert.aligned.calibration import calibration
from headpool.convert.aligned.gains import choose_gains
from headpool.convert.aligned.options import Alignment
from headpool.convert.aligned.walk import Walk
from headpool.convert.run import convert_checkpoint
from headpool.errors import RequestError
from headpool.families import families
from headpool.text import TextData

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


def key_squares(attention: Any, calls: list[tuple[Any, Any]]) -> torch.Tensor:
    """E[k^2] of every channel after the key norm, heads in order, over calls of a stock attention module."""
    seen: dict[str, list[torch.Tensor]] = {}

    def keep(name: str) -> Any:
        return lambda norm, _, output: seen.setdefault(name, []).append(output.reshape(-1, norm.weight.numel()))

    norms = [name for name, _ in attention.named_modules() if re.fullmatch(r"k_norm|k_layernorm\.norms\.\d+", name)]
    hooks = [attention.get_submodule(name).register_forward_hook(keep(name)) for name in norms]
    with torch.no_grad():
        for arguments, keywords in calls:
            attention(*arguments, **keywords)
    for hook in hooks:
        hook.remove()
    return torch.cat([torch.cat(seen[name]).double().square().mean(0) for name in norms])


def calls_of_attention(model: Any, ids: torch.Tensor) -> dict[str, list[tuple[Any, Any]]]:
    """What each attention module with a key norm is called with when the whole model runs."""
    calls: dict[str, list[tuple[Any, Any]]] = {}
    for name, module in model.named_modules():
        if hasattr(module, "k_norm") or hasattr(module, "k_layernorm"):
            module.register_forward_pre_hook(
                lambda _, arguments, keywords, name=name: calls.setdefault(name, []).append((arguments, keywords)),
                with_kwargs=True,
            )
    with torch.no_grad():
        model(ids, use_cache=False)
    return {name: list(held) for name, held in calls.items()}


@pytest.fixture(scope="module")
def text() -> TextData:
    return TextData([tiny.NOVEL.read_text(encoding="utf-8")[:20_000]], "0" * 64, "novel.txt")


GAINED = [name for name in registry.LANGUAGE if families()[name].key_gains is not None]


def gained(directory: Path, model_type: str) -> Any:
    """A model of a class of the registry that has such norms, saved with a tokenizer."""
    model = registry.built(model_type, vocab_size=2048, **KINDS.get(model_type, {}))
    model.save_pretrained(directory)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tiny.QUICKSTART / file, directory / file)
    return model


@pytest.mark.parametrize(("model_type", "method", "dtype"), [
    *((name, "mean", None) for name in GAINED),
    ("olmo2", "first", "bfloat16"),
])  # fmt: skip
def test_gains_chosen_on_text_keep_the_size_of_keys(
    model_type: str, method: str, dtype: str | None, tmp_path: Path, text: TextData
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    model = gained(source, model_type)
    alignment = Alignment(calibration=text, tokens=640, window=32)
    made = convert_checkpoint(str(source), out, kv_heads=KV, method=method, dtype=dtype, alignment=alignment)
    assert made.warnings == ()
    done = json.loads((out / "headpool.json").read_text())
    options = {"calibration": text.sha256, "calibration_windows": 20, "calibration_window": 32}
    assert options.items() <= done["options"].items()
    assert "calibration: novel.txt" in done["recipe"]
    ids = calibration(open_source(str(source)), text, tokens=640, needed=1, window=32).tokens
    pooled = type(model).from_pretrained(out, dtype=torch.float32).eval()
    calls = calls_of_attention(model, ids)
    layers = [one for one in done["layers"] if "key_gains" in one]
    assert len(layers) == len(calls) >= 1
    for told, (name, held) in zip(layers, calls.items(), strict=True):
        squares, ours = (key_squares(one.get_submodule(name), held) for one in (model, pooled))
        wanted = squares.view(KV, HEADS // KV, -1).mean(1).flatten()
        off = float((ours / wanted - 1).abs().max())
        assert off < 0.05
        assert told["key_gains"] == "calibrated"
        assert told["key_square_deviation"]["calibrated"] == pytest.approx(off, abs=2e-4)
        assert told["key_square_deviation"]["pooled"] > 0.05, "or text would change nothing"


def test_what_is_chosen_is_what_is_missing_with_the_sign_of_the_usual_gain() -> None:
    wanted, held = torch.tensor([[4.0, 9.0, 4.0, 0.0]]).double(), torch.tensor([[1.0, 4.0, 1e-30, 1.0]]).double()
    usual = torch.tensor([[0.3, -0.2, 0.7, 0.0]]).double()
    assert choose_gains(wanted, held, usual).tolist() == [[2.0, -1.5, usual[0, 2].item(), 0.0]]


def test_text_changes_nothing_else(tmp_path: Path, text: TextData) -> None:
    gained(tmp_path / "source", "olmo2")
    with_text, without = (tmp_path / name for name in ("with", "without"))
    alignment = Alignment(calibration=text, tokens=640, window=32)
    convert_checkpoint(str(tmp_path / "source"), with_text, kv_heads=KV, alignment=alignment)
    convert_checkpoint(str(tmp_path / "source"), without, kv_heads=KV)
    ours, others = tiny.tensors(with_text), tiny.tensors(without)
    differ = {name for name in others if not torch.equal(ours[name], others[name])}
    assert differ == {name for name in others if name.endswith("k_norm.weight")}
    assert all(torch.equal(ours[name].sign(), others[name].sign()) for name in differ)


def test_text_for_nothing_is_refused(tmp_path: Path, text: TextData) -> None:
    llama, olmo2 = (tiny.checkpoint(tmp_path / name, name, tokenizer=True) for name in ("llama", "olmo2"))
    for source, method, changes, words in (
        (
            llama,
            "mean",
            {},
            "mean does without calibration, for method aligned only, or for mean and first where norms",
        ),
        (olmo2, "random", {}, "random does without calibration"),
        (olmo2, "mean", {"heal": 3}, "mean does without heal, for method aligned only$"),
    ):
        with pytest.raises(RequestError, match=words):
            convert_checkpoint(
                str(source), tmp_path / "out", kv_heads=KV, method=method, alignment=Alignment(text, **changes)
            )
    assert not (tmp_path / "out").exists()


def test_the_steps_of_aligned_change_nothing_with_one_head_in_a_group(source: Path) -> None:
    steps.check(next(iter(Walk(stock(source), WINDOWS[:1], batch=1))))


def test_gains_that_do_not_fit_the_heads_are_named(family: str, source: Path, tmp_path: Path) -> None:
    name = next(name for name in tiny.tensors(source) if "k_norm" in name or "k_layernorm" in name)
    tiny.rewrite(source, {name: torch.ones(5)})
    with pytest.raises(RequestError, match=rf"'{name}' is \[5\], the config makes it \["):
        convert_checkpoint(str(source), tmp_path / "out", kv_heads=KV)
    assert not (tmp_path / "out").exists()
