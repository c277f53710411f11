"""One projection for queries, keys and values."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headpool.convert.layouts.base import Layout
from headpool.convert.layouts.weights import PARTS, AttentionWeights, Part
from headpool.family import Order

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Fused(Layout):
    """q, k and v are one weight [(heads + 2 kv_heads)*d, D], the biases one vector; `order` is that of their heads.

    "blocks": all queries, all keys, all values. "groups": for each K/V head its query heads, then its key, then its
    value; with as many K/V heads as query heads, that is query, key and value head by head.
    """

    order: Order = "blocks"

    def together(self, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        fused: tuple[Part, ...] = ("q", "k", "v")
        return (*fused, *(part for part in parts if part not in fused)) if set(parts) & set(fused) else parts

    def rows(self, layer: int, part: Part, kv_heads: int) -> int:
        held = self.layers[layer]
        return held.head_dim * (held.heads + 2 * kv_heads)

    def read(self, tensors: "Mapping[str, Tensor]", layer: int, parts: Collection[Part] = PARTS) -> AttentionWeights:
        values: dict[str, Any] = {}
        if fused := [part for part in ("q", "k", "v") if part in parts]:
            for prefix, name in zip(("", "bias_"), self.names(layer, "q"), strict=True):
                if not prefix or name in tensors:
                    held = dict(zip(("q", "k", "v"), self._split(tensors[name], layer), strict=True))
                    values |= {f"{prefix}{part}": held[part] for part in fused}
        return self._read_output(self._bare(layer, **values), tensors, layer, parts)

    def write(self, weights: AttentionWeights, layer: int) -> "dict[str, Tensor]":
        tensors = self._write_output(weights, layer)
        held = (weights.q, weights.k, weights.v), (weights.bias_q, weights.bias_k, weights.bias_v)
        for name, parts in zip(self.names(layer, "q"), held, strict=True):
            present = [part for part in parts if part is not None]
            assert len(present) in (0, 3), "a fused tensor is written whole"
            if present:
                tensors[name] = self._join(*present)
        return tensors

    def _split(self, fused: "Tensor", layer: int) -> "tuple[Tensor, Tensor, Tensor]":
        """[(h + 2k)*d, …] → [h, d, …], [k, d, …], [k, d, …]"""
        held = self.layers[layer]
        if self.order == "blocks":
            heads = fused.view(-1, held.head_dim, *fused.shape[1:])
            return heads[: held.heads], heads[held.heads : -held.kv_heads], heads[-held.kv_heads :]
        groups = fused.view(held.kv_heads, held.group_size + 2, held.head_dim, *fused.shape[1:])
        return groups[:, :-2].flatten(0, 1), groups[:, -2], groups[:, -1]

    def _join(self, q: "Tensor", k: "Tensor", v: "Tensor") -> "Tensor":
        import torch

        if self.order == "blocks":
            return torch.cat((q, k, v)).flatten(0, 1)
        return torch.cat((q.reshape(len(k), -1, *q.shape[1:]), k[:, None], v[:, None]), 1).flatten(0, 2)
