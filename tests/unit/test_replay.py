"""Refitting's normal equations, errors of blocks, and healing, on blocks whose answers are known."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from walking import WINDOWS, stock

from headpool.convert.aligned.heal import SMALLEST, Schedule, heal
from headpool.convert.aligned.replay import Example, Examples, normal_equations, relative_error, sizes
from headpool.convert.aligned.walk import Block, Layer, Walk
from headpool.convert.aligned.work import Work
from headpool.errors import RequestError

V_PROJ = "model.layers.0.self_attn.v_proj.weight"


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Layer:
    folder = tiny.checkpoint(tmp_path_factory.mktemp("replay"), "qwen2")
    return next(iter(Walk(stock(folder), WINDOWS, batch=2)))


def changed(layer: Layer) -> nn.Module:
    """The layer's attention with other values."""
    folder = layer.walk.stock.source.directory
    return layer.walk.stock.attention_with(0, {V_PROJ: tiny.tensors(folder)[V_PROJ] * 1.5})


def by_hand(layer: Layer, attention: Any, windows: slice) -> tuple[np.ndarray[Any, Any], ...]:
    """z, the original's output and the changed attention's, [N, ...], in NumPy."""
    inputs: list[Tensor] = []
    hook = attention.o_proj.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    block = layer.block(windows)
    with torch.no_grad():
        new, old = block.through(attention), block.through(layer.attention)
    hook.remove()
    return tuple(one.flatten(0, 1).double().numpy() for one in (inputs[0], old, new))


def test_normal_equations_are_sums_over_the_tokens(layer: Layer) -> None:
    attention = changed(layer)
    z, old, new = by_hand(layer, attention, slice(0, 4))
    normal = normal_equations(attention, "o_proj", Examples(layer, slice(0, 4)))
    np.testing.assert_allclose(normal.zz.numpy(), z.T @ z, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(normal.zr.numpy(), z.T @ (old - new), rtol=1e-4, atol=1e-4)
    assert normal.count == len(z) == 4 * 24
    error = relative_error(attention, Examples(layer, slice(0, 4)))
    np.testing.assert_allclose(error, np.square(old - new).sum() / np.square(old).sum(), rtol=1e-5)


def test_errors_of_a_whole_layer_are_relative_to_each_token(layer: Layer) -> None:
    rows = slice(0, 2)
    block = layer.block(rows, whole=True)
    block.x[0, 0] *= 1e4  # as the first token is in many models
    with torch.no_grad():
        target = block.through(layer.module)
        output = target + torch.randn(target.shape, generator=torch.Generator().manual_seed(0))
    example = Example(block, target, sizes(target))
    error, size = ((one.double().numpy() ** 2).sum(-1) for one in (output - target, target))
    np.testing.assert_allclose(float(example.error(output)), (error / size).sum(), rtol=1e-4)
    np.testing.assert_allclose(float(example.energy()), size.size, rtol=1e-5)
    for one in Examples(layer, rows, whole=True):
        assert torch.equal(one.size, sizes(one.target))
    assert all(one.size == 1 for one in Examples(layer, rows))


def test_no_token_counts_for_much_because_it_is_nothing() -> None:
    target = torch.ones(1, 4, 2)
    target[0, 0] = 0
    usual = np.sqrt(3 / 4 * 2)
    np.testing.assert_allclose(sizes(target).flatten().numpy(), [1e-3 * usual, *[np.sqrt(2)] * 3], rtol=1e-6)
    assert sizes(torch.zeros(1, 4, 2)).min() > 0


def test_examples_are_kept_or_made_anew(layer: Layer) -> None:
    kept, anew = Examples(layer, keep=True), Examples(layer)
    assert len(kept) == len(anew) == 3
    assert kept[1] is kept[1]
    assert anew[1] is not anew[1]
    for one, other in zip(kept, anew, strict=True):
        assert torch.equal(one.target, other.target)
        assert torch.equal(one.block.x, other.block.x)


@pytest.mark.parametrize("work", [False, True])
def test_recorded_outputs_are_the_targets(work: bool, tmp_path: Path) -> None:
    folder = tiny.checkpoint(tmp_path / "source", "qwen2")
    held = Work(tmp_path / "work", {}) if work else None
    for layer in Walk(stock(folder), WINDOWS, batch=2, work=held):
        computed = [one.target for one in Examples(layer)]
        layer.advance(record=True)
        assert layer.outputs is not None
        for one, target in zip(Examples(layer), computed, strict=True):
            assert torch.equal(one.target, target)
        assert torch.equal(layer.outputs[slice(3, 5)], torch.cat(computed)[3:5])


def test_healing_brings_a_block_back(layer: Layer) -> None:
    attention = changed(layer)
    held_out = Examples(layer, slice(4, 5))
    before = relative_error(attention, held_out)
    healed = heal(attention, Examples(layer, slice(0, 4)), held_out, Schedule(60, 0.7))
    assert healed.errors[0] == before
    assert sorted(healed.errors) == [0, *(round(60 * part / 8 + 0.49) for part in range(1, 9))]
    assert healed.best == relative_error(attention, held_out) < before / 2
    assert not any(one.requires_grad or one.grad is not None for one in attention.parameters())
    again = changed(layer)
    assert heal(again, Examples(layer, slice(0, 4)), held_out, Schedule(60, 0.7)).errors == healed.errors
    assert all(torch.equal(*pair) for pair in zip(again.parameters(), attention.parameters(), strict=True))
    other = heal(changed(layer), Examples(layer, slice(0, 4)), held_out, Schedule(60, 0.7), seed=1)
    assert other.errors != healed.errors


def test_only_the_parameters_asked_for_are_trained(layer: Layer) -> None:
    attention: Any = changed(layer)
    before = {name: one.clone() for name, one in attention.named_parameters()}
    heal(attention, Examples(layer), Examples(layer), Schedule(5, 1e-3), parameters=[attention.o_proj.weight])
    moved = {name for name, one in attention.named_parameters() if not torch.equal(one, before[name])}
    assert moved == {"o_proj.weight"}


class Linear(nn.Module):
    """A block that is a matrix."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def drawn(seed: int, count: int, width: int) -> Iterator[Example]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x, y = (torch.randn(2, 3, width, generator=generator) for _ in range(2))
        yield Example(Block(slice(0, 2), x, (), {}), y)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 1000),
    width=st.integers(1, 4),
    steps=st.integers(0, 12),
    rate=st.sampled_from([1e-4, 1e-2, 1.0, 1e30, float("inf")]),
    evaluations=st.integers(1, 20),
)
def test_healing_never_hurts(seed: int, width: int, steps: int, rate: float, evaluations: int) -> None:
    module = Linear(torch.randn(width, width, generator=torch.Generator().manual_seed(seed)))
    held_out = list(drawn(seed + 1, 2, width))
    before = relative_error(module, held_out)
    healed = heal(module, list(drawn(seed, 3, width)), held_out, Schedule(steps, rate, evaluations=evaluations))
    assert relative_error(module, held_out) == healed.best <= before == healed.errors[0]


def test_a_linear_block_is_healed_to_least_squares() -> None:
    examples = list(drawn(0, 3, 3))
    x, y = (
        torch.cat([one.flatten(0, 1) for one in ones])
        for ones in zip(*((e.block.x, e.target) for e in examples), strict=True)
    )
    best = torch.linalg.lstsq(x, y).solution
    module = Linear(torch.zeros(3, 3))
    healed = heal(module, examples, examples, Schedule(800, 5e-2 / SMALLEST, evaluations=50))
    expected = float((x @ best - y).square().sum() / y.square().sum())
    assert healed.best == pytest.approx(expected, rel=1e-2)
    assert healed.errors[0] == 1.0


def test_rates_are_relative_to_the_size_of_what_is_trained() -> None:
    """A block whose weights are a thousand times as large, on inputs a thousandth the size, computes and learns the
    same.
    """
    learnt = []
    for scale in (1.0, 1000.0):
        examples = [replace(one, block=replace(one.block, x=one.block.x / scale)) for one in drawn(0, 3, 4)]
        module = Linear(torch.randn(4, 4, generator=torch.Generator().manual_seed(1)) * scale)
        schedule = Schedule(40, 0.1, clip=math.inf)
        learnt.append(list(heal(module, examples, examples, schedule).errors.values()))
    assert learnt[1] == pytest.approx(learnt[0], rel=1e-3)
    assert learnt[0][-1] < 0.7 * learnt[0][0]


def test_a_block_that_is_broken_is_refused() -> None:
    examples = list(drawn(0, 2, 3))
    with pytest.raises(RequestError, match="not finite"):
        heal(Linear(torch.full((3, 3), torch.nan)), examples, examples, Schedule(3, 1e-3))


def test_the_rate_rises_and_falls() -> None:
    schedule = Schedule(100, 2.0, warmup=0.1, final=0.1)
    assert [schedule.rate(step) for step in (0, 4, 9)] == pytest.approx([0.2, 1.0, 2.0])
    assert schedule.rate(10) == 2.0
    assert schedule.rate(55) == pytest.approx(1.1)
    assert 0.2 < schedule.rate(99) < 0.21
