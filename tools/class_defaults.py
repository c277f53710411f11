"""Write src/headpool/class_defaults.json: what transformers' classes make of fewer K/V heads, measured.

    python tools/class_defaults.py            writes the file
    python tools/class_defaults.py --check    says whether it is current, exit code 1 where it is not

For every model_type whose config class has a K/V-head field, in itself or in the language model's part of it, small
models are built and compared:

- the class's defaults of the fields that headpool reads;
- what each attention tensor's size follows: K/V heads, query heads, or neither (builds that differ in one);
- which layers slide when a config holds no layer_types (rules are tried against transformers' own cache);
- `geometry`: whether the cache that a small model fills has the shapes that headpool.geometry tells from its
  config;
- whether it converts: pooling would change the rows of a k_proj and a v_proj, and the gains of a key norm, in every
  layer with attention and nothing else, the checkpoint's names are the class's, and each K/V head serves query heads
  that stand next to each other (repeating K/V heads so changes no logit, repeating them in another order does).
  `reason` says what stands against it;
- composites: where the language model's config lies in theirs, and the stems that its layers' tensors have in files.
"""

import argparse
import json
import logging
import sys
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from class_attention import cache_agrees, measure_attention, reads_head_dim
from class_nested import Surroundings, composite_probe, stems
from class_probe import UNBUILT, NotMeasuredError, Probe, parameters_of
from class_windows import window_rule
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from headpool import family_data
from headpool.families import ENCODER_DECODER, KV_HEADS
from headpool.family import family_from

TARGET = Path(__file__).resolve().parent.parent / "src" / "headpool" / "class_defaults.json"


@dataclass
class Measured:
    """The data: families and composites by model_type, and the other model types by the reason for refusing them."""

    families: dict[str, Any]
    composites: dict[str, Any]
    others: dict[str, list[str]]


def entries(known: Mapping[str, Any] | None = None) -> Measured:
    """The data of every class that transformers has for generating text.

    known: composites that were measured before. Of those around a language model that a class holds alone, which is
    measured itself, only the config is looked at anew; what was found of their weights is taken over.
    """
    data = Measured({}, {}, {})
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    seq_to_seq = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    pictured = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    composite = pictured | modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    everything = composite | seq_to_seq | causal
    for model_type, class_name in sorted(
        everything.items(), key=lambda item: (item[0] + "_text" not in CONFIG_MAPPING, item)
    ):
        config_class = CONFIG_MAPPING[model_type]
        parameters = parameters_of(config_class)
        encoder = parameters.get("is_encoder_decoder") is True or "encoder" in config_class.sub_configs
        if model_type in REASONS:
            data.others.setdefault(REASONS[model_type], []).append(model_type)
        elif encoder:
            data.others.setdefault(ENCODER_DECODER, []).append(model_type)
        elif LANGUAGE_PARTS & config_class.sub_configs.keys():
            add_composite(data, model_type, composite.get(model_type, class_name), known or {})
        elif model_type in seq_to_seq and model_type not in composite:
            data.others.setdefault(ENCODER_DECODER, []).append(model_type)
        elif "thinker_config" in config_class.sub_configs:
            data.others.setdefault("it is several models that generate together", []).append(model_type)
        elif missing := missing_field(parameters_with_aliases(config_class)):
            data.others.setdefault(f"its config has no {missing}", []).append(model_type)
        elif model_type not in causal:
            data.others.setdefault("it is no causal language model of text alone", []).append(model_type)
        else:
            data.families[model_type] = measure(Probe(model_type, class_name))
    return data


NO_ATTENTION = "a recurrent or state-space model, which keeps no keys and values"
DRAFTER = "it drafts for another model, whose keys and values it reads"
GENERATOR = "its checkpoints hold a generator of pictures, too, which attends to the same keys and values"
REASONS = {
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"), NO_ATTENTION),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), DRAFTER),
    **dict.fromkeys(("cosmos3_edge", "cosmos3_omni"), GENERATOR),
    "blt": "it is several models with attention of their own (patcher, encoder, decoder, and one between them)",
    "jetmoe": "its experts have a query head for each K/V head: with fewer of these it would have fewer of those",
    "pi0": "it moves robots and generates no text",
}
"""What stands against model types whose configs do not tell it by themselves."""

LANGUAGE_PARTS = {"text_config", "decoder"}
"""Names under which a config holds a language model's."""


def missing_field(names: Container[str]) -> str | None:
    return next((field for field in ("num_attention_heads", KV_HEADS) if field not in names), None)


def parameters_with_aliases(config_class: Any) -> set[str]:
    names = set(parameters_of(config_class))
    return names | {field for field, name in config_class.attribute_map.items() if name in names}


def add_composite(data: Measured, model_type: str, class_name: str, known: Mapping[str, Any]) -> None:
    """Measure a composite class, and its language model's family where no class has that alone."""
    try:
        surroundings = Surroundings(model_type)
    except Exception:
        reason = UNBUILT
        data.others.setdefault(reason, []).append(model_type)
        return
    config_class = CONFIG_MAPPING[surroundings.text]
    if parameters_of(config_class).get("is_encoder_decoder") is True:
        data.others.setdefault(ENCODER_DECODER, []).append(model_type)
        return
    if missing := missing_field(parameters_with_aliases(config_class)):
        reason = f"its language model's config has no {missing}"
        data.others.setdefault(reason, []).append(model_type)
        return
    entry: dict[str, Any] = {"class": class_name, "path": list(surroundings.path), "text": surroundings.text}
    data.composites[model_type] = entry
    if surroundings.flat():
        entry["flat"] = True
    alone = surroundings.text in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if alone and model_type in known:
        data.composites[model_type] = entry | {
            key: held for key, held in known[model_type].items() if key in ("silent", "stems", "reason")
        }
        return
    try:
        probe = composite_probe(model_type, class_name, silent=alone)
        if not probe.runs():
            entry["silent"] = True
        entry["stems"] = stems(probe)
        if not alone and surroundings.text not in data.families:
            data.families[surroundings.text] = measure(probe) | {"within": model_type}
    except NotMeasuredError as error:
        entry["reason"] = str(error)


def measure(probe: Probe) -> dict[str, Any]:
    """The data of one family."""
    name = probe.config_class.model_type
    entry: dict[str, Any] = {"class": probe.class_name, "defaults": probe.defaults(), "geometry": False}
    if probe.aliases:
        entry["aliases"] = dict(sorted(probe.aliases.items()))
    try:
        probe.settle()
        entry["defaults"] |= probe.partial_rotation()
        known = family_data.told().get(name, {})
        if "window" in known:
            entry["window"], entry["layer_fields"] = known["window"], known.get("layer_fields", {})
        else:
            entry["window"], entry["layer_fields"] = window_rule(probe, family_from(name, entry))
        entry["head_dim_read"] = reads_head_dim(probe)
        entry["geometry"] = cache_agrees(probe, family_from(name, entry))
        measure_attention(probe, entry)
    except NotMeasuredError as error:
        entry["reason"] = str(error)
    return entry


def section(name: str, held: dict[str, Any]) -> str:
    """A part of the file, one entry a line."""
    lines = (f"    {json.dumps(key)}: {json.dumps(one, sort_keys=True)}" for key, one in sorted(held.items()))
    return f"  {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n  }"


def render(known: Mapping[str, Any] | None = None) -> str:
    """The data file: one family a line. known: see `entries`."""
    data = entries(known)
    version = json.dumps(transformers.__version__)
    sections = {"families": data.families, "composites": data.composites, "others": data.others}
    parts = [f'  "transformers": {version}', *(section(name, held) for name, held in sections.items())]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    transformers.logging.set_verbosity(logging.CRITICAL)  # configs that refuse an attempt say so
    transformers.logging.disable_progress_bar()
    text = render()
    if not check:
        TARGET.write_text(text, encoding="utf-8")
    current = TARGET.read_text(encoding="utf-8") == text
    print(f"{TARGET.name} is {'current' if current else 'stale: run python tools/class_defaults.py'}")
    return int(not current)


if __name__ == "__main__":
    sys.exit(main())
