"""What an attention function gets, and the attention weights that it computes from that, a part at a time.

Shape suffixes: B sequences, T tokens, S queries looked at, h query heads, k key/value heads, r query heads of each, U
r*S, d head_dim.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headpool.errors import RequestError

_PATCH = {"cpu": 1 << 22}
_PATCH_ELSEWHERE = 1 << 26
"""Attention weights held at a time, by the type of device: a CPU wants them in its caches."""

_PIECES = 4
"""Causal queries are taken in so many pieces, each with the keys up to its end: a good third of the work is saved."""


@dataclass(frozen=True)
class Patch:
    """A part of the attention weights that is computed at once: those of the query heads of some key/value heads, for
    the queries at `positions`, which are the `queries` among those looked at, on the first `keys` keys.

    bias [1 or B, 1 or k, U, keys] is added to the scores.
    """

    kv_heads: slice
    positions: slice
    queries: slice
    keys: int
    bias: Tensor


@dataclass(frozen=True)
class Seen:
    """Sequences as the attention function gets them: q [B, h, T, d], k and v [B, k, T, d], after norms and rotation.

    queries: how many of each are looked at; patches: all the parts of their weights; sinks [h]: scores of nothing.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    queries: int
    patches: tuple[Patch, ...]
    scaling: float
    softcap: float | None
    sinks: Tensor | None

    @property
    def shared(self) -> int:
        """Query heads of one key/value head."""
        return self.q.shape[1] // self.k.shape[1]

    def attend(self, patch: Patch) -> Tensor:
        """The weights [B, k, U, keys] with which the queries of a patch attend, those of each query head in a row."""
        k_BkTd = self.k[:, patch.kv_heads, : patch.keys]
        heads = slice(patch.kv_heads.start * self.shared, patch.kv_heads.stop * self.shared)
        q_BkUd = self.q[:, heads, patch.positions].reshape(*k_BkTd.shape[:2], -1, k_BkTd.shape[-1])
        scores = q_BkUd @ k_BkTd.mT
        if self.softcap is None:
            scores = torch.add(patch.bias, scores, alpha=self.scaling, out=scores)
        else:
            scores = torch.tanh(scores * (self.scaling / self.softcap)) * self.softcap + patch.bias
        if self.sinks is None:
            return torch.softmax(scores, -1)
        sinks_kU = self.sinks[heads].repeat_interleave(q_BkUd.shape[2] // self.shared).view(k_BkTd.shape[1], -1)
        sinks_BkU1 = sinks_kU[None, ..., None].expand(len(scores), -1, -1, 1)
        return torch.softmax(torch.cat((scores, sinks_BkU1), -1), -1)[..., :-1]


def sequences(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, every: int, keywords: Mapping[str, Any]
) -> Iterator[Seen]:
    """The sequences of a batch, as many at a time as have weights that may be held at a time, or one."""
    query, key, value = (one.to(torch.promote_types(one.dtype, torch.float32)) for one in (query, key, value))
    limit = _PATCH.get(query.device.type, _PATCH_ELSEWHERE)
    sinks = keywords.get("s_aux")
    scaling = keywords.get("scaling")
    step = max(1, limit * (1 if mask is not None else _PIECES) // (query[0, ..., 0].numel() // every * key.shape[2]))
    for begin in range(0, len(query), step):
        rows = slice(begin, begin + step)
        own = mask if mask is None or len(mask) == 1 else mask[rows]
        yield Seen(
            q=query[rows],
            k=key[rows],
            v=value[rows],
            queries=query.shape[2] // every,
            patches=tuple(_patches(query[rows], key[rows], own, every)),
            scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
            softcap=keywords.get("softcap"),
            sinks=None if sinks is None else sinks.to(query.dtype).flatten(),
        )


def _patches(q_BhTd: Tensor, k_BkTd: Tensor, mask: Tensor | None, every: int) -> Iterator[Patch]:
    """The parts in which attention weights are computed; without a mask they are causal."""
    (batch, kv_heads, tokens, _), count = k_BkTd.shape, q_BhTd.shape[2] // every
    shared = q_BhTd.shape[1] // kv_heads
    piece = max(1, -(-count // _PIECES)) if mask is None else count
    for first in range(0, count, piece):
        last = min(first + piece, count)
        positions = slice((first + 1) * every - 1, last * every, every)
        keys = last * every if mask is None else tokens
        bias = _bias(q_BhTd, positions, keys, mask, kv_heads)
        limit = _PATCH.get(q_BhTd.device.type, _PATCH_ELSEWHERE)
        step = max(1, limit // (batch * shared * (last - first) * keys))
        for begin in range(0, kv_heads, step):
            some = slice(begin, min(begin + step, kv_heads))
            yield Patch(some, positions, slice(first, last), keys, bias[:, some] if bias.shape[1] > 1 else bias)


def _bias(q_BhTd: Tensor, positions: slice, keys: int, mask: Tensor | None, kv_heads: int) -> Tensor:
    """What is added to scores, [1 or B, 1 or k, U, keys]: zero where a key is seen, minus infinity where it is not, or
    what a mask of numbers [1 or B, 1 or h, T, keys] says.
    """
    shared = q_BhTd.shape[1] // kv_heads
    if mask is None:
        at = torch.arange(q_BhTd.shape[2], device=q_BhTd.device)
        mask = (at[:keys] <= at[:, None])[None, None]
    mask = mask[:, :, positions, :keys]
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, -torch.inf)
    mask = mask.to(q_BhTd.dtype)
    if mask.shape[1] == 1:
        return mask.repeat(1, 1, shared, 1)
    return torch.unflatten(mask, 1, (kv_heads, shared)).flatten(2, 3)


def compare(module: nn.Module, seen: Seen, result_BThd: Tensor) -> None:
    """RequestError unless the attention weights computed here give what the stock function gave."""
    patch = seen.patches[-1]
    here_BkUd = seen.attend(patch) @ seen.v[:, patch.kv_heads, : patch.keys]
    result_BkrTd = torch.unflatten(result_BThd[: len(here_BkUd)].transpose(1, 2), 1, (-1, seen.shared))
    there_BkUd = result_BkrTd[:, patch.kv_heads, :, patch.positions].flatten(2, 3).to(here_BkUd.dtype)
    tolerance = 1e-3 if result_BThd.dtype in (torch.float32, torch.float64) else 3e-2
    if not (here_BkUd - there_BkUd).norm() <= tolerance * there_BkUd.norm():
        raise RequestError(f"{type(module).__name__} attends in a way that is not known here, so it cannot be observed")
