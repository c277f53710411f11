"""Classes that hold a language model beside others: where its config and its layers' tensors lie, measured."""

import itertools
from collections.abc import Callable
from typing import Any

from class_attention import LATENT, OTHER_NAMES, changed, is_latent, split
from class_probe import KV, SMALLER, UNBUILT, NotMeasuredError, Probe, Rules, parameters_of, small_fields
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from headpool.families import KV_HEADS

DEPTH = ("layers|depth", 2, 2)
HEADS = ("heads", 4, 4)
CHANNELS: Rules = (("base_channels", 32, 32), ("num_filters", 4, 4), ("num_embeddings", 128, 128))
"""Rules like class_probe's for the parts around a language model."""

NEEDED: dict[str, Callable[[int], dict[str, Any]]] = {
    "emu3": lambda _: {"vocabulary_map": {"<image>": 4}},
    "fun_asr_nano": lambda hidden: {"adaptor_config": {"hidden_size": hidden, "intermediate_size": hidden // 4}},
    "molmo2": lambda _: {"adapter_config": {"vision_feature_layer": [-1, -2]}},
    "nemotron_h_omni": lambda _: {"vision_config": {"video_temporal_patch_size": 2}},
}
"""What the parts around a language model need in some classes, by its hidden_size."""


class Surroundings:
    """The config of a composite class around that of its language model.

    path: the keys from the one to the other; text: the model_type of the language model. The other parts are as small
    as they come, or (`shallow`) have few layers of their usual sizes.
    """

    def __init__(self, model_type: str, *, shallow: bool = False) -> None:
        self.config_class = CONFIG_MAPPING[model_type]
        self.model_type = model_type
        self._rules: Rules = (DEPTH,) if shallow else (DEPTH, HEADS, *CHANNELS, *SMALLER)
        self._usual = self.config_class()
        self._language = self._usual.get_text_config(decoder=True)
        self.path = _path(self._usual, self._language)
        self.text: str = self._language.model_type

    def config(self, text_fields: dict[str, Any]) -> Any:
        """The composite config with these fields of the language model."""
        rules = (("(out|text|llm)_(hidden|dim)", 0, text_fields["hidden_size"]), *self._rules)
        parts = self._small_parts(self._usual, rules)
        needed = NEEDED[self.model_type](text_fields["hidden_size"]) if self.model_type in NEEDED else {}
        for name, held in needed.items():
            parts[name] = parts.get(name, {}) | held if isinstance(held, dict) else held
        return self.config_class(**_merged(parts, self.path, {"model_type": self.text} | text_fields))

    def flat(self) -> bool:
        """Whether the class takes the language model's fields from the top where nothing is nested."""
        try:
            made = self.config_class(num_attention_heads=6, **{KV_HEADS: 3})
            return bool(made.get_text_config(decoder=True).num_key_value_heads == 3)
        except Exception:
            return False

    def _small_parts(self, config: Any, rules: Rules) -> dict[str, Any]:
        parts: dict[str, Any] = {}
        for name in config.sub_configs:
            part = getattr(config, name, None)
            if part is not None and part is not self._language and hasattr(part, "sub_configs"):
                small = small_fields(parameters_of(type(part)), rules)
                parts[name] = small | self._small_parts(part, rules) | {"model_type": part.model_type}
        return parts


def _path(config: Any, language: Any) -> tuple[str, ...]:
    """The attributes that lead from a config to the language model's in it; none where it is not there."""
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is language:
            return (name,)
        if hasattr(part, "sub_configs") and (rest := _path(part, language)):
            return (name, *rest)
    return ()


def _merged(fields: dict[str, Any], path: tuple[str, ...], inner: dict[str, Any]) -> dict[str, Any]:
    """`fields` with `inner` at a path in it."""
    if not path:
        return fields | inner
    return fields | {path[0]: _merged(fields.get(path[0], {}), path[1:], inner)}


TAKES_NO_TEXT = "no small model of its class takes text alone, by which it could be tested"


def composite_probe(model_type: str, class_name: str, *, silent: bool = False) -> Probe:
    """A probe of a composite class with small models that take text, or, where `silent` ones do, that can be built;
    NotMeasuredError where there are none.
    """
    first: NotMeasuredError | None = None
    for shallow in (False, True):
        surroundings = Surroundings(model_type, shallow=shallow)
        probe = Probe(surroundings.text, class_name, surroundings)
        try:
            probe.settle()
        except NotMeasuredError as error:
            first = first or error
            continue
        if probe.runs() or (silent and probe.small()):
            return probe
        if is_latent(probe):
            raise NotMeasuredError(LATENT)
        first = first or NotMeasuredError(TAKES_NO_TEXT if probe.small() else UNBUILT)
    assert first is not None
    raise first


def stems(probe: Probe) -> list[str]:
    """The beginnings, up to a layer's number, of the tensors that follow the language model's K/V heads: in files that
    transformers writes, and in others that it reads. None where nothing follows them.
    """
    inside = sorted(changed(probe.shapes(), probe.shapes(**{KV_HEADS: 2 * KV})))
    if not inside:
        return []
    written = changed(*(probe.written(**{KV_HEADS: count}) for count in (KV, 2 * KV)))
    places, found = ({split(name)[0] for name in names} for names in (inside, written))
    if len(places) != 1 or len(found) != 1:
        raise NotMeasuredError("its language model's keys and values lie in several places")
    if {split(name)[2] for name in inside} != {split(name)[2] for name in written}:
        raise NotMeasuredError(OTHER_NAMES)
    read = places | read_stems(probe, inside[0], found)
    if not found <= read:
        raise NotMeasuredError("its class does not read the names that it writes")
    return sorted(read)


PREFIXES = ("model", "language_model", "text_model")
"""What has been seen before the list of layers in releases of composite models."""


def read_stems(probe: Probe, name: str, others: set[str]) -> set[str]:
    """Stems, such as `others`, from which transformers, on loading, makes that of the tensor `name`."""
    stem, number, rest = split(name)
    layers = stem.removesuffix(".").rpartition(".")[2]
    prefixes = itertools.chain.from_iterable(itertools.permutations(PREFIXES, count) for count in range(4))
    likely = others | {".".join((*prefix, layers, "")) for prefix in prefixes}
    model = probe.on_meta()
    rules = [rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)]
    state = model.state_dict()

    def renamed(other: str) -> str:
        return str(rename_source_key(f"{other}{number}.{rest}", rules, [], model.base_model_prefix, state)[0])

    return {other for other in likely if renamed(other) == name}
