"""What attention sees: second moments of a layer's queries, keys and values, gathered while the stock attention runs.

The attention function that the class would use is called as ever, and its result is what the layer goes on with. Beside
it the attention weights are computed once more, for the queries that are looked at, and both are compared: a class that
does something else in between is noticed rather than misread.

Shape suffixes: B sequences, T tokens, S queries looked at, h query heads, k key/value heads, r query heads of each, U
r*S, g groups, d head_dim, E k*d, e the value dimensions of a group, F rotary pairs, n dimensions without rotation.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from headpool.convert.aligned.moments import Moments, to_pairs
from headpool.convert.layouts import Rotary
from headpool.errors import RequestError

Values = Literal["attention", "tokens"]

_NAME = "headpool"
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


class Observer(Protocol):
    """Gathers something of all sequences that pass through an attention submodule."""

    def add(self, seen: Seen) -> None: ...


class _Sums:
    """Sums in double of products that have the precision of what was observed."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, product: Tensor) -> None:
        wide = product.to(torch.complex128 if product.is_complex() else torch.float64)
        self._sums[name] = self._sums[name].add_(wide) if name in self._sums else wide

    def mean(self, name: str, count: int) -> Tensor:
        return self._sums[name] / count


class MomentsObserver:
    """Gathers Moments of a layer over sequences.

    values: whether the value moments are those of single tokens, or of the values that a query averages by the mean
    attention of its heads.
    """

    def __init__(self, rotary: Rotary, *, values: Values = "attention") -> None:
        self._rotary = rotary
        self._values = values
        self._sums = _Sums()
        self._sequences = 0
        self._tokens = 0
        self._averages = 0

    def add(self, seen: Seen) -> None:
        total_BST = seen.q.new_zeros((len(seen.q), seen.queries, seen.k.shape[2]))
        for patch in seen.patches:
            weights_BkrST = torch.unflatten(seen.attend(patch), 2, (seen.shared, -1))
            total_BST[:, patch.queries, : patch.keys] += weights_BkrST.sum((1, 2))
        self._add_keys(seen.k, total_BST.sum(1))
        self._add_queries(seen.q)
        values_BTE = seen.v.transpose(1, 2).flatten(2)
        self._add_values(values_BTE if self._values == "tokens" else total_BST @ values_BTE / seen.q.shape[1])

    def _add_keys(self, k_BkTd: Tensor, received_BT: Tensor) -> None:
        """Rotated keys, weighted by the attention that their tokens receive, about their weighted mean."""
        share_B1T1 = (received_BT / received_BT.sum(1, keepdim=True))[:, None, :, None]
        centred_BkTd = (k_BkTd - (share_B1T1 * k_BkTd).sum(2, keepdim=True)) * share_B1T1.sqrt()
        pairs_BkTF, flat_BkTn = to_pairs(centred_BkTd, self._rotary)
        pairs_FkT = pairs_BkTF.permute(3, 1, 0, 2).flatten(2)
        flat_TE = flat_BkTn.transpose(1, 2).flatten(2).flatten(0, 1)
        self._sums.add("keys", pairs_FkT @ pairs_FkT.mH)
        self._sums.add("flat_keys", flat_TE.mT @ flat_TE)
        self._sequences += len(k_BkTd)

    def _add_queries(self, q_BhTd: Tensor) -> None:
        squares_F, _ = to_pairs(q_BhTd.square().sum((0, 2)), self._rotary)
        flat_hTn = to_pairs(q_BhTd, self._rotary)[1].transpose(0, 1).flatten(1, 2)
        self._sums.add("queries", squares_F.real + squares_F.imag)
        self._sums.add("flat_queries", flat_hTn.mT @ flat_hTn)
        self._tokens += len(q_BhTd) * q_BhTd.shape[2]

    def _add_values(self, values_BSE: Tensor) -> None:
        values_SE = values_BSE.flatten(0, 1)
        self._sums.add("values", values_SE.mT @ values_SE)
        self._sums.add("value_means", values_SE.sum(0))
        self._averages += len(values_SE)

    def moments(self) -> Moments:
        """What was gathered so far, on the device where it was."""
        counts = {
            "keys": self._sequences,
            "flat_keys": self._sequences,
            "queries": self._tokens,
            "flat_queries": self._tokens,
            "values": self._averages,
            "value_means": self._averages,
        }
        return Moments(**{name: self._sums.mean(name, count) for name, count in counts.items()})


class GroupObserver:
    """Gathers second moments of the values as the query heads of each group average them, for one partition of the
    key/value heads: `partition` lists each group's heads.
    """

    def __init__(self, partition: Sequence[Sequence[int]]) -> None:
        self._partition = [list(group) for group in partition]
        self._group = {head: index for index, group in enumerate(self._partition) for head in group}
        self._sums = _Sums()
        self._averages = 0

    def add(self, seen: Seen) -> None:
        """Sums over a group's query heads and the queries of u^T u and u, u being attention weights times v_G.

        Where a group has more value dimensions than the sequence has tokens, weights^T weights is summed first.
        """
        v_gBTe = torch.stack([seen.v[:, group].transpose(1, 2).flatten(2) for group in self._partition])
        by_token = v_gBTe.shape[2] <= v_gBTe.shape[3]
        size = v_gBTe.shape[2 if by_token else 3]
        grams = v_gBTe.new_zeros((*v_gBTe.shape[:2], size, size))
        received_gBT = v_gBTe.new_zeros(v_gBTe.shape[:3])
        for patch in seen.patches:
            for head, weights_BUT in enumerate(seen.attend(patch).unbind(1), patch.kv_heads.start):
                group = self._group[head]
                received_gBT[group, :, : patch.keys] += weights_BUT.sum(1)
                rows = weights_BUT if by_token else weights_BUT @ v_gBTe[group, :, : patch.keys]
                grams[group, :, : rows.shape[2], : rows.shape[2]] += rows.mT @ rows
        self._sums.add("moments", (v_gBTe.mT @ grams @ v_gBTe if by_token else grams).sum(1))
        self._sums.add("means", (received_gBT[:, :, None] @ v_gBTe).sum((1, 2)))
        self._averages += len(seen.q) * len(self._partition[0]) * seen.shared * seen.queries

    def moments(self) -> tuple[Tensor, Tensor]:
        """Second moments [g, r*d, r*d] of each group, and the means [k*d], in the partition's order."""
        return self._sums.mean("moments", self._averages), self._sums.mean("means", self._averages).flatten()


class HeadSizes:
    """While its block runs, gathers the size of each head of a projection's output [B, T, heads*d], as it is before any
    norm: what Moments call `key_scale`.
    """

    def __init__(self, projection: nn.Module, heads: int) -> None:
        self._projection = projection
        self._heads = heads
        self._sums = _Sums()
        self._tokens = 0

    def __enter__(self) -> Self:
        self._hook = self._projection.register_forward_hook(self._add)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def _add(self, _: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        heads_NKd = output.detach().float().view(-1, self._heads, output.shape[-1] // self._heads)
        self._sums.add("squares", heads_NKd.square().mean(2).sum(0))
        self._tokens += len(heads_NKd)

    def root_mean_squares(self) -> Tensor:
        """[heads]"""
        return self._sums.mean("squares", self._tokens).sqrt()


@contextlib.contextmanager
def observing(attention: nn.Module, observer: Observer, *, every: int = 1) -> Iterator[None]:
    """While the block runs, `observer` is given all sequences that go through an attention submodule.

    every: one query in so many is looked at, the last of each run of that length.

    Raises RequestError where the class computes attention in a way that is not known here.
    """
    config: Any = attention.config
    own = config._attn_implementation
    _observed[attention] = _Observation(observer, _stock_function(attention, own), every)
    config._attn_implementation = _NAME
    try:
        yield
        if not _observed[attention].compared:
            raise RequestError(f"{type(attention).__name__} does not say what it attends to, so it cannot be observed")
    finally:
        config._attn_implementation = own
        del _observed[attention]


@dataclass
class _Observation:
    observer: Observer
    function: Callable[..., tuple[Tensor, Any]]
    every: int
    compared: bool = False


_observed: WeakKeyDictionary[nn.Module, _Observation] = WeakKeyDictionary()


def _stock_function(attention: nn.Module, implementation: str) -> Callable[..., tuple[Tensor, Any]]:
    """The function that a class computes attention with: the library's, or the eager one of the class's own file."""
    module = sys.modules[type(attention).__module__]
    if not hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
        raise RequestError(
            f"{type(attention).__name__} computes attention by itself, so it cannot be observed; align without "
            f"calibration text"
        )
    function: Callable[..., tuple[Tensor, Any]] | None
    if implementation == "eager":
        function = getattr(module, "eager_attention_forward", None)
    else:
        function = AttentionInterface().get(implementation)
    if function is None:
        raise RequestError(f"{type(attention).__name__}: attention {implementation!r} cannot be observed")
    return function


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **keywords: Any
) -> tuple[Tensor, Any]:
    """The attention function that transformers calls in an observed submodule; query, key, value [B, heads, T, d]."""
    observation = _observed[module]
    result = observation.function(module, query, key, value, attention_mask, **keywords)
    with torch.no_grad():
        for seen in _sequences(query, key, value, attention_mask, observation.every, keywords):
            if not observation.compared:
                _compare(module, seen, result[0])
                observation.compared = True
            observation.observer.add(seen)
    return result


def _sequences(
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


def _compare(module: nn.Module, seen: Seen, result_BThd: Tensor) -> None:
    """RequestError unless the attention weights computed here give what the stock function gave."""
    patch = seen.patches[-1]
    here_BkUd = seen.attend(patch) @ seen.v[:, patch.kv_heads, : patch.keys]
    result_BkrTd = torch.unflatten(result_BThd[: len(here_BkUd)].transpose(1, 2), 1, (-1, seen.shared))
    there_BkUd = result_BkrTd[:, patch.kv_heads, :, patch.positions].flatten(2, 3).to(here_BkUd.dtype)
    tolerance = 1e-3 if result_BThd.dtype in (torch.float32, torch.float64) else 3e-2
    if not (here_BkUd - there_BkUd).norm() <= tolerance * there_BkUd.norm():
        raise RequestError(f"{type(module).__name__} attends in a way that is not known here, so it cannot be observed")


AttentionInterface.register(_NAME, _attend)
