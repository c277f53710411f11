"""`headpool uptrain --dry-run`: everything is checked, nothing is trained, memory and time are estimated."""

import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headpool.recipe import Recipe
from headpool.uptrain.inputs import open_inputs
from headpool.uptrain.loss import CHUNK, DEFAULT_CHUNK
from headpool.uptrain.metrics import PEAK_FLOPS, flops_per_token, peak_flops
from headpool.uptrain.models import build_on_meta
from headpool.uptrain.optimizer import choose_trainable
from headpool.uptrain.parallel import default_precision
from headpool.uptrain.plan import Plan, plan_uptraining

if TYPE_CHECKING:
    from rich.console import RenderableType

ASSUMED_MFU = 0.4
"""What a well-fed GPU reaches with models of a billion parameters and more."""

ACTIVATION_BYTES_16 = 34
"""Bytes of activations per token, layer and hidden dimension in 16-bit precision, attention scores not kept
(Korthikanti et al. 2022, equation 2 without its quadratic part)."""


@dataclass(frozen=True)
class Estimate:
    """Bytes are per device, seconds for the whole training. `processes` are those of the recipe's launch settings.

    `seconds` has an entry for this machine's device where its speed can be told, and one each for GPUs in common use,
    one process on each, at ASSUMED_MFU.
    """

    parameters: int
    trainable: int
    steps: int
    tokens: int
    sequence_length: int
    batch_tokens: int
    micro_batch: int
    processes: int
    precision: str
    memory: dict[str, int]
    memory_total: int
    seconds: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def describe(self) -> "RenderableType":
        """In words, for a person."""
        from rich.console import Group
        from rich.table import Table

        table = Table(title="Memory per device, estimated")
        table.add_column("what")
        table.add_column("GiB", justify="right")
        for name, size in {**self.memory, "total": self.memory_total}.items():
            table.add_row(name, f"{size / 2**30:.2f}")
        times = ", ".join(f"{_duration(seconds)} on {device}" for device, seconds in self.seconds.items())
        return Group(
            f"{self.parameters / 1e6:,.1f} M parameters, {self.trainable / 1e6:,.1f} M of them train, {self.precision}",
            f"{self.steps:,} steps of {self.batch_tokens:,} tokens in sequences of {self.sequence_length:,}: "
            f"{self.tokens:,} tokens; {self.processes} process(es), {self.micro_batch} sequences at a time",
            table,
            f"time, estimated: {times}",
            "Nothing was trained: all that could be checked without training is in order.",
        )


def _duration(seconds: float) -> str:
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.1f} days"


def estimate(recipe: Recipe) -> Estimate:
    """Check a recipe's uptraining as far as that is possible without weights, and estimate what it takes.

    Raises RequestError for all that training would refuse before it starts.
    """
    processes = recipe.uptrain.processes if recipe.uptrain else 1
    plan = plan_uptraining(recipe, world=processes, made=False)
    open_inputs(plan)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(plan.config_text, encoding="utf-8")
        model = build_on_meta(Path(folder))
    choose_trainable(model, plan.family, plan.section.train)
    memory = _memory(plan, model, processes)
    return Estimate(
        parameters=sum(one.numel() for one in model.parameters()),
        trainable=_trainable(model),
        steps=plan.steps,
        tokens=plan.steps * plan.batch_tokens,
        sequence_length=plan.sequence_length,
        batch_tokens=plan.batch_tokens,
        micro_batch=_rows(plan, processes),
        processes=processes,
        precision=plan.section.precision or default_precision(),
        memory=memory,
        memory_total=sum(memory.values()),
        seconds=_seconds(plan, model, processes),
    )


def _trainable(model: Any) -> int:
    return sum(one.numel() for one in model.parameters() if one.requires_grad)


def _rows(plan: Plan, processes: int) -> int:
    """Sequences that a device holds at a time."""
    return min(plan.section.micro_batch, plan.lanes // processes)


def _memory(plan: Plan, model: Any, processes: int) -> dict[str, int]:
    section = plan.section
    parameters, trainable = sum(one.numel() for one in model.parameters()), _trainable(model)
    parts = processes if section.sharding == "full" else 1
    rows, width = _rows(plan, processes), 4 if (section.precision or default_precision()) == "fp32" else 2
    config = model.config.get_text_config()
    tokens, hidden, vocabulary = rows * plan.sequence_length, config.hidden_size, config.vocab_size
    per_layer = tokens * hidden * ACTIVATION_BYTES_16 * width // 2
    layers = len(plan.layers)
    kept = tokens * hidden * width * layers + per_layer if section.gradient_checkpointing else per_layer * layers
    states = 8 if section.optimizer == "adamw" else 0  # Adafactor's are a row and a column of each matrix
    chunk = CHUNK["cpu"] if not torch.cuda.is_available() else DEFAULT_CHUNK
    memory = {
        "weights (float32)": 4 * parameters // parts,
        "gradients (float32)": 4 * trainable // parts,
        f"optimizer ({section.optimizer})": states * trainable // parts,
        "activations": kept,
        "logits and their gradient": 2 * tokens * vocabulary * width + 2 * 4 * chunk,
    }
    if width == 2:
        memory[f"weights in {section.precision or default_precision()} while computing"] = 2 * parameters // parts
    if plan.teacher is not None:
        memory["teacher"] = parameters * width
    return memory


def _seconds(plan: Plan, model: Any, processes: int) -> dict[str, float]:
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    parameters = sum(one.numel() for one in model.parameters()) - (0 if head is embedding else embedding.numel())
    layer = plan.layers[0]
    each = flops_per_token(parameters, len(plan.layers), layer.heads * layer.head_dim, plan.sequence_length)
    if plan.section.gradient_checkpointing:
        each *= 4 / 3
    if plan.teacher is not None:
        each *= 4 / 3
    total = each * plan.steps * plan.batch_tokens / processes
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    peak = peak_flops(name) if name else None
    here = {name: total / (peak * ASSUMED_MFU)} if name and peak else {}
    if name is None:
        here = {"this CPU": total / _cpu_flops()}
    common = {f"{gpu} ({ASSUMED_MFU:.0%} MFU)": total / (PEAK_FLOPS[gpu] * ASSUMED_MFU) for gpu in ("A100", "H100")}
    return here | common


def _cpu_flops() -> float:
    """What float32 matrix products of a training step's shape reach, half of it lost to everything else."""
    a, b = torch.randn(1024, 256), torch.randn(256, 1024)
    a @ b
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < 0.1:
        a @ b
        count += 1
    return 2 * 1024 * 256 * 1024 * count / (time.perf_counter() - begin) / 2
