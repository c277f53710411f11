"""The checkpoints that are measured: opened and checked without reading weights, tokenized for, loaded."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from headpool import checkpoint, geometry, headers
from headpool.checkpoint import Source
from headpool.drawing import UNADAPTED
from headpool.errors import RequestError
from headpool.eval.cache import dtype_name
from headpool.geometry import Layer
from headpool.loading import load_model, load_tokenizer, position_limit, read_config

DTYPES = {dtype_name(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)}

AUTO = "auto"
"""The checkpoint's own dtype."""

UPTRAINED = "converted and uptrained"

Role = Literal["baseline", "model"]


@dataclass(frozen=True)
class ModelSpec:
    """A checkpoint to measure: directory or hub id, as the user typed it."""

    role: Role
    path: str
    revision: str | None = None


@dataclass(frozen=True)
class Provenance:
    """What headpool.json says of a checkpoint. `conversion` is its method and layers, None where headpool did not make
    the checkpoint.
    """

    label: str | None = None
    uptrained: bool = False
    conversion: dict[str, Any] | None = None


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that passed its checks; no weights in memory. `limit` is the number of positions, None without."""

    spec: ModelSpec
    source: Source
    layers: tuple[Layer, ...]
    limit: int | None
    vocabulary: int
    checkpoint_dtype: torch.dtype
    tokenizer: Any
    provenance: Provenance

    @property
    def kv_heads(self) -> int | list[int]:
        """K/V heads: a number, or a list where layers differ. Layers without a cache do not count."""
        counts = [layer.kv_heads for layer in self.layers if layer.kind != "none"]
        return counts[0] if len(set(counts)) == 1 else counts

    @property
    def cache_curve(self) -> tuple[tuple[int, int], ...]:
        """`geometry.cache_curve` in the checkpoint's dtype."""
        return geometry.cache_curve(self.layers, itemsize=self.checkpoint_dtype.itemsize, positions=self.limit)

    def tokenize(self, text: str) -> list[int]:
        """Tokens of a text after BOS where the tokenizer has one; never what its template would add by itself.

        Raises RequestError for a token that the model does not know.
        """
        bos = [] if self.tokenizer.bos_token_id is None else [self.tokenizer.bos_token_id]
        tokens: list[int] = bos + self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if max(tokens, default=0) >= self.vocabulary:
            raise RequestError(
                f"{self.spec.path}: its tokenizer gives token {max(tokens)}, but its model's vocabulary ends at "
                f"{self.vocabulary - 1}: they do not belong together"
            )
        return tokens


def open_candidate(spec: ModelSpec) -> Candidate:
    """Open a checkpoint with its config and tokenizer. Raises RequestError for what cannot be read."""
    source = checkpoint.open_source(spec.path, spec.revision)
    config = read_config(source)
    text_config = config.get_text_config()
    return Candidate(
        spec=spec,
        source=source,
        layers=geometry.layers(source.config),
        limit=position_limit(text_config),
        vocabulary=text_config.vocab_size,
        checkpoint_dtype=_checkpoint_dtype(config, source),
        tokenizer=load_tokenizer(source),
        provenance=_provenance(source),
    )


@contextmanager
def loaded(candidates: Sequence[Candidate], dtype: str, device: str) -> Iterator[list[Any]]:
    """The models of some candidates, in memory together while the context lasts and no longer."""
    models = [
        load_model(one.source, one.checkpoint_dtype if dtype == AUTO else DTYPES[dtype], device) for one in candidates
    ]
    try:
        yield models
    finally:
        models.clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _provenance(source: Source) -> Provenance:
    done = source.provenance
    if done is None:
        return Provenance()
    uptrained = "uptrain" in done
    if "method" not in done:
        return Provenance("uptrained", uptrained, None)
    conversion = {"method": done["method"], "layers": done.get("layers", [])}
    return Provenance(UPTRAINED if uptrained else UNADAPTED, uptrained, conversion)


def _checkpoint_dtype(config: Any, source: Source) -> torch.dtype:
    """The dtype that `from_pretrained(dtype="auto")` uses: the config's, else that of the first floating
    tensor.
    """
    if isinstance(config.dtype, torch.dtype):
        return config.dtype
    names = {headers.TORCH_DTYPES[name]: dtype for name, dtype in DTYPES.items()}
    found = (names[record.dtype] for record in source.tensors.values() if record.dtype in names)
    return next(found, torch.float32)
