"""Perplexity before any uptraining, relative to the original's: mean, first, and aligned step by step.

    python benchmarks/quality.py --calibration recipes/quickstart/train.txt --data recipes/quickstart/test.txt
        [--model recipes/quickstart/model] [--kv-heads 4,2,1] [--window 256]
        [--calibration-window N] [--tokens N] [--heal N] [--step-tokens N] [--only healed]

Converts the model once for each method and number of K/V heads, through the command line's own function, and scores
each result on every --data (several may be given) with window = stride. Seconds are of the conversion, the start of
Python and the check left out. Prints a Markdown table.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headpool.convert.aligned import run
from headpool.convert.aligned.options import Alignment
from headpool.convert.run import convert_checkpoint
from headpool.defaults import CALIBRATION_TOKENS, HEAL_RATE, HEAL_STEPS
from headpool.eval.measure import ModelSpec, evaluate
from headpool.text import TextData, read_documents, read_texts


@dataclass(frozen=True)
class Row:
    """A way to convert: a line of the table."""

    name: str
    method: str
    alignment: Alignment


def rows(calibration: TextData, arguments: argparse.Namespace) -> Iterator[Row]:
    """From the baselines on, each with one step more than the one before."""
    text: dict[str, Any] = {
        "calibration": calibration,
        "tokens": arguments.tokens,
        "window": arguments.calibration_window,
    }
    nothing: dict[str, Any] = {"heal": 0, "refit": False, "groups": "contiguous"}
    yield Row("mean", "mean", Alignment())
    yield Row("first", "first", Alignment())
    yield Row("aligned, data-free", "aligned", Alignment(**nothing))
    yield Row("keys and values shared (1, 2)", "aligned", Alignment(**text, **nothing))
    yield Row("+ groups searched (3)", "aligned", Alignment(**text, **{**nothing, "groups": "search"}))
    yield Row("+ refitted (4)", "aligned", Alignment(**text, heal=0))
    if arguments.heal:
        yield Row("+ healed (5)", "aligned", Alignment(**text, heal=arguments.heal, learning_rate=arguments.rate))


def perplexities(models: list[Path], data: list[TextData], window: int) -> list[list[float]]:
    specs = [ModelSpec("model", str(model)) for model in models]
    reports = [evaluate(specs, one, window=window, stride=window) for one in data]
    return [[report.models[index].score.perplexity for report in reports] for index in range(len(models))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("recipes/quickstart/model"))
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--data", type=Path, action="append", required=True)
    parser.add_argument("--kv-heads", default="4,2,1")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--calibration-window", type=int)
    parser.add_argument("--tokens", type=int, default=CALIBRATION_TOKENS)
    parser.add_argument("--heal", type=int, default=HEAL_STEPS)
    parser.add_argument("--rate", type=float, default=HEAL_RATE)
    parser.add_argument("--step-tokens", type=int, default=run.STEP_TOKENS, help="of a healing step")
    parser.add_argument("--only", help="only the rows whose name holds this")
    arguments = parser.parse_args()
    run.STEP_TOKENS = arguments.step_tokens
    data = [read_texts(path) for path in arguments.data]
    [original] = perplexities([arguments.model], data, arguments.window)
    print("original:", ", ".join(f"{one.name} {value:.3f}" for one, value in zip(data, original, strict=True)))
    names = " | ".join(f"{one.name}: ratio | nats/token more" for one in data)
    print(f"| K/V heads | method | {names} | seconds |\n|{'---|' * (3 + 2 * len(data))}", flush=True)
    for kv_heads in map(int, arguments.kv_heads.split(",")):
        for row in rows(read_documents(arguments.calibration), arguments):
            if arguments.only and arguments.only not in row.name:
                continue
            print(line(row, kv_heads, arguments, data, original), flush=True)


def line(row: Row, kv_heads: int, arguments: argparse.Namespace, data: list[TextData], original: list[float]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "converted"
        begin = time.perf_counter()
        convert_checkpoint(str(arguments.model), out, kv_heads=kv_heads, method=row.method, alignment=row.alignment)
        seconds = time.perf_counter() - begin
        [found] = perplexities([out], data, arguments.window)
    cells = [f"{value / base:.4f} | {math.log(value / base):.4f}" for value, base in zip(found, original, strict=True)]
    return f"| {kv_heads} | {row.name} | {' | '.join(cells)} | {seconds:.0f} |"


if __name__ == "__main__":
    main()
