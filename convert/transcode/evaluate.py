"""Expressions, computed.

Shape suffixes: h heads, d head_dim, n rotary dimensions, D hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import singledispatchmethod
from typing import Any

import torch
from torch import Tensor

from headpool.convert.transcode.expressions import (
    Beyond,
    ByDepth,
    ByHead,
    Expression,
    Filled,
    Folded,
    FoldedBias,
    HalfSplit,
    Held,
    LessOne,
    Part,
    Transposed,
)

_ROWS = 1024
"""Rows of a weight that are in float64 at a time where only their product with a vector is wanted."""

Read = Callable[[Held], Tensor | None]
"""Gives a tensor of the source, None where the config says that there is none."""


@dataclass(frozen=True)
class Evaluation:
    """Computes the expressions of one layer (None: outside the layers).

    shape: letters of a shape → sizes. switched: whether a field of the config is on. dtype: of tensors that the source
    does not have.
    """

    read: Read
    shape: Callable[[tuple[str, ...]], tuple[int, ...]]
    switched: Callable[[str], bool]
    layer: int | None
    heads: int
    rotary: int
    dtype: torch.dtype

    @singledispatchmethod
    def value(self, expression: Any) -> Tensor:
        """The tensor that an expression stands for, in the source's dtype where nothing is computed."""
        raise TypeError(expression)

    @value.register
    def _(self, one: Held) -> Tensor:
        found = self.read(one)
        return torch.full(self.shape(one.shape), one.otherwise, dtype=self.dtype) if found is None else found

    @value.register
    def _(self, one: Filled) -> Tensor:
        return torch.full(self.shape(one.shape), one.value, dtype=self.dtype)

    @value.register
    def _(self, one: Part) -> Tensor:
        fused = self.value(one.of)
        rest = fused.shape[1:]
        if one.arrangement == "heads":
            held = fused.view(self.heads, 3, -1, *rest)[:, "qkv".index(one.part)]
        elif one.arrangement == "thirds":
            held = fused.view(3, -1, *rest)["qkv".index(one.part)]
        else:
            held = fused.view(4, 3, -1, *rest)[:, "qvk".index(one.part)]
        return held.reshape(-1, *rest)

    @value.register
    def _(self, one: HalfSplit) -> Tensor:
        rows = self.value(one.of)
        heads_hdD = rows.view(self.heads, -1, *rows.shape[1:])
        even, odd, flat = (
            heads_hdD[:, : self.rotary : 2],
            heads_hdD[:, 1 : self.rotary : 2],
            heads_hdD[:, self.rotary :],
        )
        return torch.cat((even, odd, flat), 1).flatten(0, 1)

    @value.register
    def _(self, one: Transposed) -> Tensor:
        return self.value(one.of).t()

    @value.register
    def _(self, one: ByHead) -> Tensor:
        q, k, v = (self.value(part) for part in (one.q, one.k, one.v))
        heads = [part.reshape(self.heads, 1, -1, *part.shape[1:]) for part in (q, k, v)]
        return torch.cat(heads, 1).flatten(0, 2)

    @value.register
    def _(self, one: Beyond) -> Tensor:
        return self.value(one.of)[one.rows :]

    @value.register
    def _(self, one: LessOne) -> Tensor:
        return self.value(one.of).double() - 1

    @value.register
    def _(self, one: ByDepth) -> Tensor:
        assert self.layer is not None
        held = self.value(one.of)
        return held.double() / (self.layer + 1) if self.switched(one.switch) else held

    @value.register
    def _(self, one: Folded) -> Tensor:
        return self.value(one.weight).to(torch.float64, copy=True).mul_(self.value(one.gain).double())

    @value.register
    def _(self, one: FoldedBias) -> Tensor:
        shift = self.value(one.shift).double()
        moved = [rows.double() @ shift for rows in torch.split(self.value(one.weight), _ROWS)]
        return self.value(one.bias).double() + torch.cat(moved)


def evaluate(evaluation: Evaluation, expression: Expression) -> Tensor:
    """`Evaluation.value`, typed."""
    result: Tensor = evaluation.value(expression)
    return result
