"""Losses and their gradients over chunks of positions, against PyTorch's own in float64."""

import pytest
import torch
from torch.nn import functional

from headpool.uptrain import loss as under_test
from headpool.uptrain.loss import Distillation, token_losses
from headpool.uptrain.stream import IGNORED

B, T, V = 3, 5, 17


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits, teacher = (3 * torch.randn(B, T, V, dtype=torch.float64, generator=generator) for _ in range(2))
    labels = torch.randint(0, V, (B, T), generator=generator)
    labels[0, 1:3] = labels[2, 4] = IGNORED
    return logits.to(dtype).requires_grad_(), teacher.to(dtype), labels


def expected(
    logits: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor, weight: float, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    counted = labels != IGNORED
    nats = functional.cross_entropy(logits[counted], labels[counted], reduction="sum")
    soft = (logits[counted] / temperature).log_softmax(-1)
    divergence = functional.kl_div(soft, (teacher[counted] / temperature).softmax(-1), reduction="sum")
    return (1 - weight) * nats + weight * temperature**2 * divergence, nats, divergence


@pytest.mark.parametrize("chunk", [1, 4 * V, 1000 * V])
@pytest.mark.parametrize(("weight", "temperature"), [(0.0, 1.0), (0.5, 1.0), (0.3, 2.0), (1.0, 0.5)])
def test_loss_and_gradient_are_pytorchs_whatever_the_chunk(
    weight: float, temperature: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(under_test.CHUNK, "cpu", chunk)
    logits, teacher, labels = inputs()
    asked: list[int] = []

    def teacher_logits(begin: int, end: int) -> torch.Tensor:
        asked.append(end - begin)
        return teacher.flatten(0, 1)[begin:end]

    loss, sums = token_losses(logits, labels, Distillation(weight, temperature), teacher_logits)
    wanted, nats, divergence = expected(logits, teacher, labels, weight, temperature)
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sums, torch.stack([nats, divergence]).detach(), rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(loss / 7, logits)
    (wanted_gradient,) = torch.autograd.grad(wanted / 7, logits)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-12, atol=1e-12)
    assert sum(asked) == B * T
    assert max(asked) * V <= max(chunk, V), "more than a chunk over the whole vocabulary at once"


def test_without_a_teacher_it_is_cross_entropy() -> None:
    logits, _, labels = inputs()
    loss, sums = token_losses(logits, labels)
    wanted = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)
    assert sums[1] == 0
    torch.testing.assert_close(
        torch.autograd.grad(loss, logits), torch.autograd.grad(wanted, logits), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_half_precision_logits_have_a_loss_in_float32_and_a_gradient_of_their_own_dtype(
    dtype: torch.dtype, tolerance: float
) -> None:
    logits, _, labels = inputs(dtype)
    loss, _ = token_losses(logits, labels)
    assert loss.dtype == torch.float32
    (gradient,) = torch.autograd.grad(loss / 1000, logits)
    wide = logits.detach().double().requires_grad_()
    wanted = functional.cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    torch.testing.assert_close(loss.double(), wanted.detach(), rtol=1e-6, atol=0)
    (wanted_gradient,) = torch.autograd.grad(wanted / 1000, wide)
    assert gradient.dtype == dtype
    torch.testing.assert_close(gradient.double(), wanted_gradient, rtol=2 * tolerance, atol=1e-7)


def test_a_row_that_does_not_count_has_no_gradient_whatever_stands_there() -> None:
    logits, _, labels = inputs()
    with torch.no_grad():
        logits[labels == IGNORED] = 1e6
    loss, _ = token_losses(logits, labels)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert bool((gradient[labels == IGNORED] == 0).all())
    assert bool(loss.isfinite())
