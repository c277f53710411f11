"""Nats over windows of tokens: what evaluation, calibration and training all ask a causal language model."""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch.nn import functional

from headpool.errors import HeadpoolError, RequestError

CHUNK_LOGITS, CHUNK_ROWS = 2**20, 256
"""The logits of one chunk of positions exist at a time: so many that a CPU's cache holds them, but those of 256 rows
at least, since every chunk reads the whole head.
"""

WHOLE_LOGITS = 2**27
"""Logits that one batch may hold (512 MiB in float32) where a class's head cannot be applied to chunks. A single window
is never split.
"""

_NO_TARGET = -100
"""cross_entropy's own mark of a position that does not count."""

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
    """`nats`: summed negative log-likelihood of the `tokens` scored; `token_nats`: that of every token scored, by
    sequence and window, each [targets] in float64.
    """

    nats: float
    tokens: int
    token_nats: tuple[tuple[torch.Tensor, ...], ...] = field(compare=False, repr=False)

    @cached_property
    def window_nats(self) -> tuple[tuple[float, ...], ...]:
        """Summed nats of each window given, by sequence."""
        return tuple(tuple(one.sum().item() for one in of_text) for of_text in self.token_nats)

    @property
    def perplexity(self) -> float:
        """Of all tokens scored. Raises HeadpoolError as `perplexity` does."""
        return perplexity(self.nats, self.tokens)


def perplexity(nats: float, tokens: int) -> float:
    """exp(nats / tokens). Raises HeadpoolError where that exceeds the largest float."""
    try:
        return math.exp(nats / tokens)
    except OverflowError as error:
        raise HeadpoolError(f"{nats / tokens:.0f} nats per token: these weights are broken") from error


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

    Windows that score from the same offset share a batch, the shorter ones padded at their end, which no earlier token
    of a causal model sees. Where the number of inputs changes a model's rotation (longrope, dynamic), only windows of
    one length share a batch. Log-softmax is taken in float32 (float64
    for a float64 model), sums in float64, over chunks of positions, so that memory does not grow with vocabulary times
    window. The model is put in evaluation mode meanwhile. Raises HeadpoolError for a score that is not finite and
    ValueError for a window that does not fit its sequence.
    """
    jobs = sorted(_jobs(sequences, windows), key=lambda job: (job.offset, job.targets), reverse=True)
    total = sum(job.targets for job in jobs)
    nats = [[torch.zeros(0, dtype=torch.float64)] * len(of_text) for of_text in windows]
    done = 0
    with _evaluating(model):
        chunks = bool(jobs) and _head_takes_chunks(model, sequences[jobs[0].text])
        alike = _by_shape if _length_changes_rotation(model) else _by_offset
        for batch in _batches(jobs, alike, batch_size, None if chunks else _widest(model)):
            tokens = [sequences[job.text][job.window.start : job.window.end] for job in batch]
            rows = _batch_nats(model, tokens, batch[0].offset, chunks=chunks)
            for job, row in zip(batch, rows, strict=True):
                if not torch.isfinite(row).all():
                    value = row.sum().item()
                    raise HeadpoolError(f"text {job.text}, {job.window}: {value} nats in {model.dtype}; try float32")
                nats[job.text][job.index] = row
                done += job.targets
            if progress is not None:
                progress(done, total)
    return Score(math.fsum(one.sum().item() for of_text in nats for one in of_text), total, tuple(map(tuple, nats)))


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Dropout is off within it; a model in training is back in training after it."""
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(training)


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
    def inputs(self) -> int:
        return self.offset + self.targets


def _by_offset(job: _Job) -> int:
    return job.offset


def _by_shape(job: _Job) -> tuple[int, int]:
    return job.offset, job.targets


def _length_changes_rotation(model: Any) -> bool:
    rotation = str(getattr(model.config.get_text_config(), "rope_parameters", None))
    return any(kind in rotation for kind in ("longrope", "dynamic"))


def _jobs(sequences: Sequence[Sequence[int]], windows: Sequence[Sequence[Window]]) -> Iterator[_Job]:
    for text, (tokens, of_text) in enumerate(zip(sequences, windows, strict=True)):
        for index, one in enumerate(of_text):
            if not 0 <= one.start < one.first <= one.end <= len(tokens):
                raise ValueError(f"{one} does not fit the {len(tokens)} tokens of text {text}")
            if one.first < one.end:
                yield _Job(text, index, one)


def _batches(
    jobs: Sequence[_Job], alike: Callable[[_Job], Any], batch_size: int, widest: Callable[[_Job], int] | None
) -> Iterator[list[_Job]]:
    """Jobs of which `alike` gives the same, the longest first and none shorter than half of it, at most `batch_size`
    and what `widest` allows for the longest.
    """
    for _, group in groupby(jobs, key=alike):
        rows, batch = batch_size, list[_Job]()
        for job in group:
            if batch and (len(batch) == rows or 2 * job.inputs < batch[0].inputs):
                yield batch
                batch = []
            if not batch and widest is not None:
                rows = max(1, min(batch_size, widest(job)))
            batch.append(job)
        yield batch


def _widest(model: Any) -> Callable[[_Job], int]:
    """The rows of a window's shape whose logits, all at once, number at most WHOLE_LOGITS."""
    vocabulary = _vocabulary(model)
    return lambda job: WHOLE_LOGITS // ((job.targets + (0 if keeps_logits(model) else job.offset)) * vocabulary)


def _vocabulary(model: Any) -> int:
    size: int = model.config.get_text_config().vocab_size
    return size


def keeps_logits(model: Any) -> bool:
    """Whether the class can be asked for the logits of some positions only."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def _batch_nats(model: Any, tokens: Sequence[Sequence[int]], offset: int, *, chunks: bool) -> Iterator[torch.Tensor]:
    """The nats of each row of `tokens` (the first the longest), each [targets] in float64, from the logits of input
    `offset` on.
    """
    inputs_BT, targets_BS = (one.to(model.device) for one in _padded(tokens, offset))
    if chunks:
        rows = max(CHUNK_ROWS, CHUNK_LOGITS // _vocabulary(model))
        pieces = _logits_in_chunks(model, inputs_BT, offset, max(1, rows // len(tokens)))
    else:
        pieces = iter([_logits(model, inputs_BT, offset)])
    nats, at = [], 0
    for logits_BSV in pieces:
        wide = logits_BSV.to(torch.promote_types(logits_BSV.dtype, torch.float32))
        aims = targets_BS[:, at : at + wide.shape[1]]
        nats.append(functional.cross_entropy(wide.flatten(0, 1), aims.flatten(), reduction="none").view(aims.shape))
        at += wide.shape[1]
    for row, of_row in zip(torch.cat(nats, dim=1).cpu().double(), tokens, strict=True):
        yield row[: len(of_row) - 1 - offset]


def _padded(tokens: Sequence[Sequence[int]], offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [B, T] and the targets of those from `offset` on [B, S]; what pads a row counts as no target."""
    longest = len(tokens[0]) - 1
    inputs_BT = torch.zeros(len(tokens), longest, dtype=torch.long)
    targets_BS = torch.full((len(tokens), longest - offset), _NO_TARGET)
    for row, of_row in enumerate(tokens):
        inputs_BT[row, : len(of_row) - 1] = torch.tensor(of_row[:-1])
        targets_BS[row, : len(of_row) - 1 - offset] = torch.tensor(of_row[offset + 1 :])
    return inputs_BT, targets_BS


def _logits(model: Any, inputs_BT: torch.Tensor, offset: int) -> torch.Tensor:
    """Logits of all inputs from `offset` on, at once: [B, S, V]."""
    if keeps_logits(model):
        positions = torch.arange(offset, inputs_BT.shape[1], device=model.device)
        kept: torch.Tensor = model(input_ids=inputs_BT, use_cache=False, logits_to_keep=positions).logits
        return kept
    logits: torch.Tensor = model(input_ids=inputs_BT, use_cache=False).logits[:, offset:]
    return logits


def _logits_in_chunks(model: Any, inputs_BT: torch.Tensor, offset: int, size: int) -> Iterator[torch.Tensor]:
    """The same for `size` positions at a time: the backbone runs once, then the class's own path from hidden states
    to logits (its head, scale, soft cap) for each chunk.
    """
    with _backbone_runs_once(model.base_model):
        for at in range(offset, inputs_BT.shape[1], size):
            positions = torch.arange(at, min(at + size, inputs_BT.shape[1]), device=model.device)
            yield model(input_ids=inputs_BT, use_cache=False, logits_to_keep=positions).logits


@contextmanager
def _backbone_runs_once(backbone: Any) -> Iterator[None]:
    """Within it, every call of the backbone after the first is answered with what the first gave."""
    own, replaced = backbone.forward, "forward" in vars(backbone)
    answers: list[Any] = []

    def forward(*inputs: Any, **options: Any) -> Any:
        if not answers:
            answers.append(own(*inputs, **options))
        return answers[0]

    backbone.forward = forward
    try:
        yield
    finally:
        if replaced:
            backbone.forward = own
        else:
            del backbone.forward


def _head_takes_chunks(model: Any, tokens: Sequence[int]) -> bool:
    """Whether logits taken in chunks are those taken at once, tried on a few tokens; False where the class is built
    so that they cannot be.
    """
    backbone = getattr(model, "base_model", model)
    if not keeps_logits(model) or backbone is model:
        return False
    inputs_BT = torch.tensor([tokens[:9]], device=model.device)
    whole = _logits(model, inputs_BT, 0)
    chunked = torch.cat(list(_logits_in_chunks(model, inputs_BT, 0, 4)), dim=1)
    # A head applied to fewer rows may round otherwise in the last place.
    near = 16 * torch.finfo(whole.dtype).eps * whole.abs().max()
    return whole.shape == chunked.shape and bool(((whole - chunked).abs() <= near).all())
