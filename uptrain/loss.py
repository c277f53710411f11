"""Cross-entropy and distillation over a whole vocabulary, a chunk of positions at a time.

Shape suffixes: B sequences, T tokens of one, N = B * T positions, n those of a chunk, V vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headpool.uptrain.stream import IGNORED

CHUNK = {"cpu": 1 << 18}
"""Logits in a chunk by kind of device: what fits a processor's cache, or keeps an accelerator busy."""

DEFAULT_CHUNK = 1 << 25

TeacherLogits = Callable[[int, int], Tensor]
"""From a range of positions (half-open, in N) to the teacher's logits there, [n, V]."""


@dataclass(frozen=True)
class Distillation:
    """How much of the loss is the teacher's (0 to 1), at which temperature (Hinton et al. 2015)."""

    weight: float
    temperature: float


def token_losses(
    logits_BTV: Tensor,
    labels_BT: Tensor,
    distillation: Distillation | None = None,
    teacher_logits: TeacherLogits | None = None,
) -> tuple[Tensor, Tensor]:
    """Losses summed over the positions whose label is not IGNORED.

    Returns the sum of (1 - weight) * cross-entropy + weight * temperature² * KL(teacher || model), which has a
    gradient, and [cross-entropy, KL] without one, all in nats and float32 (float64 for float64 logits). Beside the
    logits and their gradient no more than a chunk over the whole vocabulary exists at a time, be it the model's in
    float32 or the teacher's.
    """
    loss, sums = _TokenLosses.apply(  # type: ignore[no-untyped-call]
        logits_BTV.flatten(0, 1), labels_BT.flatten(), distillation or Distillation(0.0, 1.0), teacher_logits
    )
    return loss, sums


class _TokenLosses(torch.autograd.Function):
    """The gradient with respect to the logits is known with the loss: probabilities minus targets."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: Tensor,
        labels_N: Tensor,
        distillation: Distillation,
        teacher_logits: TeacherLogits | None,
    ) -> tuple[Tensor, Tensor]:
        # float16 has no room for a probability of 1e-7: its gradient is kept in float32 until it has been scaled.
        kept = torch.float32 if logits_NV.dtype == torch.float16 else logits_NV.dtype
        gradient_NV = torch.empty_like(logits_NV, dtype=kept) if ctx.needs_input_grad[0] else None
        wide = torch.promote_types(logits_NV.dtype, torch.float32)
        sums = torch.zeros(2, dtype=wide, device=logits_NV.device)
        for begin, end in _chunks(logits_NV):
            teacher_nV = teacher_logits(begin, end) if teacher_logits else None
            of_chunk, gradient_nV = _chunk(logits_NV[begin:end], labels_N[begin:end], teacher_nV, distillation)
            sums += of_chunk
            if gradient_NV is not None:
                gradient_NV[begin:end] = gradient_nV
        ctx.gradient, ctx.dtype = gradient_NV, logits_NV.dtype
        weight, temperature = distillation.weight, distillation.temperature
        ctx.mark_non_differentiable(sums)
        return (1 - weight) * sums[0] + weight * temperature**2 * sums[1], sums

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None]:
        gradient, ctx.gradient = ctx.gradient, None
        return gradient.mul_(upstream[0]).to(ctx.dtype), None, None, None


def _chunks(logits_NV: Tensor) -> Iterator[tuple[int, int]]:
    positions, vocabulary = logits_NV.shape
    rows = max(1, CHUNK.get(logits_NV.device.type, DEFAULT_CHUNK) // vocabulary)
    return ((begin, min(begin + rows, positions)) for begin in range(0, positions, rows))


def _chunk(
    logits_nV: Tensor, labels_n: Tensor, teacher_nV: Tensor | None, distillation: Distillation
) -> tuple[Tensor, Tensor]:
    """[cross-entropy, KL] of a few positions, and the gradient of their loss [n, V]."""
    weight, temperature = distillation.weight, distillation.temperature
    ignored_n1 = (labels_n == IGNORED).unsqueeze(1)
    labels_n1 = labels_n.clamp(min=0).unsqueeze(1)
    wide = torch.promote_types(logits_nV.dtype, torch.float32)
    log_p_nV = logits_nV.log_softmax(1, dtype=wide)
    nats_n1 = -log_p_nV.gather(1, labels_n1)
    divergence_n1 = torch.zeros_like(nats_n1)
    if teacher_nV is None:
        gradient_nV = log_p_nV.exp_()
    else:
        soft_log_p_nV = log_p_nV if temperature == 1 else (logits_nV.to(wide) / temperature).log_softmax(1)
        log_t_nV = (teacher_nV.to(wide) / temperature).log_softmax(1)
        t_nV = log_t_nV.exp()
        divergence_n1 = log_t_nV.sub_(soft_log_p_nV).mul_(t_nV).sum(1, keepdim=True)
        if temperature == 1:  # (1 - weight) p + weight p is p
            gradient_nV = log_p_nV.exp_().sub_(t_nV, alpha=weight)
        else:
            gradient_nV = log_p_nV.exp_().mul_(1 - weight)
            gradient_nV.add_(soft_log_p_nV.exp_().sub_(t_nV), alpha=weight * temperature)
    gradient_nV.scatter_add_(1, labels_n1, torch.full_like(nats_n1, weight - 1)).masked_fill_(ignored_n1, 0)
    sums = torch.stack([one.masked_fill(ignored_n1, 0).sum() for one in (nats_n1, divergence_n1)])
    return sums, gradient_nV
