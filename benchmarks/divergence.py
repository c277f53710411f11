"""How far converted models are from the original on some texts: by what the text costs more, and by KL divergence.

    python benchmarks/divergence.py recipes/quickstart/model CONVERTED... --data recipes/quickstart/test.txt
        [--window 256] [--windows 128] [--batch 16]

Where the original itself is at a loss on a text, a model that is less sure of itself may cost less there and be farther
from the original: KL(original ‖ converted) tells. Nats per token over windows at equal distances; the converted models'
entropy more than the original's beside them. Prints a Markdown table for each --data.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer


def windows(tokenizer: Any, data: Path, window: int, count: int) -> Tensor:
    """At most `count` full windows [N, window] of a text, spread over it."""
    ids = tokenizer(data.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False)["input_ids"]
    full = torch.tensor(ids[: len(ids) // window * window]).view(-1, window)
    return full[:: max(1, len(full) // count)][:count]


def predictions(directory: Path, batches: list[Tensor]) -> Iterator[Tensor]:
    """Log-probabilities [B, T-1, V] of each token but the first of every window."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    for ids in batches:
        with torch.no_grad():
            yield model(ids).logits[:, :-1].log_softmax(-1)


def compare(original: Path, converted: Path, batches: list[Tensor]) -> tuple[float, float, float]:
    """Means per token: loss more, KL(original ‖ converted), entropy more."""
    sums = torch.zeros(3, dtype=torch.float64)
    pairs = zip(batches, predictions(original, batches), predictions(converted, batches), strict=True)
    for ids, before, after in pairs:
        target = ids[:, 1:, None]
        loss = (before - after).gather(-1, target)[..., 0]
        divergence = (before.exp() * (before - after)).sum(-1)
        entropy = (before.exp() * before).sum(-1) - (after.exp() * after).sum(-1)
        sums += torch.stack([one.double().sum() for one in (loss, divergence, entropy)])
    more, divergence, surprise = (sums / sum(ids[:, 1:].numel() for ids in batches)).tolist()
    return more, divergence, surprise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("original", type=Path)
    parser.add_argument("converted", type=Path, nargs="+")
    parser.add_argument("--data", type=Path, action="append", required=True)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--windows", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.original)
    for data in arguments.data:
        batches = list(windows(tokenizer, data, arguments.window, arguments.windows).split(arguments.batch))
        print(f"| {data.name}, {sum(map(len, batches))} windows | nats more | KL | entropy more |\n|---|---|---|---|")
        for converted in arguments.converted:
            figures = compare(arguments.original, converted, batches)
            print(f"| {converted.name} | {' | '.join(f'{one:.4f}' for one in figures)} |", flush=True)


if __name__ == "__main__":
    main()
