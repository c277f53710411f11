"""report.html, drawn from report.json: one file that opens anywhere, without a network, and its plots beside it."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from headpool import plots
from headpool.drawing import figure
from headpool.errors import HeadpoolError
from headpool.eval import wording
from headpool.eval.schema import ReportFile, load
from headpool.planning import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE = "report.html"
TEMPLATE = "report.html.jinja"

CAPTIONS = {
    "quality-against-cache": "Further down and to the left is better. The grey line joins the models that no other "
    "beats in both. Cache in the checkpoint's dtype.",
    "cache-against-context": "By the formula, in the checkpoint's dtype; n sequences take n times as much. The dotted "
    "lines are the memory of common GPUs, which has to hold the weights, too.",
    "decode-against-context": "Median time of one decode step, which gives each sequence of the batch one token, with "
    "so many tokens in the cache. Bars reach from the fastest measurement to the slowest.",
    "perplexity-by-position": "Perplexity of the tokens in each range of positions, drawn at the range's end. Where "
    "attention over long distances suffered, a line leaves the original's to the right.",
    "learning-curve": "Uptraining: perplexity on held-out text, loss and learning rate against the tokens trained on.",
    "block-errors": "relative squared error of each block's output after each step of the conversion, and the "
    "share of its keys' and values' energy that was dropped.",
}
"""What stands below each plot, by the stem of its file's name; block errors have a file for each model."""

WORDS: tuple[Callable[..., str], ...] = (
    wording.bandwidth, wording.duration, wording.error, figure, wording.milliseconds, wording.percent,
    wording.speedup, wording.tokens,
)  # fmt: skip


@dataclass(frozen=True)
class Plot:
    """A figure, the stem of its file's name, and what stands below it on the page."""

    name: str
    caption: str
    figure: "Figure"


def draw(directory: Path) -> list[Path]:
    """Draw report.html and its plots as PNG into a directory, from the report.json in it; returns their paths.

    The same report gives the same bytes under the same versions. Everything is drawn before anything is replaced; what
    would stay the same is not touched, and the PNG of a plot that no longer has data is removed. Raises RequestError
    for what is no report, HeadpoolError where nothing can be written.
    """
    report = load(directory)
    drawn = list(figures(report))
    files = {f"{plot.name}.png": plots.png(plot.figure) for plot in drawn}
    files[PAGE] = render(report, drawn).encode()
    try:
        _replace(directory, files)
    except OSError as error:
        raise HeadpoolError(f"{directory} cannot be written: {error.strerror}") from error
    return [directory / name for name in files]


def figures(report: ReportFile) -> Iterator[Plot]:
    """The plots that the report has data for."""
    models = [
        {**model.model_dump(), "label": name, "unadapted": wording.unadapted(model), "index": index}
        for index, (name, model) in enumerate(zip(wording.names(report.models), report.models, strict=True))
    ]
    points = list(_quality_points(report, models))
    if len(points) > 1:
        yield _plot("quality-against-cache", plots.quality_against_cache(points))
    if any(point["bytes"] for model in models for point in model["cache_curve"]):
        curves = [{**model, "curve": model["cache_curve"]} for model in models]
        yield _plot("cache-against-context", plots.cache_against_context(curves))
    if any(model["decode"] for model in models):
        yield _plot("decode-against-context", plots.decode_against_context(models))
    if any(model["positions"] for model in models):
        yield _plot("perplexity-by-position", plots.perplexity_by_position(models))
    if report.training is not None and report.training.metrics:
        metrics = [metric.model_dump() for metric in report.training.metrics]
        reference = report.training.original_perplexity
        yield _plot("learning-curve", plots.learning_curve(metrics, original_perplexity=reference))
    yield from _block_errors(models, wording.labels(report))


def _block_errors(models: Sequence[dict[str, Any]], labels: Sequence[str]) -> Iterator[Plot]:
    """One plot for each conversion; an uptrained model has the same as the one that it was trained from."""
    found: list[tuple[list[dict[str, Any]], list[str]]] = []
    for model, label in zip(models, labels, strict=True):
        layers = model["conversion"]["layers"] if model["conversion"] else []
        if any(layer["block_error"] or layer["lost_energy"] for layer in layers):
            if layers not in [known for known, _ in found]:
                found.append((layers, []))
            next(alike for known, alike in found if known == layers).append(label)
    for number, (layers, alike) in enumerate(found, start=1):
        caption = f"{', '.join(alike)}: {CAPTIONS['block-errors']}"
        yield Plot(f"block-errors-{number}", caption, plots.block_errors(layers))


def _plot(name: str, figure: "Figure") -> Plot:
    return Plot(name, CAPTIONS[name], figure)


def _quality_points(report: ReportFile, models: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for model, shown in zip(report.models, models, strict=True):
        ratios = wording.compared(report, model)
        ratio = 1.0 if model.role == "baseline" else ratios and ratios.perplexity_ratio
        size = model.cache_bytes_per_token.formula_in_checkpoint_dtype
        if ratio and size:
            yield {**shown, "cache_bytes_per_token": size, "perplexity_ratio": ratio}


def render(report: ReportFile, drawn: Sequence[Plot]) -> str:
    """The page: everything in it, nothing fetched, and whatever the report's texts hold is text."""
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {word.__name__: word for word in WORDS} | {"bytes": format_bytes}
    source = (resources.files("headpool.eval") / TEMPLATE).read_text(encoding="utf-8")
    return environment.from_string(source).render(
        report=report,
        names=wording.names(report.models),
        wording=wording,
        palette=plots.PALETTE,
        plots=[(plot, plots.svg(plot.figure, plot.name)) for plot in drawn],
    )


def _replace(directory: Path, files: Mapping[str, bytes]) -> None:
    """Write everything new beside its place, then rename all, the page last; plots that were not drawn go."""
    changed = {name for name, content in files.items() if _content(directory / name) != content}
    partials = {name: directory / f".{name}.partial" for name in files if name in changed}
    try:
        for name, partial in partials.items():
            with partial.open("wb") as file:
                file.write(files[name])
                file.flush()
                os.fsync(file.fileno())
        for name, partial in partials.items():
            partial.replace(directory / name)
    finally:
        for partial in partials.values():
            partial.unlink(missing_ok=True)
    earlier = [*(directory / f"{name}.png" for name in CAPTIONS), *directory.glob("block-errors-[0-9].png")]
    for path in earlier:
        if path.name not in files:
            path.unlink(missing_ok=True)


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
