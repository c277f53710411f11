"""report.json as it is read back: what it must hold and what it may. headpool.eval.report says what it means."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headpool.drawing import printable
from headpool.errors import RequestError, first_line

FILE = "report.json"

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Spread = Annotated[list[float], Field(min_length=2, max_length=2)]


class _Part(BaseModel):
    """Fields may be added to a report, so that unknown ones are passed over; types are never guessed at."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)


class CacheBytes(_Part):
    formula: Count
    allocated: float
    tokens: Count
    checkpoint_dtype: str
    formula_in_checkpoint_dtype: Count


class CurvePoint(_Part):
    tokens: Annotated[int, Field(ge=1)]
    bytes: Count


class Comparison(_Part):
    perplexity_ratio: Positive | None = None
    bits_per_byte_ratio: Positive | None = None
    cache_ratio: float | None = None
    decode_speedup: Positive | None = None


class Kernel(_Part):
    name: str
    grouped: bool | None = None
    explanation: str | None = None


class Decode(_Part):
    context: Annotated[int, Field(ge=1)]
    batch: Annotated[int, Field(ge=1)]
    prefill_seconds: float
    seconds_per_token: Positive
    prefill_spread: Spread | None = None
    seconds_per_token_spread: Spread | None = None
    steps: int | None = None
    repeats: int | None = None
    bytes_per_token: float | None = None
    bandwidth: float | None = None
    kernel: Kernel | None = None
    preallocated: bool | None = None
    speedup: Positive | None = None


class Bucket(_Part):
    first: Count
    last: Count
    tokens: Count
    perplexity: Positive


class Task(_Part):
    task: str
    metric: str
    value: float
    stderr: float | None = None
    samples: int | None = None


class Sample(_Part):
    prompt: str
    text: str


class LayerLoss(_Part):
    layer: Count
    lost_energy: dict[str, float] | None = None
    block_error: dict[str, float] | None = None


class Conversion(_Part):
    method: str
    layers: list[LayerLoss] = []


class Model(_Part):
    role: str
    path: str
    kv_heads: int | list[int]
    perplexity: Positive
    nats: float
    tokens: Count
    bits_per_byte: Positive
    dtype: str
    cache_bytes_per_token: CacheBytes
    revision: str | None = None
    label: str | None = None
    uptrained: bool = False
    bos: bool | None = None
    cache_curve: list[CurvePoint] = []
    comparison: Comparison | None = None
    decode: list[Decode] = []
    positions: list[Bucket] = []
    tasks: list[Task] = []
    samples: list[Sample] = []
    conversion: Conversion | None = None
    checkpoint_sha256: str | None = None


class Data(_Part):
    name: str
    sha256: str
    texts: Count
    bytes: Count


class Metric(_Part):
    step: Count
    tokens: Count
    loss: float | None = None
    learning_rate: float | None = None
    validation_perplexity: Positive | None = None


class Training(_Part):
    metrics: list[Metric] = []
    original_perplexity: Positive | None = None
    tokens: int | None = None
    steps: int | None = None


class ReportFile(_Part):
    models: Annotated[list[Model], Field(min_length=1)]
    data: Data
    settings: dict[str, Any]
    comparison: Comparison | None = None
    notes: list[str] = []
    versions: dict[str, str] = {}
    recipe: str | None = None
    training: Training | None = None


def load(directory: Path) -> ReportFile:
    """The report in a directory, with nothing in its texts that no page could show.

    Raises RequestError where there is none, and for what is no report: the first field that is missing or wrong.
    """
    path = directory / FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return ReportFile.model_validate(_printable(values))
    except FileNotFoundError:
        raise RequestError(f"no {FILE} in {directory}: headpool eval writes one") from None
    except OSError as error:
        raise RequestError(f"{path} cannot be read ({error.strerror})") from error
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(map(str, fault["loc"])) or "the whole"
        raise RequestError(f"{path} is no report of headpool eval: {where}: {fault['msg']}") from error
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} is not JSON in UTF-8: {first_line(error)}") from error


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {printable(key): _printable(one) for key, one in value.items()}
    return [_printable(one) for one in value] if isinstance(value, list) else value
