"""What convert refuses: one clear line, and nothing written."""

import errno
import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fused
import pytest
import registry
import tiny
import torch

from headpool.convert import run, shards
from headpool.convert.run import convert_checkpoint
from headpool.errors import HeadpoolError, RequestError

pytestmark = pytest.mark.usefixtures("quick_check")

Q0 = "model.layers.0.self_attn.q_proj.weight"
K1 = "model.layers.1.self_attn.k_proj.weight"
V1 = "model.layers.1.self_attn.v_proj.weight"


def refused(model: Path | str, out: Path, says: str, kind: type[HeadpoolError] = RequestError, **options: Any) -> None:
    """Converting raises exactly `kind` with a line that matches, and leaves the destination's folder as it was."""
    before = sorted(out.parent.iterdir())
    with pytest.raises(kind, match=says) as caught:
        convert_checkpoint(str(model), out, **{"kv_heads": 4, **options})
    assert type(caught.value) is kind
    assert sorted(out.parent.iterdir()) == before


@pytest.fixture
def copy(sources: dict[str, Path], tmp_path: Path) -> Path:
    """A llama of 12 heads to be spoilt."""
    return shutil.copytree(
        sources["llama"],
        tmp_path / "model",
        ignore=shutil.ignore_patterns("consolidated*", "*.gguf", "*.bin", "*.pt"),
    )


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


@pytest.mark.parametrize(
    ("kv_heads", "says"),
    [
        (5, r"layer 0 has 12 K/V heads, which do not divide into 5; possible are 12, 6, 4, 3, 2, 1"),
        (24, r"24 K/V heads asked for, the model has 12; possible are 12, 6, 4, 3, 2, 1"),
        (0, r"0 K/V heads asked for, at least 1 is needed"),
        (-4, r"-4 K/V heads asked for, at least 1 is needed"),
    ],
)
def test_head_counts_that_do_not_fit(copy: Path, tmp_path: Path, kv_heads: int, says: str) -> None:
    refused(copy, tmp_path / "out", says, kv_heads=kv_heads)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"method": "median"}, "unknown method 'median'; there are mean, first, random"),
        ({"dtype": "int8"}, "unknown dtype 'int8'"),
    ],
)
def test_options_that_do_not_exist(copy: Path, tmp_path: Path, options: dict[str, Any], says: str) -> None:
    refused(copy, tmp_path / "out", says, **options)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("/no/such/place", "no such directory: /no/such/place"),
        ("./nowhere", "no such directory"),
        ("nobody/nothing", "nobody/nothing"),
        ("not a name!", "not a name!"),
        ("", "no such directory"),
    ],
)
def test_models_that_are_not_there(tmp_path: Path, model: str, says: str) -> None:
    refused(model, tmp_path / "out", says)


def remove(*names: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return spoil


def replace_with(name: str, content: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / name).write_text(content)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (remove("config.json"), "no config.json"),
        (remove("model.safetensors"), "no weights there"),
        (replace_with("adapter_config.json", "{}"), "holds an adapter; merge it"),
        (replace_with("m.Q4_K_M.gguf", ""), "holds GGUF weights"),
        (replace_with("consolidated.00.pth", ""), "original release's format"),
        (replace_with("model.safetensors.index.json", "{"), "model.safetensors.index.json: not valid JSON"),
        (replace_with("model.safetensors.index.json", "{}"), "index.json: it has no weight_map"),
        (
            replace_with("model.safetensors.index.json", '{"weight_map": {"a": "../../etc/passwd"}}'),
            r"tensor 'a' points to '\.\./\.\./etc/passwd', not a file of this directory",
        ),
        (
            replace_with("model.safetensors.index.json", '{"weight_map": {"a": "x.safetensors"}}'),
            "x.safetensors, which is not there",
        ),
        (replace_with("model.safetensors", "short"), r"model\.safetensors: truncated"),
    ],
)
def test_directories_without_usable_weights(copy: Path, tmp_path: Path, spoil: Any, says: str) -> None:
    spoil(copy)
    refused(copy, tmp_path / "out", says)


def test_a_truncated_file_is_named_with_its_last_tensor(copy: Path, tmp_path: Path) -> None:
    path = copy / "model.safetensors"
    os.truncate(path, path.stat().st_size - 10)
    refused(
        copy,
        tmp_path / "out",
        r"model\.safetensors: truncated: tensor '\S+' ends at byte \d+, the file has \d+",
    )


def test_an_index_that_lies_about_its_files(tmp_path: Path) -> None:
    source = tiny.checkpoint(tmp_path / "model", "llama", max_shard_size="100KB")
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    files = sorted(set(index["weight_map"].values()))
    elsewhere = next(file for file in files if file != index["weight_map"][K1])
    for spoilt, says in [
        (
            {**index["weight_map"], K1: elsewhere},
            f"places tensor '{K1}' in {elsewhere}, which does not hold it",
        ),
        (
            {n: f for n, f in index["weight_map"].items() if n != K1},
            f"holds tensor '{K1}', which .* does not name",
        ),
        ({**index["weight_map"], "ghost": files[0]}, "places tensor 'ghost'"),
    ]:
        path.write_text(json.dumps({"weight_map": spoilt}))
        refused(source, tmp_path / "out", says)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({K1: None}, rf"contradict each other: tensor '{K1}' is missing, the config makes it \[96, 96\]"),
        (
            {K1.replace("k_proj", "qkv_proj"): torch.zeros(288, 96)}
            | {K1.replace("k_proj", f"{part}_proj"): None for part in "qkv"},
            r"1.self_attn.qkv_proj.weight' \[288, 96\] is not known .* q_proj.weight \[96, 96\], k_proj.weight \[96,",
        ),
        (
            {
                name: None
                for layer in (0, 1)
                for part in "qkvo"
                for name in [K1.replace("1", str(layer)).replace("k_p", f"{part}_p")]
            },
            r"no attention tensors named model.layers.N.self_attn.\*, which .* q_proj.weight \[96, 96\], ",
        ),
        ({K1: torch.zeros(48, 96)}, rf"contradict.*'{K1}' is \[48, 96\], the config makes it \[96, 96\]"),
        ({Q0: torch.zeros(96, 64)}, rf"contradict.*'{Q0}' is \[96, 64\], the config makes it \[96, 96\]"),
        (
            {K1.replace("weight", "bias"): torch.zeros(95)},
            r"k_proj.bias' is \[95\], the config makes it \[96\]",
        ),
        ({K1: torch.zeros(96, 96, dtype=torch.int8)}, f"'{K1}' .I8. is of a quantized checkpoint"),
        (
            {"model.layers.2.self_attn.k_proj.weight": torch.zeros(96, 96)},
            r"k_proj.weight' \[96, 96\] belongs to layer 2, the config has 2 layers",
        ),
        (
            {"model.layers.0.self_attn.mystery": torch.zeros(3)},
            r"mystery' \[3\] is not known in the attention of llama, which the config makes q_proj.weight \[96, 96\],",
        ),
        (
            {"model.embed_tokens.weight": torch.zeros(299, 96)},
            r"contradict each other: .*embed_tokens.weight' is \[299, 96\], the config makes it \[300, 96\]",
        ),
        ({V1: torch.full((96, 96), float("nan"))}, f"tensor '{V1}' holds NaN or infinity"),
        ({K1: torch.eye(96) * float("inf")}, f"tensor '{K1}' holds NaN or infinity"),
    ],
)
def test_weights_that_contradict_the_config_or_themselves(
    copy: Path, tmp_path: Path, changes: dict[str, torch.Tensor | None], says: str
) -> None:
    tiny.rewrite(copy, changes)
    refused(copy, tmp_path / "out", says)


def test_a_hybrid_whose_weights_attend_in_another_layer_than_its_config(tmp_path: Path) -> None:
    source = tmp_path / "model"
    registry.built("jamba").save_pretrained(source)
    attends = {name.split(".")[2] for name in tiny.tensors(source) if "self_attn" in name}
    assert attends == {"1", "3"}
    (tmp_path / "more").mkdir()
    edit_config(source, attn_layer_period=4)
    refused(source, tmp_path / "more" / "out", r"3.self_attn.k_proj.weight' is \[192, 192\], .* one without attention")
    edit_config(source, attn_layer_period=2, attn_layer_offset=0)
    refused(source, tmp_path / "more" / "out", r"0.self_attn.q_proj.weight' is missing, .* \[192, 192\]")


def test_attention_that_its_class_calls_otherwise_lacks_a_tensor_or_has_one_too_many(tmp_path: Path) -> None:
    """Sarvam's class reads one tensor as three; that of Llama 3.2 Vision calls all layers by another name."""
    (tmp_path / "more").mkdir()
    sarvam = fused.checkpoint(tmp_path / "sarvam", "sarvam_moe")
    tiny.rewrite(sarvam, {"model.layers.0.attention.query_key_value.bias": None})
    refused(sarvam, tmp_path / "more" / "out", r"0.self_attn.k_proj.bias' is missing, the config makes it \[96\]")
    biased = {f"model.layers.{layer}.attention.query_key_value.bias": torch.zeros(288) for layer in (0, 1)}
    tiny.rewrite(sarvam, biased)
    edit_config(sarvam, attention_bias=False)
    refused(sarvam, tmp_path / "more" / "out", r"reads a tensor as '\S+k_proj.bias', the config makes none there")
    registry.built("mllama").save_pretrained(tmp_path / "mllama")
    stray = "language_model.model.layers.0.self_attn.k_norm.weight"
    tiny.rewrite(tmp_path / "mllama", {stray: torch.ones(16)})
    refused(tmp_path / "mllama", tmp_path / "more" / "out", rf"'{stray}' is \[16\], the config makes none there")


def test_layers_that_lie_in_several_places(copy: Path, tmp_path: Path) -> None:
    held = {name: w for name, w in tiny.tensors(copy).items() if ".self_attn." in name}
    moved = {name.replace("model.", f"part{name.split('.')[2]}."): w for name, w in held.items()}
    tiny.rewrite(copy, dict.fromkeys(held) | moved)
    places = r"such as 'part0.layers.0.\S+' \[96, 96\] and 'part1.layers.1.\S+' \[96, 96\]; one is expected"
    refused(copy, tmp_path / "out", f"several sets of attention tensors, {places}")


@pytest.mark.parametrize("method", ["mean", "first", "random"])
def test_one_nan_anywhere_in_a_projection_is_found(copy: Path, tmp_path: Path, method: str) -> None:
    spoilt = tiny.tensors(copy)[V1].clone()
    spoilt[-1, -1] = float("nan")
    tiny.rewrite(copy, {V1: spoilt})
    refused(copy, tmp_path / "out", f"tensor '{V1}' holds NaN", method=method)


def test_values_that_the_output_dtype_cannot_hold(copy: Path, tmp_path: Path) -> None:
    name = "model.norm.weight"
    tiny.rewrite(copy, {name: torch.full((96,), 70000.0)})
    refused(copy, tmp_path / "out", rf"tensor '{name}' has values that float16 cannot hold", dtype="float16")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantized \(gptq\)"),
        (
            {"model_type": "llava", "text_config": {"model_type": "llama", "quantization_config": {"bits": 4}}},
            r"quantized \(quantization_config\)",
        ),
        ({"model_type": "zamba", "num_hidden_layers": 2}, "no layers_block_type, and how ZambaForCausalLM computes"),
        ({"model_type": "deepseek_v3"}, "deepseek_v3.*MLA"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "mamba"}, "mamba"),
        ({"model_type": "jamba"}, "no layer of the model keeps keys and values"),  # only every 8th, from the 5th on
        ({"model_type": "bloom"}, "bloom"),
        ({"model_type": "doge"}, "doge.*separate"),
        ({"model_type": "lama"}, "'lama'.*did you mean llama"),
        ({"model_type": "my_model", "auto_map": {"AutoConfig": "x.Y"}}, "remote code"),
        ({"model_type": ...}, "no model_type"),
        ({"num_kv_heads": 3}, "contradicts itself: num_key_value_heads is 12, num_kv_heads is 3"),
        ({"num_attention_heads": 10}, "num_attention_heads 10 does not divide by num_key_value_heads 12"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers must be a whole number"),
        ({"num_hidden_layers": 3}, r"layers.2.self_attn.q_proj.weight' is missing, .* \[96, 96\]"),
        ({"hidden_size": 128}, r"contradict.*\[96, 96\], the config makes it \[96, 128\]"),
    ],
)
def test_models_that_cannot_be_converted(copy: Path, tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    edit_config(copy, **changes)
    refused(copy, tmp_path / "out", says)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("model.layers.0.mlp.up_proj.weight", torch.zeros(64, 96, dtype=torch.int8)),
        ("model.layers.0.mlp.up_proj.SCB", torch.zeros(64)),
        ("model.layers.0.self_attn.q_proj.qweight", torch.zeros(12, 96, dtype=torch.int32)),
        ("model.layers.0.mlp.up_proj.weight.absmax", torch.zeros(6, dtype=torch.uint8)),
        ("model.layers.0.mlp.up_proj.weight_scale_inv", torch.zeros(1, 1)),
    ],
)
def test_quantized_weights_are_known_by_their_tensors(
    copy: Path, tmp_path: Path, name: str, tensor: torch.Tensor
) -> None:
    tiny.rewrite(copy, {name: tensor})
    refused(copy, tmp_path / "out", f"'{name}' .* is of a quantized checkpoint; convert the unquantized one")


def test_float8_weights_are_quantized_weights(copy: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tiny.rewrite(copy, {name: tiny.tensors(copy)[name].to(torch.float8_e4m3fn)})
    refused(copy, tmp_path / "out", rf"tensor '{name}' \(F8_E4M3\) is of a quantized checkpoint")


def test_destinations_that_would_harm(copy: Path, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    refused(copy, taken, "exists; choose another destination or pass --overwrite")
    refused(copy, copy / "out", "inside one another")
    refused(copy, copy, "inside one another", overwrite=True)
    with pytest.raises(RequestError, match=r"cannot be written|the disk has"):
        convert_checkpoint(str(copy), Path("/proc/headpool/out"), kv_heads=4)


def test_a_disk_too_small_is_refused_before_the_first_byte(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headpool.destination.shutil.disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 1000))
    refused(copy, tmp_path / "out", r"needs 0\.00 GiB, the disk has 0\.00 GiB free")


def test_a_disk_that_fills_up_leaves_nothing(copy: Path, tmp_path: Path) -> None:
    """A real refusal by the kernel: no file of this process may grow past 100 kB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        refused(
            copy,
            tmp_path / "out",
            "the disk filled up while writing .*untouched",
            HeadpoolError,
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("function", ["pwrite", "fsync", "rename"])
def test_a_disk_that_fills_up_later_leaves_nothing(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, function, full)
    refused(copy, tmp_path / "out", "the disk filled up", HeadpoolError)


def test_a_source_that_shrinks_while_it_is_read(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = shards.write_headers

    def then_truncate(*arguments: Any) -> None:
        headers(*arguments)
        os.truncate(copy / "model.safetensors", 5000)

    monkeypatch.setattr(run, "write_headers", then_truncate)
    refused(copy, tmp_path / "out", "became shorter while it was read")


def test_a_result_that_does_not_fit_its_class_is_removed(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were the plan ever wrong, the check has to say so: here the config's change is withheld."""
    plan_conversion = run.plan_conversion

    def wrong(source: Any, **options: Any) -> Any:
        from dataclasses import replace

        return replace(plan_conversion(source, **options), config_text=source.config_text)

    monkeypatch.setattr(run, "plan_conversion", wrong)
    refused(copy, tmp_path / "out", r"does not fit its class.*k_proj\.weight' is \[32, 96\], .* \[96, 96\]")


@pytest.mark.parametrize(
    ("model_type", "suffix", "tensor", "message"),
    [
        ("gpt_oss", "sinks", None, r"sinks' is missing, the config makes it \[12\]"),
        ("qwen3", "k_norm.weight", None, r"k_norm.weight' is missing, the config makes it \[16\]"),
        ("llama", "k_proj.bias", torch.ones(192), r"k_proj.bias' is \[192\], the config makes none there"),
    ],
)
def test_attention_that_lacks_a_tensor_or_has_one_too_many_is_refused(
    tmp_path: Path, model_type: str, suffix: str, tensor: Any, message: str
) -> None:
    source = tmp_path / "source"
    registry.built(model_type).save_pretrained(source)
    tiny.rewrite(source, {f"model.layers.1.self_attn.{suffix}": tensor})
    refused(source, tmp_path / "out", f"'model.layers.1.self_attn.{message}")


def test_faults_that_the_source_has_are_inherited_with_a_warning(copy: Path, tmp_path: Path) -> None:
    tiny.rewrite(copy, {"stray.weight": torch.ones(3), "model.norm.weight": None})
    result = convert_checkpoint(str(copy), tmp_path / "out", kv_heads=4)
    assert "missing: model.norm.weight; unexpected: stray.weight" in result.warnings[0]
    assert "stray.weight" in tiny.tensors(tmp_path / "out")


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [("bloom", "no num_key_value_heads"), ("mamba", "state-space model"), ("gpt2", "--transcode")],
)
def test_a_model_that_no_weights_would_help_is_told_so_before_they_are_missed(
    model_type: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(RequestError, match=reason):
        convert_checkpoint(str(tmp_path / "source"), tmp_path / "out", kv_heads=1)
