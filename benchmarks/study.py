"""The study of the README: what conversion costs and what uptraining brings back, on the bundled model.

    python benchmarks/study.py [--out docs/study] [--data recipes/quickstart/train.txt] [--only g2] [--scale 0.01]

Each run is a stage: its result is kept in OUT/results.json, and a run that is there is not made again, so that the
study goes on where it was stopped; within a run uptraining resumes. It takes some hours on two cores. Writes
OUT/README.md (the tables) and OUT/*.png from what there is. `--scale` makes every budget smaller, to try it.

Ainslie et al. 2023 compare the methods in figure 4 and budgets in figure 5.
"""

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from headpool.drawing import save_png
from headpool.plots import quality_against_budget

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = ROOT / "recipes" / "quickstart"
ALPHAS = (0.0, 0.01, 0.02, 0.05, 0.1)
SEEDS = (0, 1, 2)
PAPER = 0.05
"""The share of pretraining that the paper settles on; three seeds here, one elsewhere."""


@dataclass(frozen=True)
class Case:
    """One training: `kv_heads` None is the original itself, trained on the same tokens with the same schedule."""

    kv_heads: int | None
    method: str = "mean"
    alpha: float = PAPER
    distill: bool = False
    seed: int = 0

    @property
    def name(self) -> str:
        start = "original" if self.kv_heads is None else f"g{self.kv_heads}-{self.method}"
        return f"{start}-alpha{self.alpha:g}{'-distill' if self.distill else ''}-seed{self.seed}"


def cases() -> list[Case]:
    """The most telling ones first."""
    found = [Case(g, method, seed=seed) for seed in SEEDS for g in (2, 1) for method in ("mean", "first", "random")]
    found += [Case(None, seed=seed) for seed in SEEDS] + [Case(4, seed=seed) for seed in SEEDS]
    found += [Case(g, distill=True, seed=seed) for seed in SEEDS for g in (4, 2, 1)]
    found += [Case(g, method, alpha=0) for g in (2, 1) for method in ("first", "random")]
    for alpha in ALPHAS:
        found += [Case(g, alpha=alpha) for g in (4, 2, 1)]
        found += [Case(g, alpha=alpha, distill=True) for g in (4, 2, 1) if alpha]
        found.append(Case(None, alpha=alpha))
    return list(dict.fromkeys(found))


def recipe(case: Case, data: list[str], scale: float) -> dict[str, Any]:
    section = {
        "data": data, "alpha": case.alpha * scale, "pretraining_tokens": 16_000_000, "sequence_length": 256,
        "batch_tokens": 4096, "micro_batch": 16, "learning_rate": 1e-3 if case.kv_heads else 5e-4,
        "schedule": {"shape": "wsd", "warmup": 0.05, "decay": 1.0, "final": 0.05}, "save_every": "1min",
    }  # fmt: skip
    if case.distill:
        section["distill"] = {"weight": 0.5}
    made: dict[str, Any] = {"model": str(QUICKSTART / "model"), "seed": case.seed}
    if case.kv_heads:
        made["convert"] = {"kv_heads": case.kv_heads, "method": case.method}
    return made | ({"uptrain": section} if case.alpha else {})


def measure(case: Case, data: list[str], scale: float, work: Path) -> dict[str, Any]:
    """Convert, train, evaluate; each of them goes on where it was."""
    folder = work / case.name
    folder.mkdir(parents=True, exist_ok=True)
    given = recipe(case, data, scale)
    model = QUICKSTART / "model"
    if "convert" in given or "uptrain" in given:
        (folder / "recipe.yaml").write_text(yaml.safe_dump(given))
        _headpool("run", str(folder / "recipe.yaml"), f"output={folder / 'out'}")
        model = folder / "out" / ("uptrained" if "uptrain" in given else "converted")
    report = folder / "report"
    _headpool("eval", str(model), "--data", str(QUICKSTART / "test.txt"), "--window", "256", "--out", str(report))
    measured = json.loads((report / "report.json").read_text())["models"][0]
    return {"case": asdict(case), "perplexity": measured["perplexity"], "tokens": measured["tokens"]}


def _headpool(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "headpool", *arguments], check=True, stdout=subprocess.DEVNULL)


def key(case: Case, data: list[str], scale: float) -> str:
    """What a result is only good for."""
    given = json.dumps([recipe(case, [Path(one).name for one in data], scale), asdict(case)], sort_keys=True)
    return f"{case.name} {hashlib.sha256(given.encode()).hexdigest()[:12]}"


Results = Mapping[str, Mapping[str, Any]]


def perplexities(results: Results, **wanted: Any) -> list[float]:
    """Of all results whose case is such, over seeds."""

    def fits(case: Mapping[str, Any]) -> bool:
        return all(case[name] == value for name, value in wanted.items())

    return [one["perplexity"] for one in results.values() if fits(one["case"])]


def _at_paper(results: Results, g: int, method: str) -> list[float]:
    return perplexities(results, kv_heads=g, method=method, alpha=PAPER, distill=False)


def _at(results: Results, g: int | None, alpha: float, distill: bool) -> list[float]:
    """Without training there is nothing to distill."""
    return perplexities(results, kv_heads=g, method="mean", alpha=alpha, distill=distill and alpha > 0)


def spread(values: list[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.2f}" if values else "-"
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


def tables(results: Results) -> Iterator[str]:
    """The tables in Markdown: perplexities, with the standard deviation over seeds where there are several."""
    yield "# Study: what uptraining brings back"
    yield (
        "`make study` writes this page from `results.json`. The bundled model (8 K/V heads) converted to g, perplexity "
        "on the quickstart's test novel in windows of 256 tokens; mean ± standard deviation of three seeds if made."
    )
    yield f"## Methods of conversion, alpha {PAPER:g}"
    methods = ("mean", "first", "random")
    rows = [[str(g), *(spread(_at_paper(results, g, method)) for method in methods)] for g in (2, 1)]
    yield _table(["g", *methods], rows)
    yield "## Budgets, method mean"
    rows = []
    for g, distill in [(None, False), *((g, distill) for g in (4, 2, 1) for distill in (False, True))]:
        label = "original, trained on" if g is None else f"g = {g}{', distilled' if distill else ''}"
        rows.append([label, *(spread(_at(results, g, alpha, distill)) for alpha in ALPHAS)])
    yield _table(["", *(f"alpha {alpha:g}" for alpha in ALPHAS)], rows)
    yield f"## Stability: spread over seeds at alpha {PAPER:g}"
    rows = []
    for g in (4, 2, 1):
        found = _at_paper(results, g, "mean")
        deviation = f"{statistics.stdev(found):.3f}" if len(found) > 1 else "-"
        rows.append([str(g), ", ".join(f"{one:.2f}" for one in found), deviation])
    yield _table(["g", "perplexities", "standard deviation"], rows)
    yield "![Perplexity against the share of pretraining](budgets.png)"


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def write(results: Results, out: Path) -> None:
    (out / "README.md").write_text("\n\n".join(tables(results)) + "\n")
    curves = {}
    for g, distill in ((4, False), (2, False), (1, False), (4, True), (2, True), (1, True), (None, False)):
        label = "original, trained on" if g is None else f"{g} K/V heads{', distilled' if distill else ''}"
        found = {alpha: values for alpha in ALPHAS if (values := _at(results, g, alpha, distill))}
        if found:
            curves[label] = {alpha: statistics.mean(values) for alpha, values in found.items()}
    if curves:
        original = perplexities(results, kv_heads=None, alpha=0.0)
        save_png(quality_against_budget(curves, original=original[0] if original else None), out / "budgets.png")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "study")
    parser.add_argument("--work", type=Path, default=Path("headpool-out") / "study")
    parser.add_argument("--data", nargs="+", default=[str(QUICKSTART / "train.txt")])
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--scale", type=float, default=1.0, help="of all budgets")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "results.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    wanted = {key(case, options.data, options.scale) for case in cases()}
    chosen = [case for case in cases() if options.only in case.name]
    for number, case in enumerate(chosen, start=1):
        name = key(case, options.data, options.scale)
        if name not in results:
            print(f"{number} of {len(chosen)}: {case.name}", flush=True)
            results[name] = measure(case, options.data, options.scale, options.work)
            file.with_suffix(".partial").write_text(json.dumps(results, indent=1) + "\n")
            file.with_suffix(".partial").replace(file)
        write({name: one for name, one in results.items() if name in wanted}, options.out)
    print(f"{options.out / 'README.md'}: {len(chosen)} of {len(cases())} cases")


if __name__ == "__main__":
    main()
