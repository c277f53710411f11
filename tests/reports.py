"""Reports as `headpool eval` writes them, of made-up figures: from a single model to everything filled in."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

CONTEXTS = (512, 2048, 8192, 32768)
HOSTILE = "<script>alert(\"1\")</script> & 'x' $\\frac{1}{2}$ {{ 7*7 }} {% raw %} 模型 😀 _underscore"
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "It was the best of times, it was the worst of times, it was the age of",
)


def model(
    path: str,
    *,
    kv_heads: int = 32,
    perplexity: float = 5.47,
    role: str = "model",
    label: str | None = "converted and uptrained",
    measured: bool = False,
    baseline: dict[str, Any] | None = None,
    window: int | None = None,
) -> dict[str, Any]:
    """A model of 32 layers with heads of 128 in float16; with `measured`, everything that eval can measure."""
    per_token = 2 * 32 * kv_heads * 128 * 2
    tokens = 341_469
    one: dict[str, Any] = {
        "role": role,
        "path": path,
        "revision": None,
        "label": label,
        "uptrained": label == "converted and uptrained",
        "kv_heads": kv_heads,
        "perplexity": perplexity,
        "nats": math.log(perplexity) * tokens,
        "tokens": tokens,
        "bits_per_byte": math.log2(perplexity) * tokens / 1_290_590,
        "bos": True,
        "dtype": "float32",
        "cache_bytes_per_token": {
            "formula": per_token * 2,
            "allocated": float(per_token * 2),
            "tokens": 2048,
            "checkpoint_dtype": "float16",
            "formula_in_checkpoint_dtype": per_token,
            "explanation": None,
            "flagged": False,
        },
        "cache_curve": [
            {"tokens": 2**n, "bytes": per_token * min(2**n, window or 2**n)} for n in range(18 if measured else 13)
        ],
        "comparison": None,
        "decode": _decode(per_token) if measured else [],
        "positions": _positions(perplexity) if measured else [],
        "tasks": _tasks(perplexity) if measured else [],
        "samples": _samples(path, label) if measured else [],
        "conversion": None if label is None else {"method": "aligned", "layers": _layers() if measured else []},
    }
    if baseline is not None:
        one["comparison"] = {
            "perplexity_ratio": perplexity / baseline["perplexity"],
            "bits_per_byte_ratio": one["bits_per_byte"] / baseline["bits_per_byte"],
            "cache_ratio": per_token / baseline["cache_bytes_per_token"]["formula_in_checkpoint_dtype"],
            "decode_speedup": 1.8 if measured else None,
        }
        for mine, other in zip(one["decode"], baseline["decode"], strict=True):
            mine["speedup"] = other["seconds_per_token"] / mine["seconds_per_token"]
    return one


def _decode(per_token: int) -> list[dict[str, Any]]:
    rows = []
    for batch in (1, 8):
        for context in CONTEXTS:
            read = 13.5e9 + batch * context * per_token
            seconds = read / 2.9e12 * 1.1
            rows.append(
                {
                    "context": context,
                    "batch": batch,
                    "steps": 32,
                    "repeats": 5,
                    "prefill_seconds": context * batch * 13.5e9 / 4e14,
                    "prefill_spread": [context * batch * 13.4e9 / 4e14, context * batch * 13.9e9 / 4e14],
                    "seconds_per_token": seconds,
                    "seconds_per_token_spread": [seconds * 0.97, seconds * 1.12],
                    "cache_bytes": batch * context * per_token,
                    "bytes_per_token": read,
                    "bandwidth": read / seconds,
                    "kernel": {
                        "name": "sdpa",
                        "grouped": per_token < 500_000,
                        "explanation": "enable_gqa reads grouped K/V as they are",
                    },
                    "preallocated": True,
                    "speedup": None,
                }
            )
    return rows


def _positions(perplexity: float) -> list[dict[str, Any]]:
    edges = [0, 16, 64, 128, 256, 512, 1024, 1536, 2048]
    rows = []
    for first, end in itertools.pairwise(edges):
        value = perplexity * (0.93 + 3.2 / math.sqrt(first + 4))
        rows.append(
            {
                "first": first,
                "last": end - 1,
                "tokens": 166 * (end - first),
                "nats": math.log(value) * 166 * (end - first),
                "perplexity": value,
            }
        )
    return rows


def _tasks(perplexity: float) -> list[dict[str, Any]]:
    return [
        {"task": "hellaswag", "metric": "acc_norm", "value": 0.7, "stderr": 0.0043, "samples": 10042},
        {"task": "piqa", "metric": "acc", "value": 0.5 + 1.5 / perplexity, "stderr": 0.0095, "samples": 1838},
        {"task": "wikitext", "metric": "word_perplexity", "value": perplexity * 1.6, "stderr": None, "samples": 62},
    ]  # fmt: skip


def _samples(path: str, label: str | None) -> list[dict[str, Any]]:
    text = {
        None: " Paris, a city of some two million people on the Seine. It has been the seat of government since 987,"
        " with interruptions.",
        "converted and uptrained": " Paris, the largest city of the country, on the Seine.\n\nIts population is about"
        " two million.",
    }.get(label, " the the of of France is the the a the of is is France" * 3)
    return [{"prompt": prompt, "text": f"{text}"} for prompt in PROMPTS]


def _layers() -> list[dict[str, Any]]:
    return [
        {
            "layer": index,
            "source_kv_heads": 32,
            "kv_heads": 8,
            "partition": [[4 * j, 4 * j + 1, 4 * j + 2, 4 * j + 3] for j in range(8)],
            "lost_energy": {"keys": 0.31 + 0.1 * math.sin(index), "values": 0.45 + 0.08 * math.cos(index * 1.7)},
            "block_error": {
                "closed": 0.3 + 0.1 * math.sin(index * 1.3),
                "refit": 0.12 + 0.05 * math.sin(index * 1.3),
                "heal": 0.05 + 0.02 * math.cos(index),
            },
        }
        for index in range(32)
    ]


def report(models: Sequence[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    compared = [one["comparison"] for one in models if one["role"] == "model"]
    with_baseline = any(one["role"] == "baseline" for one in models)
    return {
        "models": list(models),
        "comparison": compared[0] if with_baseline and len(compared) == 1 else None,
        "data": {
            "name": "wikitext-2-raw-v1:test",
            "sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
            "texts": 62,
            "bytes": 1_290_590,
        },
        "settings": {"window": 2048, "stride": 2048, "batch_size": 8, "dtype": "float32", "device": "cpu"},
        "notes": [],
        "versions": {"headpool": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0"},
        "recipe": None,
        **changes,
    }


def single() -> dict[str, Any]:
    """One model, without a baseline."""
    return report([model("/somewhere/private/Llama-2-7b-hf", label=None)])


def pair() -> dict[str, Any]:
    """An original and a conversion that was not uptrained."""
    original = model("meta-llama/Llama-2-7b-hf", role="baseline", label=None)
    pooled = model(
        "/somewhere/private/llama-2-7b-gqa8", kv_heads=8, perplexity=1187.3, label="converted, not yet uptrained",
        baseline=original,
    )  # fmt: skip
    return report(
        [original, pooled],
        notes=["/somewhere/private/llama-2-7b-gqa8: no BOS token, so the first token of each text is not scored"],
    )


def run() -> dict[str, Any]:
    """What `headpool run` writes: the original, converted, uptrained, everything measured."""
    original = model("meta-llama/Llama-2-7b-hf", role="baseline", label=None, measured=True)
    options: dict[str, Any] = {"kv_heads": 8, "measured": True, "baseline": original}
    models = [
        original,
        model("/srv/out/converted", perplexity=9.81, label="converted, not yet uptrained", **options),
        model("/srv/out/uptrained", perplexity=5.71, **options),
    ]
    steps = 400
    metrics = [
        {
            "step": step,
            "tokens": step * 524_288,
            "loss": 1.74 + 0.6 * math.exp(-step / 60) + 0.03 * math.sin(step * 12.9898),
            "learning_rate": 2e-5 * min(step / 20, 0.5 + 0.5 * math.cos(math.pi * step / steps)),
            "validation_perplexity": 5.71 + 4.1 * math.exp(-step / 70) if step % 50 == 0 else None,
        }
        for step in range(0, steps + 1, 5)
    ]
    recipe = """# headpool run llama.yaml
model: meta-llama/Llama-2-7b-hf
convert: {kv_heads: 8, method: aligned, calibration: /srv/private/c4.jsonl}
eval: {data: wikitext, window: 2048}
"""
    training = {"metrics": metrics, "original_perplexity": 5.47, "tokens": steps * 524_288, "steps": steps}
    return report(
        models,
        recipe=recipe,
        training=training,
        notes=["GQA does not speed up the prefill: it saves cache and what decoding reads"],
    )


def several() -> dict[str, Any]:
    """An original and five models, one with sliding layers, everything measured, names as hostile as they come."""
    original = model("/a/mha", role="baseline", label=None, measured=True)
    rows: list[tuple[str, int, float, str, int | None]] = [
        ("/a/b/uptrained-16", 16, 5.52, "converted and uptrained", None),
        (f"/a/b/{HOSTILE}", 8, 5.71, "converted and uptrained", None),
        ("/a/c/pooled", 8, 2210.4, "converted, not yet uptrained", None),
        ("/a/d/pooled", 4, 8123.9, "converted, not yet uptrained", None),
        ("mqa-with-a-very-long-name-that-does-not-fit-anywhere-" + "x" * 60, 1, 6.9, "converted and uptrained", 4096),
    ]
    models = [
        model(path, kv_heads=heads, perplexity=value, label=label, measured=True, baseline=original, window=window)
        for path, heads, value, label, window in rows
    ]
    for one in [original, *models]:
        one["samples"] = [{"prompt": HOSTILE, "text": HOSTILE + "\n" + "unbroken" * 40}, *one["samples"]]
    return report([original, *models], recipe=f"# {HOSTILE}\nmodel: x\n", notes=[HOSTILE])
