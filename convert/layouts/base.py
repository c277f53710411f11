"""What all layouts have in common: the names of a layer's attention tensors, and the parts that need no splitting."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headpool.convert.layouts.weights import PARTS, AttentionWeights, Part, Rotary
from headpool.geometry import Layer

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Layout(ABC):
    """A checkpoint's attention tensors, each `{stem}{layer}.{attention}.` and a name inside the attention module.

    projections: the module that holds each part, `.weight` and `.bias` below it; parts may share one. The output
    projection is [D, heads*d] in every layout. norms: the query and key norm; input_norms: names that the norm
    before attention may have inside the layer. key_gains: the gains of a norm across all key heads, or of one for each
    head; with * for the head's number where each is a tensor. gains_by_head: they are one tensor [k, d], not [k*d].
    query_parts: rows of the query projection for each dimension of a head; where there are more than one, `read` is for
    the other parts.
    """

    stem: str
    attention: str
    projections: Mapping[Part, str]
    layers: tuple[Layer, ...]
    rotary: Rotary | None
    per_query_head: tuple[str, ...] = ()
    norms: tuple[str, str] = ("q_norm", "k_norm")
    input_norms: tuple[str, ...] = ("input_layernorm",)
    key_gains: str | None = None
    gains_by_head: bool = False
    query_parts: int = 1

    def tensor(self, layer: int, suffix: str) -> str:
        return f"{self.stem}{layer}.{self.attention}.{suffix}"

    def names(self, layer: int, part: Part) -> tuple[str, str]:
        """The names of the weight and the bias that hold a part."""
        projection = self.projections[part]
        return self.tensor(layer, f"{projection}.weight"), self.tensor(layer, f"{projection}.bias")

    def changed(self, layer: int, parts: Collection[Part]) -> list[str]:
        """The names of all that changes with these parts, whether the model has it or not. With the query heads moves
        what belongs to them.
        """
        names = [name for part in parts for name in self.names(layer, part)]
        names += [self.tensor(layer, suffix) for suffix in self.per_query_head if "q" in parts]
        names += self.gain_names(layer, self.layers[layer].kv_heads) if "k" in parts else []
        return list(dict.fromkeys(names))

    def gain_names(self, layer: int, kv_heads: int) -> list[str]:
        """The names of the tensors with the key heads' gains, were the layer to have so many K/V heads."""
        if self.key_gains is None:
            return []
        numbers = range(kv_heads) if "*" in self.key_gains else (0,)
        return [self.tensor(layer, self.key_gains.replace("*", str(number))) for number in numbers]

    @abstractmethod
    def together(self, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        """These parts, and those that lie in one tensor with them: it can only be written whole."""

    @abstractmethod
    def rows(self, layer: int, part: Part, kv_heads: int) -> int:
        """The rows of the tensors that hold q, k or v, were the layer to have so many K/V heads."""

    @abstractmethod
    def read(self, tensors: "Mapping[str, Tensor]", layer: int, parts: Collection[Part] = PARTS) -> AttentionWeights:
        """The asked-for parts of one layer, split by head; `tensors` is asked for nothing else."""

    @abstractmethod
    def write(self, weights: AttentionWeights, layer: int) -> "dict[str, Tensor]":
        """The tensors of the parts that `weights` holds, in the shapes that they have on disk: read's inverse."""

    def _read_output(
        self, weights: AttentionWeights, tensors: "Mapping[str, Tensor]", layer: int, parts: Collection[Part]
    ) -> AttentionWeights:
        if "o" not in parts:
            return weights
        weight, bias = self.names(layer, "o")
        o = tensors[weight]
        by_head = o.view(len(o), -1, self.layers[layer].head_dim).transpose(0, 1)
        return replace(weights, o=by_head, bias_o=tensors.get(bias))

    def _write_output(self, weights: AttentionWeights, layer: int) -> "dict[str, Tensor]":
        weight, bias = self.names(layer, "o")
        tensors = {} if weights.o is None else {weight: weights.o.transpose(0, 1).flatten(1)}
        return tensors if weights.bias_o is None else tensors | {bias: weights.bias_o}
