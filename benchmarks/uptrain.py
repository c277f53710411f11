"""Speed of uptraining against a bare PyTorch loop and transformers.Trainer over the same model, batches and optimizer.

    python benchmarks/uptrain.py [--steps 24] [--rounds 3]

The bundled model with 2 K/V heads, 16 sequences of 256 tokens a step. Contestants take turns, each in the same process
and with the same threads; prints medians over all rounds, and their ratios.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from contestants import Race, Times, bare, headpool, trainer

from headpool.convert.run import convert_checkpoint

QUICKSTART = Path(__file__).resolve().parent.parent / "recipes" / "quickstart"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        convert_checkpoint(str(QUICKSTART / "model"), folder / "model", kv_heads=2)
        race = Race(
            folder / "model", QUICKSTART / "train.txt", folder, steps=options.steps, sequence=256, batch=16, micro=16
        )
        given = race.batches()
        waited: list[float] = []

        def plain() -> Times:
            times, result, _ = headpool(race)
            waited.append(result.waited or 0.0)
            return times

        distilling = f"uptrain.teacher={QUICKSTART / 'model'}"
        contestants: dict[str, Callable[[], Times]] = {
            "headpool": plain,
            "bare loop": lambda: bare(race, given),
            "transformers.Trainer": lambda: trainer(race, given),
            "headpool, distilling": lambda: headpool(race, distilling)[0],
        }
        times: dict[str, Times] = {name: [] for name in contestants}
        for _ in range(options.rounds):
            for contestant, run in contestants.items():
                times[contestant] += run()
    medians = {contestant: statistics.median(held) for contestant, held in times.items()}
    for contestant, seconds in medians.items():
        print(f"{contestant}: {race.sequence * race.batch / seconds:,.0f} tokens/s")
    print(f"headpool / bare loop: {medians['bare loop'] / medians['headpool']:.3f} (goal: 0.97)")
    print(f"headpool / transformers.Trainer: {medians['transformers.Trainer'] / medians['headpool']:.3f} (goal: 1.0)")
    print(f"time that steps waited for data: {statistics.median(waited):.2%} (goal: under 2%)")
    print(f"a distilling step / a plain step: {medians['headpool, distilling'] / medians['headpool']:.3f} (goal: 1.45)")


if __name__ == "__main__":
    main()
