"""Nats over windows of tokens: what evaluation, calibration and training all ask a causal language model."""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch.nn import functional

from headpool.errors import HeadpoolError, RequestError

MAX_LOGITS = 2**27
"""Logits that one batch may hold (512 MiB in float32); fewer windows share a batch where it would hold
more. A single window is never split."""

Progress = Callable[[int, int], None]
"""Called after every batch with the tokens scored so far and the tokens to score."""


@dataclass(frozen=True, slots=True)
class Window:
    """Half-open ranges of a sequence's tokens: the model reads [start, end - 1) and tokens [first, end)
    are scored.

    Token t is predicted from [start, t), hence start < first. The last token is only a target.
    """

    start: int
    end: int
    first: int


@dataclass(frozen=True)
class Score:
    """`nats`: summed negative log-likelihood of the `tokens` scored; `window_nats`: the same for each
    window given, by sequence.
    """

    nats: float
    tokens: int
    window_nats: tuple[tuple[float, ...], ...]

    @property
    def perplexity(self) -> float:
        """exp(nats / tokens). Raises HeadpoolError where that exceeds the largest float."""
        try:
            return math.exp(self.nats / self.tokens)
        except OverflowError as error:
            raise HeadpoolError(f"{self.nats / self.tokens:.0f} nats per token: these weights are broken") from error


def sliding_windows(n: int, window: int, stride: int) -> list[Window]:
    """Windows over n tokens that score each but the first exactly once, with as much context as they hold.

    Window 0 is [0, window). Window i is [min(i * stride, e - 1), i * stride + window), e being the end of the
    one before, and scores from e on; all end at n at the latest, and the first to end there is the last. At
    stride = window a window thus reaches back by one token, as the first token scored needs one before it.
    The model is never fed more than `window` tokens. Fewer than two tokens give no window. Raises
    RequestError unless 1 <= stride <= window.
    """
    if not 1 <= stride <= window:
        raise RequestError(f"window {window}, stride {stride}: the stride must lie between 1 and the window")
    if n < 2:
        return []
    windows = [Window(0, min(window, n), 1)]
    while (reached := windows[-1].end) < n:
        offset = len(windows) * stride
        windows.append(Window(min(offset, reached - 1), min(offset + window, n), reached))
    return windows


def score(
    model: Any,
    sequences: Sequence[Sequence[int]],
    windows: Sequence[Sequence[Window]],
    batch_size: int,
    progress: Progress | None = None,
) -> Score:
    """Score each sequence's windows with a causal language model of transformers, on the device it is on.

    Windows of equal shape share a batch and nothing is padded: with some position encodings (longrope)
    padding one window to the length of another changes its logits. Log-softmax is taken in float32 (float64
    for a float64 model), sums in float64. The model is put in evaluation mode meanwhile. Raises HeadpoolError
    for a score that is not finite and ValueError for a window that does not fit its sequence.
    """
    jobs = sorted(_jobs(sequences, windows), key=lambda job: job.shape, reverse=True)
    total = sum(job.targets for job in jobs)
    nats = [[0.0] * len(of_text) for of_text in windows]
    done = 0
    training = model.training
    model.eval()
    try:
        for batch in _batches(jobs, batch_size, model):
            tokens = [sequences[job.text][job.window.start : job.window.end] for job in batch]
            for job, value in zip(batch, _batch_nats(model, tokens, batch[0].offset), strict=True):
                if not math.isfinite(value):
                    raise HeadpoolError(f"text {job.text}, {job.window}: {value} nats in {model.dtype}; try float32")
                nats[job.text][job.index] = value
                done += job.targets
            if progress is not None:
                progress(done, total)
    finally:
        model.train(training)
    return Score(math.fsum(map(math.fsum, nats)), total, tuple(map(tuple, nats)))


@dataclass(frozen=True, slots=True)
class _Job:
    """A window with something to score, and its place in the result."""

    text: int
    index: int
    window: Window

    @property
    def offset(self) -> int:
        """The input whose logits are the first to be scored."""
        return self.window.first - 1 - self.window.start

    @property
    def targets(self) -> int:
        return self.window.end - self.window.first

    @property
    def shape(self) -> tuple[int, int]:
        return self.offset + self.targets, self.offset


def _jobs(sequences: Sequence[Sequence[int]], windows: Sequence[Sequence[Window]]) -> Iterator[_Job]:
    for text, (tokens, of_text) in enumerate(zip(sequences, windows, strict=True)):
        for index, one in enumerate(of_text):
            if not 0 <= one.start < one.first <= one.end <= len(tokens):
                raise ValueError(f"{one} does not fit the {len(tokens)} tokens of text {text}")
            if one.first < one.end:
                yield _Job(text, index, one)


def _batches(jobs: Sequence[_Job], batch_size: int, model: Any) -> Iterator[list[_Job]]:
    """Jobs of one shape each, at most `batch_size` and as many as MAX_LOGITS allows."""
    vocabulary = model.config.get_text_config().vocab_size
    for (inputs, offset), group in groupby(jobs, key=lambda job: job.shape):
        positions = inputs - offset if keeps_logits(model) else inputs
        rows = max(1, min(batch_size, MAX_LOGITS // (positions * vocabulary)))
        same = list(group)
        for at in range(0, len(same), rows):
            yield same[at : at + rows]


def keeps_logits(model: Any) -> bool:
    """Whether the class can be asked for the logits of some positions only."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


@torch.inference_mode()
def _batch_nats(model: Any, tokens: Sequence[Sequence[int]], offset: int) -> list[float]:
    """Summed nats of each row of `tokens` (all of one length), from the logits of input `offset` on."""
    tokens_BT = torch.tensor(tokens, device=model.device)
    inputs, targets = tokens_BT[:, :-1], tokens_BT[:, offset + 1 :]
    if keeps_logits(model):
        positions = torch.arange(offset, inputs.shape[1], device=model.device)
        logits_BSV = model(input_ids=inputs, use_cache=False, logits_to_keep=positions).logits
    else:
        logits_BSV = model(input_ids=inputs, use_cache=False).logits[:, offset:]
    wide = logits_BSV.to(torch.promote_types(logits_BSV.dtype, torch.float32))
    nats = functional.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="none")
    sums: list[float] = nats.cpu().double().view(targets.shape).sum(dim=1).tolist()
    return sums
