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
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import transformers

from headpool import checkpoint
from headpool.checkpoint import Source
from headpool.convert.aligned.estimate import Task, estimate
from headpool.convert.aligned.grouping import GroupLoss, best_partition, permute
from headpool.convert.aligned.heal import Schedule, heal
from headpool.convert.aligned.keys import share_keys
from headpool.convert.aligned.observe import MomentsObserver, observing
from headpool.convert.aligned.refit import refit_output
from headpool.convert.aligned.replay import Examples, normal_equations
from headpool.convert.aligned.stock import Stock
from headpool.convert.aligned.values import share_values
from headpool.convert.aligned.walk import Layer, Walk
from headpool.convert.aligned.work import Work
from headpool.convert.layouts import AttentionWeights
from headpool.convert.plan import Plan, plan_conversion

MODEL = Path(__file__).resolve().parent.parent / "recipes" / "quickstart" / "model"
EVERY = 4
"""One query in so many is looked at."""


class Run:
    """The steps of aligned conversion on a checkpoint, layer by layer; nothing is written."""

    def __init__(self, source: Source, tokens: torch.Tensor, kv_heads: int, batch: int, work: Work | None) -> None:
        self.plan: Plan = plan_conversion(source, kv_heads=kv_heads)
        self.stock = Stock(source, self.plan.layout, device="cpu", dtype=torch.float32)
        self.converted = Stock(
            source, self.plan.layout, device="cpu", dtype=torch.float32, config_text=self.plan.config_text
        )
        self.walk = Walk(self.stock, tokens, batch=batch, work=work)

    def layers(self, *, refit: bool, heal_steps: int) -> Iterator[AttentionWeights]:
        for layer in self.walk:
            weights = self.closed_form(layer)
            if refit:
                attention = self.attention(layer, weights)
                normal = normal_equations(attention, self.plan.layout.projections["o"], Examples(layer))
                weights = refit_output(weights, normal, 1e-4)
            if heal_steps:
                held_out = Examples(layer, slice(0, self.walk.batch))
                heal(self.attention(layer, weights), Examples(layer), held_out, Schedule(heal_steps, 1e-3))
            yield weights

    def all(self, *, refit: bool = False, heal_steps: int = 0) -> None:
        for _ in self.layers(refit=refit, heal_steps=heal_steps):
            pass

    def closed_form(self, layer: Layer) -> AttentionWeights:
        layout, kv_heads = self.plan.layout, self.plan.kv_heads
        assert layout.rotary is not None
        observer = MomentsObserver(layout.rotary)
        with observing(layer.attention, observer, every=EVERY):
            layer.advance(record=True)
        moments = observer.moments()
        weights = self.stock.weights(layer.index)
        loss = GroupLoss(weights, moments)
        partition = best_partition(loss, len(moments.keys[0]), kv_heads, search=True)
        order = [head for group in partition for head in group]
        weights, moments = permute(weights, order), moments.permuted(order)
        weights = share_keys(weights, kv_heads, moments)
        return share_values(weights, kv_heads, moments.value_groups(kv_heads), moments.value_means, fold_mean=False)

    def attention(self, layer: Layer, weights: AttentionWeights) -> torch.nn.Module:
        return self.converted.attention_with(layer.index, self.plan.layout.write(weights, layer.index))


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

    def closed_form() -> None:
        Run(source, ids, kv_heads, batch, None).all()

    def refitted() -> None:
        Run(source, ids, kv_heads, batch, None).all(refit=True)

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
    windows, batch, heal_steps = tokens // window, 2, 2
    ids = torch.randint(0, 1000, (windows, window), generator=torch.Generator().manual_seed(0))
    plan = plan_conversion(source, kv_heads=4)
    task = Task(windows, window, batch, heal_steps=heal_steps, heal_batch=batch)
    estimated = estimate(source, plan.layout, task)
    with tempfile.TemporaryDirectory() as directory, Work(Path(directory), {}) as work:
        Run(source, ids, 4, batch, work).all(refit=True, heal_steps=heal_steps)
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
