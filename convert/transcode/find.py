"""The transcoding for a config. Light: nothing here imports torch."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headpool import families
from headpool.convert.transcode import gpt2, gptj, neox
from headpool.convert.transcode.table import Transcoding
from headpool.errors import RequestError
from headpool.family_data import told

_OWN = (*neox.TRANSCODINGS, *gptj.TRANSCODINGS, *gpt2.TRANSCODINGS)

TRANSCODINGS = (
    *_OWN,
    *(replace(one, source=name) for name, held in told().items() for one in _OWN if one.source == held.get("like")),
)
"""Of every source, and of the model types whose data say that they are like one."""

SOURCES = frozenset(one.source for one in TRANSCODINGS)
"""The model types that it takes a transcoding to convert."""


def find(config: Mapping[str, Any]) -> Transcoding | str:
    """How a model is written as one of a class that can hold fewer K/V heads, or the reason for which it is not."""
    candidates = [one for one in TRANSCODINGS if one.source == config.get("model_type")]
    if not candidates:
        return "no stock class is known that computes the same function and can hold fewer K/V heads"
    if (quantized := families.quantization(config)) is not None:
        return quantized
    chosen = next(one for one in candidates if one.applies(one.getter(config)))
    reason = chosen.refusal(config)
    return chosen if reason is None else reason


def transcoding_of(config: Mapping[str, Any], *, wanted: bool) -> Transcoding | None:
    """The transcoding without which a model cannot be converted; None where its own class can hold fewer K/V heads.

    Raises RequestError where it is not `wanted` or there is none.
    """
    model_type = config.get("model_type")
    if model_type not in SOURCES:
        return None  # whether it converts is for families to say
    found = find(config)
    alone = f"model_type {model_type!r}: its class cannot hold fewer K/V heads"
    if isinstance(found, str):
        raise RequestError(f"{alone}, and it cannot be written as another: {found}")
    if not wanted:
        raise RequestError(
            f"{alone}; {found.host_class}, which computes the same function, can: --transcode (convert.transcode in a "
            f"recipe) writes the model as one first"
        )
    return found
