"""Where a layer's attention weights lie in a checkpoint: the seam between layouts and methods.

A layout gives and takes one `AttentionWeights` per layer; every method is written against that alone. Shape suffixes:
h query heads, k key/value heads, d head_dim, D hidden.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from headpool import families
from headpool.errors import RequestError
from headpool.families import AttentionTensor, Family
from headpool.geometry import Layer
from headpool.headers import FLOATS, TensorRecord

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
    query_norm and key_norm [d]: gains of the norms between the projections and the scores, as stored; centred_norms:
    those norms subtract the mean, too (layer norms). per_query_head: whatever else belongs to a query head, its first
    dimension h or a multiple of it, head by head (sinks, gates).
    """

    q: "Tensor | None" = None
    k: "Tensor | None" = None
    v: "Tensor | None" = None
    o: "Tensor | None" = None
    bias_q: "Tensor | None" = None
    bias_k: "Tensor | None" = None
    bias_v: "Tensor | None" = None
    bias_o: "Tensor | None" = None
    rotary: Rotary | None = None
    query_norm: "Tensor | None" = None
    key_norm: "Tensor | None" = None
    centred_norms: bool = False
    per_query_head: "Mapping[str, Tensor]" = field(default_factory=dict)


@dataclass(frozen=True)
class Separate:
    """Projections of their own: `{stem}{layer}.{attention}.{projections[part]}.weight`, rows grouped by head.

    On disk q, k, v are [heads*d, D], o is [D, heads*d]; biases [heads*d] and [D].
    """

    stem: str
    attention: str
    projections: Mapping[Part, str]
    layers: tuple[Layer, ...]
    rotary: Rotary | None
    per_query_head: tuple[str, ...] = ()
    norms: tuple[str, str] = ("q_norm", "k_norm")

    def tensor(self, layer: int, suffix: str) -> str:
        return f"{self.stem}{layer}.{self.attention}.{suffix}"

    def names(self, layer: int, part: Part) -> tuple[str, str]:
        """The names of a part's weight and bias."""
        projection = self.projections[part]
        return self.tensor(layer, f"{projection}.weight"), self.tensor(layer, f"{projection}.bias")

    def changed(self, layer: int, parts: Collection[Part]) -> list[str]:
        """The names of all that changes with these parts, whether the model has it or not. With the query heads moves
        what belongs to them.
        """
        names = [name for part in parts for name in self.names(layer, part)]
        return names + [self.tensor(layer, suffix) for suffix in self.per_query_head if "q" in parts]

    def read(self, tensors: "Mapping[str, Tensor]", layer: int, parts: Collection[Part] = PARTS) -> AttentionWeights:
        """The asked-for parts of one layer, split by head, as views; `tensors` is asked for nothing else."""
        d = self.layers[layer].head_dim
        values: dict[str, Any] = {}
        for part in parts:
            weight, bias = self.names(layer, part)
            w = tensors[weight]
            values[part] = w.view(len(w), -1, d).transpose(0, 1) if part == "o" else w.view(-1, d, w.shape[1])
            if bias in tensors:
                values[f"bias_{part}"] = tensors[bias] if part == "o" else tensors[bias].view(-1, d)
        if "q" not in parts:
            return AttentionWeights(rotary=self.rotary, **values)
        query_norm, key_norm = (self.tensor(layer, f"{norm}.weight") for norm in self.norms)
        heads = {s: tensors[self.tensor(layer, s)] for s in self.per_query_head if self.tensor(layer, s) in tensors}
        return replace(
            AttentionWeights(rotary=self.rotary, **values),
            query_norm=tensors.get(query_norm),
            key_norm=tensors.get(key_norm),
            centred_norms=self.tensor(layer, f"{self.norms[1]}.bias") in tensors,
            per_query_head=heads,
        )

    def write(self, weights: AttentionWeights, layer: int) -> "dict[str, Tensor]":
        """The tensors of the parts that `weights` holds, in the shapes that they have on disk: read's inverse."""
        tensors: dict[str, Tensor] = {}
        for part in PARTS:
            w, b = getattr(weights, part), getattr(weights, f"bias_{part}")
            weight, bias = self.names(layer, part)
            if w is not None:
                tensors[weight] = w.transpose(0, 1).flatten(1) if part == "o" else w.flatten(0, 1)
            if b is not None:
                tensors[bias] = b.flatten()
        for norm, gain in zip(self.norms, (weights.query_norm, weights.key_norm), strict=True):
            if gain is not None:
                tensors[self.tensor(layer, f"{norm}.weight")] = gain
        tensors |= {self.tensor(layer, suffix): tensor for suffix, tensor in weights.per_query_head.items()}
        return tensors


def find_layout(
    tensors: Mapping[str, TensorRecord], config: Mapping[str, Any], family: Family, layers: tuple[Layer, ...]
) -> Separate:
    """The layout of a checkpoint, once its headers agree with its config.

    Raises RequestError naming the tensor, the shape found and the shape expected where they contradict each other: a
    projection missing or of another shape, a layer too many, an attention tensor that this family is not known to have,
    a projection that is no floating-point tensor.
    """
    found = {name: held for name in tensors if (held := families.attention_tensor(family, name))}
    stems = {held.stem for held in found.values()}
    if len(stems) != 1:
        where = f"under {' and '.join(sorted(stems))}" if stems else f"named {family.attention.format('N')}.*"
        raise RequestError(f"the weights hold {'several sets of' if stems else 'no'} attention tensors {where}")
    for name, held in found.items():
        _check_known(name, held, family, len(layers))
    dims = families.rotary_dims(config, family, layers[0].head_dim)
    projections: dict[Part, str] = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": family.output}
    layout = Separate(
        stem=stems.pop(),
        attention=family.attention.rpartition("{}.")[2],
        projections=projections,
        layers=layers,
        rotary=Rotary(family.rotary, dims) if family.rotary else None,
        per_query_head=tuple(
            suffix
            for suffix, follows in family.attention_tensors.items()
            if follows == "heads" and suffix.split(".")[0] not in projections.values()
        ),
        norms=_norms(family),
    )
    hidden = families.get(config, family, "hidden_size")
    for index, layer in enumerate(layers):
        _check_shapes(tensors, layout, index, layer, hidden)
    return layout


def _norms(family: Family) -> tuple[str, str]:
    """The names of the family's query and key norm in its attention module; names that no tensor has where it has
    none.
    """
    found = {suffix.rpartition(".")[0] for suffix in family.attention_tensors if "norm" in suffix}
    query, key = (sorted(name for name in found if name.startswith(letter)) for letter in ("q", "k"))
    return (query or ["q_norm"])[0], (key or ["k_norm"])[0]


_BUFFERS = re.compile(r"rotary_emb\.inv_freq|(masked_)?bias")
"""Buffers that old checkpoints carry in their attention modules and no class reads."""


def _check_known(name: str, held: AttentionTensor, family: Family, layers: int) -> None:
    if held.layer >= layers:
        raise RequestError(f"tensor {name!r} belongs to layer {held.layer}, the config has {layers} layers")
    if held.suffix not in family.attention_tensors and not _BUFFERS.fullmatch(held.suffix):
        raise RequestError(f"tensor {name!r} is not known in the attention of {family.model_type}")


def _check_shapes(tensors: Mapping[str, TensorRecord], layout: Separate, index: int, layer: Layer, hidden: int) -> None:
    q_rows, kv_rows = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    rows: dict[Part, int] = {"q": q_rows, "k": kv_rows, "v": kv_rows, "o": hidden}
    for part in PARTS:
        weight, bias = layout.names(index, part)
        if weight not in tensors and (part in ("q", "o") or layer.shares is None):
            raise RequestError(f"tensor {weight!r} is missing from the weights")
        columns = q_rows if part == "o" else hidden
        for name, expected in ((weight, (rows[part], columns)), (bias, (rows[part],))):
            record = tensors.get(name)
            if record is not None and record.shape != expected:
                raise RequestError(
                    f"weights and config contradict each other: tensor {name!r} is {list(record.shape)}, "
                    f"the config makes it {list(expected)}"
                )
            if record is not None and record.dtype not in FLOATS:
                raise RequestError(f"tensor {name!r} is {record.dtype}: a quantized projection cannot be pooled")
