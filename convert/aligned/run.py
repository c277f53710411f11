"""Aligned conversion: each layer's attention, fitted to fewer K/V heads on calibration text or on its weights alone;
and for pooling the gains of norms for every key head, on text.

Layers are independent of each other: each is fitted to what the original does with the original's hidden states. So
one layer is in memory at a time, a killed run goes on at the layer where it was, and the error of one layer does not
become the target of the next.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from headpool import __version__, families
from headpool.convert.aligned.calibration import Calibration, calibration
from headpool.convert.aligned.estimate import (
    Estimate,
    Task,
    check_resources,
    estimate,
    free_disk,
    free_memory,
    on_one_disk,
)
from headpool.convert.aligned.fit import HELD_OUT, Fit
from headpool.convert.aligned.gains import GainFigures, calibrate_gains
from headpool.convert.aligned.moments import rotary_of
from headpool.convert.aligned.options import Alignment
from headpool.convert.aligned.sharing import Figures, changed, compute_dtype, searches, share_without_text
from headpool.convert.aligned.stock import Stock
from headpool.convert.aligned.values import BESIDE
from headpool.convert.aligned.walk import Walk
from headpool.convert.aligned.work import Work
from headpool.convert.layouts import AttentionWeights
from headpool.convert.plan import Plan
from headpool.convert.shards import layer_file
from headpool.errors import RequestError
from headpool.loading import usable_device

STEP_TOKENS = 4096
"""Tokens of a healing step."""

KEPT_BYTES = 2 << 30
"""Inputs and outputs of a layer are held on to while it is healed, where they take no more than that."""

Prepared = tuple[dict[str, Tensor], Figures | GainFigures]
"""The changed tensors of a layer by their names, and its figures."""


def prepare(plan: Plan, alignment: Alignment, directory: Path, seed: int, out: Path) -> dict[str, Any]:
    """Align every layer of the plan, or for a method that pools choose the gains of its norms, and leave the tensors in
    `directory` under `layer_file`; gives what headpool.json says of it.

    A directory that a killed run of the same alignment left is gone on with. The result is to be at `out`.

    Raises RequestError for calibration text that is too short, too little memory or space on the disk, activations that
    are not finite (the layer is named), attention that cannot be observed or has no freedom to use, and while another
    process works there.
    """
    if plan.method.aligned:
        check_attention(plan)
    usable_device(alignment.device)
    text = read_calibration(plan, alignment, seed)
    options = alignment.options() if plan.method.aligned else alignment.text_options()
    if text is not None:
        windows, tokens = text.tokens.shape
        options |= {"calibration": text.data_sha256, "calibration_windows": windows, "calibration_window": tokens}
    run = {
        "source": plan.source.headers_sha256(),
        "files": sorted({(one.path.name, one.path.stat().st_mtime_ns) for one in plan.source.tensors.values()}),
        "kv_heads": plan.kv_heads,
        "method": [plan.method.name, plan.output_dtype],
        "options": options,
        "seed": seed,
        "tokens": None if text is None else text.sha256,
        "versions": [__version__, torch.__version__, transformers.__version__],
    }
    if text is not None:
        check_resources(
            estimate_for(plan, alignment, text.tokens.shape, output=plan.nbytes * on_one_disk(directory, out)),
            memory=free_memory(usable_device(alignment.device)),
            disk=free_disk(directory),
            work=directory,
        )
    with Work(directory, run) as work:
        figures = align(plan, alignment, None if text is None else text.tokens, work, seed=seed)
    return {"options": options, "layers": [asdict(one) for one in figures]}


def estimate_for(plan: Plan, alignment: Alignment, shape: Sequence[int], output: int = 0) -> Estimate:
    """What aligning on calibration windows of `shape` [N, T] will take; `output` is bytes of the result where it goes
    to the same disk.
    """
    windows, tokens = shape
    batch = min(batch_of(tokens), windows)
    stock = open_stock(plan, alignment)
    task = Task(
        windows,
        tokens,
        batch,
        itemsize=compute_dtype(plan).itemsize,
        refit=alignment.refit and plan.method.aligned,
        heal_steps=alignment.heal * plan.method.aligned,
        heal_batch=batch,
        whole_layers=alignment.whole_layers and plan.method.aligned,
        kept=kept_bytes(plan, stock, shape) * plan.method.aligned,
        held_out=max(1, windows // HELD_OUT),
        scores=stock.eager,
        output=output,
    )
    return estimate(plan.source, plan.layout, task)


def kept_bytes(plan: Plan, stock: Stock, shape: Sequence[int]) -> int:
    """Bytes of a layer's attention inputs, masks and outputs for windows of `shape` [N, T], where they are few enough
    to be held on to; 0 otherwise.
    """
    windows, tokens = shape
    hidden = plan.source.tensors[plan.layout.names(plan.units[0].layer, "o")[0]].shape[0]
    masked = stock.eager or any(layer.kind == "sliding" for layer in plan.before)
    size = compute_dtype(plan).itemsize * windows * tokens * (3 * hidden + tokens * masked)
    return size if size <= KEPT_BYTES else 0


def read_calibration(plan: Plan, alignment: Alignment, seed: int) -> Calibration | None:
    """The windows of calibration text that an alignment asks for, if it has any."""
    if alignment.calibration is None:
        return None
    needed = max(plan.before[unit.layer].kv_heads * plan.before[unit.layer].head_dim for unit in plan.units)
    text = calibration(
        plan.source,
        alignment.calibration,
        tokens=alignment.tokens,
        needed=needed,
        window=alignment.window,
        seed=seed,
    )
    windows, tokens = text.tokens.shape
    if windows < 2 and plan.method.aligned:
        raise RequestError(
            f"{text.data}: {windows} window of {tokens} tokens, and at least 2 are needed, one of them to be held out; "
            f"take more text or tokens, or a smaller window"
        )
    return text


def check_attention(plan: Plan) -> None:
    """RequestError for attention that does more than the method knows how to preserve."""
    if (reason := families.find_family(plan.source.config).unaligned) is not None:
        raise RequestError(f"method aligned does not know this family's attention: {reason}; use method mean")
    rotary_of(AttentionWeights(rotary=plan.layout.rotary))
    shared = next((index for index, layer in enumerate(plan.before) if layer.shares is not None), None)
    if shared is not None:
        raise RequestError(f"layer {shared} reads the keys and values of another, which method aligned cannot change")
    for suffix in plan.layout.per_query_head:
        name = plan.layout.tensor(plan.units[0].layer, suffix)
        if name in plan.source.tensors and suffix not in BESIDE:
            raise RequestError(f"method aligned does not know what {name!r} does to attention; use method mean")


def align(plan: Plan, alignment: Alignment, windows_NT: Tensor | None, work: Work, *, seed: int = 0) -> list[Any]:
    """Fit every layer of the plan and leave its tensors in `work`; gives the figures of all of them, in order: Figures,
    or GainFigures.

    windows_NT: calibration tokens; None takes inputs to be uncorrelated, scaled by the gain of the layer's norm, and
    does without refit and healing. Layers that `work` has already are not done again.
    """
    todo = {unit.layer for unit in plan.units} if plan.method.aligned else plan.gained
    if any(work.facts(layer_file(index)) is None for index in todo):
        _fit_layers(plan, alignment, windows_NT, work, seed, todo)
    kept = [work.facts(layer_file(index)) for index in sorted(todo)]
    kind = Figures if plan.method.aligned else GainFigures
    return [kind(**facts) for facts in kept if facts is not None]


def _fit_layers(
    plan: Plan, alignment: Alignment, windows_NT: Tensor | None, work: Work, seed: int, todo: Collection[int]
) -> None:
    fits = _without_text(plan, alignment) if windows_NT is None else _on_text(plan, alignment, windows_NT, work, seed)
    tokens = 1 if windows_NT is None else windows_NT.numel()
    for index, fit in fits:
        if index in todo and work.facts(layer_file(index)) is None:
            begin = time.perf_counter()
            tensors, figures = fit()
            figures.seconds = time.perf_counter() - begin
            work.save(layer_file(index), tensors, asdict(figures))
        alignment.progress((index + 1) * tokens, len(plan.before) * tokens)


def _without_text(plan: Plan, alignment: Alignment) -> Iterator[tuple[int, Callable[[], Prepared]]]:
    stock = open_stock(plan, alignment)
    search = searches(plan, alignment)
    for unit in plan.units:

        def fit(index: int = unit.layer, kv_heads: int = unit.kv_heads) -> Prepared:
            shared, figures = share_without_text(plan, stock, index, kv_heads, search=search)
            return changed(plan, index, shared), figures

        yield unit.layer, fit


def _on_text(
    plan: Plan, alignment: Alignment, windows_NT: Tensor, work: Work, seed: int
) -> Iterator[tuple[int, Callable[[], Prepared]]]:
    converted = open_stock(plan, alignment, config_text=plan.config_text)
    kv_heads = {unit.layer: unit.kv_heads for unit in plan.units}
    stock = open_stock(plan, alignment)
    keep = kept_bytes(plan, stock, windows_NT.shape) > 0
    for layer in Walk(stock, windows_NT, batch=batch_of(windows_NT.shape[1]), work=work):
        target = kv_heads.get(layer.index, 0)
        if plan.method.aligned:
            yield layer.index, Fit(plan, alignment, layer, converted, target, seed, keep).run
        else:
            yield layer.index, partial(calibrate_gains, plan, layer, converted, target, seed)


def open_stock(plan: Plan, alignment: Alignment, config_text: str | None = None) -> Stock:
    """The source's stock class, on the device that an alignment asks for."""
    device, dtype = usable_device(alignment.device), compute_dtype(plan)
    return Stock(plan.source, plan.layout, device=device, dtype=dtype, config_text=config_text)


def batch_of(tokens: int) -> int:
    """Windows of so many tokens that go through a layer at a time, and that are one step of healing."""
    return max(1, STEP_TOKENS // tokens)
