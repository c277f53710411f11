"""Change values in a JSON text and leave every other byte of it alone."""

import json
import re
from collections.abc import Mapping
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

_SPACE = re.compile(r"[ \t\n\r]*")


def patch_json(text: str, changes: Mapping[str, Any]) -> str:
    """`text`, a JSON object, with its top-level `changes` applied: a key that is there gets the new value in place, one
    that is not becomes the object's first. A mapping changes within the object that is there.

    Everything else (order, indentation, the spelling of numbers, unknown keys) survives verbatim. Raises ValueError
    when `text` is no JSON object.
    """
    spans = _value_spans(text)
    for key in sorted(changes.keys() & spans.keys(), key=lambda key: -spans[key][0]):
        begin, end = spans[key]
        change, held = changes[key], text[begin:end]
        nested = isinstance(change, Mapping) and held.startswith("{")
        text = text[:begin] + (patch_json(held, change) if nested else json.dumps(change)) + text[end:]
    new = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in changes.items() if key not in spans]
    if new:
        brace = text.index("{") + 1
        gap = text[brace : _space_after(text, brace)]
        text = text[:brace] + ",".join(gap + one for one in new) + ("," if spans else "") + text[brace:]
    return text


def _value_spans(text: str) -> dict[str, tuple[int, int]]:
    """Where each top-level value of a JSON object begins and ends in `text`."""
    decoder = json.JSONDecoder()
    position = _space_after(text, 0)
    if text[position : position + 1] != "{":
        raise ValueError("a JSON object was expected")
    position = _space_after(text, position + 1)
    spans: dict[str, tuple[int, int]] = {}
    while text[position : position + 1] == '"':
        key, position = scanstring(text, position + 1, True)
        position = _space_after(text, position)
        if text[position : position + 1] != ":":
            raise ValueError(f"a colon was expected after {key!r}")
        begin = _space_after(text, position + 1)
        _, end = decoder.raw_decode(text, begin)
        spans[key] = (begin, end)
        position = _space_after(text, end)
        if text[position : position + 1] == ",":
            position = _space_after(text, position + 1)
    return spans


def _space_after(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position
