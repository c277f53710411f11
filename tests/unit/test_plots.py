"""Plots hold the figures that they are given, say what is not yet uptrained, and are the same bytes each time."""

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import pytest
import reports
from hypothesis import given, settings
from hypothesis import strategies as st

from headpool import drawing, plots
from headpool.plots import UNADAPTED

CONTENT = reports.run()
MODELS = [
    {
        **model,
        "label": model["path"].rsplit("/")[-1],
        "unadapted": model["label"] == UNADAPTED,
        "curve": model["cache_curve"],
    }
    for model in CONTENT["models"]
]
POINTS = [
    {"label": "mha", "cache_bytes_per_token": 1024, "perplexity_ratio": 1.0, "unadapted": False},
    {"label": "gqa", "cache_bytes_per_token": 256, "perplexity_ratio": 9.5, "unadapted": True},
]
LAYERS = CONTENT["models"][1]["conversion"]["layers"]
DRAWN: dict[str, Callable[[], Any]] = {
    "quality_against_cache": lambda: plots.quality_against_cache(POINTS),
    "cache_against_context": lambda: plots.cache_against_context(MODELS),
    "decode_against_context": lambda: plots.decode_against_context(MODELS),
    "perplexity_by_position": lambda: plots.perplexity_by_position(MODELS),
    "learning_curve": lambda: plots.learning_curve(CONTENT["training"]["metrics"], original_perplexity=5.47),
    "block_errors": lambda: plots.block_errors(LAYERS),
}


def lines(axes: Any) -> dict[str, tuple[list[float], list[float]]]:
    """The lines with a label, those of error bars among them."""
    bars = {bar.get_label(): bar.lines[0] for bar in axes.containers}
    shown = {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")} | bars
    return {label: (list(line.get_xdata()), list(line.get_ydata())) for label, line in shown.items()}


def legend(figure: Any) -> list[str]:
    return [text.get_text() for one in figure.legends for text in one.get_texts()]


def test_cache_against_context_shows_the_curves_and_the_memory_of_gpus() -> None:
    figure = plots.cache_against_context(MODELS)
    (axes,) = figure.axes
    # 32 layers of 32 heads of 128 in two bytes, keys and values; the last ten octaves to 131072 tokens
    assert lines(axes)["Llama-2-7b-hf"] == ([2**n for n in range(7, 18)], [524_288 * 2**n for n in range(7, 18)])
    assert lines(axes)["uptrained"][1][-1] == 131_072 * 131_072
    levels = {line.get_ydata()[0] for line in axes.lines if len(set(line.get_ydata())) == 1}
    assert levels == {24 * 2**30, 48 * 2**30, 80 * 2**30, 141 * 2**30}
    assert axes.get_ylim()[1] > 141 * 2**30
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


def test_decode_against_context_has_a_panel_for_each_batch_in_milliseconds() -> None:
    figure = plots.decode_against_context(MODELS)
    for axes, batch in zip(figure.axes, (1, 8), strict=True):
        rows = [row for row in CONTENT["models"][2]["decode"] if row["batch"] == batch]
        x, y = lines(axes)["uptrained"]
        assert x == [512, 2048, 8192, 32768]
        assert y == pytest.approx([row["seconds_per_token"] * 1000 for row in rows])
        assert axes.get_ylim()[0] == 0
        assert f"batch {batch}" in axes.get_ylabel()


def test_perplexity_by_position_and_the_learning_curve_show_their_figures() -> None:
    positions = CONTENT["models"][0]["positions"]
    (axes,) = plots.perplexity_by_position(MODELS).axes
    assert lines(axes)["Llama-2-7b-hf"] == (
        [16, 64, 128, 256, 512, 1024, 1536, 2048],
        [bucket["perplexity"] for bucket in positions],
    )
    metrics = CONTENT["training"]["metrics"]
    figure = plots.learning_curve(metrics, original_perplexity=5.47)
    perplexity, loss, rate = figure.axes
    validated = [one for one in metrics if one["validation_perplexity"] is not None]
    assert len(validated) == 9
    assert list(perplexity.lines[0].get_ydata()) == [one["validation_perplexity"] for one in validated]
    assert set(perplexity.lines[1].get_ydata()) == {5.47}
    assert list(loss.lines[0].get_ydata()) == [one["loss"] for one in metrics]
    assert list(rate.lines[0].get_xdata()) == [one["tokens"] for one in metrics]
    bare = plots.learning_curve([{**one, "validation_perplexity": None} for one in metrics], original_perplexity=5.47)
    assert len(bare.axes) == 2
    assert legend(bare) == []


def test_block_errors_show_what_there_is_of_them() -> None:
    errors, energy = plots.block_errors(LAYERS).axes
    assert len(lines(errors)) == 3
    assert lines(energy)["energy of the keys"][1] == [layer["lost_energy"]["keys"] for layer in LAYERS]
    (alone,) = plots.block_errors([{"layer": 0}, {"layer": 3, "block_error": {"heal": 0.5}}]).axes
    assert list(lines(alone).values()) == [([3], [0.5])]


PLACES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=8)


@settings(max_examples=12)
@given(PLACES)
def test_the_front_joins_what_no_other_point_beats(places: list[tuple[int, int]]) -> None:
    points = [{"label": "m", "cache_bytes_per_token": size, "perplexity_ratio": ratio} for size, ratio in places]
    (axes,) = plots.quality_against_cache(points).axes
    front = axes.lines[1]
    beaten = {a for a, b in itertools.permutations(places, 2) if b != a and b[0] <= a[0] and b[1] <= a[1]}
    expected = sorted(set(places) - beaten)
    assert list(zip(front.get_xdata(), front.get_ydata(), strict=True)) == expected


def test_what_is_not_yet_uptrained_is_hollow_dashed_and_called_so() -> None:
    for name in ("quality_against_cache", "cache_against_context", "decode_against_context", "perplexity_by_position"):
        figure = DRAWN[name]()
        assert sum(UNADAPTED in text for text in legend(figure)) == 1, name
        for axes in figure.axes:
            marked = [line for line in axes.lines if line.get_marker() in drawing.MARKERS]
            hollow = [line for line in marked if line.get_markerfacecolor() == "none"]
            assert 0 < len(hollow) < len(marked), name
            assert name == "quality_against_cache" or all(line.get_linestyle() == "--" for line in hollow)


def test_nothing_to_draw_is_said() -> None:
    empty = [{"label": "m", "curve": [], "decode": [], "positions": []}]
    for draw in (plots.cache_against_context, plots.decode_against_context, plots.perplexity_by_position):
        with pytest.raises(ValueError, match="nothing to draw"):
            draw(empty)
    for draw in (plots.quality_against_cache, plots.learning_curve, plots.block_errors):
        with pytest.raises(ValueError, match="nothing to draw"):
            draw([])


@pytest.mark.parametrize("name", DRAWN)
def test_files_are_the_same_whatever_the_users_settings_are(name: str, tmp_path: Path) -> None:
    first, svg = plots.png(DRAWN[name]()), plots.svg(DRAWN[name](), "p")
    before = dict(matplotlib.rcParams)
    with matplotlib.rc_context({"font.size": 30, "lines.linewidth": 9, "axes.facecolor": "red", "svg.hashsalt": None}):
        plots.save_png(DRAWN[name](), tmp_path / "a.png")
        assert plots.svg(DRAWN[name](), "p") == svg
    assert dict(matplotlib.rcParams) == before
    assert (tmp_path / "a.png").read_bytes() == first
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
    assert first.startswith(b"\x89PNG")
    assert not re.search(rb"tEXt|tIME|matplotlib", first)


@pytest.mark.parametrize("name", DRAWN)
def test_an_svg_stands_in_a_page_without_touching_the_rest_of_it(name: str) -> None:
    roots = [ElementTree.fromstring(plots.svg(DRAWN[name](), prefix)) for prefix in ("a", "b")]
    for root, prefix in zip(roots, ("a", "b"), strict=True):
        elements = list(root.iter())
        ids = [one.get("id", "") for one in elements if one.get("id")]
        assert ids
        assert len(set(ids)) == len(ids)
        assert all(one.startswith(f"{prefix}-") for one in ids)
        values = [value for one in elements for key, value in one.attrib.items() if key != "id"]
        referred = {name for value in values for name in re.findall(r"#([A-Za-z][\w-]*-\w+)", value)}
        assert referred == set(ids)
        assert not {one.tag.rpartition("}")[2] for one in elements} & {"style", "metadata", "script", "image"}
        coloured = " ".join(one.get("style", "") for one in elements)
        assert "var(--series-" in coloured
        assert not re.search(r"(fill|stroke): #", coloured)  # else it would stay dark on dark


def test_labels_are_text_whatever_is_in_them() -> None:
    hostile = "_a$b_{1}$ <b>&amp;\0\ud800\x1b"
    figure = plots.quality_against_cache([{**POINTS[0], "label": hostile}])
    texts = [
        element.text for element in ElementTree.fromstring(plots.svg(figure)).iter() if element.tag.endswith("text")
    ]
    assert "\u200b_a$b_{1}$ <b>&amp;\ufffd\ufffd\ufffd" in texts
    assert plots.png(figure)


def test_long_labels_keep_both_ends_and_the_legend_fits() -> None:
    points = [{**point, "label": "first" + "n" * 300 + "last"} for point in POINTS]
    figure = plots.quality_against_cache(points)
    for text, ending in zip(legend(figure), ("", f" ({UNADAPTED})"), strict=True):
        assert re.fullmatch(rf"firstn+…n+last{re.escape(ending)}", text)
    assert figure.legends[0].get_window_extent().width <= figure.bbox.width


def luminance(colour: str) -> float:
    """Relative luminance by WCAG 2.1."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("column", [0, 1])
def test_colours_stand_out_on_light_and_on_dark(column: int) -> None:
    """Contrast of 4.5 for text and 3 for lines, as WCAG 2.1 asks."""
    shades = {name: luminance(pair[column]) for name, pair in plots.PALETTE.items()}
    for name, shade in shades.items():
        low, high = sorted((shade, shades["surface"]))
        contrast = (high + 0.05) / (low + 0.05)
        assert name in ("surface", "grid") or contrast >= (4.5 if name in ("ink", "muted") else 3), name


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (2e-5, "2e-5"), (1.5e-4, "1.5e-4"), (0.002, "0.002"), (50, "50"), (2000, "2k"), (1.5e6, "1.5M")],
)
def test_ticks_are_short(value: float, text: str) -> None:
    assert drawing.short(value) == text


@pytest.mark.parametrize(("tokens", "text"), [(16, "16"), (512, "512"), (1000, "1000"), (8192, "8k"), (131072, "128k")])
def test_ticks_of_tokens(tokens: int, text: str) -> None:
    assert drawing.short_tokens(tokens) == text
