"""Step 5 of aligned conversion: a module is trained, by itself, to do what the original did on calibration text.

The module is usually one attention block with fewer key/value heads; nothing here knows what it is. Its error is
measured on held-out examples now and then, and it ends with the weights that had the least, those that it came with
included: healing never hurts there.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from headpool.convert.aligned.replay import Example, relative_error
from headpool.errors import RequestError

SMALLEST = 1e-3
"""A parameter that is smaller than this learns as if it were not: biases often begin at zero."""


class Examples(Protocol):
    """Batches to learn from, by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Example: ...


@dataclass(frozen=True)
class Schedule:
    """How a module is trained: Adam with these betas, the rate rising linearly over the first `warmup` (a fraction of
    the steps) to `learning_rate` and falling as half a cosine to `final` times it; gradients clipped to norm `clip`.

    The rates are relative: a parameter's is its root mean square as it came (Shazeer and Stern 2018, "Adafactor",
    section 8; no less than SMALLEST), divided by the root of its last dimension (Yang et al. 2022, "Tensor Programs V",
    table 3: Adam's go as 1 / inputs, where weights go as the root of that), times this. So one rate changes what
    models of any width compute by as much, and published weights differ tenfold in size.

    The held-out error is measured `evaluations` times, at equal distances, the last time at the end.
    """

    steps: int
    learning_rate: float
    warmup: float = 0.1
    final: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    evaluations: int = 8

    def rate(self, step: int) -> float:
        """The relative learning rate of step 0 … steps-1."""
        rising = max(1, round(self.warmup * self.steps))
        if step < rising:
            return self.learning_rate * (step + 1) / rising
        done = (step - rising) / max(1, self.steps - rising)
        return self.learning_rate * (self.final + (1 - self.final) * (1 + math.cos(math.pi * done)) / 2)

    def evaluates(self, step: int) -> bool:
        """Whether the held-out error is measured after step 0 … steps-1."""
        done = step + 1
        return done * self.evaluations // self.steps > step * self.evaluations // self.steps


@dataclass(frozen=True)
class Healed:
    """Held-out relative squared errors by the number of steps before them; the module has the least of them."""

    errors: dict[int, float]

    @property
    def best(self) -> float:
        return min(error for error in self.errors.values() if math.isfinite(error))


def heal(
    module: nn.Module,
    examples: Examples,
    held_out: Iterable[Example],
    schedule: Schedule,
    *,
    parameters: Sequence[nn.Parameter] | None = None,
    seed: int = 0,
) -> Healed:
    """Train `module` to give the examples' targets; it is left with what had the least error on `held_out`.

    parameters: those to train, float32 or wider; all of the module's by default. Batches come in an order that `seed`
    decides, each once before any comes again. The loss is a batch's squared error relative to the usual size of so many
    targets; one that is not finite ends the training.

    Raises RequestError where the module's output is not finite to begin with.
    """
    trained = list(module.parameters()) if parameters is None else list(parameters)
    held_out = list(held_out)
    errors = {0: relative_error(module, held_out)}
    if not math.isfinite(errors[0]):
        raise RequestError("the converted attention gives values that are not finite on the calibration text")
    least, best = errors[0], _copies(trained)
    usual = sum(float(one.energy()) for one in held_out) / sum(len(one.target) for one in held_out)
    order = _order(len(examples), seed)
    with _training(module, trained):
        optimizer = torch.optim.Adam([{"params": [one], "size": _size(one)} for one in trained], betas=schedule.betas)
        for step in range(schedule.steps):
            for group in optimizer.param_groups:
                group["lr"] = schedule.rate(step) * group["size"]
            one = examples[next(order)]
            optimizer.zero_grad()
            loss = one.error(one.block.through(module)) / (usual * len(one.target) or 1.0)
            if not loss.isfinite():
                break
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(trained, schedule.clip)
            optimizer.step()
            if schedule.evaluates(step):
                errors[step + 1] = relative_error(module, held_out)
                if errors[step + 1] < least:
                    least, best = errors[step + 1], _copies(trained)
    with torch.no_grad():
        for parameter, kept in zip(trained, best, strict=True):
            parameter.copy_(kept)
    return Healed(errors)


def _order(count: int, seed: int) -> Iterator[int]:
    """0 … count-1 in an order of its own, again and again."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(count, generator=generator).tolist()


def _size(parameter: Tensor) -> float:
    """What its learning rate is relative to."""
    size = max(float(parameter.detach().float().square().mean().sqrt()), SMALLEST)
    return size / math.sqrt(parameter.shape[-1])


def _copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [one.detach().clone() for one in tensors]


@contextlib.contextmanager
def _training(module: nn.Module, trained: Sequence[nn.Parameter]) -> Iterator[None]:
    """While the block runs, gradients reach these parameters of the module and no others, and none afterwards."""
    module.requires_grad_(False)
    try:
        for one in trained:
            one.requires_grad_(True)
        yield
    finally:
        for one in trained:
            one.requires_grad_(False)
            one.grad = None
