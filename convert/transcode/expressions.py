"""What a tensor of a host class is made of: small expressions over the source's tensors. Data, and no torch.

Shapes are written in letters: D hidden, F the MLP's width, V the vocabulary, P positions; 3D is three times D.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

Shape = tuple[str, ...]

Arrangement = Literal["heads", "thirds", "four"]
"""How a source's fused projection is laid out: query, key and value head by head; all queries, all keys, all values; or
four times a quarter of the queries, of the values, of the keys (CodeGen).
"""


@dataclass(frozen=True)
class Held:
    """A tensor of the source; {} in its name is the layer's number. Where the config's field `switch` is false the
    source has none, and all its values are `otherwise`.
    """

    name: str
    shape: Shape
    switch: str | None = None
    otherwise: float = 0.0


@dataclass(frozen=True)
class Filled:
    """A tensor of one value."""

    value: float
    shape: Shape


@dataclass(frozen=True)
class Part:
    """The rows of the queries, keys or values in a fused projection, head by head."""

    of: "Expression"
    part: Literal["q", "k", "v"]
    arrangement: Arrangement


@dataclass(frozen=True)
class HalfSplit:
    """Rows of heads whose n rotary dimensions pair as (2f, 2f + 1), in an order in which they do as (f, f + n/2)."""

    of: "Expression"


@dataclass(frozen=True)
class Transposed:
    of: "Expression"


@dataclass(frozen=True)
class ByHead:
    """One fused projection: query, key and value of the first head, of the second, and so on."""

    q: "Expression"
    k: "Expression"
    v: "Expression"


@dataclass(frozen=True)
class Beyond:
    """All rows but the first `rows`."""

    of: "Expression"
    rows: int


@dataclass(frozen=True)
class LessOne:
    """Every value less one, in float64."""

    of: "Expression"


@dataclass(frozen=True)
class ByDepth:
    """Divided by the layer's number, counted from one, where the config's field `switch` is true; in float64."""

    of: "Expression"
    switch: str


@dataclass(frozen=True)
class Folded:
    """A weight with the gain of the norm before it folded in, W diag(gain), in float64."""

    weight: "Expression"
    gain: "Expression"


@dataclass(frozen=True)
class FoldedBias:
    """A bias with the shift of the norm before it folded in, b + W shift, in float64."""

    bias: "Expression"
    weight: "Expression"
    shift: "Expression"


Expression = Held | Filled | Part | HalfSplit | Transposed | ByHead | Beyond | LessOne | ByDepth | Folded | FoldedBias


def parts(expression: Expression) -> Iterator[Any]:
    """An expression and all expressions in it."""
    yield expression
    for one in fields(expression):
        inner = getattr(expression, one.name)
        if isinstance(inner, Expression):
            yield from parts(inner)


@dataclass(frozen=True)
class Row:
    """A tensor of the host class, {} in its name for the layer's number, and what it is made of. Where the config's
    field `unless` is true there is none.
    """

    target: str
    shape: Shape
    value: Expression
    unless: str | None = None
