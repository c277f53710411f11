"""Where a layer's attention weights lie in a checkpoint: the seam between layouts and methods."""

from headpool.convert.layouts.base import Layout
from headpool.convert.layouts.find import find_layout
from headpool.convert.layouts.fused import Fused
from headpool.convert.layouts.separate import Separate
from headpool.convert.layouts.weights import PARTS, AttentionWeights, Part, Rotary

__all__ = ["PARTS", "AttentionWeights", "Fused", "Layout", "Part", "Rotary", "Separate", "find_layout"]
