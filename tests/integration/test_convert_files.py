"""Files of a conversion: shards, dtypes, pickles, licences; what is replaced, and how much memory it takes."""

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from pooling import by_head, bytes_of, projections

from headpool import reference
from headpool.convert.run import Conversion, convert_checkpoint
from headpool.errors import RequestError

pytestmark = pytest.mark.usefixtures("quick_check")

KEPT = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "LICENSE", "chat_template.jinja")


def sharded(folder: Path, **changes: Any) -> Path:
    made = tiny.checkpoint(folder, "llama", max_shard_size="100KB", **changes)
    assert len(list(made.glob("*.safetensors"))) > 2
    return made


def test_shards_stay_as_they_were_cut(tmp_path: Path) -> None:
    source = sharded(tmp_path / "source")
    convert_checkpoint(str(source), tmp_path / "out", kv_heads=4)
    before = json.loads((source / "model.safetensors.index.json").read_text())
    after = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert after["weight_map"] == before["weight_map"]
    held = tiny.tensors(tmp_path / "out")
    assert after["metadata"]["total_size"] == sum(t.nbytes for t in held.values()) < before["metadata"]["total_size"]
    tiny.load(tmp_path / "out")


def test_max_shard_size_cuts_anew(tmp_path: Path) -> None:
    source = sharded(tmp_path / "source")
    convert_checkpoint(str(source), tmp_path / "one", kv_heads=4, max_shard_size=1 << 30)
    assert [path.name for path in (tmp_path / "one").glob("*.safetensors*")] == ["model.safetensors"]
    convert_checkpoint(str(tmp_path / "one"), tmp_path / "many", kv_heads=2, max_shard_size=130_000)
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2
    largest = max(tensor.nbytes for tensor in tiny.tensors(tmp_path / "many").values())
    for file in files:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
        assert file.stat().st_size - 8 - length <= max(130_000, largest)
    assert set(tiny.tensors(tmp_path / "many")) == set(tiny.tensors(source))
    tiny.load(tmp_path / "many")


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
def test_dtype_casts_every_float_and_the_config_says_so(key: str, tmp_path: Path) -> None:
    source = tiny.checkpoint(tmp_path / "source", "qwen3")
    config = json.loads((source / "config.json").read_text())
    config = {key if name in ("dtype", "torch_dtype") else name: value for name, value in config.items()}
    (source / "config.json").write_text(json.dumps(config))
    convert_checkpoint(str(source), tmp_path / "out", kv_heads=4, dtype="bfloat16")
    after = tiny.tensors(tmp_path / "out")
    for name, tensor in tiny.tensors(source).items():
        expected = tensor.double()
        if name in projections("qwen3"):
            expected = torch.from_numpy(reference.mean_heads(by_head(tensor, 12), 4)).reshape(after[name].shape)
        assert after[name].dtype == torch.bfloat16
        # Half a unit in the last of 8 bits: nearest, whatever the way there.
        assert ((after[name].double() - expected).abs() <= expected.abs() * 2.0**-8).all(), name
        assert torch.equal(after[name], expected.float().bfloat16()) or name in projections("qwen3")
    patched = json.loads((tmp_path / "out" / "config.json").read_text())
    assert patched == {**config, key: "bfloat16", "num_key_value_heads": 4}


def test_pickled_sources_give_the_same_tensors(tmp_path: Path) -> None:
    source = tiny.checkpoint(tmp_path / "source", "llama", tie_word_embeddings=True)
    held = tiny.tensors(source)
    pickled = shutil.copytree(source, tmp_path / "pickled", ignore=shutil.ignore_patterns("*.safetensors"))
    aliased = {**held, "lm_head.weight": held["model.embed_tokens.weight"]}
    torch.save(aliased, pickled / "pytorch_model.bin")
    halves = shutil.copytree(source, tmp_path / "halves", ignore=shutil.ignore_patterns("*.safetensors"))
    names = sorted(held)
    files = {"pytorch_model-00001-of-00002.bin": names[:9], "pytorch_model-00002-of-00002.bin": names[9:]}
    for file, part in files.items():
        torch.save({name: held[name] for name in part}, halves / file)
    weight_map = {name: file for file, part in files.items() for name in part}
    (halves / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for folder in (source, pickled, halves):
        convert_checkpoint(str(folder), tmp_path / f"{folder.name}-out", kv_heads=4)
    expected = {name: bytes_of(tensor) for name, tensor in tiny.tensors(tmp_path / "source-out").items()}
    assert "lm_head.weight" not in expected
    for folder in (pickled, halves):
        out = tmp_path / f"{folder.name}-out"
        assert not list(out.glob("*.bin*"))
        assert {name: bytes_of(tensor) for name, tensor in tiny.tensors(out).items()} == expected


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("tied", [True, False])
def test_aliases_in_pickles_are_written_as_the_class_stores_them(order: int, tied: bool, tmp_path: Path) -> None:
    source = tiny.checkpoint(tmp_path / "source", "llama", tie_word_embeddings=tied)
    held = {name: tensor for name, tensor in tiny.tensors(source).items() if name != "lm_head.weight"}
    (source / "model.safetensors").unlink()
    aliased = {**held, "lm_head.weight": held["model.embed_tokens.weight"]}
    torch.save(dict(list(aliased.items())[::order]), source / "pytorch_model.bin")
    result = convert_checkpoint(str(source), tmp_path / "out", kv_heads=4)
    assert result.warnings == ()
    assert ("lm_head.weight" in tiny.tensors(tmp_path / "out")) == (not tied)
    assert "model.embed_tokens.weight" in tiny.tensors(tmp_path / "out")


def test_float64_and_mixed_dtypes_keep_theirs(tmp_path: Path) -> None:
    source = tiny.checkpoint(tmp_path / "source", "qwen2", dtype=torch.float64)
    bias = "model.layers.0.self_attn.k_proj.bias"
    tiny.rewrite(source, {bias: tiny.tensors(source)[bias].float()})
    convert_checkpoint(str(source), tmp_path / "out", kv_heads=4)
    before, after = tiny.tensors(source), tiny.tensors(tmp_path / "out")
    assert {name: tensor.dtype for name, tensor in after.items()} == {n: t.dtype for n, t in before.items()}
    assert after[bias].dtype == torch.float32
    mean = reference.mean_heads(by_head(before[bias], 12), 4)
    assert torch.equal(after[bias], torch.from_numpy(mean).float().flatten())


def test_licences_in_any_case_and_the_first_card_survive_a_second_conversion(tmp_path: Path) -> None:
    source = tiny.checkpoint(tmp_path / "source", "llama")
    for name in ("License.md", "license.txt", "Notice.txt", "LICENCE"):
        (source / name).write_text(name)
    (source / "README.md").write_text("the card")
    convert_checkpoint(str(source), tmp_path / "4", kv_heads=4)
    convert_checkpoint(str(tmp_path / "4"), tmp_path / "2", kv_heads=2)
    for name in ("License.md", "license.txt", "Notice.txt", "LICENCE"):
        assert (tmp_path / "2" / name).read_text() == name
    assert (tmp_path / "2" / "SOURCE_README.md").read_text() == "the card"


def test_more_shards_than_files_may_be_open(tmp_path: Path) -> None:
    source = tiny.checkpoint(tmp_path / "source", "llama", max_shard_size="40KB")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 12, hard))
    try:
        convert_checkpoint(str(source), tmp_path / "out", kv_heads=4)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 12


MEASURE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from crash import NoCheck
from headpool.convert import run
run.Check = NoCheck
print(run.convert_checkpoint(sys.argv[2], Path(sys.argv[3]), kv_heads=4).peak_rss_bytes)
"""


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """The operating system's peak for a fresh process, over checkpoints of equal width with 4 and 24 layers."""
    peaks = {}
    for layers in (4, 24):
        source = tiny.checkpoint(
            tmp_path / str(layers), "llama", num_hidden_layers=layers, hidden_size=768, head_dim=64,
            intermediate_size=2048, max_shard_size="100MB", dtype=torch.bfloat16,
        )  # fmt: skip
        command = [
            sys.executable,
            "-c",
            MEASURE,
            str(tiny.ROOT / "tests"),
            str(source),
            str(tmp_path / f"{layers}-out"),
        ]
        peaks[layers] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    size = sum(file.stat().st_size for file in (tmp_path / "24").glob("*.safetensors"))
    assert size > 300e6
    assert peaks[24] < peaks[4] * 1.1


def test_dry_run_writes_nothing(sources: dict[str, Path], tmp_path: Path) -> None:
    result = convert_checkpoint(str(sources["llama"]), tmp_path / "out", kv_heads=4, dry_run=True)
    assert list(tmp_path.iterdir()) == []
    written = convert_checkpoint(str(sources["llama"]), tmp_path / "out", kv_heads=4)
    assert result.output_bytes == written.output_bytes == (tmp_path / "out" / "model.safetensors").stat().st_size
    assert isinstance(result, Conversion)


def test_a_source_may_hold_nothing_but_config_and_weights(sources: dict[str, Path], tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(sources["gemma"] / name, bare / name)
    convert_checkpoint(str(bare), tmp_path / "out", kv_heads=4)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "model.safetensors",
        "headpool.json",
        "README.md",
    }


def test_overwrite_replaces_whole(sources: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("old")
    with pytest.raises(RequestError, match="holds no checkpoint, and --overwrite replaces nothing else"):
        convert_checkpoint(str(sources["llama"]), out, kv_heads=4, overwrite=True)
    (out / "config.json").write_text("{}")
    convert_checkpoint(str(sources["llama"]), out, kv_heads=4, overwrite=True)
    assert not (out / "old").exists()
    assert (out / "config.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
