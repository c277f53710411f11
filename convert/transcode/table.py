"""Which classes can be written as another that holds fewer K/V heads and computes the same function, and how.

One `Transcoding` for each pair of classes: when it applies, what stands against it, the host's config field by field,
the host's tensors one by one. Nothing here imports torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headpool.convert.transcode.expressions import Row
from headpool.errors import RequestError

Get = Callable[[str], Any]
"""What a source's config holds for a field, or its class's default."""

Condition = tuple[Callable[[Get], bool], str]
"""What must hold, and the reason for a refusal where it does not."""


@dataclass(frozen=True)
class Transcoding:
    """From class `source` to class `host`, both by model_type.

    names: the source's own names for hidden_size, num_attention_heads, num_hidden_layers, vocab_size, the MLP's "width"
    and the learned "positions" if any (a function where one follows from others). config: the host's fields, each a
    field of the source or a function. prefix: what the names of the source's tensors begin with, which checkpoints of
    bare models lack; renamed: other names that its checkpoints use, by those in `rows`; buffers: a pattern of what old
    checkpoints carry and no class reads. rotary: the number of dimensions of a head that rotate.
    """

    source: str
    host: str
    host_class: str
    defaults: Mapping[str, Any]
    names: Mapping[str, str | Callable[[Get], int]]
    config: Mapping[str, str | Callable[[Get], Any]]
    rows: tuple[Row, ...]
    prefix: str
    buffers: str
    applies: Callable[[Get], bool] = lambda get: True
    conditions: tuple[Condition, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    rotary: Callable[[Get], int] = lambda get: 0

    def getter(self, config: Mapping[str, Any]) -> Get:
        return lambda name: config[name] if name in config else self.defaults.get(name)

    def number(self, name: str, get: Get) -> int:
        """hidden_size, num_attention_heads, num_hidden_layers, vocab_size, the MLP's width ("width") or the number of
        learned "positions". RequestError where the config's is no count.
        """
        own = self.names[name]
        count = get(own) if isinstance(own, str) else own(get)
        if type(count) is not int or count < 1:
            field = own if isinstance(own, str) else name
            raise RequestError(f"config.json: {field} must be a whole number of 1 or more, found {count!r}")
        return count

    def refusal(self, config: Mapping[str, Any]) -> str | None:
        """Why this config's model is not the same function in the host class; None where it is."""
        get = self.getter(config)
        for holds, reason in self.conditions:
            if not holds(get):
                return reason
        return None
