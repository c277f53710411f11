"""The table of a model card: a column for each model, with what headpool.json or report.json say of it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headpool.drawing import UNADAPTED, figure, short_tokens
from headpool.planning import format_bytes, tabulated


@dataclass(frozen=True)
class Column:
    """What is known of one model: bytes of cache in `dtype`, by the formula, per token and at lengths in tokens; what a
    report says of it otherwise.
    """

    title: str
    kv_heads: int | Sequence[int]
    dtype: str
    bytes_per_token: int
    bytes_at: Mapping[int, int]
    measured: Mapping[str, Any]


def columns(done: Mapping[str, Any], report: Mapping[str, Any] | None) -> list[Column]:
    """The models of a report, else those that headpool.json tells of: the original first, the checkpoint itself last,
    what it was trained from between them where that was measured.
    """
    if report is not None:
        return [_measured(model) for model in report["models"]]
    held = done.get("cache", {})
    last = "converted and uptrained" if "uptrain" in done else UNADAPTED
    last = last if "method" in done else "uptrained"
    return [_by_formula(title, held[key]) for title, key in (("original", "source"), (last, "output")) if key in held]


def table(models: Sequence[Column]) -> str:
    """Markdown: a row for each thing that is known of any model."""
    lengths = sorted({length for one in models for length in tabulated(one.bytes_at)})
    rows = [
        ("K/V heads", [heads_in_words(one.kv_heads) for one in models]),
        ("K/V cache per token", [format_bytes(one.bytes_per_token) for one in models]),
        *(
            (
                f"K/V cache at {short_tokens(length)} tokens",
                [_optional(format_bytes, one.bytes_at.get(length)) for one in models],
            )
            for length in lengths
        ),
        ("perplexity", [_optional(figure, one.measured.get("perplexity")) for one in models]),
        ("bits per byte", [_optional(figure, one.measured.get("bits_per_byte")) for one in models]),
        *_timings(models),
        *_tasks(models),
    ]
    lines = [["", *(one.title for one in models)], ["---"] * (len(models) + 1)]
    lines += [[label, *cells] for label, cells in rows if any(cells)]
    return "\n".join(f"| {' | '.join(_cell(text) for text in line)} |" for line in lines)


def _timings(models: Sequence[Column]) -> Iterator[tuple[str, list[str]]]:
    """Decode steps at the longest context that was timed."""
    timed = [
        {(row["context"], row["batch"]): row["seconds_per_token"] for row in one.measured.get("decode", ())}
        for one in models
    ]
    longest = max((context for rows in timed for context, _ in rows), default=0)
    for context, batch in sorted({key for rows in timed for key in rows if key[0] == longest}):
        label = f"decode step at {short_tokens(context)} tokens, batch {batch}"
        yield label, [_optional(_milliseconds, rows.get((context, batch))) for rows in timed]


def _tasks(models: Sequence[Column]) -> Iterator[tuple[str, list[str]]]:
    scores = [{(row["task"], row["metric"]): row for row in one.measured.get("tasks", ())} for one in models]
    for task, metric in dict.fromkeys(key for rows in scores for key in rows):
        yield f"{task}, {metric}", [_optional(_score, rows.get((task, metric))) for rows in scores]


def _measured(model: Mapping[str, Any]) -> Column:
    size = model["cache_bytes_per_token"]
    curve = {point["tokens"]: point["bytes"] for point in model.get("cache_curve", ())}
    title = model.get("label") or ("original" if model["role"] == "baseline" else "this model")
    return Column(
        title=title,
        kv_heads=model["kv_heads"],
        dtype=size["checkpoint_dtype"],
        bytes_per_token=size["formula_in_checkpoint_dtype"],
        bytes_at=curve,
        measured=model,
    )


def _by_formula(title: str, held: Mapping[str, Any]) -> Column:
    lengths = {int(length): size for length, size in held["bytes_at"].items()}
    return Column(title, held["kv_heads"], held["dtype"], held["bytes_per_token"], lengths, {})


def heads_in_words(heads: int | Sequence[int]) -> str:
    """K/V heads of a model, each number once where layers differ."""
    return str(heads) if isinstance(heads, int) else ", ".join(map(str, sorted(set(heads), reverse=True)))


def _optional(text: Callable[[Any], str], value: Any) -> str:
    return "" if value is None else text(value)


def _milliseconds(seconds: float) -> str:
    return f"{figure(seconds * 1e3, 3)} ms"


def _score(row: Mapping[str, Any]) -> str:
    return figure(row["value"]) + (f" ± {row['stderr']:.2g}" if row.get("stderr") else "")


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
