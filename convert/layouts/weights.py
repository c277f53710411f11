"""One layer's attention by head, whatever it looks like in a file: what layouts give and take, and methods work on.

Shape suffixes: h query heads, k key/value heads, d head_dim, D hidden.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # planning needs no torch, and answers at once without it
    from torch import Tensor

Part = Literal["q", "k", "v", "o"]
PARTS: tuple[Part, ...] = ("q", "k", "v", "o")


@dataclass(frozen=True)
class Rotary:
    """Which dimensions of a head rotate, and how they pair: (f, f + dims/2) or (2f, 2f + 1)."""

    kind: Literal["half-split", "interleaved"]
    dims: int


@dataclass(frozen=True)
class AttentionWeights:
    """One layer's attention by head. A part that was not asked for, or that the model lacks, is None.

    q [h, d, D], k [k, d, D], v [k, d, D], o [h, D, d]; bias_q [h, d], bias_k [k, d], bias_v [k, d], bias_o [D];
    gate [h, d, D], bias_gate [h, d]: what scales the dimensions of each query head's output, as a projection.
    query_norm and key_norm [d]: gains of the norms between the projections and the scores, as stored; query_gains
    [h, d] and key_gains [k, d]: likewise, where every head has its own. bare_norms: there are norms without gains.
    centred_norms: those norms subtract the mean, too (layer norms). whole_norms: they span all heads, not each by
    itself. normed_values: each head's values pass a norm without gains. clipped: queries, keys and values are cut off
    at a size. per_query_head: whatever else belongs to a query head, its first dimension h or a multiple of it, head by
    head (sinks, gates).
    """

    q: "Tensor | None" = None
    k: "Tensor | None" = None
    v: "Tensor | None" = None
    o: "Tensor | None" = None
    bias_q: "Tensor | None" = None
    bias_k: "Tensor | None" = None
    bias_v: "Tensor | None" = None
    bias_o: "Tensor | None" = None
    gate: "Tensor | None" = None
    bias_gate: "Tensor | None" = None
    rotary: Rotary | None = None
    query_norm: "Tensor | None" = None
    key_norm: "Tensor | None" = None
    query_gains: "Tensor | None" = None
    key_gains: "Tensor | None" = None
    bare_norms: bool = False
    centred_norms: bool = False
    whole_norms: bool = False
    normed_values: bool = False
    clipped: bool = False
    per_query_head: "Mapping[str, Tensor]" = field(default_factory=dict)
