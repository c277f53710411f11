"""A layer's attention and one that shall replace it, run on the same inputs: what refitting and healing learn from.

Shape suffixes: N tokens, B windows of a batch, T tokens of each, D hidden, Z the width of the output projection's
input.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headpool.convert.aligned.refit import Normal
from headpool.convert.aligned.walk import Block, Layer

SMALLEST = 1e-3
"""A token that is smaller than this, relative to a batch's root mean square, counts as if it were not."""


@dataclass(frozen=True)
class Example:
    """A batch of attention inputs, and what shall come out of it (`target` [B, T, D]).

    size: what a token's error is relative to, [B, T, 1], or one number for all.
    """

    block: Block
    target: Tensor
    size: Tensor | float = 1.0

    def energy(self) -> Tensor:
        """The squared size of the target: what relative errors are relative to."""
        return (self.target / self.size).square().sum()

    def error(self, output_BTD: Tensor) -> Tensor:
        """The squared error of an output."""
        return ((output_BTD - self.target) / self.size).square().sum()


class Examples:
    """What a layer's own attention, or the whole layer, makes of some windows, as batches by number; all windows where
    none are named.

    Errors of a whole layer are relative to each token's own output, as norms are what reads it: a few tokens, the first
    above all, are a thousand times larger than others in many models (Sun et al. 2024, "Massive activations") and would
    else be all that counts.

    Attention's outputs are computed where the layer has not recorded them. keep: hold on to each batch once it was
    made, three arrays of the size of its hidden states at most, or make it anew whenever it is asked for.
    """

    def __init__(
        self,
        layer: Layer,
        windows: slice | None = None,
        *,
        whole: bool = False,
        keep: bool = False,
    ) -> None:
        self._layer = layer
        self._whole = whole
        self._batches = list(layer.walk.batches(windows))
        self._keep = keep
        self._kept: dict[int, Example] = {}

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Example:
        if index in self._kept:
            return self._kept[index]
        made = self._make(self._batches[index])
        if self._keep:
            self._kept[index] = made
        return made

    def __iter__(self) -> Iterator[Example]:
        return (self[index] for index in range(len(self)))

    @torch.no_grad()
    def _make(self, rows: slice) -> Example:
        block = self._layer.block(rows, whole=self._whole)
        if not self._whole:
            return Example(block, self._attention_output(block))
        target_BTD = self._layer.output(block)
        return Example(block, target_BTD, sizes(target_BTD))

    def _attention_output(self, block: Block) -> Tensor:
        recorded = self._layer.outputs
        return block.through(self._layer.attention) if recorded is None else recorded[block.rows].to(block.x)


def sizes(output_BTD: Tensor) -> Tensor:
    """The length of each token's output, [B, T, 1], none near zero."""
    sizes_BT1: Tensor = output_BTD.norm(dim=-1, keepdim=True)
    usual = sizes_BT1.square().mean().sqrt()
    return sizes_BT1.clamp_min(max(SMALLEST * float(usual), torch.finfo(output_BTD.dtype).tiny))


@torch.no_grad()
def normal_equations(attention: nn.Module, output: str, examples: Iterable[Example]) -> Normal:
    """What `refit_output` needs to correct the projection `output` of an attention so that it gives the targets."""
    inputs: list[Tensor] = []
    normal: Normal | None = None

    def keep(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        inputs.append(arguments[0])

    hook = attention.get_submodule(output).register_forward_pre_hook(keep)
    try:
        for one in examples:
            residual_ND = (one.target - one.block.through(attention)).flatten(0, 1)
            z_NZ = inputs.pop().flatten(0, 1)
            normal = normal or Normal(z_NZ.shape[1], residual_ND.shape[1], z_NZ.device)
            normal.add(z_NZ, residual_ND)
    finally:
        hook.remove()
    assert normal is not None
    return normal


@torch.no_grad()
def relative_error(attention: nn.Module, examples: Iterable[Example]) -> float:
    """The squared error of an attention's output on some examples, relative to the squared size of their targets."""
    lost = energy = 0.0
    for one in examples:
        lost += float(one.error(one.block.through(attention)))
        energy += float(one.energy())
    return lost / energy if energy else 0.0
