"""Small checkpoints of many kinds to walk through, and the windows to walk with."""

from pathlib import Path
from typing import Any

import torch

from headpool import checkpoint, families, geometry
from headpool.convert.aligned.stock import Stock
from headpool.convert.layouts import find_layout

KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "mistral": {},
    "gemma2": {"sliding_window": 8},
    "gemma3_text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "phi": {"partial_rotary_factor": 0.5},
    "glm": {"partial_rotary_factor": 0.5},
    "mixtral": {"num_local_experts": 4},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
}
"""Of three layers each: windows, soft-capping, key norms, partial rotation, parallel blocks, experts, layers without
rotation.
"""

WINDOWS = torch.randint(0, 300, (5, 24), generator=torch.Generator().manual_seed(0))


def stock(directory: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Stock:
    """The stock class of a checkpoint, on the CPU."""
    source = checkpoint.open_source(str(directory))
    family = families.family_of(source.config)
    layout = find_layout(source.tensors, source.config, family, geometry.layers(source.config))
    return Stock(source, layout, device="cpu", dtype=dtype, **changes)
