"""Projections of their own for queries, keys and values."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headpool.convert.layouts.base import Layout
from headpool.convert.layouts.weights import PARTS, AttentionWeights, Part

if TYPE_CHECKING:
    from torch import Tensor

QKV: tuple[Part, ...] = ("q", "k", "v")


@dataclass(frozen=True)
class Separate(Layout):
    """q, k, v are [heads*d, D] on disk, rows grouped by head; biases [heads*d]."""

    def together(self, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        return parts

    def rows(self, layer: int, part: Part, kv_heads: int) -> int:
        held = self.layers[layer]
        return held.head_dim * (held.heads * self.query_parts if part == "q" else kv_heads)

    def read(self, tensors: "Mapping[str, Tensor]", layer: int, parts: Collection[Part] = PARTS) -> AttentionWeights:
        d = self.layers[layer].head_dim
        values: dict[str, Any] = {}
        for part in (one for one in QKV if one in parts):
            weight, bias = self.names(layer, part)
            values[part] = tensors[weight].view(-1, d, tensors[weight].shape[1])
            if bias in tensors:
                values[f"bias_{part}"] = tensors[bias].view(-1, d)
        if "k" in parts:
            values["key_gains"] = self._read_gains(tensors, layer)
        weights = self._read_output(AttentionWeights(rotary=self.rotary, **values), tensors, layer, parts)
        return self._read_beside(weights, tensors, layer) if "q" in parts else weights

    def _read_gains(self, tensors: "Mapping[str, Tensor]", layer: int) -> "Tensor | None":
        import torch

        held = self.layers[layer]
        found = [tensors[name] for name in self.gain_names(layer, held.kv_heads) if name in tensors]
        return torch.cat(found).view(held.kv_heads, held.head_dim) if found else None

    def _read_beside(self, weights: AttentionWeights, tensors: "Mapping[str, Tensor]", layer: int) -> AttentionWeights:
        """With the norms, and what belongs to the query heads."""
        query_norm, key_norm = (self.tensor(layer, f"{norm}.weight") for norm in self.norms)
        heads = {s: tensors[self.tensor(layer, s)] for s in self.per_query_head if self.tensor(layer, s) in tensors}
        return replace(
            weights,
            query_norm=tensors.get(query_norm),
            key_norm=tensors.get(key_norm),
            centred_norms=self.tensor(layer, f"{self.norms[1]}.bias") in tensors,
            per_query_head=heads,
        )

    def write(self, weights: AttentionWeights, layer: int) -> "dict[str, Tensor]":
        tensors = self._write_output(weights, layer)
        for part in QKV:
            w, b = getattr(weights, part), getattr(weights, f"bias_{part}")
            weight, bias = self.names(layer, part)
            if w is not None:
                tensors[weight] = w.flatten(0, 1)
            if b is not None:
                tensors[bias] = b.flatten()
        if weights.key_gains is not None:
            names = self.gain_names(layer, len(weights.key_gains))
            parts = weights.key_gains.chunk(len(names))
            tensors |= {
                name: one if self.gains_by_head else one.flatten() for name, one in zip(names, parts, strict=True)
            }
        for norm, gain in zip(self.norms, (weights.query_norm, weights.key_norm), strict=True):
            if gain is not None:
                tensors[self.tensor(layer, f"{norm}.weight")] = gain
        return tensors | {self.tensor(layer, suffix): tensor for suffix, tensor in weights.per_query_head.items()}
