"""What is seen of a run while it goes on, and what is left of it to look at."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from headpool.drawing import save_png
from headpool.plots import learning_curve
from headpool.uptrain.metrics import Metrics, flops_per_token, peak_flops
from headpool.uptrain.parallel import Workers
from headpool.uptrain.plan import Plan

CURVE = "learning_curve.png"

Shown = Callable[[int, int, str], None]
"""Called after each step with tokens done, tokens in all, and a note of loss and speed."""


class Reporter:
    """Takes the figures of each step to the metrics file, to trackers and to whoever shows progress, on one process.

    `seconds` is the time that the steps of this attempt took, validation and saving left out.
    """

    def __init__(self, plan: Plan, workers: Workers, metrics: Metrics, progress: Shown) -> None:
        self._plan, self._workers, self._metrics, self._progress = plan, workers, metrics, progress
        self._total = plan.steps * plan.batch_tokens
        self._tokens = 0
        self.seconds = 0.0
        self._flops = _model_flops(plan, workers)
        self._trackers = bool(plan.section.trackers)
        if self._trackers:
            workers.accelerator.init_trackers("headpool", config=_flat(plan.settings()))

    def __call__(self, figures: Mapping[str, Any]) -> None:
        if (speed := figures.get("tokens_per_second")) is not None:
            self._tokens += self._plan.batch_tokens
            self.seconds += self._plan.batch_tokens / speed
        if not self._workers.accelerator.is_main_process:
            return
        self._metrics.append(figures)
        if self._trackers:
            values = {key: value for key, value in figures.items() if value is not None and key != "step"}
            self._workers.accelerator.log(values, step=figures["step"])
        self._progress(figures["tokens"], self._total, self._note(figures))

    def tokens_per_second(self) -> float | None:
        return self._tokens / self.seconds if self.seconds else None

    def _note(self, figures: Mapping[str, Any]) -> str:
        notes = []
        if figures.get("loss") is not None:
            notes.append(f"loss {figures['loss']:.4f}")
        if figures.get("validation_perplexity") is not None:
            notes.append(f"validation perplexity {figures['validation_perplexity']:.2f}")
        if (speed := figures.get("tokens_per_second")) is not None:
            notes.append(f"{speed:,.0f} tokens/s")
            if self._flops is not None:
                notes.append(f"MFU {speed * self._flops:.1%}")
        return ", ".join(notes)

    def finish(self, original: float | None) -> dict[str, Any]:
        """Draw the learning curve; returns the last step's figures."""
        self._workers.accelerator.end_training()
        lines = self._metrics.read()
        if self._workers.accelerator.is_main_process and lines:
            save_png(learning_curve(lines, original_perplexity=original), self._plan.work / CURVE)
        return lines[-1] if lines else {}


def _model_flops(plan: Plan, workers: Workers) -> float | None:
    """The share of all devices' peak that a token per second takes, None where the peak is not known."""
    device = workers.accelerator.device
    peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if peak is None or workers.accelerator.mixed_precision == "no":
        return None
    student = workers.objective.student
    embedding, head = student.get_input_embeddings().weight, student.get_output_embeddings().weight
    parameters = sum(one.numel() for one in student.parameters()) - (0 if head is embedding else embedding.numel())
    layer = plan.layers[0]
    flops = flops_per_token(parameters, len(plan.layers), layer.heads * layer.head_dim, plan.sequence_length)
    return flops / (peak * workers.world)


def _flat(settings: Mapping[str, Any]) -> dict[str, str]:
    """What every tracker takes."""
    return {key: str(value) for key, value in settings.items()}
