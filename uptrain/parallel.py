"""Devices, precision and sharding: accelerate's business, behind one function.

accelerate 1.15 ignores an FSDP plugin on CPUs without a word, so there torch's own `fully_shard` does the work; either
way what was asked for is checked against what came out.
"""

import importlib.util
import os
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import get_available_trackers
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    broadcast_object_list,
    gather_object,
)
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from headpool.composite import composites
from headpool.destination import reporting_os_errors
from headpool.errors import HeadpoolError, RequestError
from headpool.sections import UptrainSection
from headpool.uptrain.objective import Objective
from headpool.uptrain.optimizer import build_optimizer

MIXED = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}


def start_accelerator(section: UptrainSection, project: str) -> Accelerator:
    """accelerate as it was launched, in the recipe's precision."""
    launched_sharded = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    plugin = None
    if section.sharding == "full" and not launched_sharded and torch.cuda.is_available():
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    precision = section.precision or default_precision()
    only_cpu = not torch.accelerator.is_available()
    AcceleratorState._reset_state()  # an earlier training in this process may have had another precision
    accelerator = Accelerator(
        cpu=only_cpu,  # else several processes on CPUs do not know of one another
        mixed_precision=MIXED[precision],
        fsdp_plugin=plugin,
        log_with=list(section.trackers) or None,
        project_dir=project,
    )
    if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise RequestError(f"launched with {accelerator.distributed_type}; headpool trains with DDP or FSDP2")
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise RequestError("launched with FSDP 1; pass --fsdp_version 2 to accelerate launch")
    return accelerator


NEEDED = {"flash_attention_2": ("flash_attn", "kernels"), "flash_attention_3": ("flash_attn_interface", "kernels")}
"""Packages, by what needs one of them."""


def check_machine(section: UptrainSection) -> None:
    """Raise RequestError for what a recipe asks for and this machine has not: accelerate computes in float32 instead of
    fp16 on CPUs, and leaves out a tracker that is not installed, without a word.
    """
    if not torch.accelerator.is_available():
        if section.precision == "fp16":
            raise RequestError("precision fp16 needs a GPU; on a CPU choose fp32 or bf16")
        if section.attention == "flex_attention":
            raise RequestError("attention flex_attention has gradients on GPUs only; choose sdpa")
    needed = NEEDED.get(section.attention, ())
    if needed and not any(importlib.util.find_spec(name) for name in needed):
        raise RequestError(f"attention {section.attention} needs {needed[0]}: pip install 'headpool[gpu]'")
    if section.liger and not importlib.util.find_spec("liger_kernel"):
        raise RequestError("liger: true needs liger-kernel: pip install 'headpool[gpu]'")
    known = [one.value for one in get_available_trackers()]
    missing = [one for one in section.trackers if one not in known]
    if missing:
        raise RequestError(f"trackers: {', '.join(missing)}: not installed; there are: {', '.join(known) or 'none'}")


def default_precision() -> str:
    """bf16 where a GPU computes in it; float32 on CPUs, most of which emulate bf16 at an eightieth of the speed."""
    return "bf16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "fp32"


def wants_sharding(section: UptrainSection) -> bool:
    return section.sharding == "full" or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


@dataclass(frozen=True)
class Workers:
    """The objective as this process runs it among the others, with its optimizer."""

    accelerator: Accelerator
    objective: Objective
    """As it was before it was wrapped; its parameters are those that train."""
    wrapped: Any
    optimizer: Any
    """accelerate's wrapper where precision needs one."""

    @property
    def world(self) -> int:
        return int(self.accelerator.num_processes)

    @property
    def sharded(self) -> bool:
        return isinstance(self.wrapped, FSDPModule)

    @property
    def plain_optimizer(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return optimizer

    @property
    def scaler(self) -> Any:
        """The loss scaler of fp16, otherwise None."""
        return self.accelerator.scaler

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        """Gradients are exchanged in the last micro-batch of a step only."""
        return nullcontext() if last else self._unsynchronized()

    @contextmanager
    def _unsynchronized(self) -> Iterator[None]:
        if not self.sharded:
            with self.accelerator.no_sync(self.wrapped):
                yield
            return
        self.wrapped.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.wrapped.set_requires_gradient_sync(True)

    def total(self, values: Tensor) -> Tensor:
        """Summed over all processes."""
        reduced: Tensor = self.accelerator.reduce(values, reduction="sum")
        return reduced

    def gather_objects(self, value: Any) -> list[Any]:
        """Every process's value, in the order of ranks."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(values, value)
        return values


def check_shared(folder: Path, accelerator: Accelerator) -> None:
    """Raise HeadpoolError, in every process, unless all of them see in `folder` what the main process writes there:
    each saves its part of the state, and a part that stays behind on another machine would be missed only on resuming.

    All processes have to ask at once.
    """
    probe = folder / "attempt"
    token = [uuid.uuid4().hex]
    if accelerator.is_main_process:
        with reporting_os_errors(probe):
            probe.write_text(token[0], encoding="utf-8")
    broadcast_object_list(token)
    seen = gather_object([probe.is_file() and probe.read_text(encoding="utf-8") == token[0]])
    if not all(seen):
        blind = ", ".join(str(rank) for rank, one in enumerate(seen) if not one)
        raise HeadpoolError(
            f"process {blind} does not see what process 0 writes in {folder}: the output must lie on a disk that all "
            "machines share"
        )


def prepare(objective: Objective, section: UptrainSection, accelerator: Accelerator) -> Workers:
    """The one place where a model is distributed.

    Raises HeadpoolError where the sharding is not what was asked for.
    """
    wanted = wants_sharding(section)
    if wanted and section.optimizer == "adafactor":
        raise RequestError("PyTorch's Adafactor does not work on sharded weights; choose optimizer: adamw")
    if wanted and accelerator.distributed_type != DistributedType.FSDP:
        wrapped: Any = _shard(objective, accelerator)
        optimizer: Any = build_optimizer(objective, section)
    else:
        if objective.student.config.model_type in composites():  # text leaves the other parts without a gradient
            accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=True)
        objective.to("cpu" if accelerator.distributed_type == DistributedType.FSDP else accelerator.device)
        wrapped, optimizer = accelerator.prepare(objective, build_optimizer(objective, section))
    workers = Workers(accelerator, objective, wrapped, optimizer)
    _check_sharding(workers, wanted)
    return workers


def _shard(objective: Objective, accelerator: Accelerator) -> FSDPModule:
    if accelerator.num_processes == 1:
        raise RequestError("sharding: full needs several processes; start it with torchrun or accelerate launch")
    if accelerator.mixed_precision != "no":
        raise RequestError(f"precision {accelerator.mixed_precision} with sharding: full needs GPUs")
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    kinds = set(objective._no_split_modules or ())
    for module in objective.modules():
        if type(module).__name__ in kinds:
            fully_shard(module, mesh=mesh)
    return fully_shard(objective, mesh=mesh)


def _check_sharding(workers: Workers, wanted: bool) -> None:
    sharded = {isinstance(one, DTensor) for one in workers.objective.parameters()}
    if sharded != {wanted}:
        raise HeadpoolError(
            f"sharding was {'' if wanted else 'not '}asked for, and {'some' if True in sharded else 'no'} weights are"
            " sharded: accelerate did something else than it was told"
        )


def whole(tensor: Tensor) -> Tensor:
    """A tensor of the full shape; of a sharded one all processes have to ask at once."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
