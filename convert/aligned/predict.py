"""What aligned conversion would lose at every possible number of K/V heads, from one pass over calibration text."""

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headpool import geometry
from headpool.convert.aligned.estimate import check_resources, free_disk, free_memory
from headpool.convert.aligned.grouping import GroupLoss
from headpool.convert.aligned.options import Alignment, Prediction
from headpool.convert.aligned.run import (
    batch_of,
    check_attention,
    estimate_for,
    open_stock,
    read_calibration,
)
from headpool.convert.aligned.sharing import observe, searches
from headpool.convert.aligned.values import folds
from headpool.convert.aligned.walk import Layer, Walk
from headpool.convert.aligned.work import Work
from headpool.convert.plan import Plan
from headpool.headers import BITS
from headpool.loading import usable_device


def predict(plan: Plan, alignment: Alignment, seed: int) -> tuple[list[Prediction], dict[str, Any]]:
    """A prediction for every number of K/V heads that the model can be brought to, most first, drawn to
    `alignment.plot` where that is given; and the estimate of what aligning will take.

    Raises RequestError as `aligned.prepare` does.
    """
    check_attention(plan)
    usable_device(alignment.device)
    text = read_calibration(plan, alignment, seed)
    assert text is not None
    counts = geometry.options(plan.before)
    lost: dict[int, list[dict[str, float]]] = {count: [] for count in counts}
    estimate = estimate_for(plan, alignment, text.tokens.shape)
    with tempfile.TemporaryDirectory(prefix="headpool-") as folder, Work(Path(folder), {}) as work:
        check_resources(
            estimate,
            memory=free_memory(usable_device(alignment.device)),
            disk=free_disk(work.directory),
            work=work.directory,
        )
        for layer in Walk(open_stock(plan, alignment), text.tokens, batch=batch_of(text.tokens.shape[1]), work=work):
            if plan.before[layer.index].kind != "none":
                loss = _loss(layer)
                for count in counts:
                    heads = plan.before[layer.index].kv_heads
                    partition = loss.choose(min(count, heads), search=searches(plan, alignment))
                    lost[count].append(dict(loss.lost(partition)))
            alignment.progress((layer.index + 1) * text.tokens.numel(), len(plan.before) * text.tokens.numel())
    keys = plan.source.tensors[plan.layout.names(plan.units[0].layer, "k")[0]]
    predictions = [
        Prediction(
            count,
            geometry.cache_bytes_per_token(geometry.regroup(plan.before, count), BITS[keys.dtype] // 8),
            *(sum(layer[part] for layer in lost[count]) / len(lost[count]) for part in ("keys", "values")),
        )
        for count in counts
    ]
    if alignment.plot is not None:
        from headpool.plots import predicted_loss, save_png

        save_png(predicted_loss([asdict(one) for one in predictions]), alignment.plot)
    return predictions, estimate.to_dict()


def _loss(layer: Layer) -> GroupLoss:
    weights, moments = observe(layer)
    return GroupLoss(weights, moments, fold_mean=folds(weights))
