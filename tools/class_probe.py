"""Small models of one transformers class, and what can be asked of them: shapes, caches, sliding layers."""

import copy
import inspect
import itertools
import json
import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from headpool.families import FIELDS, KV_HEADS
from headpool.geometry import WINDOW_FIELDS

if TYPE_CHECKING:
    from class_nested import Surroundings

HEADS, KV, HEAD_DIM, LAYERS, TOKENS, WINDOW = 8, 2, 16, 4, 12, 8
BASE: dict[str, Any] = {
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, KV_HEADS: KV, "hidden_size": HEADS * HEAD_DIM,
    "vocab_size": 128, "max_position_embeddings": 64,
}  # fmt: skip
Rules = tuple[tuple[str, int, int], ...]
SMALLER: Rules = (
    ("token_id", -1, 1), ("vocab_size", 128, 128), ("intermediate|ffn", 64, 64), ("group", 1, 1),
    ("top_?k|per_tok|moe_k", 2, 2), ("expert", 4, 4), ("sliding_window", WINDOW, WINDOW), ("dim|size|rank", 64, 16),
)  # fmt: skip
"""A numeric field whose name matches and whose default exceeds the first number gets the second."""

MROPE: tuple[dict[str, Any], ...] = (
    {"mrope_section": [3, 3, 2]},
    {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5},
)
"""Sections of a rotary embedding of several axes, which must add up to the pairs of a head of HEAD_DIM."""

ATTEMPTS: tuple[dict[str, Any], ...] = (
    {},
    {"head_dim": HEAD_DIM},
    {"num_kv_shared_layers": 0},
    {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    {"layer_types": ["full_attention"] * LAYERS},
    *({field: ["linear_attention", "full_attention"] * 2} for field in ("layer_types", "layers_block_type")),
    {"attn_layer_indices": [1, 3]},
    {"attn_layer_period": 2, "attn_layer_offset": 1},
    {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    *({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4} | more} for more in MROPE),
    {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")
        }
    },
)
"""What a class may need beyond its defaults to be built, in the order tried."""

MOST_PARAMETERS = 45_000_000
"""Models whose small version is larger are not run."""

CACHE_KINDS = {
    "DynamicLayer": "full", "DynamicSlidingWindowLayer": "sliding", "DummyLayer": "none",
    "LinearAttentionLayer": "none", "LinearAttentionAndFullAttentionLayer": "full",
    "LinearAttentionAndSlidingWindowAttentionLayer": "sliding",
}  # fmt: skip
"""transformers' cache layers that hold keys and values, and nothing else that grows, or none, in geometry's words."""

FULL_INTERVAL = "full_attention_interval"
"""The field of hybrids that says that one layer in so many attends."""

LAYER_FIELDS = re.compile("layer|attn|attention|window|pattern|period|interval|idx|indices|global|chunk|share|block")
"""Names of fields that may say which layers slide."""

Shapes = dict[str, tuple[int, ...]]
Windows = list[tuple[str, int | None]]
"""Each layer's kind and window, in geometry's words."""


class NotMeasuredError(Exception):
    """Why a family is refused."""


UNBUILT = "no model of its class that is small enough to test could be built"


def unbuilt(error: Exception | None) -> str:
    """Why no small model of a class was built, in words for people."""
    package = re.search(r"requires the (\w+) library", str(error))
    if package:
        return f"a part of it comes from the package {package[1]}, without which it was not tested"
    equal = re.search(rf"({KV_HEADS}|num_attention_heads).* (must match|must be the same as) ", str(error))
    return "its class refuses fewer K/V heads than query heads" if equal else UNBUILT


def parameters_of(config_class: Any) -> dict[str, Any]:
    """A config class's fields with their defaults."""
    signature = inspect.signature(config_class.__init__)
    return {name: parameter.default for name, parameter in signature.parameters.items()}


def small_fields(parameters: dict[str, Any], rules: Rules = SMALLER) -> dict[str, Any]:
    """Values that make a model small, for fields with larger defaults."""
    small = {}
    for name, default in parameters.items():
        if type(default) is int:
            matching = (rule for rule in rules if re.search(rule[0], name))
            _, most, instead = next(matching, ("", default, default))
            if default > most:
                small[name] = instead
    return small


class Probe:
    """Small models of one class: a language model's, or that of a composite which `surroundings` describe."""

    def __init__(self, model_type: str, class_name: str, surroundings: "Surroundings | None" = None) -> None:
        self.config_class = CONFIG_MAPPING[model_type]
        self.class_name = class_name
        self.surroundings = surroundings
        self.parameters = parameters_of(self.config_class)
        self.aliases = {field: name for field, name in self.config_class.attribute_map.items() if field in FIELDS}
        self.fields = BASE | self._small()
        self._built: dict[str, Any] = {}
        self._ran: bool | None = None
        self.cached: list[Any] = []
        """The layers of the cache that a model filled, once `runs` has seen it."""

    def _small(self) -> dict[str, Any]:
        named = {*self.parameters, *self.popped()}
        small: dict[str, Any] = {name: HEAD_DIM for name in ("head_dim", "global_head_dim") if name in named}
        known = {*BASE, *small, *self.aliases.values()}
        return small | small_fields({name: value for name, value in self.parameters.items() if name not in known})

    def settle(self) -> None:
        """Find the first of ATTEMPTS with which the class builds a model that runs, or builds one at all;
        NotMeasuredError where none does.
        """
        first: Exception | None = None
        built = None
        for attempt in ATTEMPTS:
            usual = self.fields
            self.fields = usual | attempt
            self._forget()
            try:
                self.shapes()
            except Exception as error:
                first = first or error
            else:
                built = attempt if built is None else built
                if self.runs():
                    self._write_out_types()
                    return
            self.fields = usual
        if built is None:
            raise NotMeasuredError(unbuilt(first))
        self.fields |= built
        self._forget()

    def _write_out_types(self) -> None:
        """A hybrid's config says which layers attend."""
        config = self.config()
        field = self.aliases.get("layer_types", "layer_types")
        if field in self.parameters and any(
            type(one).__name__ == "LinearAttentionLayer" for one in cache_layers(config)
        ):
            self.fields[field] = list(config.layer_types)

    def runs(self) -> bool:
        """Whether a small model takes text."""
        if self._ran is None:
            self._ran = self.small() and self._takes_text()
        return self._ran

    def small(self) -> bool:
        """Whether its models are small enough to be run."""
        return sum(map(math.prod, self.shapes().values())) <= MOST_PARAMETERS

    def _takes_text(self) -> bool:
        """Whether it does, and keeps keys and values of it; a hybrid's layer types are then told from its config."""
        try:
            self.cached = run(self.model("cpu")).past_key_values.layers
        except Exception:
            return False
        return any(CACHE_KINDS.get(type(layer).__name__) != "none" for layer in self.cached)

    def _forget(self) -> None:
        self._built.clear()
        self._ran = None

    def has_field(self, field: str) -> bool:
        return self.aliases.get(field, field) in self.parameters

    def defaults(self) -> dict[str, Any]:
        """The class's defaults of FIELDS, where they are values."""
        found = {field: self.parameters.get(self.aliases.get(field, field)) for field in FIELDS}
        return {field: value for field, value in found.items() if isinstance(value, bool | int | float | list | tuple)}

    def partial_rotation(self) -> dict[str, Any]:
        """The default share of rotated dimensions, which classes compute into rope_parameters, where there is one."""
        rope = getattr(self.config(), "rope_parameters", None) or {}
        return {key: rope[key] for key in ("partial_rotary_factor",) if key in rope}

    def flags(self) -> list[str]:
        """Options, off by default, that switch on biases or norms and with them tensors of their own."""
        return [name for name, value in self.parameters.items() if value is False and re.search("bias|norm", name)]

    def config(self, **changes: Any) -> Any:
        return self.config_class(**self._fields(changes))

    def _fields(self, changes: dict[str, Any]) -> dict[str, Any]:
        return copy.deepcopy(self.fields | changes)  # configs add to the objects that they are given

    @property
    def model_class(self) -> Any:
        return getattr(transformers, self.class_name)

    def whole_config(self, **changes: Any) -> Any:
        """The config that the model class takes: the language model's, with what surrounds it."""
        return self.surroundings.config(self._fields(changes)) if self.surroundings else self.config(**changes)

    def model(self, device: str, **changes: Any) -> Any:
        with torch.device(device):
            return self.model_class(self.whole_config(**changes)).eval()

    def shapes(self, **changes: Any) -> Shapes:
        """The shape of every tensor of a model with these changes."""
        return {name: tuple(tensor.shape) for name, tensor in self.on_meta(**changes).state_dict().items()}

    def written(self, **changes: Any) -> Shapes:
        """The shape of every tensor that transformers would write of a model with these changes."""
        model = self.on_meta(**changes)
        try:
            tensors = revert_weight_conversion(model, model.state_dict())
        except RuntimeError as error:
            raise NotMeasuredError("transformers cannot write a small model of its class") from error
        return {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def on_meta(self, **changes: Any) -> Any:
        """A model with these changes and without memory, which is made once."""
        key = json.dumps(changes, sort_keys=True)
        if key not in self._built:
            self._built[key] = self.model("meta", **changes)
        return self._built[key]

    def window_configs(self, **fixed: Any) -> Iterator[dict[str, Any]]:
        """Configs without layer_types that differ in what the choice of sliding layers may depend on."""
        varied: dict[str, tuple[Any, ...]] = {
            "sliding_window": (None, 5), "use_sliding_window": (True, False), "max_window_layers": (0, 2, 99),
            "sliding_window_pattern": (2, 3), "attention_chunk_size": (None, 5), FULL_INTERVAL: (2, 3),
        }  # fmt: skip
        choices = [
            [(), *((name, value) for value in values)]
            for name, values in varied.items()
            if (name in self.parameters or name in self.popped() or name.startswith("sliding")) and name not in fixed
        ]
        for layers, picked in itertools.product((1, 13), itertools.product(*choices)):
            named = dict(filter(None, picked))
            if len(named) <= 2:
                yield self.without_windows() | fixed | {"num_hidden_layers": layers} | named

    def popped(self) -> list[str]:
        """Fields that the config class takes from keyword arguments, by its source."""
        return re.findall(r"kwargs\.(?:pop|get)\(\s*[\"'](\w+)[\"']", inspect.getsource(self.config_class))

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
        names = {name for name in (*self.parameters, *self.popped()) if LAYER_FIELDS.search(name)}
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
    ids = torch.arange(3, 3 + TOKENS)[None]
    with torch.no_grad():
        out = model(input_ids=ids, use_cache=True)
        if out.get("past_key_values") is None:  # a class that hands no cache back fills the one that it is given
            cache = transformers.DynamicCache(config=model.config)
            out = model(input_ids=ids, past_key_values=cache, use_cache=True)
            out["past_key_values"] = cache
    return out
