"""Score checkpoints on the same text, each under its own stock class: perplexity and key/value-cache
bytes."""

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from headpool import checkpoint, geometry, headers
from headpool.checkpoint import Source
from headpool.errors import RequestError, first_line
from headpool.eval.cache import CacheReport, cache_report, dtype_name
from headpool.geometry import Layer
from headpool.score import Score, score, sliding_windows
from headpool.text import TextData

DEFAULT_WINDOW = 2048
"""Window where none is asked for and the models' positions do not limit it further."""

DTYPES = {dtype_name(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)}

AUTO = "auto"
"""The checkpoint's own dtype."""

_POSITIONS = ("max_position_embeddings", "max_seq_len")
"""Config attributes that limit positions; a class with neither has no limit (BLOOM)."""

_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "*.spm")

Role = Literal["baseline", "model"]


@dataclass(frozen=True)
class ModelSpec:
    """A checkpoint to score: directory or hub id, as the user typed it."""

    role: Role
    path: str
    revision: str | None = None


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
    """What was measured of one checkpoint. `label` is None for one that headpool did not make; `bos` says
    whether a beginning-of-sequence token stood before each text. `cache_curve` is `geometry.cache_curve` in the
    checkpoint's dtype.
    """

    spec: ModelSpec
    label: str | None
    uptrained: bool
    kv_heads: int | list[int]
    score: Score
    bits_per_byte: float
    bos: bool
    cache: CacheReport
    cache_curve: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Report:
    """`same_tokens`: all models read the data as the same tokens, so that their perplexities compare."""

    models: tuple[ModelResult, ...]
    data: TextData
    settings: Settings
    same_tokens: bool


@dataclass(frozen=True)
class _Candidate:
    """A checkpoint that passed its checks; no weights in memory."""

    spec: ModelSpec
    source: Source
    layers: tuple[Layer, ...]
    limit: int | None
    vocabulary: int
    checkpoint_dtype: torch.dtype
    tokenizer: Any
    label: str | None
    uptrained: bool


def evaluate(
    models: Sequence[ModelSpec],
    data: TextData,
    *,
    window: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
    dtype: str | None = None,
    device: str | None = None,
    progress: Callable[[ModelSpec, int, int], None] | None = None,
) -> Report:
    """Score the models on the data with the same windows, one model in memory at a time.

    Each text has its own windows and, where the tokenizer has one, its own BOS. `window` defaults to the
    smallest of the models' positions and DEFAULT_WINDOW, `stride` to the window, `device` to a GPU where
    there is one, `dtype` to float32 on a CPU and the checkpoint's on a GPU. `progress` is called with the
    model and its tokens scored and to score. Everything is checked before the first weights are read. Raises
    RequestError for what is impossible.
    """
    device = _device(device)
    dtype = _dtype_choice(dtype, device)
    if batch_size < 1:
        raise RequestError(f"batch size {batch_size}: one window at least is scored at a time")
    candidates = [_open(spec) for spec in models]
    window = _window(candidates, window)
    settings = Settings(window, window if stride is None else stride, batch_size, dtype, device)
    sliding_windows(0, settings.window, settings.stride)  # refuses a wrong stride before anything is tokenized
    readings = [_tokenize(candidate, data.texts) for candidate in candidates]
    for sequences in readings:
        if max(map(len, sequences)) < 2:
            raise RequestError(f"{data.name}: nothing to score: no text is longer than one token, BOS included")
    results = [
        _measure(candidate, sequences, data, settings, progress)
        for candidate, sequences in zip(candidates, readings, strict=True)
    ]
    return Report(tuple(results), data, settings, all(one == readings[0] for one in readings))


def _device(name: str | None) -> str:
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise RequestError(f"device {name!r} cannot be used: {first_line(error)}") from error
    return name


def _dtype_choice(name: str | None, device: str) -> str:
    # bf16 products on a CPU without bf16 units run some 80 times slower than float32 ones.
    name = name or ("float32" if torch.device(device).type == "cpu" else AUTO)
    if name not in (AUTO, *DTYPES):
        raise RequestError(f"dtype {name!r}: choose from {', '.join((AUTO, *DTYPES))}")
    return name


def _open(spec: ModelSpec) -> _Candidate:
    source = checkpoint.open_source(spec.path, spec.revision)
    try:
        config = AutoConfig.from_pretrained(source.directory, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise RequestError(f"{spec.path}: its config cannot be read: {first_line(error)}") from error
    text_config = config.get_text_config()
    label, uptrained = _provenance(source)
    return _Candidate(
        spec=spec,
        source=source,
        layers=geometry.layers(source.config),
        limit=next((getattr(text_config, name) for name in _POSITIONS if hasattr(text_config, name)), None),
        vocabulary=text_config.vocab_size,
        checkpoint_dtype=_checkpoint_dtype(config, source),
        tokenizer=_tokenizer(spec, source),
        label=label,
        uptrained=uptrained,
    )


def _tokenizer(spec: ModelSpec, source: Source) -> Any:
    # Without its files some tokenizer classes come up with an empty vocabulary instead of failing.
    if not any(any(source.directory.glob(pattern)) for pattern in _TOKENIZER_FILES):
        raise RequestError(f"{spec.path}: no tokenizer there (looked for {', '.join(_TOKENIZER_FILES)})")
    try:
        return AutoTokenizer.from_pretrained(source.directory, trust_remote_code=False)
    except Exception as error:  # tokenizers fail in classes of their own, some of them bare Exception
        raise RequestError(f"{spec.path}: its tokenizer cannot be read: {first_line(error)}") from error


def _tokenize(candidate: _Candidate, texts: Sequence[str]) -> list[list[int]]:
    """Tokens of each text, after BOS where the tokenizer has one; never what its template would add by
    itself.
    """
    tokenizer = candidate.tokenizer
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    sequences = [bos + tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts]
    largest = max((max(tokens) for tokens in sequences if tokens), default=0)
    if largest >= candidate.vocabulary:
        raise RequestError(
            f"{candidate.spec.path}: its tokenizer gives token {largest}, but its model's vocabulary ends at "
            f"{candidate.vocabulary - 1}: they do not belong together"
        )
    return sequences


def _provenance(source: Source) -> tuple[str | None, bool]:
    """What headpool.json says was done, in words, and whether uptraining was part of it."""
    path = source.directory / checkpoint.PROVENANCE
    if not path.is_file():
        return None, False
    done = headers.read_json_object(path.read_bytes(), checkpoint.PROVENANCE)
    uptrained = "uptrain" in done
    return "converted and uptrained" if uptrained else "converted, not yet uptrained", uptrained


def _checkpoint_dtype(config: Any, source: Source) -> torch.dtype:
    """The dtype that `from_pretrained(dtype="auto")` uses: the config's, else that of the first floating
    tensor.
    """
    if isinstance(config.dtype, torch.dtype):
        return config.dtype
    names = {headers.TORCH_DTYPES[name]: dtype for name, dtype in DTYPES.items()}
    found = (names[record.dtype] for record in source.tensors.values() if record.dtype in names)
    return next(found, torch.float32)


def _window(candidates: Sequence[_Candidate], window: int | None) -> int:
    """The window, checked against every model's positions. At stride = window too a model is fed no more
    than `window` tokens: such a window has one more, but its last is only a target.
    """
    limits = {one.spec.path: one.limit for one in candidates if one.limit is not None}
    if window is None:
        return min([*limits.values(), DEFAULT_WINDOW])
    for path, limit in limits.items():
        if window > limit:
            raise RequestError(f"window {window} is larger than the {limit} positions of {path}")
    return window


def _measure(
    candidate: _Candidate,
    sequences: Sequence[Sequence[int]],
    data: TextData,
    settings: Settings,
    progress: Callable[[ModelSpec, int, int], None] | None,
) -> ModelResult:
    model = _load(candidate, settings)
    scored = score(
        model,
        sequences,
        [sliding_windows(len(tokens), settings.window, settings.stride) for tokens in sequences],
        settings.batch_size,
        None if progress is None else lambda done, total: progress(candidate.spec, done, total),
    )
    prefill = max(sequences, key=len)[: max(settings.window, 2)]
    cache = cache_report(model, candidate.layers, prefill, candidate.checkpoint_dtype)
    del model
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    kv_heads = [layer.kv_heads for layer in candidate.layers if layer.kind != "none"]
    return ModelResult(
        spec=candidate.spec,
        label=candidate.label,
        uptrained=candidate.uptrained,
        kv_heads=kv_heads[0] if len(set(kv_heads)) == 1 else kv_heads,
        score=scored,
        bits_per_byte=scored.nats / math.log(2) / data.bytes,
        bos=candidate.tokenizer.bos_token_id is not None,
        cache=cache,
        cache_curve=geometry.cache_curve(
            candidate.layers, itemsize=candidate.checkpoint_dtype.itemsize, positions=candidate.limit
        ),
    )


def _load(candidate: _Candidate, settings: Settings) -> Any:
    """The model in its stock class. A tensor that is missing or of another shape would be filled at
    random: refused.
    """
    transformers.utils.logging.disable_progress_bar()  # `progress` is what is shown
    path = candidate.spec.path
    dtype = candidate.checkpoint_dtype if settings.dtype == AUTO else DTYPES[settings.dtype]
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            candidate.source.directory,
            dtype=dtype,
            device_map=settings.device,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError) as error:
        raise RequestError(f"{path} cannot be loaded: {first_line(error)}") from error
    wrong = sorted(info["missing_keys"]) + sorted(str(key[0]) for key in info["mismatched_keys"])
    if wrong:
        raise RequestError(
            f"{path}: {len(wrong)} tensors are missing or of another shape than its config says ({wrong[0]})"
        )
    return model
