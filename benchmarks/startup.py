"""How soon the command line answers, against an interpreter that imports typer and rich: ratios from one run.

    python benchmarks/startup.py [--runs 11]

`headpool --help`, `headpool plan` of the bundled model, and a request that convert refuses; medians of wall-clock time.
"""

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

MODEL = Path(__file__).resolve().parent.parent / "recipes" / "quickstart" / "model"
COMMANDS = {
    "typer and rich alone": ["-c", "import typer, rich.console, rich.table"],
    "headpool --help": ["-m", "headpool", "--help"],
    "headpool plan": ["-m", "headpool", "plan", str(MODEL)],
    "headpool convert, refused": ["-m", "headpool", "convert", str(MODEL), "nowhere", "--kv-heads", "3"],
}


def seconds(arguments: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, *arguments], capture_output=True, check=False)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=11)
    runs = parser.parse_args().runs
    taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(runs):
        for name, arguments in COMMANDS.items():
            taken[name].append(seconds(arguments))
    alone = statistics.median(taken["typer and rich alone"])
    for name, values in taken.items():
        middle = statistics.median(values)
        print(f"{name}: {middle:.2f} s, {middle / alone:.1f} times typer and rich alone")


if __name__ == "__main__":
    main()
