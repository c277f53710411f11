"""What an evaluation found, as report.json and as a table.

report.json is one object. Fields may be added; the ones here keep their names and meanings:

    models[]    role ("baseline" or "model"), path, revision, label (None for a checkpoint that headpool did not make,
                else "converted, not yet uptrained" or "converted and uptrained"), uptrained, kv_heads (a number, or a
                list where layers differ), perplexity, nats, tokens, bits_per_byte, bos, dtype
      cache_bytes_per_token  formula, allocated, tokens, checkpoint_dtype, formula_in_checkpoint_dtype, explanation,
                             flagged
      cache_curve[]  tokens (powers of two up to the model's positions or 131072), bytes (of one sequence's cache, by the
                  formula, in the checkpoint's dtype; sliding layers hold their window)
      comparison  None for the baseline and where there is none; else this model's figure divided by the baseline's:
                  perplexity_ratio (None where tokens differ), bits_per_byte_ratio, cache_ratio, and the baseline's
                  seconds divided by this model's: decode_speedup (geometric mean over decode[]; None without it)
      decode[]    context, batch, steps, repeats, prefill_seconds, prefill_spread [low, high], seconds_per_token (of
                  one decode step, which gives each sequence a token), seconds_per_token_spread [low, high],
                  cache_bytes, bytes_per_token (read by one decode step: weights and cache), bandwidth (bytes per
                  second that this means), kernel {name, grouped, explanation}, preallocated, speedup (the baseline's
                  seconds_per_token divided by this one's, at the same context and batch; None for the baseline)
      positions[] first, last (positions in the window, 0-based, both included), tokens, nats, perplexity
      tasks[]     task, metric, value, stderr (or None), samples
      samples[]   prompt, text (the greedy continuation without the prompt)
      conversion  None, or method and layers of the checkpoint's headpool.json
    comparison  the one model's comparison with the baseline; None without a baseline or with several models
    data        name, sha256, texts, bytes
    settings    window, stride, batch_size, dtype, device
    notes[]     what a reader of the figures has to know, one line each
    versions    headpool, torch, transformers
    recipe      YAML text of the recipe that was run, or None
    training    absent, or what uptraining recorded: metrics[], original_perplexity, tokens, steps

Lists are empty where nothing of the kind was measured. Seconds are medians, spreads the fastest and the slowest.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.table import Table
from rich.text import Text

from headpool import __version__
from headpool.errors import HeadpoolError, RequestError
from headpool.eval.evaluate import ModelResult, Report

FILE = "report.json"


def check_out(out_dir: Path) -> None:
    """Refuse, before anything is measured, a destination that cannot be a directory. Nothing is written."""
    nearest = next(one for one in (out_dir, *out_dir.absolute().parents) if one.exists())
    if not nearest.is_dir():
        raise RequestError(f"{out_dir}: {nearest} is a file, not a directory")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise RequestError(f"{out_dir}: {nearest} is not writable")


def write_report(report: Report, out_dir: Path) -> Path:
    """Write report.json into a directory, made where it is not there, at one stroke; returns its path.

    Raises HeadpoolError when it cannot be written; an earlier report is then still whole.
    """
    out_dir = Path(out_dir)
    path, partial = out_dir / FILE, out_dir / f".{FILE}.partial"
    text = json.dumps(as_json(report), indent=2, allow_nan=False) + "\n"
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise HeadpoolError(f"{path} cannot be written: {error.strerror}") from error
    return path


def as_json(report: Report) -> dict[str, Any]:
    """The report in JSON's types. `comparison` is None without a baseline."""
    settings = report.settings
    return {
        "models": [_model(result) for result in report.models],
        "comparison": comparison(report),
        "data": {
            "name": report.data.name,
            "sha256": report.data.sha256,
            "texts": len(report.data.texts),
            "bytes": report.data.bytes,
        },
        "settings": {
            "window": settings.window,
            "stride": settings.stride,
            "batch_size": settings.batch_size,
            "dtype": settings.dtype,
            "device": settings.device,
        },
        "notes": notes(report),
        "versions": {
            "headpool": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def _model(result: ModelResult) -> dict[str, Any]:
    return {
        "role": result.spec.role,
        "path": result.spec.path,
        "revision": result.spec.revision,
        "label": result.label,
        "uptrained": result.uptrained,
        "kv_heads": result.kv_heads,
        "perplexity": result.score.perplexity,
        "nats": result.score.nats,
        "tokens": result.score.tokens,
        "bits_per_byte": result.bits_per_byte,
        "bos": result.bos,
        "dtype": result.cache.dtype,
        "cache_bytes_per_token": {
            "formula": result.cache.formula,
            "allocated": result.cache.allocated,
            "tokens": result.cache.tokens,
            "checkpoint_dtype": result.cache.checkpoint_dtype,
            "formula_in_checkpoint_dtype": result.cache.formula_checkpoint,
            "explanation": result.cache.explanation,
            "flagged": result.cache.flagged,
        },
        "cache_curve": [{"tokens": tokens, "bytes": size} for tokens, size in result.cache_curve],
    }


def comparison(report: Report) -> dict[str, float | None] | None:
    """The model's figures divided by the baseline's; perplexities only where both read the same tokens."""
    by_role = {result.spec.role: result for result in report.models}
    if set(by_role) != {"baseline", "model"}:
        return None
    baseline, model = by_role["baseline"], by_role["model"]
    return {
        "perplexity_ratio": model.score.perplexity / baseline.score.perplexity if report.same_tokens else None,
        "bits_per_byte_ratio": model.bits_per_byte / baseline.bits_per_byte,
        "cache_ratio": model.cache.allocated / baseline.cache.allocated,
    }


def notes(report: Report) -> list[str]:
    """What a reader of the figures has to know: one line each."""
    found = []
    if not report.same_tokens:
        found.append("the models' tokenizers differ: compare them in bits per byte, not in perplexity")
    if len({result.cache.dtype for result in report.models}) > 1:
        found.append("the models were evaluated in different dtypes; --dtype holds them to one")
    for result in report.models:
        if not result.bos:
            found.append(f"{result.spec.path}: no BOS token, so the first token of each text is not scored")
        if result.cache.explanation is not None:
            found.append(f"{result.spec.path}: cache: {result.cache.explanation}")
    return found


def table(report: Mapping[str, Any]) -> Table:
    """A report, in JSON's types: one row a model, one for the comparison, and the conditions beneath."""
    data, settings = report["data"], report["settings"]
    conditions = (
        f"{data['name']}: texts {data['texts']}, bytes {data['bytes']}, SHA-256 {data['sha256'][:12]}; "
        f"window {settings['window']}, stride {settings['stride']}, {settings['device']}"
    )
    result = Table(caption=Text("\n".join([conditions, *report["notes"]])), caption_justify="left")
    result.add_column("model", overflow="fold")
    for name in ("K/V heads", "perplexity", "bits/byte", "tokens", "cache bytes/token", "allocated", "dtype"):
        result.add_column(name, justify="right")
    for model in report["models"]:
        result.add_row(*map(Text, _row(model)))
    ratios = report["comparison"]
    if ratios is not None:
        result.add_section()
        perplexity, bits, cache = (_ratio(value) for value in ratios.values())
        result.add_row("model / baseline", "", perplexity, bits, "", "", cache, "")
    return result


def _row(model: Mapping[str, Any]) -> tuple[str, ...]:
    cache, heads = model["cache_bytes_per_token"], model["kv_heads"]
    formula = str(cache["formula"])
    if cache["checkpoint_dtype"] != model["dtype"]:
        formula += f" ({cache['formula_in_checkpoint_dtype']} in {cache['checkpoint_dtype']})"
    return (
        f"{model['path']} ({model['label'] or model['role']})",
        ", ".join(map(str, sorted({heads} if isinstance(heads, int) else set(heads)))),
        f"{model['perplexity']:.3f}",
        f"{model['bits_per_byte']:.4f}",
        str(model["tokens"]),
        formula,
        f"{cache['allocated']:.0f}",
        model["dtype"],
    )


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}x"


def read_report(path: Path) -> dict[str, Any]:
    """A report.json that `write_report` wrote."""
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report
