"""What `headpool plan` says: options, weights, tensor-parallel sizes, and what it refuses."""

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import tiny
from rich.console import Console

from headpool import planning
from headpool.errors import RequestError

GIB = 2**30


def llama(**fields: Any) -> dict[str, Any]:
    return {
        "model_type": "llama", "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 8,
        "hidden_size": 64, "max_position_embeddings": 128,
    } | fields  # fmt: skip


def write(directory: Path, config: dict[str, Any]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_plan_of_the_quickstart_model() -> None:
    plan = planning.plan(tiny.QUICKSTART, context=512, batch=2, memory=16 * 2**20)
    assert (plan.layers, plan.heads, plan.kv_heads, plan.head_dim) == (4, 8, 8, 16)
    assert (plan.dtype, plan.parameters, plan.weight_bytes) == ("bfloat16", 1_115_264, 2 * 1_115_264)
    assert (plan.convertible, plan.reason) == (True, None)
    assert [option.kv_heads for option in plan.options] == [8, 4, 2, 1]
    assert [option.group_size for option in plan.options] == [1, 2, 4, 8]
    assert [option.saved for option in plan.options] == [0, 0.5, 0.75, 0.875]
    per_head_and_token = 2 * 4 * 16 * 2
    for option in plan.options:
        assert option.cache_bytes_per_token == per_head_and_token * option.kv_heads
        assert option.cache_bytes == per_head_and_token * option.kv_heads * 512 * 2
        gone = 4 * 2 * (8 - option.kv_heads) * 16 * 128  # layers, k and v, heads, head_dim, hidden
        assert option.parameters == 1_115_264 - gone
        assert option.weight_bytes == 2 * option.parameters
        one = per_head_and_token * option.kv_heads * 512
        assert option.sequences == (16 * 2**20 - option.weight_bytes) // one


def test_biases_count_among_what_pooling_removes(tmp_path: Path) -> None:
    tiny.checkpoint(tmp_path, "qwen2")
    plan = planning.plan(tmp_path)
    assert plan.parameters == sum(tensor.numel() for tensor in tiny.tensors(tmp_path).values())
    [option] = [option for option in plan.options if option.kv_heads == 4]
    assert option.parameters == plan.parameters - 2 * 2 * (12 - 4) * 8 * (96 + 1)


def test_fields_that_need_headers_are_null_without_weights(tmp_path: Path) -> None:
    plan = planning.plan(write(tmp_path / "m", llama(torch_dtype="float16")), memory=GIB)
    assert (plan.parameters, plan.weight_bytes, plan.context) == (None, None, 128)
    assert {(o.parameters, o.weight_bytes, o.sequences) for o in plan.options} == {(None, None, None)}
    assert plan.options[0].cache_bytes_per_token == 3 * 2 * 64 * 2


def test_weights_that_do_not_fit_leave_room_for_none() -> None:
    assert {option.sequences for option in planning.plan(tiny.QUICKSTART, memory=10**6).options} == {0}


def test_dtype_is_the_configs_else_the_weights_else_float32(tmp_path: Path) -> None:
    assert (
        planning.plan(write(tmp_path / "a", llama(dtype="float64"))).options[0].cache_bytes_per_token == 3 * 2 * 64 * 8
    )
    assert planning.plan(write(tmp_path / "b", llama())).dtype == "float32"
    shutil.copy(tiny.QUICKSTART / "model.safetensors", tmp_path / "model.safetensors")
    config = json.loads((tiny.QUICKSTART / "config.json").read_text())
    del config["torch_dtype"]
    assert planning.plan(write(tmp_path, config)).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "expected"),
    [
        (64, 8, {1: 8, 2: 4, 4: 2, 8: 1, 16: 1, 32: 1, 64: 1}),
        (64, 1, {1: 1, 2: 1, 4: 1, 8: 1, 16: 1, 32: 1, 64: 1}),
        (
            12,
            4,
            {1: 4, 2: 2, 4: 1, 12: 1},
        ),  # 3 and 6 divide the query heads, but neither divides 4 nor is divided by it
        (9, 3, {1: 3, 3: 1, 9: 1}),
    ],
)
def test_tensor_parallel_sizes_that_vllm_takes(
    tmp_path: Path, heads: int, kv_heads: int, expected: dict[int, int]
) -> None:
    config = llama(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=8, num_hidden_layers=5)
    first = planning.plan(write(tmp_path / "m", config), context=10, batch=3).options[0]
    assert {one.size: one.kv_heads_per_gpu for one in first.tensor_parallel} == expected
    for one in first.tensor_parallel:
        assert one.cache_bytes_per_gpu == 2 * 5 * expected[one.size] * 8 * 4 * 10 * 3


def test_group_sizes_that_kernels_are_not_tuned_for_are_noted(tmp_path: Path) -> None:
    plan = planning.plan(write(tmp_path / "m", llama(num_attention_heads=48, num_key_value_heads=48, head_dim=8)))
    noted = {option.group_size for option in plan.options if option.note}
    assert noted == {3, 6, 12, 16, 24, 48}


def test_windows_bound_the_saving(tmp_path: Path) -> None:
    config = {
        "model_type": "gemma2",
        "num_hidden_layers": 4,
        "sliding_window": 100,
        "max_position_embeddings": 1000,
    }
    plan = planning.plan(write(tmp_path / "m", config))
    assert (plan.sliding, plan.window) == (2, 100)
    assert plan.options[0].cache_bytes == 2 * 4 * 256 * 4 * (2 * 100 + 2 * 1000)
    assert plan.options[0].cache_bytes_per_token == 2 * 4 * 256 * 4 * 4


def shown_text(table: Any) -> str:
    console = Console(width=200, file=io.StringIO())
    console.print(table)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "doge"}, "dt_proj.weight"),
        (llama(quantization_config={"quant_method": "awq"}), "quantized (awq)"),
    ],
)
def test_models_that_do_not_convert_still_have_a_plan(tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    plan = planning.plan(write(tmp_path / "m", config))
    assert not plan.convertible
    assert reason in str(plan.reason)
    assert plan.options[-1].kv_heads == 1


def test_a_model_that_is_transcoded_first_says_how(tmp_path: Path) -> None:
    plan = planning.plan(write(tmp_path / "m", {"model_type": "gpt_neox"}))
    assert (plan.convertible, plan.transcode, plan.reason) == (True, True, None)
    assert planning.plan(write(tmp_path / "n", llama())).transcode is False
    quantized = {"model_type": "gpt_neox", "quantization_config": {"quant_method": "gptq"}}
    refused = planning.plan(write(tmp_path / "q", quantized))
    assert (refused.convertible, refused.transcode) == (False, False)
    shown = [shown_text(planning.plan_table(one)) for one in (plan, refused)]
    assert ["--transcode" in text for text in shown] == [True, False]
    assert ["does not convert" in text for text in shown] == [False, True]


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        ({"new_decoder_architecture": True, "num_kv_heads": 8}, True),
        ({"multi_query": False}, True),
        ({"multi_query": True}, False),
        ({"multi_query": False, "parallel_attn": False}, False),
    ],
)
def test_plan_tells_that_falcons_new_architecture_saves_no_cache(
    tmp_path: Path, changes: dict[str, Any], warned: bool
) -> None:
    config = {"model_type": "falcon", "num_attention_heads": 64, "hidden_size": 4096} | changes
    plan = planning.plan(write(tmp_path / "m", config))
    assert [("caches Falcon's keys and values for each query head" in one) for one in plan.warnings] == [True] * warned


@pytest.mark.parametrize(
    ("model_type", "options"), [("cohere", {"use_qk_norm": True}), ("stablelm", {"qk_layernorm": True}), ("olmo2", {})]
)
def test_norms_with_gains_for_every_key_head_shrink_with_them(
    tmp_path: Path, model_type: str, options: dict[str, Any]
) -> None:
    counts = {}
    for kv_heads in (4, 2, 1):
        model = tiny.model(model_type, num_attention_heads=4, num_key_value_heads=kv_heads, **options)
        counts[kv_heads] = sum(tensor.numel() for tensor in model.parameters())
    tiny.model(model_type, num_attention_heads=4, num_key_value_heads=4, **options).save_pretrained(tmp_path)
    assert {one.kv_heads: one.parameters for one in planning.plan(tmp_path).options} == counts


@pytest.mark.parametrize("model_type", ["deepseek_v3", "mamba", "gemma3", "t5", "no-such"])
def test_models_whose_layers_cannot_be_told_have_none(tmp_path: Path, model_type: str) -> None:
    with pytest.raises(RequestError, match=model_type):
        planning.plan(write(tmp_path / "m", {"model_type": model_type}))


def test_weights_that_contradict_the_config_are_refused(tmp_path: Path) -> None:
    shutil.copy(tiny.QUICKSTART / "model.safetensors", tmp_path)
    config = json.loads((tiny.QUICKSTART / "config.json").read_text()) | {"num_key_value_heads": 4}
    with pytest.raises(RequestError, match=r"k_proj.weight' is \[128, 128\], the config gives it 64 rows"):
        planning.plan(write(tmp_path, config))


def test_bad_requests_and_directories(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no such directory"):
        planning.plan(tmp_path / "missing")
    with pytest.raises(RequestError, match=r"no config\.json"):
        planning.plan(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(RequestError, match=r"config\.json: not valid JSON"):
        planning.plan(tmp_path)
    with pytest.raises(RequestError, match="context 0 and batch 1 must be 1 or more"):
        planning.plan(tiny.QUICKSTART, context=0)
    model = write(tmp_path, llama(max_position_embeddings=None))
    with pytest.raises(RequestError, match="no max_position_embeddings; give a context"):
        planning.plan(model)


def test_a_hub_id_without_a_network_is_one_clear_line() -> None:
    with pytest.raises(RequestError, match=r"^no such directory, and the hub cannot be reached: some-org/some-model$"):
        planning.plan("some-org/some-model")


def test_a_hub_id_is_planned_from_its_config_and_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, llama(torch_dtype="bfloat16"))
    info = {
        f"model.layers.{i}.self_attn.{p}_proj.weight": SimpleNamespace(dtype="BF16", shape=[64, 64])
        for i in range(3)
        for p in "qkvo"
    }
    asked = []

    def download(model: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((model, revision, allow_patterns))
        return str(tmp_path)

    metadata = SimpleNamespace(files_metadata={"model.safetensors": SimpleNamespace(tensors=info)})
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", lambda model, revision: metadata)
    plan = planning.plan("org/name", revision="abc")
    assert asked == [("org/name", "abc", ["config.json"])]
    assert plan.parameters == 12 * 64 * 64
    assert plan.options[-1].parameters == 12 * 64 * 64 - 3 * 2 * 7 * 8 * 64


def test_plan_reads_no_weights_imports_no_torch_and_takes_under_a_second_of_a_core() -> None:
    code = f"""
import sys, time
start = time.process_time()
import headpool.geometry
headpool.geometry.plan({str(tiny.QUICKSTART)!r})
print(time.process_time() - start, sorted({{"torch", "transformers", "numpy"}} & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, loaded = result.stdout.split(maxsplit=1)
    assert loaded.strip() == "[]"
    assert float(seconds) < 1


def test_plan_as_json_and_as_a_table(tmp_path: Path) -> None:
    plan = planning.plan(write(tmp_path / "m", llama(num_attention_heads=12, num_key_value_heads=12, hidden_size=96)))
    text = json.loads(json.dumps(plan.to_dict()))
    assert {"layers", "heads", "kv_heads", "head_dim", "options"} <= text.keys()
    assert {"kv_heads", "group_size", "cache_bytes_per_token", "cache_bytes", "saved"} <= text["options"][0].keys()
    assert [option["kv_heads"] for option in text["options"]] == [12, 6, 4, 3, 2, 1]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(planning.plan_table(plan))
    shown = console.export_text()
    assert "llama: 3 layers, 12 query heads, 12 K/V heads of 8, float32" in shown
    assert "cache: 1 x 128 tokens" in shown
    assert "12 *" in shown
    assert "tuned for group sizes 1, 2, 4, 8" in shown
    refused = planning.plan(write(tmp_path / "m", {"model_type": "doge"}))
    console.print(planning.plan_table(refused))
    assert "does not convert this model" in console.export_text()
