"""Small models of one transformers class, and what can be asked of them: shapes, caches, sliding layers."""

import inspect
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from headpool.families import FIELDS, KV_HEADS
from headpool.geometry import WINDOW_FIELDS

HEADS, KV, HEAD_DIM, LAYERS, TOKENS, WINDOW = 8, 2, 16, 4, 12, 8
BASE: dict[str, Any] = {
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, KV_HEADS: KV, "hidden_size": HEADS * HEAD_DIM,
    "vocab_size": 128, "max_position_embeddings": 64,
}  # fmt: skip
SMALLER: tuple[tuple[str, int, int], ...] = (
    ("token_id", -1, 1), ("intermediate|ffn", 64, 64), ("group", 1, 1), ("top_?k|per_tok|moe_k", 2, 2),
    ("expert", 4, 4), ("sliding_window", WINDOW, WINDOW), ("dim|size|rank", 64, 16),
)  # fmt: skip
"""A numeric field whose name matches and whose default exceeds the first number gets the second."""

ATTEMPTS: tuple[dict[str, Any], ...] = (
    {},
    {"head_dim": HEAD_DIM},
    {"num_kv_shared_layers": 0},
    {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    {"layer_types": ["full_attention"] * LAYERS},
    {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")
        }
    },
)
"""What a class may need beyond its defaults to be built, in the order tried."""

CACHE_KINDS = {"DynamicLayer": "full", "DynamicSlidingWindowLayer": "sliding", "DummyLayer": "none"}
"""transformers' cache layers that hold keys and values alone (or nothing), in geometry's words."""

LAYER_FIELDS = re.compile("layer|attn|attention|window|pattern|period|interval|idx|indices|global|chunk|share|block")
"""Names of fields that may say which layers slide."""

Shapes = dict[str, tuple[int, ...]]
Windows = list[tuple[str, int | None]]
"""Each layer's kind and window, in geometry's words."""


class NotMeasuredError(Exception):
    """Why a family is refused."""


class Probe:
    """Small models of one class."""

    def __init__(self, model_type: str, class_name: str) -> None:
        self.config_class = CONFIG_MAPPING[model_type]
        self.class_name = class_name
        signature = inspect.signature(self.config_class.__init__)
        self.parameters = {name: parameter.default for name, parameter in signature.parameters.items()}
        self.aliases = {field: name for field, name in self.config_class.attribute_map.items() if field in FIELDS}
        self.fields = BASE | self._small()
        self._shapes: dict[str, Shapes] = {}

    def _small(self) -> dict[str, Any]:
        small: dict[str, Any] = {"head_dim": HEAD_DIM} if "head_dim" in self.parameters else {}
        for name, default in self.parameters.items():
            if type(default) is int and name not in {*BASE, *small, *self.aliases.values()}:
                matching = (rule for rule in SMALLER if re.search(rule[0], name))
                _, most, instead = next(matching, ("", default, default))
                if default > most:
                    small[name] = instead
        return small

    def settle(self) -> None:
        """Find the first of ATTEMPTS with which the class builds; NotMeasuredError where none does."""
        first = None
        for attempt in ATTEMPTS:
            try:
                self.shapes(**attempt)
            except Exception as error:
                first = first or f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            else:
                self.fields |= attempt
                self._shapes.clear()
                return
        raise NotMeasuredError(f"no small model of its class could be built to measure ({first})")

    def has_field(self, field: str) -> bool:
        return self.aliases.get(field, field) in self.parameters

    def defaults(self) -> dict[str, Any]:
        """The class's defaults of FIELDS, where they are values."""
        found = {field: self.parameters.get(self.aliases.get(field, field)) for field in FIELDS}
        return {field: value for field, value in found.items() if isinstance(value, bool | int | float | list)}

    def partial_rotation(self) -> dict[str, Any]:
        """The default share of rotated dimensions, which classes compute into rope_parameters, where there is one."""
        rope = getattr(self.config(), "rope_parameters", None) or {}
        return {key: rope[key] for key in ("partial_rotary_factor",) if key in rope}

    def flags(self) -> list[str]:
        """Options, off by default, that switch on biases or norms and with them tensors of their own."""
        return [name for name, value in self.parameters.items() if value is False and re.search("bias|norm", name)]

    def config(self, **changes: Any) -> Any:
        return self.config_class(**self.fields | changes)

    @property
    def model_class(self) -> Any:
        return getattr(transformers, self.class_name)

    def model(self, device: str, **changes: Any) -> Any:
        with torch.device(device):
            return self.model_class(self.config(**changes)).eval()

    def shapes(self, **changes: Any) -> Shapes:
        """The shape of every tensor of a model with these changes."""
        key = json.dumps(changes, sort_keys=True)
        if key not in self._shapes:
            state = self.model("meta", **changes).state_dict()
            self._shapes[key] = {name: tuple(tensor.shape) for name, tensor in state.items()}
        return self._shapes[key]

    def window_configs(self, **fixed: Any) -> Iterator[dict[str, Any]]:
        """Configs without layer_types that differ in what the choice of sliding layers may depend on."""
        varied: dict[str, tuple[Any, ...]] = {
            "sliding_window": (None, 5), "use_sliding_window": (True, False), "max_window_layers": (0, 2, 99),
            "sliding_window_pattern": (2, 3), "attention_chunk_size": (None, 5),
        }  # fmt: skip
        choices = [
            [(), *((name, value) for value in values)]
            for name, values in varied.items()
            if (name in self.parameters or name.startswith("sliding")) and name not in fixed
        ]
        for layers, picked in itertools.product((1, 13), itertools.product(*choices)):
            named = dict(filter(None, picked))
            if len(named) <= 2:
                yield self.without_windows() | fixed | {"num_hidden_layers": layers} | named

    def without_windows(self) -> dict[str, Any]:
        omitted = ("layer_types", *WINDOW_FIELDS.values())
        return {name: value for name, value in self.fields.items() if name not in omitted}

    def windows(self, config: dict[str, Any]) -> Windows | None:
        """Each layer's kind and window by transformers' own cache; None where it makes nothing of the
        config.
        """
        try:
            layers = cache_layers(self.config_class(**config))
        except Exception:
            return None
        told = [
            (CACHE_KINDS.get(type(layer).__name__, "other"), getattr(layer, "sliding_window", None)) for layer in layers
        ]
        return None if ("sliding", None) in told else told

    def layer_fields(self, config: dict[str, Any]) -> dict[str, Any]:
        """Fields outside FIELDS, with their defaults, that change which layers of `config` slide or keep K/V.

        Tried are the names in the class's signature and those that its source takes from keyword arguments.
        """
        source = inspect.getsource(self.config_class)
        popped = re.findall(r"kwargs\.(?:pop|get)\(\s*[\"'](\w+)[\"']", source)
        names = {name for name in (*self.parameters, *popped) if LAYER_FIELDS.search(name)}
        values: list[Any] = [True, False, 1, 2, [0], [0] * LAYERS, [1] * LAYERS, ["attention"] * LAYERS]
        usual = self.windows(config)
        found = {}
        for name in sorted(names - set(FIELDS) - set(self.aliases.values())):
            told = [self.windows(config | {name: value}) for value in values]
            if any(one is not None and one != usual for one in told):
                found[name] = self.parameters.get(name)
        return found


def cache_layers(config: Any) -> list[Any]:
    """transformers' own cache for a config, layer by layer."""
    return list(transformers.DynamicCache(config=config).layers)


def run(model: Any) -> Any:
    """The output of a model, cache included, for one sequence of TOKENS tokens."""
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 3 + TOKENS)[None], use_cache=True)
