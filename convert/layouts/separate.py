"""Projections of their own for queries, keys and values."""

from collections.abc import Collection, Mapping, Sequence
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
            for prefix, name in zip(("", "bias_"), self.names(layer, part), strict=True):
                if not prefix or name in tensors:
                    held = self._by_head(tensors[name], part, d)
                    values |= {f"{prefix}{one}": heads for one, heads in zip(self._within(part), held, strict=True)}
        if "k" in parts:
            values["key_gains"] = self._read_gains(tensors, self.gain_names(layer, self.layers[layer].kv_heads), d)
        weights = self._read_output(self._bare(layer, **values), tensors, layer, parts)
        return self._read_beside(weights, tensors, layer) if "q" in parts else weights

    def _within(self, part: Part) -> tuple[str, ...]:
        """What a projection holds for each head, one after the other."""
        return ("q", "gate")[: self.query_parts] if part == "q" else (part,)

    def _by_head(self, projection: "Tensor", part: Part, d: int) -> "Sequence[Tensor]":
        """[heads * parts * d, …] → [heads, d, …] of each part"""
        return projection.view(-1, len(self._within(part)), d, *projection.shape[1:]).unbind(1)

    def _read_gains(self, tensors: "Mapping[str, Tensor]", names: Sequence[str], d: int) -> "Tensor | None":
        """[heads, d]"""
        import torch

        found = [tensors[name] for name in names if name in tensors]
        return torch.cat(found).view(-1, d) if found else None

    def _read_beside(self, weights: AttentionWeights, tensors: "Mapping[str, Tensor]", layer: int) -> AttentionWeights:
        """With the norms, and what belongs to the query heads."""
        query_norm, key_norm = (self.tensor(layer, f"{norm}.weight") for norm in self.norms)
        gains = self._read_gains(tensors, self.query_gain_names(layer), self.layers[layer].head_dim)
        heads = {s: tensors[self.tensor(layer, s)] for s in self.per_query_head if self.tensor(layer, s) in tensors}
        return replace(
            weights,
            query_norm=tensors.get(query_norm) if gains is None else None,
            key_norm=tensors.get(key_norm) if gains is None else None,
            query_gains=gains,
            # a norm of each head by itself that has gains for every one is a layer norm, as the registry test holds
            centred_norms=self.tensor(layer, f"{self.norms[1]}.bias") in tensors
            or (gains is not None and not self.whole_norms),
            whole_norms=gains is not None and self.whole_norms,
            per_query_head=heads,
        )

    def write(self, weights: AttentionWeights, layer: int) -> "dict[str, Tensor]":
        import torch

        tensors = self._write_output(weights, layer)
        for part in QKV:
            for prefix, name in zip(("", "bias_"), self.names(layer, part), strict=True):
                held = [getattr(weights, f"{prefix}{one}") for one in self._within(part)]
                if held[0] is not None:
                    tensors[name] = (torch.cat(held, 1) if len(held) > 1 else held[0]).flatten(0, 1)
        tensors |= self._write_gains(weights.query_gains, self.query_gain_names(layer))
        if weights.key_gains is not None:
            tensors |= self._write_gains(weights.key_gains, self.gain_names(layer, len(weights.key_gains)))
        for norm, gain in zip(self.norms, (weights.query_norm, weights.key_norm), strict=True):
            if gain is not None:
                tensors[self.tensor(layer, f"{norm}.weight")] = gain
        return tensors | {self.tensor(layer, suffix): tensor for suffix, tensor in weights.per_query_head.items()}

    def _write_gains(self, gains: "Tensor | None", names: Sequence[str]) -> "dict[str, Tensor]":
        if gains is None:
            return {}
        parts = zip(names, gains.chunk(len(names)), strict=True)
        return {name: one if self.gains_by_head else one.flatten() for name, one in parts}
