"""What a run reports of itself: a line of JSON for each step, and a figure of speed."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headpool.destination import reporting_os_errors

METRICS = "metrics.jsonl"
"""The name of their file."""

ORIGINAL = "original.json"
"""Beside it, the original's perplexity on the validation text."""

PEAK_FLOPS: Mapping[str, float] = {
    "H100 PCIe": 756e12, "H100 NVL": 835e12,
    "H200": 989e12, "H100": 989e12, "GH200": 989e12, "B200": 2250e12, "A100": 312e12, "A800": 312e12, "L40S": 362e12,
    "L4": 121e12, "A10": 125e12, "RTX 4090": 165e12, "RTX 3090": 71e12, "V100": 125e12, "T4": 65e12,
}  # fmt: skip
"""Dense bf16 (fp16 where there is none) operations per second with float32 sums, by words of the device's name, the
more telling ones first; from the makers' data sheets."""


class Metrics:
    """A file with one JSON object a line and each step once, whatever was interrupted on the way."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def resume(self, step: int) -> None:
        """Keep what was written up to a step; later steps are going to be made again."""
        kept = [line for line in self.read() if line["step"] <= step]
        _replace(self.path, "".join(json.dumps(line) + "\n" for line in kept))

    def append(self, values: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values, allow_nan=False) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """Every line up to the first that is not whole: a killed process's last."""
        if not self.path.is_file():
            return []
        lines = map(_object, self.path.read_text(encoding="utf-8").splitlines())
        return list(itertools.takewhile(lambda line: "step" in line, lines))


def read_record(work: Path) -> dict[str, Any] | None:
    """What a training left in its work directory, as a report has it; None where it left nothing.

    {metrics: one entry a step, original_perplexity or None, tokens, steps}
    """
    lines = Metrics(work / METRICS).read()
    if not lines:
        return None
    return {
        "metrics": lines,
        "original_perplexity": read_original(work).get("perplexity"),
        "tokens": lines[-1]["tokens"],
        "steps": lines[-1]["step"],
    }


def read_original(work: Path) -> dict[str, Any]:
    """{perplexity, of: what it was measured with}, or nothing where it was not measured."""
    note = work / ORIGINAL
    return _object(note.read_text(encoding="utf-8")) if note.is_file() else {}


def write_original(work: Path, perplexity: float, of: Any) -> None:
    """What `read_original` finds. Raises HeadpoolError where the disk is full."""
    _replace(work / ORIGINAL, json.dumps({"perplexity": perplexity, "of": of}) + "\n")


def _object(text: str) -> dict[str, Any]:
    """A JSON object, empty where the text is none."""
    try:
        held = json.loads(text)
    except ValueError:
        return {}
    return held if isinstance(held, dict) else {}


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    with reporting_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)


def peak_flops(device_name: str) -> float | None:
    """What a device can do at best, None where that is not known."""
    words = device_name.upper().replace("-", " ").split()
    for name, flops in PEAK_FLOPS.items():
        if set(name.upper().split()) <= set(words):
            return flops
    return None


def flops_per_token(parameters: int, layers: int, width: int, sequence_length: int) -> float:
    """Of forward and backward: 6 for each parameter that a token is multiplied with, and causal attention over half a
    sequence of tokens, `width` being heads times head_dim (Chowdhery et al. 2022, PaLM, appendix B).
    """
    return 6 * parameters + 6 * layers * width * sequence_length
