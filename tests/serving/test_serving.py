"""What was converted, in real servers on a CPU: the tokens and log-probabilities of transformers.

`make serving` makes the servers' environments and runs this.
"""

import importlib.util
import json
import os
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tiny
import torch

from headpool.convert.run import convert_checkpoint

HERE = Path(__file__).resolve().parent
HEADS, KV, TOKENS = 12, 4, 12
SMALL: dict[str, Any] = {
    "hidden_size": HEADS * 32, "head_dim": 32, "intermediate_size": 256, "vocab_size": 2048,
    "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
"""12 query heads, 4 K/V heads of 32 dimensions: vLLM's CPU kernels refuse fewer."""
PROMPTS = [[5, 100, 7, 1999, 42], [3], list(range(20, 50))]
Answers = list[list[list[float]]]

pytestmark = pytest.mark.serving


def converted(folder: Path, family: str) -> Path:
    """A random model, its weights large enough that it has opinions, at 4 K/V heads."""
    changes = {"num_key_value_heads": HEADS, **SMALL} | ({"head_dim": None} if family == "phi" else {})
    source = tiny.checkpoint(folder / "source", family, tokenizer=True, **changes)
    larger = {name: tensor * 4 for name, tensor in tiny.tensors(source).items() if name.endswith("proj.weight")}
    tiny.rewrite(source, larger)
    convert_checkpoint(str(source), folder / "out", kv_heads=KV)
    assert json.loads((folder / "out" / "config.json").read_text())["num_key_value_heads"] == KV
    return folder / "out"


@torch.no_grad()
def expected(checkpoint: Path) -> Answers:
    """Greedily, without a cache, in float64."""
    model = tiny.load(checkpoint)
    answers: Answers = []
    for prompt in PROMPTS:
        ids, answer = list(prompt), []
        for _ in range(TOKENS):
            logits = model(torch.tensor([ids])).logits[0, -1]
            token = int(logits.argmax())
            answer.append([token, float(torch.log_softmax(logits, -1)[token])])
            ids.append(token)
        answers.append(answer)
    return answers


def served(server: str, *arguments: str) -> Answers:
    """By the server whose Python the environment variable names."""
    python = os.environ[f"HEADPOOL_{server.upper()}_PYTHON"]
    done = subprocess.run(
        [python, str(HERE / f"in_{server}.py"), *arguments, str(TOKENS)],
        input=json.dumps(PROMPTS), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    answers: Answers = json.loads(done.stdout)["answers"]
    return answers


def check(found: Answers, wanted: Answers, tolerance: float) -> None:
    assert [[token for token, _ in one] for one in found] == [[token for token, _ in one] for one in wanted]
    levels = np.array([[level for _, level in one] for one in wanted])
    np.testing.assert_allclose([[level for _, level in one] for one in found], levels, rtol=0, atol=tolerance)
    assert len({token for one in wanted for token, _ in one}) > 5, "a model of one word tells little"
    assert levels.max() > -5, "a model without opinions tells little"


@pytest.mark.parametrize(("family", "implementation"), [
    ("llama", "auto"), ("qwen2", "auto"), ("phi", "transformers"),
])  # fmt: skip
def test_vllm_computes_what_transformers_does(tmp_path: Path, family: str, implementation: str) -> None:
    checkpoint = converted(tmp_path, family)
    check(served("vllm", str(checkpoint), implementation), expected(checkpoint), 1e-3)


@pytest.fixture(scope="module")
def gguf_file() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gguf_file", HERE / "gguf_file.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_llama_cpp_computes_what_transformers_does(tmp_path: Path, family: str, gguf_file: ModuleType) -> None:
    checkpoint = converted(tmp_path, family)
    gguf_file.write(checkpoint, tmp_path / "model.gguf")
    check(served("llama_cpp", str(tmp_path / "model.gguf")), expected(checkpoint), 1e-3)
