"""What an evaluation found, as report.json.

report.json is one object. Fields may be added; the ones here keep their names and meanings:

    models[]    role ("baseline" or "model"), path, revision, label (None for a checkpoint that headpool did not make,
                else "converted, not yet uptrained" or "converted and uptrained"), uptrained, kv_heads (a number, or a
                list where layers differ), perplexity, nats, tokens, bits_per_byte, bos, dtype
      cache_bytes_per_token  formula, allocated, tokens, checkpoint_dtype, formula_in_checkpoint_dtype, explanation,
                             flagged
      cache_curve[]  tokens (powers of two up to the model's positions or 131072), bytes (of one sequence's cache, by
                  the formula, in the checkpoint's dtype; sliding layers hold their window)
      comparison  None for the baseline and where there is none; else this model's figure divided by the baseline's:
                  perplexity_ratio (None where tokens differ), bits_per_byte_ratio, cache_ratio, and the baseline's
                  seconds divided by this model's: decode_speedup (geometric mean over decode[]; None without it)
      decode[]    context (tokens in each sequence's cache at the end; all but the last `steps` are prefilled), batch,
                  steps, repeats, prefill_seconds, prefill_spread [low, high], seconds_per_token (of
                  one decode step, which gives each sequence a token), seconds_per_token_spread [low, high],
                  cache_bytes, bytes_per_token (read by one decode step: weights and cache), bandwidth (bytes per
                  second that this means), kernel {name, grouped, explanation}, preallocated, speedup (the baseline's
                  seconds_per_token divided by this one's, at the same context and batch; None for the baseline)
      positions[] first, last (positions in the window, 0-based, both included, of the token that the scored one
                  follows), tokens, nats, perplexity
      tasks[]     task, metric, value, stderr (or None), samples
      samples[]   prompt, text (the greedy continuation without the prompt)
      conversion  None, or method and layers of the checkpoint's headpool.json
      checkpoint_sha256  of the checkpoint's headpool.json, config and headers of weights, as `Source.checkpoint_sha256`
                         has it: another once it is converted or trained anew
    comparison  the one model's comparison with the baseline; None without a baseline or with several models
    data        name, sha256, texts, bytes, column (the one that holds the texts, in tables)
    settings    window, stride, batch_size, dtype, device
    notes[]     what a reader of the figures has to know, one line each
    versions    headpool, torch, transformers
    recipe      YAML text of the recipe that was run, or None
    training    absent, or what uptraining recorded: metrics[], original_perplexity, tokens, steps

Lists are empty where nothing of the kind was measured. Seconds are medians, spreads the fastest and the slowest.
"""

import json
import os
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from headpool import __version__
from headpool.drawing import UNADAPTED
from headpool.errors import HeadpoolError, RequestError
from headpool.eval.decode import Timing
from headpool.eval.measure import ModelResult, Report

FILE = "report.json"


def check_out(out_dir: Path) -> None:
    """Refuse, before anything is measured, a destination that cannot be a directory. Nothing is written."""
    nearest = next(one for one in (out_dir, *out_dir.absolute().parents) if one.exists())
    if not nearest.is_dir():
        raise RequestError(f"{out_dir}: {nearest} is a file, not a directory")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise RequestError(f"{out_dir}: {nearest} is not writable")


def write_report(
    report: Report, out_dir: Path, *, recipe: str | None = None, training: Mapping[str, Any] | None = None
) -> Path:
    """Write report.json into a directory, made where it is not there, at one stroke; returns its path.

    `recipe` is the YAML text of the recipe that was run, `training` what uptraining recorded. Raises HeadpoolError when
    it cannot be written; an earlier report is then still whole.
    """
    out_dir = Path(out_dir)
    path, partial = out_dir / FILE, out_dir / f".{FILE}.partial"
    values = as_json(report) | {"recipe": recipe} | ({} if training is None else {"training": training})
    text = json.dumps(values, indent=2, allow_nan=False) + "\n"
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


def read_report(path: Path) -> dict[str, Any]:
    """A report.json that `write_report` wrote."""
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report


def as_json(report: Report) -> dict[str, Any]:
    """The report in JSON's types, without a recipe."""
    settings = report.settings
    baseline = next((result for result in report.models if result.spec.role == "baseline"), None)
    models = [_model(result, None if result is baseline else baseline) for result in report.models]
    compared = [model["comparison"] for model in models if model["comparison"] is not None]
    return {
        "models": models,
        "comparison": compared[0] if len(models) == 2 and compared else None,
        "data": {
            "name": report.data.name,
            "sha256": report.data.sha256,
            "texts": len(report.data.texts),
            "bytes": report.data.bytes,
            "column": report.data.column,
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
        "recipe": None,
    }


def _model(result: ModelResult, baseline: ModelResult | None) -> dict[str, Any]:
    """One model's figures, with ratios to those of a baseline where there is one to compare with."""
    return {
        "role": result.spec.role,
        "path": result.spec.path,
        "revision": result.spec.revision,
        "label": result.provenance.label,
        "uptrained": result.provenance.uptrained,
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
        "comparison": None if baseline is None else _comparison(result, baseline),
        "decode": [_timing(one, baseline) for one in result.decode],
        "positions": [
            {"first": one.first, "last": one.last, "tokens": one.tokens, "nats": one.nats, "perplexity": one.perplexity}
            for one in result.positions
        ],
        "tasks": [
            {"task": one.task, "metric": one.metric, "value": one.value, "stderr": one.stderr, "samples": one.samples}
            for one in result.tasks
        ],
        "samples": [{"prompt": one.prompt, "text": one.text} for one in result.samples],
        "conversion": result.provenance.conversion,
        "checkpoint_sha256": result.checkpoint_sha256,
    }


def _comparison(result: ModelResult, baseline: ModelResult) -> dict[str, float | None]:
    """The model's figures divided by the baseline's; perplexities only where both read the same tokens."""
    speedups = [_speedup(one, baseline) for one in result.decode]
    return {
        "perplexity_ratio": result.score.perplexity / baseline.score.perplexity if result.same_tokens else None,
        "bits_per_byte_ratio": result.bits_per_byte / baseline.bits_per_byte,
        "cache_ratio": result.cache.allocated / baseline.cache.allocated,
        "decode_speedup": statistics.geometric_mean(speedups) if speedups else None,
    }


def _speedup(timing: Timing, baseline: ModelResult) -> float:
    same = next(one for one in baseline.decode if (one.context, one.batch) == (timing.context, timing.batch))
    return same.seconds_per_token / timing.seconds_per_token


def _timing(timing: Timing, baseline: ModelResult | None) -> dict[str, Any]:
    return {
        **asdict(timing),
        "prefill_spread": list(timing.prefill_spread),
        "seconds_per_token_spread": list(timing.seconds_per_token_spread),
        "bandwidth": timing.bandwidth,
        "speedup": None if baseline is None else _speedup(timing, baseline),
    }


def notes(report: Report) -> list[str]:
    """What a reader of the figures has to know: one line each."""
    found = []
    if not report.same_tokens:
        found.append("the models' tokenizers differ: compare them in bits per byte, not in perplexity")
    if len({result.cache.dtype for result in report.models}) > 1:
        found.append("the models were evaluated in different dtypes; --dtype holds them to one")
    if any(result.decode for result in report.models):
        found.append(
            "fewer K/V heads speed up decoding, which is bound by what it reads, but not the prefill, which is bound "
            "by arithmetic"
        )
    for result in report.models:
        found += [f"{result.spec.path}: {line}" for line in _own_notes(result)]
    return found


def _own_notes(result: ModelResult) -> Iterator[str]:
    if result.provenance.label == UNADAPTED:
        yield f"{UNADAPTED}: its quality is where training starts, not what it ends with"
    if not result.bos:
        yield "no BOS token, so the first token of each text is not scored"
    if result.cache.explanation is not None:
        yield f"cache: {result.cache.explanation}"
    if any(not one.kernel.grouped for one in result.decode):
        yield next(one.kernel.explanation for one in result.decode if not one.kernel.grouped)
    if any(not one.preallocated for one in result.decode):
        yield "its class takes no preallocated cache: decoding was timed on one that grows"
