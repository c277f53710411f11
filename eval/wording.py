"""A report in words: what models are called, figures for people, the sentence that says what was gained and lost."""

import re
import shlex
from collections.abc import Sequence
from pathlib import PurePath

from headpool.drawing import UNADAPTED, figure, short_tokens
from headpool.eval.schema import Comparison, Decode, Model, ReportFile, Task
from headpool.planning import format_bytes, tabulated

_ABSOLUTE = re.compile(r"""(?<![\w.:/~])~?/(?:[^\s"'`,;:/<>{}\[\]()]+/)+([^\s"'`,;:/<>{}\[\]()]*)""")

_FILE = re.compile(r"\.(txt|jsonl|parquet)(\.\w+)?$")
_READ = {True: "reads grouped K/V directly", False: "expands K/V before attention", None: "not told how it reads K/V"}


def names(models: Sequence[Model]) -> list[str]:
    """Each model by as many last parts of its path as tell it from the others; of one path, by its revision."""
    paths = [[part for part in PurePath(model.path).parts if part != "/"] or [model.path] for model in models]
    shown = []
    for model, path in zip(models, paths, strict=True):
        rivals = [other for other in paths if other != path]
        count = next(n for n in range(1, len(path) + 1) if n == len(path) or path[-n:] not in [r[-n:] for r in rivals])
        revision = f"@{model.revision}" if model.revision and paths.count(path) > 1 else ""
        shown.append("/".join(path[-count:]) + revision)
    return shown


def status(model: Model) -> str:
    """What was done to a model: "original", what headpool did, or that headpool did nothing."""
    return model.label or ("original" if model.role == "baseline" else "not converted by headpool")


def unadapted(model: Model) -> bool:
    return model.label == UNADAPTED


def labels(report: ReportFile) -> list[str]:
    """The models' names; that of one which is not yet uptrained says so."""
    shown = zip(report.models, names(report.models), strict=True)
    return [f"{name} ({UNADAPTED})" if unadapted(model) else name for model, name in shown]


def compared(report: ReportFile, model: Model) -> Comparison | None:
    """A model's comparison with the baseline; reports of earlier versions hold one for all."""
    return model.comparison or (report.comparison if model.role == "model" else None)


def without_paths(text: str, report: ReportFile) -> str:
    """`text` with every absolute path by its last part, and the models' by their names."""
    shown = {model.path: name for model, name in zip(report.models, names(report.models), strict=True)}
    for path in sorted(filter(_is_absolute, shown), key=len, reverse=True):
        text = text.replace(path, shown[path])
    return _ABSOLUTE.sub(r"\1", text)


def _is_absolute(path: str) -> bool:
    return path.startswith(("/", "~"))


def command(report: ReportFile) -> str:
    """The command that measures this again, with names in place of absolute paths."""
    roles: dict[str, list[str]] = {}
    for model, name in zip(report.models, names(report.models), strict=True):
        roles.setdefault(model.role, []).append(name if _is_absolute(model.path) else model.path)
    words = ["headpool", "eval", *roles.get("model", [])]
    options: dict[str, Sequence[object]] = {
        "baseline": roles.get("baseline", []),
        **_data_options(report.data.name),
        "out": ["report"],
        **{key: [value] for key, value in report.settings.items() if isinstance(value, str | int)},
        "contexts": sorted({row.context for model in report.models for row in model.decode}),
        "batches": sorted({row.batch for model in report.models for row in model.decode}),
        "tasks": list(dict.fromkeys(score.task for model in report.models for score in model.tasks)),
    }
    for option, values in options.items():
        words += [f"--{option.replace('_', '-')}", ",".join(map(str, values))] if values else []
    return shlex.join(words)


def _data_options(name: str) -> dict[str, Sequence[object]]:
    """A file, or a data set on the hub: `id:split` or `id:config:split`."""
    source, *parts = name.split(":")
    if not 1 <= len(parts) <= 2 or _FILE.search(name):
        return {"data": [name]}
    return {"data": [source], "data_config": parts[:-1], "split": parts[-1:]}


def headline(report: ReportFile) -> str:
    """What was gained and what was lost, in one sentence."""
    shown = list(zip(report.models, labels(report), strict=True))
    original = next(((model, name) for model, name in shown if model.role == "baseline"), None)
    others = [(model, name) for model, name in shown if model.role != "baseline"]
    if original is None or not others:
        return "; ".join(f"{name}: {_alone(model)}" for model, name in shown) + "."
    trained = [(model, name) for model, name in others if model.uptrained]
    chosen = trained if len(trained) == 1 else others
    if len(chosen) > 1:
        return _summary(report, [model for model, _ in chosen], original[1])
    model, name = chosen[0]
    return f"{name} beside {original[1]}: {_against(model, original[0], compared(report, model) or Comparison())}."


def _alone(model: Model) -> str:
    size = format_bytes(model.cache_bytes_per_token.formula_in_checkpoint_dtype)
    return f"perplexity {figure(model.perplexity)} with {size} of K/V cache per token"


def _against(model: Model, original: Model, ratios: Comparison) -> str:
    old, new = (one.cache_bytes_per_token.formula_in_checkpoint_dtype for one in (original, model))
    clauses = [f"{kv_heads(model)} K/V heads instead of {kv_heads(original)}"]
    cache = f"{format_bytes(new)} of cache per token instead of {format_bytes(old)}"
    clauses.append(f"{cache} ({_change(new / old)})" if old else cache)
    if ratios.decode_speedup is not None:
        clauses.append(f"decoding {speedup(ratios.decode_speedup)} times as fast")
    if ratios.perplexity_ratio is not None:
        change = f"perplexity {figure(model.perplexity)} instead of {figure(original.perplexity)}"
        clauses.append(f"{change} ({_change(ratios.perplexity_ratio)})")
    elif ratios.bits_per_byte_ratio is not None:
        change = f"{model.bits_per_byte:.4f} bits per byte instead of {original.bits_per_byte:.4f}"
        clauses.append(f"{change} ({_change(ratios.bits_per_byte_ratio)})")
    return ", ".join(clauses)


def _summary(report: ReportFile, models: Sequence[Model], original: str) -> str:
    ratios = [one for one in (compared(report, model) for model in models) if one is not None]
    count, raw = len(models), sum(map(unadapted, models))
    state = "" if not raw else ", none of them uptrained yet" if raw == count else f", {raw} of them not yet uptrained"
    clauses = [f"{count} models beside {original}{state}"]
    caches = [one.cache_ratio for one in ratios if one.cache_ratio is not None]
    if caches:
        clauses.append(f"the cache is {_span([percent(one) for one in (min(caches), max(caches))])} of the original's")
    perplexities = [one.perplexity_ratio for one in ratios if one.perplexity_ratio is not None]
    bits = [one.bits_per_byte_ratio for one in ratios if one.bits_per_byte_ratio is not None]
    if perplexities and len(perplexities) == len(ratios):
        ends = [figure(one) for one in (min(perplexities), max(perplexities))]
        clauses.append(f"perplexity {_span(ends)} times as high")
    elif bits:  # of models with other tokenizers, perplexities do not compare
        ends = [figure(one) for one in (min(bits), max(bits))]
        clauses.append(f"bits per byte {_span(ends)} times as many")
    return ": ".join([clauses[0], ", ".join(clauses[1:])]) + "."


def _span(ends: list[str]) -> str:
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def _change(ratio: float) -> str:
    """A ratio as a change: "+4.39%", "−75%", and from twice on "2.50 times as high"."""
    if ratio >= 2:
        return f"{figure(ratio, 3)} times as high"
    sign = "+" if ratio >= 1 else "\N{MINUS SIGN}"
    return f"{sign}{abs(ratio - 1) * 100:.3g}%"


def kv_heads(model: Model) -> str:
    """A model's K/V heads; where layers differ, all the numbers there are."""
    heads = model.kv_heads
    return str(heads) if isinstance(heads, int) else ", ".join(map(str, sorted(set(heads), reverse=True)))


def speedup(ratio: float) -> str:
    """Two decimal places, three significant digits above ten: timings hold no more."""
    return figure(ratio, 3) if ratio >= 10 else f"{ratio:.2f}"


def percent(ratio: float) -> str:
    return f"{ratio * 100:.3g}%"


def error(value: float) -> str:
    """Two significant digits."""
    return f"{value:.2g}"


def milliseconds(seconds: float) -> str:
    return f"{figure(seconds * 1e3, 3)} ms"


def bandwidth(bytes_per_second: float) -> str:
    return f"{figure(bytes_per_second / 1e9, 3)} GB/s"


def duration(seconds: float) -> str:
    return milliseconds(seconds) if seconds < 1 else f"{figure(seconds, 3)} s"


def cache_lengths(report: ReportFile) -> list[int]:
    """The context lengths to tabulate the cache at: 8192 and 32768 where a model reaches so far, else its longest."""
    return tabulated({point.tokens for model in report.models for point in model.cache_curve})


def tokens(count: int) -> str:
    return short_tokens(count)


def cache_at(model: Model, length: int) -> int | None:
    """Bytes of one sequence's cache at a length that the model reaches."""
    return next((point.bytes for point in model.cache_curve if point.tokens == length), None)


def decode_at(report: ReportFile) -> tuple[int, int] | None:
    """The context and batch to tabulate decode at: the longest context, there the smallest batch."""
    timed = [(row.context, -row.batch) for model in report.models for row in model.decode]
    return (max(timed)[0], -max(timed)[1]) if timed else None


def decode_row(model: Model, at: tuple[int, int]) -> Decode | None:
    return next((row for row in model.decode if (row.context, row.batch) == at), None)


def timings(report: ReportFile) -> list[tuple[int, int, list[Decode | None]]]:
    """Each batch and context that was timed, and every model's times there."""
    rows = [{(row.batch, row.context): row for row in model.decode} for model in report.models]
    keys = sorted({key for one in rows for key in one})
    return [(batch, context, [one.get((batch, context)) for one in rows]) for batch, context in keys]


def kernels(report: ReportFile) -> list[str]:
    """Which attention kernel ran and how it read the K/V heads, for the models where it was so."""
    found: dict[str, dict[str, None]] = {}
    for model, name in zip(report.models, labels(report), strict=True):
        for kernel in (row.kernel for row in model.decode if row.kernel is not None):
            how = without_paths(kernel.explanation or _READ[kernel.grouped], report)
            found.setdefault(f"{kernel.name}: {how}", {})[name] = None
    return [f"{', '.join(shown)}: {facts}" for facts, shown in found.items()]


def task_rows(report: ReportFile) -> list[tuple[str, str, list[Task | None]]]:
    """Each task's metric, and every model's score in it."""
    scores = [{(score.task, score.metric): score for score in model.tasks} for model in report.models]
    keys = dict.fromkeys(key for one in scores for key in one)
    return [(task, metric, [one.get((task, metric)) for one in scores]) for task, metric in keys]


def sample_rows(report: ReportFile) -> list[tuple[str, list[tuple[int, str]]]]:
    """Each prompt, and the models' continuations by the models' index."""
    prompts: dict[str, list[tuple[int, str]]] = {}
    for index, model in enumerate(report.models):
        for sample in model.samples:
            prompts.setdefault(sample.prompt, []).append((index, sample.text))
    return list(prompts.items())


def settings(report: ReportFile) -> str:
    """All settings in a line, such as "window 2048, stride 512"."""
    shown = {key: value for key, value in report.settings.items() if value not in (None, [], {})}
    return ", ".join(f"{key.replace('_', ' ')} {_setting(value)}" for key, value in shown.items())


def _setting(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
