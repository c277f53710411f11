"""What calibrating costs: time against one forward pass, memory against the number of layers and the estimate.

    python benchmarks/calibrate.py [--model DIRECTORY] [--tokens 65536] [--window 256] [--kv-heads 2] [--hidden 1024]

Time: the model's own forward pass over the calibration tokens (transformers, the whole model in memory), then observing
and steps 1 to 3, then those and the refit; process time of one thread, medians of three runs in turn, as ratios.
Memory: synthetic float32 checkpoints of equal width with 4 and 16 layers, the larger one over 1 GB, each converted
layer by layer (all steps) in a fresh process: the operating system's peak, and what was estimated.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from headpool import checkpoint
from headpool.checkpoint import Source
from headpool.convert.aligned.estimate import Estimate
from headpool.convert.aligned.options import Alignment
from headpool.convert.aligned.run import align, estimate_for
from headpool.convert.aligned.work import Work
from headpool.convert.plan import plan_conversion
from headpool.text import TextData

MODEL = Path(__file__).resolve().parent.parent / "recipes" / "quickstart" / "model"
TEXT = TextData([], "", "random tokens")


def aligned(source: Source, ids: torch.Tensor, kv_heads: int, work: Work, **steps: Any) -> Estimate:
    """Align a checkpoint on windows of tokens, and give what it was estimated to take."""
    alignment = Alignment(calibration=TEXT, device="cpu", **steps)
    plan = plan_conversion(source, kv_heads=kv_heads, method="aligned", whole_layers=alignment.whole_layers)
    estimated = estimate_for(plan, alignment, ids.shape)
    align(plan, alignment, ids, work)
    return estimated


def seconds(work: Callable[[], None]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def measure_time(directory: Path, tokens: int, window: int, kv_heads: int) -> None:
    source = checkpoint.open_source(str(directory))
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    batch = max(1, 4096 // window)
    ids = torch.randint(0, model.config.vocab_size, (tokens // window, window))

    @torch.no_grad()
    def forward() -> None:
        for begin in range(0, len(ids), batch):
            model(ids[begin : begin + batch], use_cache=False)

    def timed(**steps: Any) -> None:
        with tempfile.TemporaryDirectory() as folder, Work(Path(folder), {}) as work:
            aligned(source, ids, kv_heads, work, heal=0, **steps)

    def closed_form() -> None:
        timed(refit=False)

    def refitted() -> None:
        timed()

    runs = {"forward pass": forward, "steps 1 to 3": closed_form, "steps 1 to 3 and the refit": refitted}
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(3):
        for name, work in runs.items():
            taken[name].append(seconds(work))
    base = statistics.median(taken["forward pass"])
    for name, values in taken.items():
        middle = statistics.median(values)
        print(f"{name}: {middle:.2f} s, {middle / base:.2f} forward passes over {ids.numel():,} tokens")


def measure_memory(folder: Path, tokens: int, window: int) -> None:
    """One conversion, to be run in a process of its own: prints one JSON object."""
    source = checkpoint.open_source(str(folder))
    ids = torch.randint(0, 1000, (tokens // window, window), generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as directory, Work(Path(directory), {}) as work:
        estimated = aligned(source, ids, 4, work, heal=2)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    print(json.dumps({"peak": int(status["VmHWM"].split()[0]) * 1024, **estimated.to_dict()}))


def synthetic(folder: Path, layers: int, hidden: int) -> int:
    """A llama-shaped float32 checkpoint of random weights; returns its bytes. Small weights keep activations small."""
    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_attention_heads=hidden // 64,
        num_hidden_layers=layers, vocab_size=32000, max_position_embeddings=2048,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def compare_memory(hidden: int) -> None:
    peaks = []
    for layers in (4, 16):
        with tempfile.TemporaryDirectory() as directory:
            size = synthetic(Path(directory), layers, hidden)
            command = [sys.executable, __file__, "--memory-of", directory, "--tokens", "2048", "--window", "512"]
            result = subprocess.run(command, check=True, capture_output=True, text=True)
            found = json.loads(result.stdout)
        peaks.append(found["peak"])
        print(
            f"{layers} layers, {size / 1e9:.2f} GB: peak {found['peak'] / 1e6:,.0f} MB, "
            f"estimated {found['memory_bytes'] / 1e6:,.0f} MB"
        )
    print(f"memory with 16 layers, relative to 4: {peaks[1] / peaks[0]:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=1024, help="width of the synthetic checkpoints; 0 for none")
    parser.add_argument("--memory-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if options.memory_of:
        measure_memory(options.memory_of, options.tokens, options.window)
        return
    measure_time(options.model, options.tokens, options.window, options.kv_heads)
    if options.hidden:
        compare_memory(options.hidden)


if __name__ == "__main__":
    main()
