"""A report, in JSON's types, as tables for a terminal."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from headpool.planning import format_bytes


def table(report: Mapping[str, Any]) -> Group:
    """The models with their comparisons, decode times and tasks where there are any, and the conditions beneath."""
    models = report["models"]
    parts = [_models(models)]
    if any(model["decode"] for model in models):
        parts.append(_decode(models))
    if any(model["tasks"] for model in models):
        parts.append(_tasks(models))
    return Group(*parts, Text("\n".join([_conditions(report), *report["notes"]])))


def _conditions(report: Mapping[str, Any]) -> str:
    data, settings = report["data"], report["settings"]
    return (
        f"{data['name']}: texts {data['texts']}, bytes {data['bytes']}, SHA-256 {data['sha256'][:12]}; "
        f"window {settings['window']}, stride {settings['stride']}, {settings['device']}"
    )


def _table(title: str | None, *columns: str) -> Table:
    """A table whose first column is text and whose others are numbers."""
    result = Table(title=title, title_justify="left")
    for index, name in enumerate(columns):
        result.add_column(name, justify="right" if index else "left", overflow="fold")
    return result


def _models(models: Sequence[Mapping[str, Any]]) -> Table:
    result = _table(
        None, "model", "K/V heads", "perplexity", "bits/byte", "tokens", "cache bytes/token", "allocated", "dtype"
    )
    for model in models:
        result.add_row(*map(Text, _figures(model)))
    compared = [model for model in models if model["comparison"] is not None]
    if compared:
        result.add_section()
    for model in compared:
        ratios = model["comparison"]
        name = "model" if len(compared) == 1 else model["path"]
        values = ("perplexity_ratio", "bits_per_byte_ratio", "cache_ratio")
        perplexity, bits, cache = (_ratio(ratios[value]) for value in values)
        result.add_row(*map(Text, (f"{name} / baseline", "", perplexity, bits, "", "", cache, "")))
    return result


def _figures(model: Mapping[str, Any]) -> tuple[str, ...]:
    cache, heads = model["cache_bytes_per_token"], model["kv_heads"]
    formula = str(cache["formula"])
    if cache["checkpoint_dtype"] != model["dtype"]:
        formula += f" ({cache['formula_in_checkpoint_dtype']} in {cache['checkpoint_dtype']})"
    return (
        _name(model),
        ", ".join(map(str, sorted({heads} if isinstance(heads, int) else set(heads)))),
        f"{model['perplexity']:.3f}",
        f"{model['bits_per_byte']:.4f}",
        str(model["tokens"]),
        formula,
        f"{cache['allocated']:.0f}",
        model["dtype"],
    )


def _decode(models: Sequence[Mapping[str, Any]]) -> Table:
    result = _table(
        "decoding: medians (fastest to slowest)",
        *(
            "model",
            "context",
            "batch",
            "prefill ms",
            "ms per token",
            "speedup",
            "read per token",
            "bandwidth",
            "K/V read",
        ),
    )
    for rows in zip(*([(model, one) for one in model["decode"]] for model in models), strict=True):
        result.add_section()
        for model, one in rows:
            result.add_row(*map(Text, (_name(model), *_timing(one))))
    return result


def _timing(one: Mapping[str, Any]) -> Iterator[str]:
    yield str(one["context"])
    yield str(one["batch"])
    for seconds, spread in (("prefill_seconds", "prefill_spread"), ("seconds_per_token", "seconds_per_token_spread")):
        middle, low, high = (_milliseconds(value) for value in (one[seconds], *one[spread]))
        yield f"{middle} ({low}-{high})"
    yield "" if one["speedup"] is None else f"{one['speedup']:.2f}x"
    yield format_bytes(one["bytes_per_token"])
    yield f"{one['bandwidth'] / 1e9:.1f} GB/s"
    yield "in place" if one["kernel"]["grouped"] else "expanded"


def _tasks(models: Sequence[Mapping[str, Any]]) -> Table:
    result = _table("tasks: value ± standard error", "task", "metric", *(_name(model) for model in models))
    for rows in zip(*(model["tasks"] for model in models), strict=True):
        values = [f"{one['value']:.4f}" + ("" if one["stderr"] is None else f" ± {one['stderr']:.4f}") for one in rows]
        result.add_row(*map(Text, (rows[0]["task"], rows[0]["metric"], *values)))
    return result


def _name(model: Mapping[str, Any]) -> str:
    return f"{model['path']} ({model['label'] or model['role']})"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}x"
