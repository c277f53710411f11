"""How plots look and are saved: one style, colours for light and dark, axes for bytes and tokens, PNG and SVG.

No pyplot and no window; matplotlib is imported by the first call.
"""

import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec
from xml.etree import ElementTree

from headpool.planning import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

P = ParamSpec("P")

UNADAPTED = "converted, not yet uptrained"

PALETTE = {
    "surface": ("#ffffff", "#15191e"),
    "ink": ("#1d242c", "#e8ecf0"),
    "muted": ("#5c6670", "#a3adb8"),
    "grid": ("#dde2e7", "#333b44"),
    "series-0": ("#4a5562", "#c3ccd6"),
    "series-1": ("#0068b5", "#5fb4f5"),
    "series-2": ("#c44a00", "#ff9a52"),
    "series-3": ("#00795a", "#3fcf9f"),
    "series-4": ("#a03a86", "#f08fd0"),
    "series-5": ("#856300", "#e2bd4a"),
}
"""Names of colours, each on a light and on a dark page; the first model's is grey, for it is the original as a rule."""

INK, MUTED, GRID, SURFACE = (PALETTE[name][0] for name in ("ink", "muted", "grid", "surface"))
SERIES = [light for name, (light, _) in PALETTE.items() if name.startswith("series")]
MARKERS = "osD^vPX"

STYLE: Any = {
    "axes.axisbelow": True, "axes.edgecolor": MUTED, "axes.facecolor": SURFACE, "axes.grid": True,
    "axes.labelcolor": INK, "axes.labelsize": 9.0, "axes.linewidth": 0.8, "axes.spines.right": False,
    "axes.spines.top": False, "axes.titlecolor": INK, "axes.titlelocation": "left", "axes.titlesize": 10.5,
    "axes.titleweight": "bold", "figure.constrained_layout.use": True, "figure.facecolor": SURFACE,
    "font.family": ["DejaVu Sans"], "font.size": 9.0, "grid.color": GRID, "grid.linewidth": 0.8, "legend.fontsize": 8.5,
    "legend.frameon": False, "legend.labelcolor": INK, "lines.linewidth": 1.8, "lines.markersize": 5.5,
    "savefig.dpi": 200, "savefig.facecolor": SURFACE, "svg.fonttype": "none", "svg.hashsalt": "headpool",
    "text.color": INK, "text.parse_math": False, "xtick.color": MUTED, "xtick.labelcolor": INK, "xtick.labelsize": 8.5,
    "ytick.color": MUTED, "ytick.labelcolor": INK, "ytick.labelsize": 8.5,
}  # fmt: skip

WIDTH, PANEL, LEGEND_ROW = 5.4, 2.0, 0.2
"""Inches: a figure's width, the height of a panel of weight 1, and what each line of the legend adds."""

LONGEST_LABEL = 60
"""Characters of a label in the legend, of middling width."""


@contextmanager
def style() -> Iterator[None]:
    """matplotlib's defaults and STYLE, whatever the user's own settings are; those are put back."""
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # names may be in any script
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def styled(draw: "Callable[P, Figure]") -> "Callable[P, Figure]":
    """Draw under `style`."""

    @wraps(draw)
    def in_style(*arguments: P.args, **options: P.kwargs) -> "Figure":
        with style():
            return draw(*arguments, **options)

    return in_style


def look(model: Mapping[str, Any], place: int) -> dict[str, Any]:
    """Colour, marker and label of a model as arguments of `Axes.plot`.

    What is not yet uptrained is hollow, dashed, on top (it often lies on its uptrained successor) and says so.
    """
    place = model.get("index", place)
    unadapted = bool(model.get("unadapted"))
    return {
        "color": SERIES[place % len(SERIES)],
        "marker": MARKERS[place % len(MARKERS)],
        "label": _fitting(str(model["label"]), f" ({UNADAPTED})" if unadapted else ""),
        **({"linestyle": "--", "markerfacecolor": "none", "markersize": 8, "zorder": 3} if unadapted else {}),
    }


def printable(text: str) -> str:
    """`text` with U+FFFD for every character that XML and HTML cannot hold: controls, halves of surrogate pairs."""
    return re.sub("[^\t\n\r\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text)


def _fitting(label: str, ending: str) -> str:
    """A label that fits, and its ending; its middle is left out where it is long, for names differ at their ends."""
    label = " ".join(printable(label).split()) or "(no name)"
    longest = LONGEST_LABEL - len(ending)
    if len(label) > longest:
        label = f"{label[: longest // 2]}…{label[1 - longest // 2 :]}"
    first = "\u200b" if label.startswith("_") else ""  # matplotlib leaves labels that begin with _ out
    return f"{first}{label}{ending}"


def panels(title: str, weights: Sequence[float], *, legend: int) -> "tuple[Figure, list[Axes]]":
    """A figure and its panels, one above the other with one x axis and as high as their weights; below them is room for
    so many lines of legend.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 0.8 + PANEL * sum(weights) + LEGEND_ROW * legend))
    axes = list(figure.subplots(len(weights), 1, sharex=True, squeeze=False, height_ratios=weights)[:, 0])
    axes[0].set_title(title, pad=10)
    return figure, axes


def with_legend(figure: "Figure", axes: "Sequence[Axes]") -> "Figure":
    """Add one legend of what these axes show, below all of them, none where nothing has a label, and lay the figure out
    once and for all: PNG and SVG are then alike, and each saved in half the time.
    """
    shown = [(handle, label) for one in axes for handle, label in zip(*one.get_legend_handles_labels(), strict=True)]
    if shown:
        handles, labels = zip(*shown, strict=True)
        figure.legend(handles, labels, loc="outside lower left", ncols=1, borderaxespad=0.3, handlelength=2.8)
    layout = figure.get_layout_engine()
    assert layout is not None  # STYLE asks for it
    layout.execute(figure)
    figure.set_layout_engine("none")
    return figure


def tokens_axis(axis: "Axis", tokens: Sequence[float]) -> None:
    """Logarithmic to base 2, with ticks such as 512 and 8k, a little wider than `tokens`."""
    _binary_axis(axis, tokens, 8, short_tokens)


def bytes_axis(axis: "Axis", sizes: Sequence[float]) -> None:
    """Logarithmic to base 2, with ticks such as 512 KiB, a little wider than `sizes`."""
    _binary_axis(axis, sizes, 7, format_bytes)


def _binary_axis(axis: "Axis", values: Sequence[float], ticks: int, text: Callable[[float], str]) -> None:
    low, high = min(values), max(values)
    first, last = math.ceil(math.log2(low) - 0.2), math.floor(math.log2(high) + 0.2)
    powers = range(first, last + 1, max(1, -(-(last - first) // ticks)))
    _log_axis(axis, 2, (low / 1.3, high * 1.3), [2.0**power for power in powers] or [low], text)


def value_axis(axis: "Axis", values: Sequence[float]) -> None:
    """Linear; logarithmic with ticks at round numbers where the values are positive and lie far apart."""
    low, high = min(values), max(values)
    if low <= 0 or high < 4 * low:
        axis.set_major_formatter(lambda value, _: short(value))
        return
    low, high = low / (high / low) ** 0.05, high * (high / low) ** 0.05
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1,), (1, 3), (1, 2, 5), range(1, 10)):
        ticks = [tick for e in exponents for digit in digits if low <= (tick := digit * 10.0**e) <= high]
        if len(ticks) >= 3:
            break
    _log_axis(axis, 10, (low, high), ticks[:: -(-len(ticks) // 8)], short)


def _log_axis(
    axis: "Axis", base: int, limits: tuple[float, float], ticks: Sequence[float], text: Callable[[float], str]
) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    name = axis.axis_name  # type: ignore[attr-defined]
    getattr(axis.axes, f"set_{name}scale")("log", base=base)
    getattr(axis.axes, f"set_{name}lim")(limits)
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: text(value))


def short(value: float) -> str:
    """Four significant digits, such as 0.002, 50, 2k, 1.5M, and 3e-5 below a thousandth."""
    if value and abs(value) < 1e-3:
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"


def figure(value: float, digits: int = 4) -> str:
    """Four significant digits, thousands set apart; an exponent for what is very small or very large."""
    if value == 0 or not 1e-6 <= abs(value) < 1e12:
        return f"{value:.{digits - 1}e}" if value else "0"
    return f"{value:,.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"


def short_tokens(tokens: float) -> str:
    """A number of tokens, such as 512 and, for 8192, 8k."""
    return f"{tokens / 1024:.0f}k" if tokens >= 1024 and tokens % 1024 == 0 else f"{tokens:.6g}"


def png(figure: "Figure") -> bytes:
    """A PNG of the figure, the same bytes for the same figure: without date and version."""
    buffer = BytesIO()
    with style():
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def save_png(figure: "Figure", path: Path) -> None:
    """Write a PNG at one stroke: beside its place, then renamed. Raises OSError."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(png(figure))
    partial.replace(path)


def svg(figure: "Figure", prefix: str = "plot") -> str:
    """An <svg> element to stand in a page: text as text, colours as `var(--NAME, …)` of PALETTE, and every id begun
    with `prefix`, so that several can stand in one page. The same text for the same figure.
    """
    buffer = BytesIO()
    with style():
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    root = ElementTree.fromstring(buffer.getvalue())
    variables = {light: f"var(--{name}, {light})" for name, (light, _) in PALETTE.items()}
    used = set(re.findall(r"#([\w-]+)", " ".join(value for one in root.iter() for value in one.attrib.values())))
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        for name, value in list(element.attrib.items()):
            del element.attrib[name]
            if name == "id" and value not in used:
                continue
            text = f"{prefix}-{value}" if name == "id" else re.sub(r"(^|url\()#", rf"\g<1>#{prefix}-", value)
            if name == "style":
                text = re.sub("#[0-9a-f]{6}", lambda match: variables.get(match[0], match[0]), text)
            element.set(name.rpartition("}")[2], text)
    for definitions in root.findall("defs"):
        if definitions.find("style") is not None:  # it would apply to the whole page
            root.remove(definitions)
    root.attrib = {"viewBox": root.attrib["viewBox"], "xmlns": "http://www.w3.org/2000/svg", "role": "img"}
    return ElementTree.tostring(root, encoding="unicode")
