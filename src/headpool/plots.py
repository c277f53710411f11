"""Plots of what was measured: functions of plain data, in report.json's words, to a matplotlib Figure.

A model here is a mapping with `label` (its name), optionally `unadapted` (converted, not yet uptrained) and `index`
(which colour and marker it has; default: its place), and the figures that the plot shows. Colours are legible to the
colour-blind and never alone: every model has a marker of its own, and what was converted but not yet uptrained is
hollow, dashed and says so. Each function raises ValueError where there is nothing to draw.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from headpool.drawing import (
    INK,
    MUTED,
    PALETTE,
    SERIES,
    SURFACE,
    UNADAPTED,
    bytes_axis,
    look,
    panels,
    png,
    save_png,
    styled,
    svg,
    tokens_axis,
    value_axis,
    with_legend,
)  # fmt: skip

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "GPU_MEMORY", "PALETTE", "UNADAPTED", "block_errors", "cache_against_context", "decode_against_context",
    "learning_curve", "perplexity_by_position", "png", "predicted_loss", "quality_against_budget",
    "quality_against_cache", "save_png", "svg",
]  # fmt: skip

Row: TypeAlias = Mapping[str, Any]

GPU_MEMORY = {"24 GiB (L4, RTX 4090)": 24, "48 GiB (L40S)": 48, "80 GiB (A100, H100)": 80, "141 GiB (H200)": 141}
"""Memory of common GPUs in GiB. What their vendors call a GB is about one GiB."""


@styled
def quality_against_cache(points: Sequence[Row]) -> "Figure":
    """Perplexity, as a multiple of the original's, against cache bytes per token; further down and left is better.

    points: {label, cache_bytes_per_token, perplexity_ratio, unadapted}. A line joins those that no other beats in both.
    """
    _require(points, "point")
    figure, (axes,) = panels("Quality against cache", [1], legend=len(points))
    places = [(point["cache_bytes_per_token"], point["perplexity_ratio"]) for point in points]
    axes.axhline(1, color=MUTED, linewidth=1, linestyle=":")
    axes.plot(*_columns(_undominated(places)), color=MUTED, alpha=0.4, linewidth=3, zorder=1)
    for index, (point, (size, ratio)) in enumerate(zip(points, places, strict=True)):
        axes.plot([size], [ratio], **{**look(point, index), "linestyle": "none"})
    bytes_axis(axes.xaxis, [size for size, _ in places])
    axes.set_xlabel("K/V cache per token")
    value_axis(axes.yaxis, [*(ratio for _, ratio in places), 1])
    axes.set_ylabel("perplexity / original's")
    return with_legend(figure, [axes])


def _undominated(places: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those that no other place beats or equals in both coordinates, by the first."""
    front: list[tuple[float, float]] = []
    for place in sorted(places):
        if not front or place[1] < front[-1][1]:
            front.append(place)
    return front


@styled
def cache_against_context(models: Sequence[Row]) -> "Figure":
    """Cache bytes of one sequence against its length, both logarithmic, with the memory of common GPUs as lines.

    models: {label, unadapted, curve: [{tokens, bytes}]}.
    """
    models = _require([model for model in models if any(point["bytes"] for point in model["curve"])], "curve")
    figure, (axes,) = panels("K/V cache of one sequence", [1.2], legend=len(models))
    longest = max(point["tokens"] for model in models for point in model["curve"])
    shown: list[Row] = []
    for index, model in enumerate(models):
        curve = [point for point in model["curve"] if point["tokens"] * 1024 >= longest]
        axes.plot(*_columns(curve, "tokens", "bytes"), markevery=[-1], **look(model, index))
        shown += curve
    tokens_axis(axes.xaxis, [point["tokens"] for point in shown])
    bytes_axis(axes.yaxis, [min(point["bytes"] for point in shown), max(GPU_MEMORY.values()) * 2**30])
    axes.set_xlabel("context (tokens)")
    for place, (name, size) in zip((0, 0.3, 0.5, 0.78), GPU_MEMORY.items(), strict=True):  # side by side: none overlaps
        axes.axhline(size * 2**30, color=MUTED, linewidth=0.8, linestyle=(0, (1, 1.5)), zorder=1)
        axes.annotate(
            name, (place, size * 2**30), xycoords=("axes fraction", "data"), xytext=(3, 2), textcoords="offset points",
            fontsize=6.5, color=MUTED, zorder=1.5, bbox={"facecolor": SURFACE, "edgecolor": "none", "pad": 0.3},
        )  # fmt: skip
    return with_legend(figure, [axes])


@styled
def decode_against_context(models: Sequence[Row]) -> "Figure":
    """Median time of one decode step against the context, a panel for each batch size; bars reach from the fastest
    measurement to the slowest.

    models: {label, unadapted, decode: [{context, batch, seconds_per_token, seconds_per_token_spread}]}.
    """
    models = _require([model for model in models if model["decode"]], "decode time")
    batches = sorted({one["batch"] for model in models for one in model["decode"]})
    weights = [1.0 if len(batches) == 1 else 0.75] * len(batches)
    figure, axes = panels("Time of one decode step", weights, legend=len(models))
    for panel, batch in zip(axes, batches, strict=True):
        for index, model in enumerate(models):
            rows = sorted((one for one in model["decode"] if one["batch"] == batch), key=lambda one: one["context"])
            times = [one["seconds_per_token"] * 1e3 for one in rows]
            spreads = [one.get("seconds_per_token_spread") or [one["seconds_per_token"]] * 2 for one in rows]
            bars = [
                [max(0.0, time - low * 1e3) for time, (low, _) in zip(times, spreads, strict=True)],
                [max(0.0, high * 1e3 - time) for time, (_, high) in zip(times, spreads, strict=True)],
            ]
            panel.errorbar(
                [one["context"] for one in rows], times, yerr=bars, elinewidth=1, capsize=2, **look(model, index)
            )
        panel.set_ylim(bottom=0)
        panel.set_ylabel(f"ms, batch {batch}")
    tokens_axis(axes[-1].xaxis, [one["context"] for model in models for one in model["decode"]])
    axes[-1].set_xlabel("context (tokens)")
    return with_legend(figure, axes[:1])


@styled
def perplexity_by_position(models: Sequence[Row]) -> "Figure":
    """Perplexity of the tokens in each range of positions of the window, drawn at the range's end; it falls while more
    context helps.

    models: {label, unadapted, positions: [{last, perplexity}]}, positions 0-based.
    """
    models = _require([model for model in models if model["positions"]], "range of positions")
    figure, (axes,) = panels("Perplexity by position in the window", [1], legend=len(models))
    for index, model in enumerate(models):
        ends, values = _columns(model["positions"], "last", "perplexity")
        axes.plot([end + 1 for end in ends], values, **look(model, index))
    buckets = [bucket for model in models for bucket in model["positions"]]
    tokens_axis(axes.xaxis, [bucket["last"] + 1 for bucket in buckets])
    axes.set_xlabel("tokens in the window, up to")
    value_axis(axes.yaxis, [bucket["perplexity"] for bucket in buckets])
    axes.set_ylabel("perplexity")
    return with_legend(figure, [axes])


@styled
def learning_curve(metrics: Sequence[Row], *, original_perplexity: float | None = None) -> "Figure":
    """Perplexity on held-out text, training loss and learning rate against tokens trained on.

    metrics: {step, tokens, loss, learning_rate, validation_perplexity or None}; the original's perplexity on the same
    held-out text is a line.
    """
    _require(metrics, "step")
    wanted = {
        "validation_perplexity": ("perplexity", 0.9),
        "loss": ("training loss", 0.7),
        "learning_rate": ("learning rate", 0.4),
    }
    shown = {name: rows for name in wanted if (rows := [one for one in metrics if one.get(name) is not None])}
    reference = [original_perplexity] if original_perplexity and "validation_perplexity" in shown else []
    figure, axes = panels("Uptraining", [wanted[name][1] for name in shown], legend=len(reference))
    for panel, (name, rows) in zip(axes, shown.items(), strict=True):
        place = list(wanted).index(name)
        tokens, values = _columns(rows, "tokens", name)
        few = len(rows) <= 40
        panel.plot(tokens, values, color=SERIES[1], marker="o" if few else "", label="_", linewidth=1.8 if few else 1.1)
        value_axis(panel.yaxis, [*values, *(reference if place == 0 else [])])
        panel.set_ylabel(wanted[name][0])
    for value in reference:
        axes[0].axhline(value, color=INK, linestyle="--", linewidth=1.2, label="the original's perplexity")
    axes[-1].set_xlabel("tokens")
    value_axis(axes[-1].xaxis, [0])
    return with_legend(figure, axes[:1])


@styled
def quality_against_budget(
    curves: Mapping[str, Mapping[str, Mapping[float, float]]], *, original: float, highest: float = 1.5
) -> "Figure":
    """Perplexity against the share of pretraining that was spent on uptraining, in panels of one scale.

    curves: {panel: {label: {share: perplexity}}}; a label looks the same in every panel. The perplexity of the original
    as shipped is a line; what is more than `highest` times that lies above the panel.
    """
    _require([curve for panel in curves.values() for curve in panel.values()], "curve")
    labels = list(dict.fromkeys(label for panel in curves.values() for label in panel))
    figure, axes = panels("Quality against uptraining", [0.9] * len(curves), legend=len(labels) + 1)
    lowest = min(value for panel in curves.values() for curve in panel.values() for value in curve.values())
    for axis, (name, panel) in zip(axes, curves.items(), strict=True):
        for label, curve in panel.items():
            axis.plot(list(curve), list(curve.values()), **look({"label": label}, labels.index(label)))
        axis.axhline(original, color=INK, linestyle="--", linewidth=1.2, label="the original as shipped")
        axis.set_ylim(0.98 * min(lowest, original), highest * original)
        axis.set_ylabel(f"perplexity, {name}")
    value_axis(axes[-1].xaxis, [0])
    axes[-1].set_xlabel("share of pretraining")
    return with_legend(figure, axes[:1])


@styled
def block_errors(layers: Sequence[Row]) -> "Figure":
    """What each layer lost in the conversion: the relative squared error of its block's output after each step, and the
    share of its keys' and values' energy that was dropped.

    layers: as in headpool.json: {layer, block_error: {closed, refit, heal}, lost_energy: {keys, values}}, any of them
    absent.
    """
    from matplotlib.ticker import MaxNLocator

    wanted = {"block_error": "relative squared error", "lost_energy": "share of energy lost"}
    series = [
        (kind, step) for kind in wanted for step in dict.fromkeys(key for one in layers for key in one.get(kind) or {})
    ]
    _require(series, "error")
    kinds = list(dict.fromkeys(kind for kind, _ in series))
    figure, axes = panels("What each layer lost", [0.85] * len(kinds), legend=len(series))
    for panel, kind in zip(axes, kinds, strict=True):
        shown: list[float] = []
        for place, (_, step) in enumerate(series):
            if series[place][0] != kind:
                continue
            rows = [(one["layer"], one[kind][step]) for one in layers if (one.get(kind) or {}).get(step) is not None]
            label = f"output of the block, after {step}" if kind == "block_error" else f"energy of the {step}"
            panel.plot(*_columns(rows), **{**look({"label": label}, place + 1), "markersize": 3.5, "linewidth": 1.2})
            shown += [value for _, value in rows]
        value_axis(panel.yaxis, shown)
        panel.set_ylabel(wanted[kind])
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[-1].set_xlabel("layer")
    return with_legend(figure, axes)


@styled
def predicted_loss(predictions: Sequence[Row]) -> "Figure":
    """What aligned conversion would lose against the cache that is left, before refit and healing.

    predictions: {kv_heads, cache_bytes_per_token, keys, values}, the latter two shares of energy lost.
    """
    _require(predictions, "prediction")
    figure, (axes,) = panels("Predicted loss against cache", [1], legend=2)
    sizes = [one["cache_bytes_per_token"] for one in predictions]
    shown: list[float] = []
    for place, part in enumerate(("keys", "values"), 1):
        lost = [one[part] for one in predictions]
        axes.plot(sizes, lost, **look({"label": f"energy of the {part}"}, place))
        shown += lost
    for size, one in zip(sizes, predictions, strict=True):
        highest = max(one["keys"], one["values"])
        axes.annotate(f"{one['kv_heads']}", (size, highest), (0, 6), textcoords="offset points", ha="center")
    bytes_axis(axes.xaxis, sizes)
    axes.set_xlabel("K/V cache per token; numbers are K/V heads")
    value_axis(axes.yaxis, shown)
    axes.set_ylabel("share of energy lost")
    return with_legend(figure, [axes])


def _require(shown: Any, what: str) -> Any:
    if not shown:
        raise ValueError(f"nothing to draw: not one {what}")
    return shown


def _columns(rows: Iterable[Any], *keys: Any) -> tuple[list[Any], list[Any]]:
    """The first two columns of rows, or those under two keys."""
    first, second = keys or (0, 1)
    rows = list(rows)
    return [row[first] for row in rows], [row[second] for row in rows]
