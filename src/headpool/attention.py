"""What a config says that attention does with its heads besides projecting them: rotation, norms without gains, clips.

Nothing here imports torch or transformers.
"""

from collections.abc import Mapping
from typing import Any

from headpool import families
from headpool.composite import text_config
from headpool.family import Family


def rotary_dims(config: Mapping[str, Any], family: Family, head_dim: int) -> int:
    """How many of a head's dimensions rotate, in layers that rotate at all; none with ALiBi."""
    config = text_config(config)
    if config.get("alibi"):
        return 0
    held = [config.get(key) for key in ("rope_parameters", "rope_scaling")]
    factors = [one["partial_rotary_factor"] for one in held if one and "partial_rotary_factor" in one]
    factor = factors[0] if factors else families.get(config, family, "partial_rotary_factor")
    return int(head_dim * (1.0 if factor is None else factor))


def bare_norms(config: Mapping[str, Any], family: Family, layers: int) -> list[int]:
    """The layers whose queries and keys pass norms that have no gains, and so no tensors."""
    if family.bare_norms is None:
        return []
    held = [text_config(config).get(field, True) for field in family.bare_norms]
    by_layer = [one if isinstance(one, list) else [one] * layers for one in held]
    return [index for index in range(layers) if all(one[index] for one in by_layer)]


def clipped(config: Mapping[str, Any]) -> bool:
    """Whether queries, keys and values are cut off at a size."""
    text = text_config(config)
    nested = text.get("attn_config")
    return (nested if isinstance(nested, Mapping) else text).get("clip_qkv") is not None
