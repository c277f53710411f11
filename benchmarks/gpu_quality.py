"""Aligned conversion on a GPU, of a model of a billion parameters' shape: time of each step, memory, block errors.

    python benchmarks/gpu_quality.py [--layers 16] [--tokens 131072] [--window 2048] [--kv-heads 4] [--heal 100]

Makes a random llama-shaped bfloat16 checkpoint (hidden size 2048, 16 heads of 128; what its blocks lose says nothing
of a trained model), then aligns it three times, each with one step more: sharing, refit, healing. Prints seconds, as
ratios to one forward pass of the stock class over the same tokens too, and the device's peak memory beside the
estimate. Under four minutes on one data-center GPU; on a machine without one it says so and ends with status 2.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import transformers

from headpool.checkpoint import open_source
from headpool.convert.aligned.options import Alignment
from headpool.convert.aligned.run import align, estimate_for
from headpool.convert.aligned.work import Work
from headpool.convert.plan import plan_conversion
from headpool.text import TextData


def make_checkpoint(folder: Path, layers: int) -> None:
    config = transformers.LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=16, vocab_size=32_000, max_position_embeddings=4096,
    )  # fmt: skip
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)


def seconds(work: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--heal", type=int, default=100)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no GPU here")
        sys.exit(2)
    print(torch.cuda.get_device_name(), torch.__version__)
    with tempfile.TemporaryDirectory() as name:
        measure(Path(name), arguments)


def measure(folder: Path, arguments: argparse.Namespace) -> None:
    make_checkpoint(folder / "model", arguments.layers)
    shape = (arguments.tokens // arguments.window, arguments.window)
    windows_NT = torch.randint(0, 32_000, shape, generator=torch.Generator().manual_seed(0))
    base = forward_seconds(folder / "model", windows_NT)
    print(f"forward pass: {base:.1f} s")
    given = Alignment(calibration=TextData([], "", "random tokens"), device="cuda", heal=0, refit=False)
    options = {
        "keys, values and groups": given,
        "and refit": replace(given, refit=True),
        "and healing": replace(given, refit=True, heal=arguments.heal),
    }
    for number, (step, alignment) in enumerate(options.items()):
        plan = plan_conversion(
            open_source(str(folder / "model")), kv_heads=arguments.kv_heads, method="aligned",
            whole_layers=alignment.heal > 0,
        )  # fmt: skip
        with Work(folder / f"work-{number}", {}) as work:
            figures = []
            taken = seconds(lambda: figures.extend(align(plan, alignment, windows_NT, work)))  # noqa: B023
        needed = estimate_for(plan, alignment, shape).memory_bytes
        errors = {name: statistics.mean(one.block_error[name] for one in figures) for name in figures[0].block_error}
        print(
            f"{step}: {taken:.1f} s, {taken / base:.2f} forward passes; block errors {errors}; peak "
            f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB (estimated {needed / 2**30:.2f})"
        )


@torch.no_grad()
def forward_seconds(folder: Path, windows_NT: torch.Tensor) -> float:
    """Of the stock class without its head, in float32 as aligning computes; loading does not count."""
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32, device_map="cuda")

    def run() -> None:
        for windows in windows_NT.split(2):
            model(windows.cuda(), use_cache=False)

    run()
    return seconds(run)


if __name__ == "__main__":
    main()
