"""The learning rate as a function of the step alone: nothing to save, and nothing that steps once per process."""

import math
from collections.abc import Callable, Mapping

from headpool.sections import ScheduleSection


def learning_rate(section: ScheduleSection, peak: float, step: int, steps: int) -> float:
    """The rate of optimizer step `step` (from 0) of `steps`.

    It rises linearly over the first `warmup` of the steps, the first step included, and follows the schedule's shape
    after that; cosine and wsd reach `final` times the peak in the last step.
    """
    warmup = round(section.warmup * steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup + 1) / (steps - warmup)
    return peak * SHAPES[section.shape](section, progress)


def _constant(_: ScheduleSection, __: float) -> float:
    return 1.0


def _cosine(section: ScheduleSection, progress: float) -> float:
    return section.final + (1 - section.final) * (1 + math.cos(math.pi * progress)) / 2


def _wsd(section: ScheduleSection, progress: float) -> float:
    """Warm-up, stable, decay (Hu et al. 2024, MiniCPM): constant until the last `decay` of what follows the warm-up."""
    left = 1 - progress
    return section.final + (1 - section.final) * min(1.0, left / section.decay)


SHAPES: Mapping[str, Callable[[ScheduleSection, float], float]] = {
    "constant": _constant,
    "cosine": _cosine,
    "wsd": _wsd,
}
"""From the share of the steps after the warm-up that are done, the current one included, to a share of the peak."""
