"""Time of prefill and of decoding, apart, on a preallocated cache: several models in one run, taking turns."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, StaticCache

from headpool.errors import HeadpoolError, first_line
from headpool.eval.cache import cache_name, stored_bytes
from headpool.geometry import Layer
from headpool.score import keeps_logits

STEPS, REPEATS = 32, 5


@dataclass(frozen=True)
class Kernel:
    """What computed the attention of a decode step, and whether it read the K/V heads as they lie in the cache
    (`grouped`) or a copy expanded to one for each query head.
    """

    name: str
    grouped: bool
    explanation: str


@dataclass(frozen=True)
class Timing:
    """One model at one context length and batch size. Seconds are medians over `repeats`, spreads the fastest and the
    slowest.

    `context`: tokens in each sequence's cache at the end, of which the last `steps` are decoded one by one and the
    others prefilled. `seconds_per_token`: of one decode step, which gives each of `batch` sequences a token.
    `bytes_per_token`: what such a step has to read: the weights (of an input embedding only the rows looked up; of a
    mixture all experts) and the cache as allocated.
    """

    context: int
    batch: int
    steps: int
    repeats: int
    prefill_seconds: float
    prefill_spread: tuple[float, float]
    seconds_per_token: float
    seconds_per_token_spread: tuple[float, float]
    cache_bytes: int
    bytes_per_token: int
    kernel: Kernel
    preallocated: bool

    @property
    def bandwidth(self) -> float:
        """Bytes per second that `bytes_per_token` read in `seconds_per_token` mean."""
        return self.bytes_per_token / self.seconds_per_token


def decode_steps(context: int) -> int:
    """How many of a context's tokens are decoded one by one: half of a short one."""
    return min(STEPS, context // 2)


@torch.no_grad()
def time_decoding(
    models: Sequence[Any],
    layers: Sequence[Sequence[Layer]],
    context: int,
    batch: int,
    progress: Callable[[int, int], None] | None = None,
    repeats: int = REPEATS,
) -> list[Timing]:
    """Time the models at one context length (two tokens at least) and batch size, in turns: every repeat runs all of
    them once, so that what disturbs the machine disturbs all.

    Each is run once before, to warm up and to see which kernel it uses. Every run fills the same cache to the same
    length, and the device is waited for before and after what is timed. `layers` are those of each model. `progress`
    is called with tokens done and to do. HeadpoolError where there is not enough memory.
    """
    try:
        return _take_turns(models, layers, context, batch, progress, repeats)
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "alloc" in str(error):
            raise HeadpoolError(
                f"not enough memory to decode at context {context} with batch size {batch}: {first_line(error)}; "
                f"take smaller contexts or batches"
            ) from error
        raise


def _take_turns(
    models: Sequence[Any],
    layers: Sequence[Sequence[Layer]],
    context: int,
    batch: int,
    progress: Callable[[int, int], None] | None,
    repeats: int,
) -> list[Timing]:
    runs = [_Run(model, of_model, context, batch) for model, of_model in zip(models, layers, strict=True)]
    tokens = batch * context
    seconds: list[list[tuple[float, float]]] = [[] for _ in runs]
    for turn in range(repeats + 1):
        for index, run in enumerate(runs):
            if turn == 0:
                run.warm_up()
            else:
                seconds[index].append(run.time())
            if progress is not None:
                progress((turn * len(runs) + index + 1) * tokens, len(runs) * (repeats + 1) * tokens)
    return [run.timing(of_run) for run, of_run in zip(runs, seconds, strict=True)]


class _Run:
    """A model with its cache and its tokens, to be run over them again and again."""

    def __init__(self, model: Any, layers: Sequence[Layer], context: int, batch: int) -> None:
        self._model, self._layers, self._context = model, layers, context
        self._steps = decode_steps(context)
        generator = torch.Generator().manual_seed(0)
        vocabulary = model.config.get_text_config().vocab_size
        self._tokens_BT = torch.randint(vocabulary, (batch, context), generator=generator).to(model.device)
        self._options = {"use_cache": True} | ({"logits_to_keep": 1} if keeps_logits(model) else {})
        self._static = StaticCache(config=model.config, max_cache_len=context) if preallocates(model) else None
        self._cache: Any = None
        self._kernel: Kernel | None = None

    def warm_up(self) -> None:
        self._prefill()
        for step in range(self._steps - 1):
            self._decode(step)
        with _Observer(self._model, self._cache, self._layers) as observer:
            self._decode(self._steps - 1)
        self._kernel = observer.kernel()

    def time(self) -> tuple[float, float]:
        """Seconds of the prefill, and of a decode step on average."""
        _wait(self._model.device)
        begin = time.perf_counter()
        self._prefill()
        _wait(self._model.device)
        filled = time.perf_counter()
        for step in range(self._steps):
            self._decode(step)
        _wait(self._model.device)
        return filled - begin, (time.perf_counter() - filled) / self._steps

    def timing(self, seconds: Sequence[tuple[float, float]]) -> Timing:
        prefill, token = zip(*seconds, strict=True)
        batch = self._tokens_BT.shape[0]
        cached = stored_bytes(self._cache)
        assert self._kernel is not None
        return Timing(
            context=self._context,
            batch=batch,
            steps=self._steps,
            repeats=len(seconds),
            prefill_seconds=statistics.median(prefill),
            prefill_spread=(min(prefill), max(prefill)),
            seconds_per_token=statistics.median(token),
            seconds_per_token_spread=(min(token), max(token)),
            cache_bytes=cached,
            bytes_per_token=weight_bytes(self._model, batch) + cached,
            kernel=self._kernel,
            preallocated=self._static is not None,
        )

    def _prefill(self) -> None:
        if self._static is not None:
            self._static.reset()
        self._cache = self._static or DynamicCache(config=self._model.config)
        self._forward(self._tokens_BT[:, : self._context - self._steps])

    def _decode(self, step: int) -> None:
        at = self._context - self._steps + step
        self._forward(self._tokens_BT[:, at : at + 1])

    def _forward(self, tokens_BT: torch.Tensor) -> None:
        self._model(input_ids=tokens_BT, **{cache_name(self._model): self._cache}, **self._options)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def weight_bytes(model: Any, batch: int) -> int:
    """Bytes of weights that one decode step of `batch` tokens reads: all, each tensor once, but of an input embedding
    that is not the output embedding's tensor only a row a token.
    """
    tensors = {one.data_ptr(): one for one in model.parameters()}
    total: int = sum(one.nbytes for one in tensors.values())
    table: torch.Tensor = model.get_input_embeddings().weight
    output = model.get_output_embeddings()
    if output is not None and output.weight.data_ptr() == table.data_ptr():
        return total
    return total - table.nbytes + batch * table.shape[1] * table.dtype.itemsize


@torch.no_grad()
def preallocates(model: Any) -> bool:
    """Whether the class gives the same logits on a preallocated cache as on none, tried on eight tokens."""
    vocabulary = model.config.get_text_config().vocab_size
    tokens_BT = (torch.arange(8, device=model.device) * 7 % vocabulary)[None]
    name = cache_name(model)
    expected = model(input_ids=tokens_BT, use_cache=False).logits[:, -1]
    try:
        cache = StaticCache(config=model.config, max_cache_len=8)
        model(input_ids=tokens_BT[:, :6], use_cache=True, **{name: cache})
        for at in (6, 7):
            logits = model(input_ids=tokens_BT[:, at : at + 1], use_cache=True, **{name: cache}).logits[:, -1]
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, NotImplementedError, IndexError):
        return False
    near = 32 * torch.finfo(expected.dtype).eps * expected.abs().max()
    return stored_bytes(cache) > 0 and bool(((logits - expected).abs() <= near).all())


class _Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the attention operator that runs within it, and whether keys or values were written for every query head:
    a new tensor of the shape that a layer's would have then.

    Not for inference mode: there composite operators come whole, with the kernel that they choose out of sight.
    """

    def __init__(self, model: Any, cache: Any, layers: Sequence[Layer]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._implementation = model.config.get_text_config()._attn_implementation or "eager"
        self._cache = cache
        self._fewer = {
            layer.kv_heads: layer.heads for layer in layers if layer.kv_heads < layer.heads and layer.kind != "none"
        }
        self._operator: str | None = None
        self._written: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.rpartition("::")[2].lstrip("_")
        if "attention" in name or "attn" in name:
            self._operator = name
        if isinstance(result, torch.Tensor):
            given = {one.untyped_storage().data_ptr() for one in args if isinstance(one, torch.Tensor)}
            if result.untyped_storage().data_ptr() not in given:
                self._written.add(tuple(result.shape))
        return result

    def _expanded_shapes(self) -> Iterator[tuple[int, ...]]:
        for layer in self._cache.layers:
            for kept in filter(lambda one: one is not None, (layer.keys, layer.values)):
                batch, kv_heads, tokens, head_dim = kept.shape
                if kv_heads in self._fewer:
                    heads = self._fewer[kv_heads]
                    for read in (tokens, tokens + 1):  # a sliding layer that grows reads one more than it keeps
                        yield batch, kv_heads, heads // kv_heads, read, head_dim
                        for part in ((read, head_dim), (head_dim, read)):
                            yield batch, heads, *part
                            yield batch * heads, *part

    def kernel(self) -> Kernel:
        name = ": ".join(filter(None, (self._implementation, self._operator)))
        if not self._fewer:
            return Kernel(name, True, "as many K/V heads as query heads: nothing to expand")
        counts = " and ".join(f"{kv} K/V heads" for kv in sorted(self._fewer))
        if self._written.intersection(self._expanded_shapes()):
            return Kernel(
                name,
                False,
                f"{counts} were expanded to {max(self._fewer.values())} before attention read them: the cache is "
                "smaller, but every step reads it and writes and reads the expanded copy",
            )
        return Kernel(name, True, f"{counts} were read as they lie in the cache")
