"""Calibration holds one decoder layer, by the operating system's accounting in fresh processes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny

WIDTH = {
    "hidden_size": 512, "intermediate_size": 2048, "head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 8,
    "vocab_size": 1000,
}  # fmt: skip
"""17 MB a layer in float32: twelve of them would add a third to what a process takes."""


def measured(directory: Path, layers: int) -> dict[str, Any]:
    tiny.checkpoint(directory, num_hidden_layers=layers, **WIDTH)
    script = tiny.ROOT / "benchmarks" / "calibrate.py"
    command = [sys.executable, str(script), "--memory-of", str(directory), "--tokens", "256", "--window", "64"]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak from /proc")
def test_peak_memory_does_not_grow_with_the_layers_and_was_foretold(tmp_path: Path) -> None:
    few, many = (measured(tmp_path / str(layers), layers) for layers in (4, 16))
    assert few["peak"] < many["memory_bytes"] < 2 * few["peak"]
    assert many["peak"] < many["memory_bytes"] == few["memory_bytes"]
    assert many["peak"] < 1.1 * few["peak"]
    assert many["disk"]["results"] == 4 * few["disk"]["results"]
