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
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from study_page import ALPHAS, GENTLE, PAPER, RATE, write

from headpool.convert.aligned.options import Alignment
from headpool.convert.run import convert_checkpoint
from headpool.eval import ModelSpec, evaluate
from headpool.text import read_documents, read_texts

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = ROOT / "recipes" / "quickstart"
WINDOW = 256
SEEDS = (0, 1, 2)
TENTH = PAPER / 10
"""By then aligned should be where mean is after the paper's share."""


@dataclass(frozen=True)
class Case:
    """One training: `kv_heads` None is the original itself, trained on the same tokens with the same schedule."""

    kv_heads: int | None
    method: str = "mean"
    alpha: float = PAPER
    distill: bool = False
    seed: int = 0
    rate: float = RATE

    @property
    def start(self) -> str:
        """What is trained; conversions that the seed does not change are shared."""
        if self.kv_heads is None:
            return "original"
        return f"g{self.kv_heads}-{self.method}{f'-seed{self.seed}' if self.method == 'random' else ''}"

    @property
    def name(self) -> str:
        start = "original" if self.kv_heads is None else f"g{self.kv_heads}-{self.method}"
        rate = "" if self.rate == Case.rate else f"-rate{self.rate:g}"
        return f"{start}-alpha{self.alpha:g}{'-distill' if self.distill else ''}{rate}-seed{self.seed}"


def cases() -> list[Case]:
    """The most telling ones first, the longest last."""
    found = [Case(None, alpha=0), *(Case(g, alpha=0) for g in (4, 2, 1))]
    found += [Case(g, method, 0) for g in (2, 1) for method in ("first", "random")]
    found += [Case(g, method) for g in (2, 1) for method in ("mean", "first", "random")]
    found += [Case(None), Case(4), *(Case(g, distill=True) for g in (4, 2, 1))]
    found += [Case(g, seed=seed) for seed in SEEDS for g in (2, 1)]
    for alpha in (0.01, 0.02):
        found += [Case(g, alpha=alpha, distill=distill) for g in (4, 2, 1) for distill in (False, True)]
        found.append(Case(None, alpha=alpha))
    found += [
        Case(g, "aligned", alpha, distill=alpha > 0) for alpha in (0, TENTH, PAPER, 0.01, 0.02) for g in (2, 1, 4)
    ]
    found += [Case(g, method, seed=seed) for seed in SEEDS for g in (2, 1) for method in ("first", "random")]
    found += [Case(None, seed=seed) for seed in SEEDS] + [Case(4, seed=seed) for seed in SEEDS]
    found += [Case(g, distill=True, seed=seed) for seed in SEEDS for g in (4, 2, 1)]
    found += [Case(g, "aligned") for g in (2, 1, 4)]
    found += [Case(g, "aligned", distill=True, rate=GENTLE) for g in (2, 1, 4)] + [Case(None, rate=GENTLE)]
    longest = ALPHAS[-1]
    found += [Case(g, alpha=longest, distill=distill) for g in (2, 1, 4) for distill in (False, True)]
    found += [Case(None, alpha=longest), *(Case(g, "aligned", longest, distill=True) for g in (2, 1, 4))]
    return list(dict.fromkeys(found))


def settings(case: Case, scale: float) -> dict[str, Any]:
    """The uptrain section of a case, but for its paths."""
    section: dict[str, Any] = {
        "alpha": case.alpha * scale, "pretraining_tokens": 16_000_000, "sequence_length": WINDOW,
        "batch_tokens": 4096, "micro_batch": 16, "learning_rate": case.rate,
        "schedule": {"shape": "wsd", "warmup": 0.05, "decay": 1.0, "final": 0.05}, "save_every": "1min",
    }  # fmt: skip
    return section | ({"distill": {"weight": 0.5}} if case.distill else {})


def converted(case: Case, work: Path) -> Path:
    """The checkpoint that a case starts from, made unless it is there."""
    if case.kv_heads is None:
        return QUICKSTART / "model"
    out = work / "converted" / case.start
    if not out.is_dir():
        out.parent.mkdir(parents=True, exist_ok=True)
        alignment = Alignment(calibration=read_documents(QUICKSTART / "train.txt"), window=WINDOW)
        convert_checkpoint(
            str(QUICKSTART / "model"), out, kv_heads=case.kv_heads, method=case.method, seed=case.seed,
            alignment=alignment if case.method == "aligned" else None,
        )  # fmt: skip
    return out


def uptrained(case: Case, data: list[str], scale: float, work: Path) -> Path:
    """The trained checkpoint; a training that was stopped goes on."""
    folder = (work / case.name).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    section = settings(case, scale) | {"data": [str(Path(one).resolve()) for one in data]}
    if case.distill:
        section["teacher"] = str(QUICKSTART / "model")
    recipe = {"model": str(converted(case, work).resolve()), "seed": case.seed, "uptrain": section}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe | {"output": str(folder)}))
    command = [sys.executable, "-m", "headpool", "uptrain", str(folder / "recipe.yaml")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / "uptrained"


def measure(case: Case, data: list[str], scale: float, work: Path) -> dict[str, Any]:
    """Convert, train, evaluate; each of them goes on where it was."""
    model = uptrained(case, data, scale, work) if case.alpha else converted(case, work)
    report = evaluate(
        [ModelSpec("model", str(model))], read_texts(QUICKSTART / "test.txt"), window=WINDOW, prompts=[]
    )  # fmt: skip
    score = report.models[0].score
    return {"case": asdict(case), "perplexity": score.perplexity, "tokens": score.tokens}


def key(case: Case, data: list[str], scale: float) -> str:
    """What a result is only good for."""
    given = json.dumps([settings(case, scale), [Path(one).name for one in data], asdict(case)], sort_keys=True)
    return f"{case.name} {hashlib.sha256(given.encode()).hexdigest()[:12]}"


def load(file: Path) -> dict[str, Any]:
    held: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return held


def keep(file: Path, name: str, result: dict[str, Any]) -> None:
    """Add a result to those that are there, what another process has added in the meantime among them."""
    results = load(file) | {name: result}
    partial = file.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(results, indent=1) + "\n")
    partial.replace(file)


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
    names = {key(case, options.data, options.scale): case for case in cases()}

    def draw() -> None:
        write({name: one for name, one in load(file).items() if name in names}, options.out)

    draw()
    for name, case in names.items():
        if options.only in case.name and name not in load(file):
            print(case.name, flush=True)
            keep(file, name, measure(case, options.data, options.scale, options.work))
            draw()
    print(f"{options.out / 'README.md'}: {len(names.keys() & load(file).keys())} of {len(names)} cases")


if __name__ == "__main__":
    main()
