"""Key/value-cache bytes per token: by the formula, and as a model's own cache allocates them."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from headpool import geometry
from headpool.errors import HeadpoolError
from headpool.geometry import Layer
from headpool.score import keeps_logits

_CACHE_NAMES = ("cache", "past_key_values")
"""The forward's parameter and the output's field for the cache: transformers renamed it."""


@dataclass(frozen=True)
class Allocation:
    """Bytes that a cache's tensors keep in memory: after a prefill, and after one token was decoded on top
    of it.

    They differ where layers slide. Such a layer keeps a slice of what it was given, and the slice pins all of
    it until the next token makes the layer build a new tensor.
    """

    prefill: int
    decoding: int


@dataclass(frozen=True)
class CacheReport:
    """Cache bytes per token of one sequence of `tokens`.

    `formula` counts every layer as if it kept all tokens, in `dtype`; `formula_checkpoint` is the same in
    `checkpoint_dtype`. `allocated` was measured in `dtype` with all tokens in the cache, the last one
    decoded. `explanation` is None where formula and allocation agree; where sliding layers do not explain the
    difference it is `flagged`.
    """

    tokens: int
    dtype: str
    formula: int
    allocated: float
    checkpoint_dtype: str
    formula_checkpoint: int
    explanation: str | None
    flagged: bool


def cache_report(
    model: Any, layers: Sequence[Layer], tokens: Sequence[int], checkpoint_dtype: torch.dtype
) -> CacheReport:
    """Measure the cache of `model` over `tokens` (two at least) and hold it against the formula for its
    layers.
    """
    per_token = geometry.cache_bytes_per_token(layers, model.dtype.itemsize)
    measured = allocated_cache_bytes(model, torch.tensor([tokens], device=model.device))
    explanation, flagged = _explain(layers, len(tokens), model.dtype.itemsize, measured)
    return CacheReport(
        tokens=len(tokens),
        dtype=dtype_name(model.dtype),
        formula=per_token,
        allocated=measured.decoding / len(tokens),
        checkpoint_dtype=dtype_name(checkpoint_dtype),
        formula_checkpoint=geometry.cache_bytes_per_token(layers, checkpoint_dtype.itemsize),
        explanation=explanation,
        flagged=flagged,
    )


@torch.inference_mode()
def allocated_cache_bytes(model: Any, input_ids_BT: torch.Tensor) -> Allocation:
    """Prefill all tokens but the last, decode the last, and weigh the cache's own tensors after each of
    the two.

    Counted are the storages behind `cache.layers[i].keys` and `.values`, each once: what stays in memory, not
    what a slice shows. Raises HeadpoolError for a model that gives no such cache.
    """
    name = cache_name(model)
    options = {"use_cache": True} | ({"logits_to_keep": 1} if keeps_logits(model) else {})
    cache = getattr(model(input_ids=input_ids_BT[:, :-1], **options), name)
    if not hasattr(cache, "layers"):
        raise HeadpoolError(f"{type(model).__name__} gives no key/value cache with layers, but {type(cache).__name__}")
    prefill = stored_bytes(cache)
    model(input_ids=input_ids_BT[:, -1:], **{name: cache}, **options)
    return Allocation(prefill, stored_bytes(cache))


def cache_name(model: Any) -> str:
    """The name of the forward's parameter, and of its output's field, for the cache."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in _CACHE_NAMES if name in parameters), _CACHE_NAMES[-1])


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def stored_bytes(cache: Any) -> int:
    """Bytes of the storages behind a cache's keys and values, each once."""
    tensors = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _explain(layers: Sequence[Layer], tokens: int, itemsize: int, measured: Allocation) -> tuple[str | None, bool]:
    full = geometry.cache_bytes_per_token(layers, itemsize) * tokens
    if measured.decoding == full:
        return None, False
    windows = [layer.window for layer in layers if layer.window is not None and layer.window < tokens]
    if measured.decoding == geometry.cache_bytes(layers, tokens=tokens, batch=1, itemsize=itemsize):
        pinned = measured.prefill / (tokens - 1)
        return (
            f"{len(windows)} of {len(layers)} layers hold at most {max(windows)} tokens "
            f"(right after the prefill their slices still pinned it: {pinned:.0f} bytes per token)"
        ), False
    by_head = [replace(layer, kv_heads=layer.heads) for layer in layers]
    if measured.decoding == geometry.cache_bytes_per_token(by_head, itemsize) * tokens:
        return "flag: its class caches keys and values once for each query head, so fewer K/V heads save nothing", True
    difference = (measured.decoding - full) / tokens
    return f"flag: allocated differs from the formula by {difference:+.1f} bytes per token, unexplained", True
