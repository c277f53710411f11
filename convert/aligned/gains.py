"""Gains of norms for every key head, chosen on calibration text.

Pooled keys are smaller than the keys they are the mean of, and not by as much in every channel. So the gain of each
channel is what brings E[k^2] after the norm to the mean of that of the group's heads.

Shape suffixes: N tokens, K source key heads, g pooled ones, d head_dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from headpool.convert.aligned.stock import Stock
from headpool.convert.aligned.walk import Layer
from headpool.convert.compute import setting_of
from headpool.convert.layouts import AttentionWeights, Layout
from headpool.convert.plan import Plan
from headpool.convert.pool import APPLY
from headpool.rounding import round_once

CANCELLED = 1e-10
"""A channel whose pooled keys have less than this share of a channel's usual E[k^2] keeps its pooled gain: what is left
of them is rounding, which no gain makes keys of.
"""


@dataclass
class GainFigures:
    """What became of a layer's gains.

    key_square_deviation: how far E[k^2] after the norm is from the mean of its group's, in the channel where it is
    farthest, relative to that mean: with "pooled" gains, as there are without text, and with the "calibrated" ones,
    rounded as they are written. seconds: how long it took.
    """

    layer: int
    key_gains: str = "calibrated"
    key_square_deviation: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


class KeySquares:
    """While its block runs, gathers E[k^2] of each channel of each key head, after the norms of an attention
    submodule: `norms` are their names, one for all heads or one each.
    """

    def __init__(self, attention: nn.Module, norms: Sequence[str], head_dim: int) -> None:
        self._norms = [attention.get_submodule(name) for name in norms]
        self._head_dim = head_dim

    def __enter__(self) -> Self:
        self._sums: list[Tensor | float] = [0.0 for _ in self._norms]
        self._tokens = [0 for _ in self._norms]
        self._hooks = [norm.register_forward_hook(self._adding(index)) for index, norm in enumerate(self._norms)]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _adding(self, index: int) -> Any:
        def add(norm: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
            gain: Any = norm.weight
            rows = output.detach().reshape(-1, gain.numel())  # a norm gives what ends in the shape of its gain
            self._sums[index] = self._sums[index] + rows.square().double().sum(0)
            self._tokens[index] += len(rows)

        return add

    def mean(self) -> Tensor:
        """[heads, d], float64"""
        means = [torch.as_tensor(one) / count for one, count in zip(self._sums, self._tokens, strict=True)]
        return torch.cat(means).view(-1, self._head_dim).cpu()


def calibrate_gains(
    plan: Plan, layer: Layer, converted: Stock, kv_heads: int, seed: int
) -> tuple[dict[str, Tensor], GainFigures]:
    """The gains of a layer with `kv_heads` K/V heads by their names, float64, and the layer's figures. The layer is
    advanced on the way.
    """
    index, layout, head_dim = layer.index, plan.layout, plan.before[layer.index].head_dim
    weights = layer.walk.stock.weights(index, ("k", "v"))
    assert weights.key_gains is not None
    setting = setting_of(plan, index, seed)
    pooled = APPLY[plan.method.name](weights, kv_heads, setting)
    assert pooled.key_gains is not None
    usual_gd = pooled.key_gains.double().cpu()
    ungained = replace(pooled, key_gains=torch.ones_like(pooled.key_gains))
    written = layout.write(ungained, index).items()
    attention = converted.attention_with(index, {name: round_once(w, setting.dtype or w.dtype) for name, w in written})
    before = KeySquares(layer.attention, norms(layout, index, plan.before[index].kv_heads), head_dim)
    after = KeySquares(attention, norms(layout, index, kv_heads), head_dim)
    with before:
        layer.advance()
    with after, torch.no_grad():
        for block in layer.blocks():
            block.through(attention)
    wanted_gd, held_gd = before.mean().view(kv_heads, -1, head_dim).mean(1), after.mean()
    gains_gd = choose_gains(wanted_gd, held_gd, usual_gd)
    dtype = setting.dtype or weights.key_gains.dtype
    figures = GainFigures(index)
    for name, one in (("pooled", usual_gd), ("calibrated", round_once(gains_gd, dtype).double())):
        figures.key_square_deviation[name] = deviation(one.square() * held_gd, wanted_gd)
    return layout.write(AttentionWeights(key_gains=gains_gd), index), figures


def norms(layout: Layout, layer: int, kv_heads: int) -> list[str]:
    """The names of the norms with gains inside the attention of a layer with so many K/V heads."""
    inside = layout.tensor(layer, "")
    return [name.removeprefix(inside).removesuffix(".weight") for name in layout.gain_names(layer, kv_heads)]


def choose_gains(wanted_gd: Tensor, held_gd: Tensor, usual_gd: Tensor) -> Tensor:
    """The gains with which keys of E[k^2] `held` have `wanted`, of the sign of the usual gains; these where nothing is
    wanted, or nothing held.
    """
    possible = (wanted_gd > 0) & (held_gd > CANCELLED * held_gd.mean())
    sizes_gd = (wanted_gd / held_gd.where(possible, torch.ones_like(held_gd))).sqrt()
    return torch.where(possible, sizes_gd.copysign(usual_gd), usual_gd)


def deviation(held_gd: Tensor, wanted_gd: Tensor) -> float:
    """The largest relative deviation of a channel for which something is wanted."""
    some = wanted_gd > 0
    return float((held_gd[some] / wanted_gd[some] - 1).abs().max()) if some.any() else 0.0
