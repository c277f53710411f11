"""`convert --method aligned` as a whole: exact where nothing has to be lost, better than pooling where something has,
resumed where it was, the same bytes every time.
"""

import errno
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml

from headpool.convert.aligned import run as aligned
from headpool.convert.aligned.fit import Fit
from headpool.convert.aligned.options import Alignment
from headpool.convert.aligned.work import Work
from headpool.convert.run import Conversion, convert_checkpoint
from headpool.errors import HeadpoolError, RequestError
from headpool.pipeline import run_recipe
from headpool.recipe import Recipe
from headpool.text import TextData, read_documents

pytestmark = pytest.mark.usefixtures("quick_check")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextData:
    return read_documents(novel(tmp_path_factory.mktemp("text")))


def novel(folder: Path) -> Path:
    path = folder / "novel.txt"
    path.write_text(tiny.NOVEL.read_text(encoding="utf-8")[:60_000], encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 llama of 2 layers, 12 heads, and the vocabulary of the quickstart's tokenizer."""
    return tiny.checkpoint(tmp_path_factory.mktemp("spread") / "llama", vocab_size=2048, tokenizer=True)


def alignment(text: TextData | None, **changes: Any) -> Alignment:
    own = {} if text is None else {"calibration": text, "tokens": 2048, "window": 64}
    return Alignment(**{**own, "heal": 0, "device": "cpu", **changes})


def convert(source: Path, out: Path, kv_heads: int, given: Alignment, **changes: Any) -> Conversion:
    return convert_checkpoint(str(source), out, kv_heads=kv_heads, method="aligned", alignment=given, **changes)


def facts(out: Path) -> dict[str, Any]:
    held: dict[str, Any] = json.loads((out / "headpool.json").read_text())
    return held


@pytest.mark.parametrize(
    ("family", "calibrated"), [("llama", True), *((family, False) for family in (*tiny.FAMILIES, "phi", "glm"))]
)
def test_expanded_heads_come_back_without_loss(
    tmp_path: Path, text: TextData, family: str, *, calibrated: bool
) -> None:
    """Keys that are equal and values that span one head's dimensions: rank one and rank d, so nothing is lost."""
    grouped = tiny.checkpoint(
        tmp_path / "grouped", family, vocab_size=2048, num_key_value_heads=4, dtype=torch.float64, tokenizer=True
    )
    wide = tmp_path / "wide"
    shutil.copytree(grouped, wide)
    config = json.loads((wide / "config.json").read_text())
    d = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    tiny.rewrite(wide, {
        name: tensor.unflatten(0, (4, d)).repeat_interleave(3, 0).flatten(0, 1)
        for name, tensor in tiny.tensors(grouped).items() if "k_proj" in name or "v_proj" in name
    })  # fmt: skip
    (wide / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 12}))
    convert(wide, tmp_path / "out", 4, alignment(text if calibrated else None, refit=False))
    expected, found = (tiny.logits(tiny.load(one)) for one in (wide, tmp_path / "out"))
    assert (found - expected).abs().max() < 1e-6 * expected.abs().max()  # norms round to float32
    assert all(sum(layer["lost_energy"].values()) < 1e-9 for layer in facts(tmp_path / "out")["layers"])


def test_each_step_brings_the_blocks_nearer_to_the_original(tmp_path: Path, spread: Path, text: TextData) -> None:
    result = convert(spread, tmp_path / "out", 4, alignment(text, tokens=8192, heal=30, heal_scope="attention"))
    layers = facts(tmp_path / "out")["layers"]
    assert all(one["seconds"] > 0 and one["block_error"] for one in result.layers)
    assert not any("seconds" in layer for layer in layers)
    assert [layer["layer"] for layer in layers] == [0, 1]
    for layer in layers:
        error = layer["block_error"]
        assert error["heal"] < error["refit"] < error["closed"]
        assert sorted(head for group in layer["partition"] for head in group) == list(range(12))
        assert all(0 < lost < 1 for lost in layer["lost_energy"].values())
    mean = convert_checkpoint(str(spread), tmp_path / "mean", kv_heads=4, method="mean")
    assert mean.pooled_tensors < len(facts(tmp_path / "out")["changed"])
    original, pooled, healed = (
        tiny.logits(tiny.stock_model(one)) for one in (spread, tmp_path / "mean", tmp_path / "out")
    )
    assert (healed - original).square().sum() < 0.7 * (pooled - original).square().sum()


def test_block_error_is_that_of_the_block_on_windows_held_out(tmp_path: Path, spread: Path, text: TextData) -> None:
    """The reported error of the first layer, computed again from both checkpoints by the stock classes."""
    given = alignment(text, refit=False)
    convert(spread, tmp_path / "out", 4, given)
    windows = aligned.read_calibration(aligned_plan(spread), given, 0)
    assert windows is not None
    held_out = windows.tokens[-2:]  # one in 16 of 32
    outputs = []
    for one in (spread, tmp_path / "out"):
        model = tiny.stock_model(one)
        model.model.layers[0].self_attn.register_forward_hook(lambda _, __, result: outputs.append(result[0]))
        with torch.no_grad():
            model(held_out)
    expected = float((outputs[1] - outputs[0]).square().sum() / outputs[0].square().sum())
    assert facts(tmp_path / "out")["layers"][0]["block_error"]["closed"] == pytest.approx(expected, rel=1e-4)


def aligned_plan(source: Path) -> Any:
    from headpool.checkpoint import open_source
    from headpool.convert.plan import plan_conversion

    return plan_conversion(open_source(str(source), None), kv_heads=4, method="aligned")


def test_declares_what_it_changes_and_leaves_the_rest(tmp_path: Path, spread: Path, text: TextData) -> None:
    convert(spread, tmp_path / "out", 4, alignment(text))
    before, after = tiny.tensors(spread), tiny.tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == set(facts(tmp_path / "out")["changed"])
    assert changed == {f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in range(2) for part in "qkvo"}


def test_healing_whole_layers_brings_them_nearer_and_changes_all_of_them(
    tmp_path: Path, spread: Path, text: TextData
) -> None:
    convert(spread, tmp_path / "layer", 4, alignment(text, tokens=4096, heal=10))
    for layer in facts(tmp_path / "layer")["layers"]:
        assert layer["layer_error"]["heal"] < layer["layer_error"]["before"]
    before, after = tiny.tensors(spread), tiny.tensors(tmp_path / "layer")
    inside = {name for name in before if name.startswith("model.layers.")}
    assert inside == {name for name in before if not torch.equal(before[name], after[name])}
    assert inside == set(facts(tmp_path / "layer")["changed"])


def test_experts_stay_as_they_are(tmp_path: Path, text: TextData) -> None:
    source = tiny.checkpoint(
        tmp_path / "mixtral", "mixtral", vocab_size=2048, tokenizer=True, num_local_experts=2, num_experts_per_tok=1
    )
    convert(source, tmp_path / "out", 4, alignment(text, heal=3))
    before, after = tiny.tensors(source), tiny.tensors(tmp_path / "out")
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert {name for name in before if "moe" in name or "expert" in name} <= same
    assert "model.layers.0.input_layernorm.weight" not in same


def test_a_rate_of_healing_is_in_the_recipe_and_at_work(tmp_path: Path, spread: Path, text: TextData) -> None:
    """The recipe of headpool.json, run elsewhere, makes the same weights: another rate would make others."""
    given = alignment(text, heal=2, learning_rate=0.25)
    convert(spread, tmp_path / "out", 4, given)
    noted = yaml.safe_load(facts(tmp_path / "out")["recipe"])
    assert noted["convert"]["heal_learning_rate"] == 0.25
    noted |= {"model": str(spread), "output": str(tmp_path / "run")}
    noted["convert"] |= {"calibration": str(novel(tmp_path)), "device": "cpu"}
    run_recipe(Recipe.model_validate(noted))
    weights = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert (tmp_path / "run" / "converted" / "model.safetensors").read_bytes() == weights
    convert(spread, tmp_path / "usual", 4, alignment(text, heal=2))
    assert (tmp_path / "usual" / "model.safetensors").read_bytes() != weights


def test_a_killed_run_goes_on_at_the_layer_where_it_was(
    tmp_path: Path, spread: Path, text: TextData, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = alignment(text, heal=5)
    convert(spread, tmp_path / "whole", 4, given)
    fitted: list[int] = []
    run = Fit.run

    def noting(self: Any) -> Any:
        fitted.append(self.layer.index)
        if len(fitted) == 2:
            raise KeyboardInterrupt
        return run(self)

    monkeypatch.setattr(Fit, "run", noting)
    with pytest.raises(KeyboardInterrupt):
        convert(spread, tmp_path / "out", 4, given)
    assert not (tmp_path / "out").exists()
    convert(spread, tmp_path / "out", 4, given)
    assert fitted == [0, 1, 1]
    for file in ("model.safetensors", "headpool.json"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "out"}


def test_other_options_do_not_go_on_with_what_a_killed_run_left(
    tmp_path: Path, spread: Path, text: TextData, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(spread, tmp_path / "whole", 4, alignment(text, groups="contiguous"))
    with monkeypatch.context() as patch:
        patch.setattr("headpool.convert.run.write_tensors", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            convert(spread, tmp_path / "out", 4, alignment(text))
    convert(spread, tmp_path / "out", 4, alignment(text, groups="contiguous"))
    for file in ("model.safetensors", "headpool.json"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


def test_a_full_disk_keeps_the_layers_that_are_done(
    tmp_path: Path, spread: Path, text: TextData, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Work.save

    def full(self: Work, name: str, *rest: Any) -> None:
        if name == "layer-0001.safetensors":
            raise OSError(errno.ENOSPC, "No space left on device")
        save(self, name, *rest)

    monkeypatch.setattr(Work, "save", full)
    with pytest.raises(HeadpoolError, match="No space left on device; the layers that are done are kept there"):
        convert(spread, tmp_path / "out", 4, alignment(text))
    assert not (tmp_path / "out").exists()
    assert (tmp_path / ".out.aligning" / "layer-0000.safetensors").is_file()


def test_copies_where_nothing_has_to_be_shared(tmp_path: Path, spread: Path, text: TextData) -> None:
    result = convert(spread, tmp_path / "out", 12, alignment(text))
    assert result.copied
    assert result.layers == ()
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (spread / "model.safetensors").read_bytes()


def test_a_dry_run_predicts_every_number_of_heads(tmp_path: Path, spread: Path, text: TextData) -> None:
    convert(spread, tmp_path / "out", 4, alignment(text, groups="contiguous"))
    lost = [layer["lost_energy"] for layer in facts(tmp_path / "out")["layers"]]
    plot = tmp_path / "plot.png"
    result = convert(spread, tmp_path / "none", 4, alignment(text, groups="contiguous", plot=plot), dry_run=True)
    assert not (tmp_path / "none").exists()
    found = {one.kv_heads: one for one in result.predictions}
    assert list(found) == [12, 6, 4, 3, 2, 1]
    assert found[12].keys == found[12].values == 0
    assert found[4].keys == pytest.approx(sum(one["keys"] for one in lost) / 2)
    assert found[4].values == pytest.approx(sum(one["values"] for one in lost) / 2)
    assert [one.cache_bytes_per_token for one in result.predictions] == [2 * 2 * 8 * 4 * count for count in found]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_dry_run_predicts_of_a_hybrid_by_the_layers_that_attend(tmp_path: Path, text: TextData) -> None:
    family, changes = OWN_WAYS["gates, in a hybrid"]
    source = tiny.checkpoint(tmp_path / "source", family, vocab_size=2048, tokenizer=True, **changes)
    given = alignment(text, groups="contiguous")
    convert(source, tmp_path / "out", 4, given)
    [lost] = [layer["lost_energy"] for layer in facts(tmp_path / "out")["layers"] if "lost_energy" in layer]
    found = {one.kv_heads: one for one in convert(source, tmp_path / "none", 4, given, dry_run=True).predictions}
    assert list(found) == [12, 6, 4, 3, 2, 1]
    assert (found[4].keys, found[4].values) == pytest.approx((lost["keys"], lost["values"]))


def test_refusals(tmp_path: Path, spread: Path, text: TextData) -> None:
    short = TextData(["Too short."], "0" * 64, "short.txt")
    refused = {
        "too short to calibrate": lambda out: convert(spread, out, 4, alignment(short)),
        "at least 96": lambda out: convert(spread, out, 4, alignment(short)),
        "128 positions": lambda out: convert(spread, out, 4, alignment(text, window=129)),
        "heal_learning_rate nan is no positive number": lambda out: alignment(text, learning_rate=math.nan),
        "heal_learning_rate 0 is no positive number": lambda out: alignment(text, learning_rate=0),
        "unknown groups 'all'": lambda out: convert(spread, out, 4, alignment(text, groups="all")),
        "mean does without calibration, calibration_tokens, .*for method aligned only": lambda out: convert_checkpoint(
            str(spread), out, kv_heads=4, method="mean", alignment=alignment(text)
        ),
        "aligned does without calibration_tokens, heal where it has no": lambda out: convert(
            spread, out, 4, Alignment(tokens=100, heal=3, refit=False, groups="contiguous")
        ),
        "first does without heal, for method aligned only": lambda out: convert_checkpoint(
            str(spread), out, kv_heads=4, method="first", alignment=Alignment(heal=3)
        ),
    }
    for words, attempt in refused.items():
        with pytest.raises(RequestError, match=words):
            attempt(tmp_path / "out")
        assert not any(path.name.endswith("out") for path in tmp_path.iterdir())


OWN_WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "gates, in a hybrid": ("qwen3_next", {
        "head_dim": 16, "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 2,
        "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 2,
        "num_experts_per_tok": 1, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    }),
    "a norm across all heads": ("olmo2", {}),
    "norms with gains for every head": ("stablelm", {"qk_layernorm": True}),
    "norms without gains": ("nanochat", {}),
    "a norm of the output": ("bitnet", {}),
    "cut off at a size": ("olmo", {"clip_qkv": 0.1}),
    "biases and partial rotation": ("phi", {"partial_rotary_factor": 0.5}),
    "norms of queries and keys": ("qwen3", {"head_dim": 16, "attention_bias": True}),
}  # fmt: skip


FREE = {
    "gates, in a hybrid": ("units", "factors"), "a norm across all heads": ("factors", "maps"),
    "norms with gains for every head": ("factors", "maps"), "norms without gains": ("units", "maps"),
    "a norm of the output": ("maps", "signs"), "cut off at a size": ("units", "signs"),
    "biases and partial rotation": ("maps", "maps"), "norms of queries and keys": ("units", "maps"),
}  # fmt: skip
"""What method.md says is left of keys and of values."""


@torch.no_grad()
def attended(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """What the first attention of a model gives; its inputs are the same whatever became of it."""
    model, outputs = tiny.stock_model(folder), []
    layers = [layer for layer in model.model.layers if hasattr(layer, "self_attn")]
    layers[0].self_attn.register_forward_hook(lambda _, __, result: outputs.append(result[0]))
    model(tokens)
    held: torch.Tensor = outputs[0]
    return held


@pytest.mark.parametrize("name", OWN_WAYS)
def test_attention_that_does_more_is_aligned_as_far_as_that_is_exact(tmp_path: Path, text: TextData, name: str) -> None:
    """Nearer to the original than pooling, in the first layer that attends, on text that was held out; only attention
    changes, in the layers that have it.
    """
    family, changes = OWN_WAYS[name]
    source = tiny.checkpoint(tmp_path / "source", family, vocab_size=2048, tokenizer=True, **changes)
    given = alignment(text, heal=20, heal_scope="attention", groups="contiguous")
    convert(source, tmp_path / "text", 4, given)
    convert(source, tmp_path / "weights", 4, alignment(None, groups="contiguous"))
    convert_checkpoint(str(source), tmp_path / "mean", kv_heads=4)
    windows = aligned.read_calibration(aligned_plan(source), given, 0)
    assert windows is not None
    found = {one: attended(tmp_path / one, windows.tokens[-2:]) for one in ("source", "text", "weights", "mean")}
    lost = {one: float((y - found["source"]).square().sum()) for one, y in found.items()}
    assert lost["text"] < 0.8 * lost["mean"]
    assert lost["weights"] < 1.2 * lost["mean"], "random heads have little in common up to signs"
    done = facts(tmp_path / "text")
    attending = [layer for layer in done["layers"] if "partition" in layer]
    assert all(layer["block_error"]["heal"] <= layer["block_error"]["closed"] < 1 for layer in attending)
    assert len(attending) == (1 if "hybrid" in name else 2)
    assert {(layer["freedom"]["keys"], layer["freedom"]["values"]) for layer in attending} == {FREE[name]}
    before, after = tiny.tensors(source), tiny.tensors(tmp_path / "text")
    same = {key for key in before if key in after and torch.equal(before[key], after[key])}
    assert {key for key in before if "attn" not in key or "linear_attn" in key} <= same


def test_text_shorter_than_asked_for_is_said(tmp_path: Path, spread: Path, text: TextData) -> None:
    few = TextData(text.texts[:8], "0" * 64, "few.txt")
    made = convert(spread, tmp_path / "out", 4, alignment(few, tokens=100_000, window=None, heal=0))
    [warning] = made.warnings
    done = json.loads((tmp_path / "out" / "headpool.json").read_text())
    options = done["options"]
    assert "calibration_window: 64\n" in done["recipe"], "half of 128 positions, which was left to default"
    held = options["calibration_windows"] * options["calibration_window"]
    assert 0 < held < 100_000
    assert warning == f"few.txt holds {held:,} of the 100,000 calibration tokens asked for"


def test_a_computed_value_that_the_dtype_cannot_hold_is_refused(tmp_path: Path) -> None:
    source = tiny.checkpoint(tmp_path / "source", dtype=torch.float16)
    o_proj = "model.layers.1.self_attn.o_proj.weight"
    tiny.rewrite(source, {o_proj: torch.full_like(tiny.tensors(source)[o_proj], 65504.0)})
    with pytest.raises(RequestError, match=rf"'{o_proj}' has values that float16 cannot hold"):
        convert(source, tmp_path / "out", 1, alignment(None))
    assert not (tmp_path / "out").exists()


def test_activations_that_are_not_finite_are_refused_by_layer(tmp_path: Path, spread: Path, text: TextData) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(spread, broken)
    names = [f"model.layers.0.mlp.{part}_proj.weight" for part in ("up", "down")]
    tiny.rewrite(broken, {name: torch.full_like(tiny.tensors(broken)[name], 1e30) for name in names})
    with pytest.raises(RequestError, match=r"layer 0 .* not finite"):
        convert(broken, tmp_path / "out", 4, alignment(text))
    assert not (tmp_path / "out").exists()
