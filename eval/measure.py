"""Measure checkpoints on the same text, each under its own stock class: perplexity, key/value-cache bytes, decode time,
tasks, samples.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from headpool.errors import RequestError
from headpool.eval.cache import CacheReport, cache_report
from headpool.eval.decode import Timing, time_decoding
from headpool.eval.models import AUTO, DTYPES, Candidate, ModelSpec, Provenance, loaded, open_candidate
from headpool.eval.positions import Bucket, by_position
from headpool.eval.samples import NEW_TOKENS, Sample, continue_greedily, default_prompts
from headpool.eval.tasks import TaskResult, Tasks
from headpool.loading import usable_device
from headpool.score import Score, Window, score, sliding_windows
from headpool.text import TextData

DEFAULT_WINDOW = 2048
"""Window where none is asked for and the models' positions do not limit it further."""

Progress = Callable[[str, int, int], None]
"""Called with the name of a piece of work, how much of it is done and how much there is, in tokens."""


@dataclass(frozen=True)
class Settings:
    """What the figures depend on besides models and data; `dtype` may be "auto"."""

    window: int
    stride: int
    batch_size: int
    dtype: str
    device: str


@dataclass(frozen=True)
class ModelResult:
    """What was measured of one checkpoint. `bos`: whether a beginning-of-sequence token stood before each text;
    `same_tokens`: whether it read the texts as the same tokens as the baseline (without one, the first model);
    `cache_curve` is `geometry.cache_curve` in the checkpoint's dtype; `decode`: by context, then batch.
    """

    spec: ModelSpec
    provenance: Provenance
    kv_heads: int | list[int]
    score: Score
    bits_per_byte: float
    bos: bool
    same_tokens: bool
    cache: CacheReport
    cache_curve: tuple[tuple[int, int], ...]
    positions: tuple[Bucket, ...]
    tasks: tuple[TaskResult, ...]
    samples: tuple[Sample, ...]
    checkpoint_sha256: str
    decode: tuple[Timing, ...] = ()


@dataclass(frozen=True)
class Report:
    """Results in the order in which the models were given."""

    models: tuple[ModelResult, ...]
    data: TextData
    settings: Settings

    @property
    def same_tokens(self) -> bool:
        """All models read the data as the same tokens, so that their perplexities compare."""
        return all(result.same_tokens for result in self.models)


@dataclass(frozen=True)
class _Reading:
    """A checkpoint with the texts and prompts as its tokens."""

    candidate: Candidate
    sequences: list[list[int]]
    prompts: list[tuple[str, list[int]]] = field(repr=False)


def evaluate(
    models: Sequence[ModelSpec],
    data: TextData,
    *,
    window: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
    dtype: str | None = None,
    device: str | None = None,
    contexts: Sequence[int] = (),
    batches: Sequence[int] = (1,),
    tasks: Sequence[str] = (),
    prompts: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> Report:
    """Measure the models on the data with the same windows, one model in memory at a time.

    Each text has its own windows and, where the tokenizer has one, its own BOS. `window` defaults to the
    smallest of the models' positions and DEFAULT_WINDOW, `stride` to the window, `device` to a GPU where
    there is one, `dtype` to float32 on a CPU and the checkpoint's on a GPU, `prompts` to beginnings of the data's
    documents (an empty list gives no samples). `tasks` are names or files for lm-evaluation-harness.

    Decoding is timed where `contexts` are given: at each with each of `batches`, all models in memory together, since
    they take turns. Everything is checked before the first weights are read. Raises RequestError for what is
    impossible.
    """
    device = usable_device(device)
    dtype = _dtype_choice(dtype, device)
    if batch_size < 1:
        raise RequestError(f"batch size {batch_size}: one window at least is scored at a time")
    candidates = [open_candidate(spec) for spec in models]
    window = _window(candidates, window)
    settings = Settings(window, window if stride is None else stride, batch_size, dtype, device)
    sliding_windows(0, settings.window, settings.stride)  # refuses a wrong stride before anything is tokenized
    _check_decoding(candidates, contexts, batches)
    readings = _read(candidates, data, prompts)
    harness = Tasks(tasks) if tasks else None
    reference = next((one for one in readings if one.candidate.spec.role == "baseline"), readings[0])
    results = [
        replace(
            _measure(reading, data, settings, harness, progress),
            same_tokens=reading.sequences == reference.sequences,
        )
        for reading in readings
    ]
    timings = _time(candidates, settings, contexts, batches, progress)
    return Report(
        tuple(replace(one, decode=decode) for one, decode in zip(results, timings, strict=True)), data, settings
    )


def _dtype_choice(name: str | None, device: str) -> str:
    # bf16 products on a CPU without bf16 units run some 80 times slower than float32 ones.
    name = name or ("float32" if torch.device(device).type == "cpu" else AUTO)
    if name not in (AUTO, *DTYPES):
        raise RequestError(f"dtype {name!r}: choose from {', '.join((AUTO, *DTYPES))}")
    return name


def _limits(candidates: Sequence[Candidate]) -> dict[str, int]:
    return {one.spec.path: one.limit for one in candidates if one.limit is not None}


def _window(candidates: Sequence[Candidate], window: int | None) -> int:
    """The window, checked against every model's positions. At stride = window too a model is fed no more
    than `window` tokens: such a window has one more, but its last is only a target.
    """
    limits = _limits(candidates)
    if window is None:
        return min([*limits.values(), DEFAULT_WINDOW])
    for path, limit in limits.items():
        if window > limit:
            raise RequestError(f"window {window} is larger than the {limit} positions of {path}")
    return window


def _check_decoding(candidates: Sequence[Candidate], contexts: Sequence[int], batches: Sequence[int]) -> None:
    for context in contexts:
        if context < 2:
            raise RequestError(f"context {context}: one token is prefilled and one decoded at least")
        for path, limit in _limits(candidates).items():
            if context > limit:
                raise RequestError(f"context {context} is larger than the {limit} positions of {path}")
    if contexts and not batches:
        raise RequestError("no batch size to decode at")
    if min(batches, default=1) < 1:
        raise RequestError(f"batch {min(batches)}: one sequence at least is decoded at a time")


def _read(candidates: Sequence[Candidate], data: TextData, prompts: Sequence[str] | None) -> list[_Reading]:
    """Tokenize texts and prompts for every model. Raises RequestError where nothing could be scored, and for a given
    prompt that leaves no position for its continuation; default prompts that do are left out.
    """
    sequences = [[one.tokenize(text) for text in data.texts] for one in candidates]
    for of_model in sequences:
        if max(map(len, of_model)) < 2:
            raise RequestError(f"{data.name}: nothing to score: no text is longer than one token, BOS included")
    wanted = default_prompts(data.texts) if prompts is None else prompts
    tokens = {prompt: [one.tokenize(prompt) for one in candidates] for prompt in wanted}
    fitting = [prompt for prompt in wanted if all(map(_leaves_room, candidates, tokens[prompt]))]
    for prompt in wanted if prompts is not None else ():
        if prompt not in fitting:
            raise RequestError(f"prompt {prompt[:40]!r}: empty, or longer than the models' positions")
    return [
        _Reading(one, of_model, [(prompt, tokens[prompt][index]) for prompt in fitting])
        for index, (one, of_model) in enumerate(zip(candidates, sequences, strict=True))
    ]


def _leaves_room(candidate: Candidate, tokens: Sequence[int]) -> bool:
    return bool(tokens) and (candidate.limit is None or len(tokens) < candidate.limit)


def _measure(
    reading: _Reading, data: TextData, settings: Settings, harness: Tasks | None, progress: Progress | None
) -> ModelResult:
    candidate, sequences = reading.candidate, reading.sequences
    windows = [sliding_windows(len(tokens), settings.window, settings.stride) for tokens in sequences]
    prefill = max(sequences, key=len)[: max(settings.window, 2)]
    identity = candidate.source.checkpoint_sha256()  # of what is loaded now
    with loaded([candidate], settings.dtype, settings.device) as models:
        scored = _score(models[0], candidate, sequences, windows, settings.batch_size, progress)
        return ModelResult(
            spec=candidate.spec,
            provenance=candidate.provenance,
            kv_heads=candidate.kv_heads,
            score=scored,
            bits_per_byte=scored.nats / math.log(2) / data.bytes,
            bos=candidate.tokenizer.bos_token_id is not None,
            same_tokens=True,
            cache=cache_report(models[0], candidate.layers, prefill, candidate.checkpoint_dtype),
            cache_curve=candidate.cache_curve,
            positions=by_position(windows, scored),
            tasks=harness.run(models[0], candidate.tokenizer, settings.batch_size) if harness else (),
            samples=_samples(models[0], reading),
            checkpoint_sha256=identity,
        )


def _score(
    model: Any,
    candidate: Candidate,
    sequences: Sequence[Sequence[int]],
    windows: Sequence[Sequence[Window]],
    batch_size: int,
    progress: Progress | None,
) -> Score:
    name = f"evaluate {candidate.spec.path}"
    return score(
        model,
        sequences,
        windows,
        batch_size,
        None if progress is None else lambda done, total: progress(name, done, total),
    )


def _samples(model: Any, reading: _Reading) -> tuple[Sample, ...]:
    candidate = reading.candidate
    samples = []
    for prompt, tokens in reading.prompts:
        room = NEW_TOKENS if candidate.limit is None else min(NEW_TOKENS, candidate.limit - len(tokens))
        samples.append(Sample(prompt, continue_greedily(model, candidate.tokenizer, tokens, room)))
    return tuple(samples)


def _time(
    candidates: Sequence[Candidate],
    settings: Settings,
    contexts: Sequence[int],
    batches: Sequence[int],
    progress: Progress | None,
) -> list[tuple[Timing, ...]]:
    """Timings of each candidate, by context, then batch."""
    if not contexts:
        return [()] * len(candidates)
    rows = []
    with loaded(candidates, settings.dtype, settings.device) as models:
        for context in contexts:
            for batch in batches:
                name = f"decode {context} x {batch}"
                report = None if progress is None else lambda done, total, name=name: progress(name, done, total)
                rows.append(time_decoding(models, [one.layers for one in candidates], context, batch, report))
    return list(zip(*rows, strict=True))
