"""The training loop."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from headpool.errors import HeadpoolError, Interrupted
from headpool.uptrain import optimizer as optimizing
from headpool.uptrain.parallel import Workers, whole
from headpool.uptrain.signals import StopRequest
from headpool.uptrain.state import Data, Interval, Shelf, State
from headpool.uptrain.stream import IGNORED, Batch

MIN_LOSS_SCALE = 1.0
"""fp16 gradients that still overflow at this scale are no matter of scaling."""


class Batches(Data, Protocol):
    """A stream of batches that knows its position."""

    def next(self) -> Batch: ...


@dataclass
class Run:
    """What the loop works with. Functions are given to it, so that it knows neither recipes nor files.

    `rate` maps a step to its learning rate; `look_at_first` is shown the first batch of all
    before it is trained on; `validate` returns the perplexity of the student as it is; `report` takes
    a step's figures, on the main process; `how_to_go_on` ends the message of an interrupted run.
    """

    workers: Workers
    state: State
    batches: Batches
    shelf: Shelf
    steps: int
    batch_tokens: int
    micro_batch: int
    clip: float | None
    document_attention: bool
    rate: Callable[[int], float]
    save_every: Interval
    eval_every: int | None
    look_at_first: Callable[[Batch], None]
    validate: Callable[[], float]
    report: Callable[[Mapping[str, Any]], None]
    how_to_go_on: str
    waited: float = field(default=0.0)
    """Seconds that steps waited for their data."""


def train(run: Run) -> None:
    """Step until the budget is used up, from where the state is.

    Raises Interrupted, after saving, when a signal came, and HeadpoolError where a loss or gradient is not finite:
    on every process, before the optimizer could spread it.
    """
    state = run.state
    with StopRequest() as stop:
        if run.eval_every and state.step == 0:
            _report(run, {"step": 0, "tokens": 0, "validation_perplexity": _validate(run)})
        while state.step < run.steps:
            begin = time.perf_counter()
            batch = _next_batch(run)
            if state.step == 0:
                run.look_at_first(batch)
            rate = run.rate(state.step)
            optimizing.set_learning_rate(run.workers.optimizer, rate)
            share = _accumulate(run, batch)
            norm = _gradient_norm(run)
            losses, stopped, due = _agree(run, share, stop)
            _refuse_non_finite(run, losses, norm)
            _update(run, norm)
            state.advance(run.batch_tokens)
            figures = _figures(run, losses, norm, rate, time.perf_counter() - begin)
            if run.eval_every and (state.step % run.eval_every == 0 or state.step == run.steps):
                figures["validation_perplexity"] = _validate(run)
            _report(run, figures)
            if due or stopped or state.step == run.steps or (state.best and state.best[1] == state.step):
                saved = run.shelf.save(state)
                run.save_every.restart()
            if stopped and state.step < run.steps:
                raise Interrupted(stopped, f"stopped after step {state.step}, saved in {saved}; {run.how_to_go_on}")


@dataclass(frozen=True)
class Losses:
    """Per counted token, over all micro-batches and processes; `total` is what was minimised."""

    total: float
    cross_entropy: float
    divergence: float
    blocks: float


def _next_batch(run: Run) -> Batch:
    begin = time.perf_counter()
    batch = run.batches.next()
    run.waited += time.perf_counter() - begin
    return batch


def _accumulate(run: Run, batch: Batch) -> Tensor:
    """Leave the gradient of the step's loss in the parameters; returns this process's share of [total, cross-entropy,
    KL, blocks], divided by the tokens that all processes count.
    """
    workers = run.workers
    device = workers.accelerator.device
    counted = workers.total((batch.labels != IGNORED).sum().to(device)).clamp(min=1)
    starts = range(0, len(batch.input_ids), run.micro_batch)
    losses = torch.zeros(4, device=device)
    for start in starts:
        part = slice(start, start + run.micro_batch)
        tensors = [batch.input_ids[part], batch.labels[part]]
        if run.document_attention:
            tensors.append(batch.position_ids[part])
        with workers.accumulating(last=start == starts[-1]):
            found = workers.wrapped(*(one.to(device, non_blocking=True) for one in tensors))
            # Gradients are averaged over processes when they are exchanged; a sum is wanted.
            workers.accelerator.backward(found["loss"] * (workers.world / counted))
        losses += torch.cat([found["loss"].detach()[None], found["sums"]]) / counted
    return losses


def _gradient_norm(run: Run) -> float:
    """Of the whole gradient, before clipping, and the same in every process."""
    run.workers.accelerator.unscale_gradients()
    return whole(torch.nn.utils.get_total_norm(optimizing.gradients(run.workers.objective))).item()


def _agree(run: Run, share: Tensor, stop: StopRequest) -> tuple[Losses, int, bool]:
    """What all processes know together: the losses, the signal that stopped any of them (or 0), whether to save."""
    due = run.workers.accelerator.is_main_process and run.save_every.due(run.state.step + 1)
    noted = torch.tensor([stop.number > 0, stop.number, due], device=share.device)
    total, cross_entropy, divergence, blocks, stops, numbers, saves = run.workers.total(
        torch.cat([share, noted.to(share)])
    ).tolist()
    number = (stop.number or round(numbers / stops)) if stops else 0  # a process that got one itself ends with that
    return Losses(total, cross_entropy, divergence, blocks), number, saves > 0


def _refuse_non_finite(run: Run, losses: Losses, norm: float) -> None:
    scaler = run.workers.scaler
    overflow = scaler is not None and scaler.get_scale() > MIN_LOSS_SCALE  # fp16: the scaler skips it and scales less
    what = "loss" if not math.isfinite(losses.total) else "gradient norm"
    if math.isfinite(losses.total) and (overflow or math.isfinite(norm)):
        return
    raise HeadpoolError(
        f"step {run.state.step + 1}: the {what} is not finite ({losses.total if what == 'loss' else norm}); "
        f"nothing was updated, {run.shelf.last_good()}. Try a lower learning_rate, or precision bf16 or fp32"
    )


def _update(run: Run, norm: float) -> None:
    if run.clip is not None and run.clip < norm < math.inf:
        torch._foreach_mul_(optimizing.gradients(run.workers.objective), run.clip / norm)
    run.workers.optimizer.step()
    run.workers.optimizer.zero_grad()


def _validate(run: Run) -> float | None:
    """None where it is beyond floating point."""
    perplexity = run.validate()
    if not math.isfinite(perplexity):
        return None
    if run.state.best is None or perplexity < run.state.best[0]:
        run.state.best = (perplexity, run.state.step)
    return perplexity


def _report(run: Run, figures: Mapping[str, Any]) -> None:
    try:
        run.report(figures)
    except OSError as error:
        raise HeadpoolError(
            f"the figures of step {run.state.step} could not be written ({error.strerror or error}); "
            f"{run.shelf.last_good()}, and the same command goes on from there"
        ) from error


def _figures(run: Run, losses: Losses, norm: float, rate: float, elapsed: float) -> dict[str, Any]:
    return {
        "step": run.state.step,
        "tokens": run.state.tokens,
        "loss": losses.total,
        "cross_entropy": losses.cross_entropy,
        "distillation": losses.divergence,
        "blocks": losses.blocks,
        "learning_rate": rate,
        "gradient_norm": norm if math.isfinite(norm) else None,
        "tokens_per_second": run.batch_tokens / elapsed,
    }
