"""The tables and plots of the study, from its results."""

import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headpool.drawing import save_png
from headpool.plots import quality_against_budget

Results = Mapping[str, Mapping[str, Any]]
"""{name: {case: {kv_heads, method, alpha, distill, seed, rate}, perplexity, tokens}}"""

ALPHAS = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1)
PAPER = 0.05
"""The share of pretraining that the paper settles on; three seeds there, one elsewhere."""

RATE = 1e-3
GENTLE = 3e-4
"""Peak learning rates: the study's, and one for what starts so close to the original that RATE first moves it away."""

Line = tuple[str, int | None, str, bool]
"""Label, K/V heads (None: the original), method, whether distilled."""

LINES: tuple[Line, ...] = (
    ("original, trained on", None, "mean", False),
    *(
        (f"g = {g}, {label}", g, method, distill)
        for g in (4, 2, 1)
        for label, method, distill in (
            ("mean", "mean", False),
            ("mean, distilled", "mean", True),
            ("aligned", "aligned", False),
            ("aligned, distilled", "aligned", True),
        )
    ),
)


def perplexities(results: Results, line: Line, alpha: float, rate: float = RATE) -> list[float]:
    """Of all seeds, in their order. Without training there is nothing to distill."""
    _, kv_heads, method, distill = line
    wanted = {
        "kv_heads": kv_heads, "method": method, "alpha": alpha, "distill": distill and alpha > 0, "rate": rate,
    }  # fmt: skip
    found = [one for one in results.values() if {**one["case"], **wanted} == one["case"]]
    return [one["perplexity"] for one in sorted(found, key=lambda one: int(one["case"]["seed"]))]


def spread(values: list[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.2f}" if values else "-"
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


def ratio(values: list[float], to: list[float]) -> str:
    return f"{statistics.mean(values) / statistics.mean(to):.3f}" if values and to else "-"


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def tables(results: Results) -> Iterator[str]:
    """The page in Markdown: perplexities, with the standard deviation over seeds where there are several."""
    yield "# Study: what uptraining brings back"
    yield (
        "`make study` writes this page from `results.json`. The bundled model (8 K/V heads) converted to g, perplexity "
        "on the quickstart's test novel in windows of 256 tokens; mean ± standard deviation of three seeds if made."
    )
    yield f"## Methods of conversion, alpha {PAPER:g}"
    methods = ("mean", "first", "random")
    rows = [[str(g), *(spread(perplexities(results, ("", g, one, False), PAPER)) for one in methods)] for g in (2, 1)]
    yield table(["g", *methods], rows)
    yield "## Budgets"
    trained = perplexities(results, LINES[0], PAPER)
    rows = [
        [
            line[0],
            *(spread(perplexities(results, line, alpha)) for alpha in ALPHAS),
            ratio(perplexities(results, line, PAPER), trained),
        ]
        for line in LINES
    ]
    yield table(["", *(f"alpha {alpha:g}" for alpha in ALPHAS), f"at {PAPER:g} / original's there"], rows)
    yield f"## Learning rate, alpha {PAPER:g}"
    trainings = ((0.0, RATE), (PAPER, RATE), (PAPER, GENTLE))
    rows = [
        [line[0], *(spread(perplexities(results, line, alpha, rate)) for alpha, rate in trainings)]
        for line in LINES
        if perplexities(results, line, PAPER, GENTLE)
    ]
    yield table(["", *(f"peak {rate:g}" if alpha else "not trained" for alpha, rate in trainings)], rows)
    yield f"## Stability: spread over seeds at alpha {PAPER:g}, mean"
    rows = []
    for g in (4, 2, 1):
        found = perplexities(results, ("", g, "mean", False), PAPER)
        deviation = f"{statistics.stdev(found):.3f}" if len(found) > 1 else "-"
        rows.append([str(g), ", ".join(f"{one:.2f}" for one in found), deviation])
    yield table(["g", "perplexities", "standard deviation"], rows)
    yield "![Perplexity against the share of pretraining](budgets.png)"


def write(results: Results, out: Path) -> None:
    """OUT/README.md and OUT/budgets.png."""
    (out / "README.md").write_text("\n\n".join(tables(results)) + "\n")
    curves = {}
    for g in (4, 2, 1):
        lines = [line for line in LINES if line[1] in (g, None)]
        found = {line[0].removeprefix(f"g = {g}, "): _curve(results, line) for line in lines}
        curves[f"g = {g}"] = {label: curve for label, curve in found.items() if len(curve) > 2}
    original = perplexities(results, LINES[0], 0.0)
    if original and all(curves.values()):
        save_png(quality_against_budget(curves, original=original[0]), out / "budgets.png")


def _curve(results: Results, line: Line) -> dict[float, float]:
    """Means over the seeds by alpha."""
    found = {alpha: perplexities(results, line, alpha) for alpha in ALPHAS}
    return {alpha: statistics.mean(values) for alpha, values in found.items() if values}
