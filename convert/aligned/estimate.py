"""What an aligned conversion will take, told from headers before anything is read: memory, disk, and arithmetic.

The figures are upper bounds of what one decoder layer at a time needs. They don't grow with the number of layers, but
for the disk's (results are kept until all are there).
"""

import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from headpool.checkpoint import Source
from headpool.convert.layouts import Layout
from headpool.errors import RequestError
from headpool.headers import TensorRecord

BASE = 600 * 2**20
"""Bytes of a process that has done everything on a very small model: interpreter, libraries, tokenizer."""

OBSERVING = 256 * 2**20
"""Bytes for attention weights on the way, in the pieces in which they are observed, and the allocator's slack."""

DOUBLE, FLOAT = 8, 4


@dataclass(frozen=True)
class Task:
    """What shall be done: calibration windows [windows, tokens], `batch` of them at a time.

    itemsize: of the dtype computed in. heal_steps: 0 for none; of `whole_layers`, or of attention alone. kept: bytes of
    inputs and outputs that are held on to for refit and healing; without, those of `held_out` windows are. scores: the
    class's attention holds all its scores at once (eager). output: bytes of the result where it goes to the same disk.
    """

    windows: int
    tokens: int
    batch: int
    itemsize: int = FLOAT
    refit: bool = True
    heal_steps: int = 0
    heal_batch: int = 1
    whole_layers: bool = False
    kept: int = 0
    held_out: int = 1
    scores: bool = False
    output: int = 0


@dataclass(frozen=True)
class Estimate:
    """Bytes at the worst moment, by what takes them, of the device that computes and of the disk; `flops` in all."""

    memory: Mapping[str, int]
    disk: Mapping[str, int]
    flops: float

    @property
    def memory_bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def disk_bytes(self) -> int:
        return sum(self.disk.values())

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"memory_bytes": self.memory_bytes, "disk_bytes": self.disk_bytes}


@dataclass(frozen=True)
class _Sizes:
    """Elements: of a layer (the largest), its attention, the embedding, and what else is outside the layers;
    widths of hidden states, queries, keys and the widest other activation; bytes of an element in the file.
    """

    layer: int
    attention: int
    embedding: int
    rest: int
    hidden: int
    queries: int
    keys: int
    widest: int
    file_itemsize: int


def estimate(source: Source, layout: Layout, task: Task) -> Estimate:
    """What calibrating on one device takes, results included."""
    sizes = _sizes(source, layout)
    batch_tokens = task.batch * task.tokens
    loading = max(task.itemsize, sizes.file_itemsize) + (sizes.file_itemsize != task.itemsize) * sizes.file_itemsize
    algebra = DOUBLE * (6 * sizes.keys**2 + 4 * sizes.attention)
    solving = DOUBLE * (6 * sizes.queries**2 + 3 * sizes.queries * sizes.hidden) * task.refit
    trained = sizes.layer if task.whole_layers else sizes.attention
    healing = task.itemsize * 6 * trained * bool(task.heal_steps)
    passing = (
        task.itemsize * batch_tokens * (6 * sizes.hidden + 4 * (sizes.queries + 2 * sizes.keys) + 3 * sizes.widest)
    )
    scores = task.itemsize * 4 * task.batch * max(one.heads for one in layout.layers) * task.tokens**2 * task.scores
    widths = 12 * (sizes.hidden + sizes.queries + 2 * sizes.keys) + 6 * sizes.widest * task.whole_layers
    learning = task.itemsize * task.heal_batch * task.tokens * widths
    kept = task.kept or 2 * task.itemsize * task.held_out * task.tokens * sizes.hidden
    inputs = DOUBLE * 2 * sizes.hidden**2 * (layout.key_gains is not None)
    hidden_states = 3 * task.itemsize * task.windows * task.tokens * sizes.hidden
    phases: dict[str, dict[str, int]] = {
        "embedding": {"embedding": loading * sizes.embedding},
        "loading": {"decoder layer": loading * sizes.layer},
        "observing": {
            "decoder layer": task.itemsize * sizes.layer,
            "activations": passing + scores,
            "statistics": OBSERVING + DOUBLE * 4 * sizes.keys**2 + inputs,
        },
        "solving": {
            "decoder layer": task.itemsize * (sizes.layer + sizes.attention),
            "activations": passing + scores + DOUBLE * batch_tokens * 3 * (sizes.queries + sizes.hidden) * task.refit,
            "statistics": algebra + solving + inputs,
            "held inputs": task.kept,
        },
        "healing": {
            "decoder layer": task.itemsize * (sizes.layer + trained),
            "activations": learning + scores,
            "training": healing,
            "held inputs": kept,
        },
    }
    worst = max(phases.values(), key=lambda parts: sum(parts.values()))
    return Estimate(
        memory={"process": BASE, "outside the layers": task.itemsize * sizes.rest, **worst},
        disk={
            "hidden states": hidden_states,
            "results": task.itemsize * len(layout.layers) * trained,
            **({"output beside them": task.output - hidden_states} if task.output > hidden_states else {}),
        },
        flops=_flops(sizes, task) * len(layout.layers),
    )


def _flops(sizes: _Sizes, task: Task) -> float:
    """Of one layer: one pass and half of one to observe, a pass of two attentions to refit, three a step to heal."""
    scores = 2 * task.tokens * sizes.queries
    tokens = task.windows * task.tokens
    observing = 1.5 * (sizes.layer + scores)
    refitting = (2 * (sizes.attention + scores) + sizes.queries * (sizes.queries + sizes.hidden)) * task.refit
    trained = sizes.layer if task.whole_layers else sizes.attention
    healing = task.heal_steps * task.heal_batch * task.tokens * 4 * (trained + scores)
    return 2 * (tokens * (observing + refitting) + healing)


def _sizes(source: Source, layout: Layout) -> _Sizes:
    layers: dict[int, list[TensorRecord]] = {index: [] for index in range(len(layout.layers))}
    outside: list[TensorRecord] = []
    for name, record in source.tensors.items():
        number = name.removeprefix(layout.stem).split(".")[0]
        if name.startswith(layout.stem) and number.isdigit() and int(number) in layers:
            layers[int(number)].append(record)
        else:
            outside.append(record)
    largest = max(layers, key=lambda index: sum(_elements(record) for record in layers[index]))
    attending = (
        largest
        if layout.layers[largest].kind != "none"
        else next(index for index, layer in enumerate(layout.layers) if layer.kind != "none")
    )
    inside = layout.tensor(attending, "")
    widths = [size for record in layers[largest] if not record.name.startswith(inside) for size in record.shape[-2:]]
    embedding = max(map(_elements, outside), default=0)
    heads = [one for one in layout.layers if one.kind != "none"]
    return _Sizes(
        layer=sum(map(_elements, layers[largest])),
        attention=sum(_elements(record) for record in layers[attending] if record.name.startswith(inside)),
        embedding=embedding,
        rest=sum(map(_elements, outside)) - sum(_elements(one) for one in outside if _elements(one) == embedding),
        hidden=source.tensors[layout.names(attending, "o")[0]].shape[0],
        queries=max(one.heads * one.head_dim for one in heads),
        keys=max(one.kv_heads * one.head_dim for one in heads),
        widest=max(widths, default=0),
        file_itemsize=max(record.nbytes // max(1, _elements(record)) for record in layers[largest]),
    )


def _elements(record: TensorRecord) -> int:
    return math.prod(record.shape)


def check_resources(needed: Estimate, *, memory: int, disk: int, work: Path) -> None:
    """Refuse what would not fit: RequestError with the estimate, before anything is started."""
    for what, parts, total, free in (
        ("memory", needed.memory, needed.memory_bytes, memory),
        (f"space beside {work}", needed.disk, needed.disk_bytes, disk),
    ):
        if total > free:
            listed = ", ".join(f"{name} {_gib(size)}" for name, size in parts.items())
            raise RequestError(f"calibration needs {_gib(total)} of {what}, {_gib(free)} are free ({listed})")


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


def free_memory(device: str) -> int:
    """Bytes that a new allocation can take: of the device, or of this machine within the process's limits."""
    if device.startswith("cuda"):
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return _free_ram()


def _free_ram() -> int:
    """What the machine has free, within the limit of this process's control group where there is one."""
    available = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    try:
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(statistics["inactive_file"])
        return max(0, min(available, int((group / "memory.max").read_text()) - used))
    except (OSError, ValueError, KeyError):  # no such file, or "max": no limit
        return available


def free_disk(path: Path) -> int:
    """Bytes free where `path` is, or will be."""
    return shutil.disk_usage(_existing(path)).free


def on_one_disk(one: Path, other: Path) -> bool:
    """Whether two paths are, or will be, on one file system."""
    return _existing(one).stat().st_dev == _existing(other).stat().st_dev


def _existing(path: Path) -> Path:
    return next(one for one in (path, *path.resolve().parents) if one.exists())
