"""What all layouts have in common: the names of a layer's attention tensors, and the parts that need no splitting."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headpool.convert.layouts.weights import PARTS, AttentionWeights, Part, Rotary
from headpool.geometry import Layer

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Layout(ABC):
    """A checkpoint's attention tensors, each `{stem}{layer}.{attention}.` and a name inside the attention module.

    cross_attention: what stands for `attention` in layers that attend to another input, None where none does.
    projections: the module that holds each part, `.weight` and `.bias` below it; parts may share one. The output
    projection is [D, heads*d] in every layout. norms: the query and key norm; input_norms: names that the norm
    before attention may have inside the layer. key_gains: the gains of a norm across all key heads, or of one for each
    head; with * for the head's number where each is a tensor. gains_by_head: they are one tensor [k, d], not [k*d].
    query_parts: rows of the query projection for each dimension of a head; with two, a head's gate follows its query.
    input_parts: how many times the hidden size its inputs are wide.
    bare_norms: the layers with norms without gains; normed_values: whether values pass such norms; clipped: whether
    queries, keys and values are cut off at a size; alibi: whether attention is biased by a slope for each place in the
    list of query heads.
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
    input_parts: int = 1
    bare_norms: frozenset[int] = frozenset()
    normed_values: bool = False
    clipped: bool = False
    alibi: bool = False
    cross_attention: str | None = None

    def tensor(self, layer: int, suffix: str) -> str:
        return f"{self.stem}{layer}.{self.module(layer)}.{suffix}"

    def module(self, layer: int) -> str:
        """The name of a layer's attention inside it."""
        other = self.cross_attention if self.layers[layer].kind == "cross" else None
        return self.attention if other is None else other

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
        names += self.query_gain_names(layer) if "q" in parts else []
        names += self.gain_names(layer, self.layers[layer].kv_heads) if "k" in parts else []
        return list(dict.fromkeys(names))

    def gain_names(self, layer: int, kv_heads: int) -> list[str]:
        """The names of the tensors with the key heads' gains, were the layer to have so many K/V heads."""
        return self._numbered(self.key_gains, layer, kv_heads)

    def query_gain_names(self, layer: int) -> list[str]:
        """The names of the tensors with the query heads' gains, which are named after the key heads'."""
        return self._numbered(self.key_gains and f"q{self.key_gains[1:]}", layer, self.layers[layer].heads)

    def _numbered(self, suffix: str | None, layer: int, heads: int) -> list[str]:
        if suffix is None:
            return []
        return [self.tensor(layer, suffix.replace("*", str(one))) for one in range(heads if "*" in suffix else 1)]

    @property
    def whole_norms(self) -> bool:
        """Whether norms that have gains for every head span all heads."""
        return self.key_gains is not None and "*" not in self.key_gains and not self.gains_by_head

    def _bare(self, layer: int, **parts: Any) -> AttentionWeights:
        """These parts of a layer, with what is known of it without its tensors."""
        facts: dict[str, Any] = {"normed_values": self.normed_values, "clipped": self.clipped}
        return AttentionWeights(rotary=self.rotary, bare_norms=layer in self.bare_norms, **facts, **parts)

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
