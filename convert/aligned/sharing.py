"""Steps 1 to 3 for one layer: which heads share, and one key head and one value head for each group."""

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from headpool import families
from headpool.convert.aligned.grouping import GroupLoss, permute
from headpool.convert.aligned.keys import share_keys
from headpool.convert.aligned.moments import Moments, data_free, is_normed
from headpool.convert.aligned.observe import GroupObserver, HeadSizes, InputMoments, MomentsObserver, observing
from headpool.convert.aligned.options import Alignment
from headpool.convert.aligned.stock import Stock
from headpool.convert.aligned.values import folds, share_values
from headpool.convert.aligned.walk import Layer
from headpool.convert.layouts import AttentionWeights
from headpool.convert.plan import Plan
from headpool.tensors import read_tensor

EVERY = 4
"""One query in so many is looked at when moments are gathered."""

SHARE, PER_DIMENSION = 4, 32
"""Values of groups are averaged on one window in so many, and on so many tokens for each dimension at least."""


@dataclass
class Figures:
    """What became of a layer.

    partition: the groups of source heads. lost_energy: what sharing loses of "keys" and "values", relative to the
    layer's. freedom: by what keys and values are told from shared ones (docs/method.md). block_error: the relative
    squared error of the attention block's output on held-out calibration windows after each step that was taken
    ("closed", "refit", "heal"); layer_error: that of the whole layer's output before and after it was healed, each
    token's relative to its own.
    seconds: how long it took.
    """

    layer: int
    partition: list[list[int]]
    lost_energy: dict[str, float]
    freedom: dict[str, str]
    block_error: dict[str, float] = field(default_factory=dict)
    layer_error: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


def share_on_text(plan: Plan, layer: Layer, kv_heads: int, *, search: bool) -> tuple[AttentionWeights, Figures]:
    """A layer's attention with `kv_heads` K/V heads, by what attention sees of the calibration text.

    The layer has been advanced and the outputs of its attention recorded afterwards.
    """
    weights, moments = observe(layer, record=True)
    weights, moments, figures = _grouped(layer.index, weights, moments, kv_heads, search=search)
    averaged = GroupObserver(figures.partition)
    with observing(layer.attention, averaged, every=EVERY, known=True):
        for block in layer.blocks(_sample(layer)):
            block.through(layer.attention)
    shared = share_keys(weights, kv_heads, moments)
    return share_values(shared, kv_heads, *averaged.moments(), fold_mean=folds(weights)), figures


def _sample(layer: Layer) -> slice:
    """The windows from which groups' values are known well enough: some, and many tokens for each dimension of them."""
    count, tokens = layer.walk.tokens_NT.shape
    own = layer.walk.stock.layout.layers[layer.index]
    enough = -(-PER_DIMENSION * own.kv_heads * own.head_dim // tokens)
    return slice(0, min(count, max(enough, -(-count // SHARE))))


def share_without_text(
    plan: Plan, stock: Stock, index: int, kv_heads: int, *, search: bool
) -> tuple[AttentionWeights, Figures]:
    """A layer's attention with `kv_heads` K/V heads, as if its inputs were uncorrelated, of the size that the layer's
    norm gives them.
    """
    weights = stock.weights(index)
    assert weights.q is not None
    moments = data_free(weights, _norm_gain(plan, index, weights.q.shape[-1]))
    weights, moments, figures = _grouped(index, weights, moments, kv_heads, search=search)
    shared = share_keys(weights, kv_heads, moments)
    groups = moments.value_groups(kv_heads)
    return share_values(shared, kv_heads, groups, moments.value_means, fold_mean=folds(weights)), figures


def observe(layer: Layer, *, record: bool = False) -> tuple[AttentionWeights, Moments]:
    """A layer's weights, and the moments of its attention over the text, on the way to the next layer's inputs."""
    weights = layer.walk.stock.weights(layer.index)
    assert weights.rotary is not None
    observer = MomentsObserver(weights.rotary)
    with observing(layer.attention, observer, every=EVERY), _before_norms(layer, weights) as before:
        layer.advance(record=record)
    return weights, replace(observer.moments(), **({} if before is None else before.moments()))


def _before_norms(layer: Layer, weights: AttentionWeights) -> AbstractContextManager[HeadSizes | InputMoments | None]:
    """Gathers what has to be known of the keys before their norm, where they have one."""
    if not is_normed(weights):
        return contextlib.nullcontext()
    assert weights.k is not None
    projection: nn.Module = layer.attention.get_submodule(layer.walk.stock.layout.projections["k"])
    return HeadSizes(projection, len(weights.k)) if weights.key_gains is None else InputMoments(projection)


def changed(plan: Plan, index: int, weights: AttentionWeights) -> dict[str, Tensor]:
    """What changes of a layer's attention, by the names that it has in the checkpoint, in the dtype computed in."""
    declared = set(plan.changed_in(index))
    made = plan.layout.write(weights, index).items()
    return {name: tensor.to(compute_dtype(plan)) for name, tensor in made if name in declared}


def compute_dtype(plan: Plan) -> torch.dtype:
    """What a layer is computed in: float32, or float64 where the source has it."""
    wide = any(record.dtype == "F64" for record in plan.source.tensors.values())
    return torch.float64 if wide else torch.float32


def _grouped(
    index: int, weights: AttentionWeights, moments: Moments, kv_heads: int, *, search: bool
) -> tuple[AttentionWeights, Moments, Figures]:
    """The layer with the heads that share side by side, its moments likewise, and what that loses."""
    loss = GroupLoss(weights, moments, fold_mean=folds(weights))
    partition = loss.choose(kv_heads, search=search)
    order = [head for members in partition for head in members]
    figures = Figures(index, [list(members) for members in partition], dict(loss.lost(partition)), loss.freedom)
    return permute(weights, order), moments.permuted(order), figures


def searches(plan: Plan, alignment: Alignment) -> bool:
    """Whether it is searched for which heads share. Not with ALiBi: slopes belong to places in the list of heads."""
    return alignment.groups == "search" and not plan.layout.alibi


def _norm_gain(plan: Plan, index: int, hidden: int) -> Tensor:
    """The gain [D] of the norm before the attention, float64; ones where there is none (OLMo)."""
    names = (f"{plan.layout.stem}{index}.{norm}.weight" for norm in plan.layout.input_norms)
    record = next((plan.source.tensors[name] for name in names if name in plan.source.tensors), None)
    if record is None:
        return torch.ones(hidden, dtype=torch.float64)
    gain = read_tensor(record).double()
    return gain + 1 if families.find_family(plan.source.config).gains_less_one else gain
