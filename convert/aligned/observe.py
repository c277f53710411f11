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
from typing import Any, Protocol, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface

from headpool.convert.aligned.moments import Moments, pair_moments, to_pairs
from headpool.convert.aligned.seen import Seen, compare, sequences
from headpool.convert.layouts import Rotary
from headpool.errors import RequestError

_NAME = "headpool"


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
    """Gathers Moments of a layer over sequences; its values are those that a query averages by the mean attention of
    its heads.
    """

    def __init__(self, rotary: Rotary) -> None:
        self._rotary = rotary
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
        self._add_values(total_BST @ seen.v.transpose(1, 2).flatten(2) / seen.q.shape[1])

    def _add_keys(self, k_BkTd: Tensor, received_BT: Tensor) -> None:
        """Rotated keys, weighted by the attention that their tokens receive, about their weighted mean."""
        share_B1T = (received_BT / received_BT.sum(1, keepdim=True))[:, None]
        centred_BkTd = (k_BkTd - share_B1T[:, None] @ k_BkTd).mul_(share_B1T.sqrt()[..., None])
        flat_TE = centred_BkTd[..., self._rotary.dims :].transpose(1, 2).flatten(2).flatten(0, 1)
        self._sums.add("keys", pair_moments(centred_BkTd, self._rotary))
        self._sums.add("flat_keys", flat_TE.mT @ flat_TE)
        self._sequences += len(k_BkTd)

    def _add_queries(self, q_BhTd: Tensor) -> None:
        squares_F, _ = to_pairs(q_BhTd.square().sum((0, 2)), self._rotary)
        flat_hTn = q_BhTd[..., self._rotary.dims :].transpose(0, 1).flatten(1, 2)
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


class _Watched:
    """While its block runs, sees what a projection gets and gives."""

    def __init__(self, projection: nn.Module) -> None:
        self._projection = projection
        self._sums = _Sums()
        self._tokens = 0

    def __enter__(self) -> Self:
        self._hook = self._projection.register_forward_hook(self._add)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def _add(self, _: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        raise NotImplementedError


def _wide(values: Tensor) -> Tensor:
    return values.detach().to(torch.promote_types(values.dtype, torch.float32))


class HeadSizes(_Watched):
    """Gathers the size of each head of a projection's output [B, T, heads*d], as it is before any norm: what Moments
    call `key_scale`.
    """

    def __init__(self, projection: nn.Module, heads: int) -> None:
        super().__init__(projection)
        self._heads = heads

    def _add(self, _: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        heads_NKd = _wide(output).view(-1, self._heads, output.shape[-1] // self._heads)
        self._sums.add("squares", heads_NKd.square().mean(2).sum(0))
        self._tokens += len(heads_NKd)

    def moments(self) -> dict[str, Tensor]:
        """key_scale [heads]"""
        return {"key_scale": self._sums.mean("squares", self._tokens).sqrt()}


class InputMoments(_Watched):
    """Gathers E[x^T x] of what a projection gets, with the constant 1: the Moments' `inputs`."""

    def _add(self, _: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        x_ND = _wide(arguments[0]).flatten(0, -2)
        x_NX = torch.cat((x_ND, torch.ones_like(x_ND[:, :1])), 1)
        self._sums.add("inputs", x_NX.mT @ x_NX)
        self._tokens += len(x_NX)

    def moments(self) -> dict[str, Tensor]:
        """inputs [X, X]"""
        return {"inputs": self._sums.mean("inputs", self._tokens)}


@contextlib.contextmanager
def observing(attention: nn.Module, observer: Observer, *, every: int = 1, known: bool = False) -> Iterator[None]:
    """While the block runs, `observer` is given all sequences that go through an attention submodule.

    every: one query in so many is looked at, the last of each run of that length. known: the class has been observed
    before, so nothing is compared; and what the submodule gives is of no use, so it does not attend where it can do
    without.

    Raises RequestError where the class computes attention in a way that is not known here.
    """
    observation = _Observation(observer, every, known, compared=known)
    asks = hasattr(sys.modules[type(attention).__module__], "ALL_ATTENTION_FUNCTIONS")
    with _answering(attention, observation) if asks else _Watch(attention, observation):
        yield
    if not observation.compared:
        raise RequestError(f"{type(attention).__name__} does not say what it attends to, so it cannot be observed")


@dataclass
class _Observation:
    observer: Observer
    every: int
    known: bool
    compared: bool

    @torch.no_grad()
    def see(
        self,
        module: nn.Module,
        qkv: tuple[Tensor, Tensor, Tensor],
        mask: Tensor | None,
        keywords: Mapping[str, Any],
        result_BThd: Tensor,
    ) -> None:
        """Take in what attention was computed from, q, k, v [B, heads, T, d], and what the class made of it."""
        for seen in sequences(*qkv, mask, self.every, keywords):
            if not self.compared:
                compare(module, seen, result_BThd)
                self.compared = True
            self.observer.add(seen)


_observed: WeakKeyDictionary[nn.Module, tuple[_Observation, Callable[..., tuple[Tensor, Any]]]] = WeakKeyDictionary()


@contextlib.contextmanager
def _answering(attention: nn.Module, observation: _Observation) -> Iterator[None]:
    """While the block runs, `_attend` is the function that a class gets where it asks transformers for one."""
    config: Any = attention.config
    own = config._attn_implementation
    _observed[attention] = observation, _stock_function(attention, own)
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = own
        del _observed[attention]


class _Watch(TorchFunctionMode):
    """While its block runs, sees the calls of PyTorch's attention function, by classes that make them themselves."""

    def __init__(self, attention: nn.Module, observation: _Observation) -> None:
        super().__init__()
        self._attention = attention
        self._observation = observation

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        result = function(*arguments, **(keywords or {}))
        if function is scaled_dot_product_attention:
            self._see(result, *arguments, **(keywords or {}))
        return result

    def _see(
        self,
        result_BhTd: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
        **_: Any,
    ) -> None:
        """Keys and values that were repeated for each query head count once."""
        repeated = key.shape[1] // getattr(self._attention, "num_kv_heads", key.shape[1])
        qkv = (query, key[:, ::repeated], value[:, ::repeated])
        self._observation.see(self._attention, qkv, attn_mask, {"scaling": scale}, result_BhTd.transpose(1, 2))


def _stock_function(attention: nn.Module, implementation: str) -> Callable[..., tuple[Tensor, Any]]:
    """The function that a class computes attention with: the library's, or the eager one of the class's own file."""
    if implementation == "eager":
        function: Callable[..., tuple[Tensor, Any]] | None = getattr(
            sys.modules[type(attention).__module__], "eager_attention_forward", None
        )
    else:
        function = AttentionInterface().get(implementation)
    if function is None:
        raise RequestError(f"{type(attention).__name__}: attention {implementation!r} cannot be observed")
    return function


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **keywords: Any
) -> tuple[Tensor, Any]:
    """The attention function that transformers calls in an observed submodule; query, key, value [B, heads, T, d]."""
    observation, function = _observed[module]
    if observation.known:
        result: tuple[Tensor, Any] = torch.zeros_like(query).transpose(1, 2), None
    else:
        result = function(module, query, key, value, attention_mask, **keywords)
    observation.see(module, (query, key, value), attention_mask, keywords, result[0])
    return result


AttentionInterface.register(_NAME, _attend)
