"""What mean-pooling may change in a tiny model; weights as bytes, and by head."""

from typing import Any

import torch


def projections(family: str, layers: int = 2) -> set[str]:
    """What mean-pooling may change, written out by hand."""
    kinds = ("weight", "bias") if family in ("qwen2", "qwen3") else ("weight",)
    return {f"model.layers.{i}.self_attn.{part}_proj.{kind}" for i in range(layers) for part in "kv" for kind in kinds}


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def by_head(weight: torch.Tensor, heads: int) -> Any:
    return weight.double().unflatten(0, (heads, -1)).numpy()
