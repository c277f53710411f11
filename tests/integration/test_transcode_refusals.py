"""What `--transcode` refuses, and what it leaves behind when it fails: nothing."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transcoded
import transformers
from transcoded import KINDS

from headpool.convert.run import convert_checkpoint
from headpool.convert.transcode import find
from headpool.convert.transcode.find import TRANSCODINGS
from headpool.errors import RequestError

pytestmark = pytest.mark.usefixtures("quick_check")


def convert(source: Path, out: Path, kv_heads: int) -> None:
    convert_checkpoint(str(source), out, kv_heads=kv_heads, transcode=True)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("opt", {"do_layer_norm_before": False}, "norms come after each branch"),
        ("opt", {"word_embed_proj_dim": 48}, "projected to the hidden size"),
        ("opt", {"_remove_final_layer_norm": True}, "no norm at the end"),
        ("gpt2", {"add_cross_attention": True}, "attends to an encoder"),
        ("gptj", {"rotary_dim": None}, "rotary_dim is no number"),
        ("codegen", {"n_head": 6}, "four parts"),
        ("pythia", {"quantization_config": {"quant_method": "gptq"}}, r"quantized \(gptq\)"),
        ("pythia", {"hidden_size": 48}, r"embed_in.weight' is \[300, 96\], the config makes it \[300, 48\]"),
        ("pythia", {"num_hidden_layers": 1}, "'gpt_neox.layers.1.attention.dense.bias' is not known in gpt_neox"),
        ("pythia", {"num_hidden_layers": 3}, r"'gpt_neox.layers.2.\S+' is missing from the weights"),
        ("pythia", {"attention_bias": False}, "'gpt_neox.layers.0.attention.dense.bias' is not known in gpt_neox"),
        ("pythia", {"hidden_size": None}, "hidden_size must be a whole number of 1 or more, found None"),
        ("pythia", {"vocab_size": 0}, "vocab_size must be a whole number of 1 or more, found 0"),
        ("pythia", {"num_attention_heads": 7}, "hidden_size 96 does not divide by num_attention_heads 7"),
    ],
)
def test_what_is_refused(tmp_path: Path, name: str, changes: dict[str, Any], reason: str) -> None:
    source = transcoded.saved(tmp_path / "source", transcoded.model(name, torch.float32))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(RequestError, match=reason) as error:
        convert(source, tmp_path / "out", 1)
    assert error.value.exit_code == 2
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


@pytest.mark.parametrize(
    ("tensor", "change", "reason"),
    [
        (
            "gpt_neox.layers.1.mlp.dense_h_to_4h.weight",
            lambda w: w[:-1],
            r"is \[79, 96\], the config makes it \[80, 96\]",
        ),
        ("gpt_neox.layers.1.attention.dense.weight", lambda w: w * torch.nan, "holds NaN or infinity"),
        ("gpt_neox.layers.0.input_layernorm.weight", lambda w: w.to(torch.int8), "is I8: a quantized one"),
        ("gpt_neox.layers.0.input_layernorm.weight", lambda w: None, "is missing from the weights"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, tensor: str, change: Any, reason: str) -> None:
    source = transcoded.saved(tmp_path / "source", transcoded.model("pythia", torch.float32))
    tiny.rewrite(source, {tensor: change(tiny.tensors(source)[tensor])})
    with pytest.raises(RequestError, match=f"{tensor}' {reason}"):
        convert(source, tmp_path / "out", 4)
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_without_transcode_the_refusal_says_what_would_do(tmp_path: Path) -> None:
    source = transcoded.saved(tmp_path / "source", transcoded.model("pythia", torch.float32))
    with pytest.raises(RequestError, match="PhiForCausalLM, which computes the same function, can: --transcode"):
        convert_checkpoint(str(source), tmp_path / "out", kv_heads=4)
    with pytest.raises(RequestError, match="layer 0 has 12 K/V heads, which do not divide into 5"):
        convert(source, tmp_path / "out", 5)
    gpt2 = transcoded.saved(tmp_path / "gpt2", transcoded.model("gpt2", torch.float32))
    with pytest.raises(RequestError, match="as many K/V heads as query heads, or one"):
        convert(gpt2, tmp_path / "out", 4)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "gpt2"}


KILLED = """
import os, signal, sys
from pathlib import Path
from headpool.convert import run
from headpool.convert.transcode import write

at, seen, evaluated = int(sys.argv[3]), 0, write._Reader.evaluated

def dying(self, target):
    global seen
    seen += 1
    if seen == at:
        os.kill(os.getpid(), signal.SIGKILL)
    return evaluated(self, target)

write._Reader.evaluated = dying
run.convert_checkpoint(sys.argv[1], Path(sys.argv[2]), kv_heads=4, transcode=True)
"""


def test_killed_in_the_middle_it_leaves_nothing_that_loads(tmp_path: Path) -> None:
    source = transcoded.saved(tmp_path / "source", transcoded.model("pythia", torch.float32))
    command = [sys.executable, "-c", KILLED, str(source), str(tmp_path / "out"), "17"]
    assert subprocess.run(command, check=False).returncode == -9
    assert {path.name for path in tmp_path.iterdir()} == {"source", ".out.transcoded"}
    assert {path.name for path in (tmp_path / ".out.transcoded").iterdir()} == {"lock", "model.safetensors"}
    convert(source, tmp_path / "out", 4)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = transcoded.saved(tmp_path / "source", transcoded.model("pythia", torch.float32))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("headpool.convert.transcode.write._bytes", full)
    with pytest.raises(Exception, match="the disk filled up") as error:
        convert(source, tmp_path / "out", 4)
    assert getattr(error.value, "exit_code", None) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_finding_needs_no_torch() -> None:
    script = (
        "import sys; from headpool.convert.transcode import find; "
        "found = find({'model_type': 'gpt_neox'}); assert found.host == 'phi'; "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"model_type": "gpt_neox"}, "phi"),
        ({"model_type": "gpt_neox", "use_parallel_residual": False, "rotary_pct": 1.0}, "starcoder2"),
        ({"model_type": "gpt_neox", "use_parallel_residual": False}, "nemotron"),
        ({"model_type": "gptj"}, "phi"),
        ({"model_type": "codegen"}, "phi"),
        ({"model_type": "gpt2"}, "gpt_bigcode"),
        ({"model_type": "opt"}, "gpt_bigcode"),
        ({"model_type": "opt", "do_layer_norm_before": False}, "norms come after"),
        ({"model_type": "bloom"}, "no stock class is known"),
        ({}, "no stock class is known"),
    ],
)
def test_what_is_found_for_a_config(config: dict[str, Any], found: str) -> None:
    result = find(config)
    if isinstance(result, str):
        assert found in result
    else:
        assert result.host == found


@pytest.mark.parametrize("transcoding", TRANSCODINGS, ids=lambda one: f"{one.source} to {one.host}")
def test_defaults_and_fields_are_those_of_the_classes(transcoding: Any) -> None:
    source = transformers.AutoConfig.for_model(transcoding.source)
    for field, default in transcoding.defaults.items():
        own = {"word_embed_proj_dim": 768}.get(field, default)  # the class fills it in
        assert getattr(source, field, None) == own, field
    made = transformers.AutoConfig.for_model(transcoding.host)
    legacy = {"rope_theta", "partial_rotary_factor", "rope_scaling"}
    assert all(hasattr(made, field) for field in set(transcoding.config) - legacy)
    assert getattr(transformers, transcoding.host_class).config_class is type(made)
    assert {kind[:2] for kind in KINDS.values()} >= {(transcoding.source, transcoding.host)}
