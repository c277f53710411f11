"""headpool.json of a conversion: what was done, from what, with which versions, and the recipe for it."""

import sys
from importlib import metadata
from typing import Any

from headpool import __version__, opening
from headpool.convert.aligned.options import Alignment
from headpool.convert.plan import Plan
from headpool.headers import read_json_object
from headpool.planning import cache_facts
from headpool.portable import recipe_text
from headpool.text import is_file_name


def classes(plan: Plan) -> dict[str, str] | None:
    """The model types between which a conversion transcodes."""
    if plan.source.origin is None:
        return None
    return {"from": plan.source.origin.config["model_type"], "to": plan.source.config["model_type"]}


def provenance(
    plan: Plan, seed: int, facts: dict[str, Any], alignment: Alignment, max_shard_size: int | None
) -> dict[str, Any]:
    """headpool.json: what was done, from what, with which versions. It holds no time and no path of this machine.

    facts: what method aligned found: "options", and "layers" with the figures of each layer that it changed.
    """
    figures = {
        one["layer"]: {name: value for name, value in one.items() if name not in ("layer", "seconds")}
        for one in facts.get("layers", ())
    }
    source, to = plan.source, classes(plan)
    shapes = {name: (record.dtype, record.shape) for name, record in source.tensors.items()}
    config = read_json_object(plan.config_text.encode(), "config.json")
    return {
        "headpool": __version__,
        "method": plan.method.name,
        "kv_heads": plan.kv_heads,
        "source_kv_heads": plan.source_kv_heads,
        "source": (source.origin or source).as_origin(),
        **({} if to is None else {"transcoded": to}),
        "options": {"seed": seed, "dtype": plan.output_dtype, "shards": len(plan.shards), **facts.get("options", {})},
        "cache": {
            "source": cache_facts(source.config, shapes, None if to is None else plan.output_dtype),
            "output": cache_facts(config, shapes, plan.output_dtype),
        },
        "recipe": _recipe(plan, seed, facts, alignment, max_shard_size),
        "versions": {name: metadata.version(name) for name in ("torch", "transformers")}
        | {"python": sys.version.split()[0]},
        "layers": [
            {"layer": index, "source_kv_heads": old.kv_heads, "kv_heads": new.kv_heads}
            | _gains(plan, index)
            | figures.get(index, {})
            for index, (old, new) in enumerate(zip(plan.before, plan.after, strict=True))
            if old.kind != "none"
        ],
        "changed": plan.changed,
        "opens_in": opening.opens_in(config),
        "warnings": [*opening.warnings(config), *plan.warnings],
    }


_GAINS = {
    "mean": "mean of the group's",
    "first": "the group's first",
    "random": "ones",
    "aligned": "so that every channel keeps its size",
}


def _gains(plan: Plan, layer: int) -> dict[str, str]:
    """What became of the gains that norms have for each key head, where the conversion changed them."""
    names = plan.layout.gain_names(layer, plan.after[layer].kv_heads)
    return {"key_gains": _GAINS[plan.method.name]} if set(names) & set(plan.changed_in(layer)) else {}


def _recipe(plan: Plan, seed: int, facts: dict[str, Any], alignment: Alignment, max_shard_size: int | None) -> str:
    """The conversion as a recipe that others can run, with the window that was left to default."""
    source, text = plan.source.origin or plan.source, alignment.calibration
    hashes = {} if source.revision else {source.name: source.headers_sha256()}
    section: dict[str, Any] = {"kv_heads": plan.kv_heads, "method": plan.method.name}
    if plan.source.origin is not None:
        section["transcode"] = True
    if plan.output_dtype is not None:
        section["dtype"] = plan.output_dtype
    if max_shard_size is not None:
        section["max_shard_size"] = str(max_shard_size)
    section |= alignment.recipe() if plan.method.aligned else alignment.text_recipe()
    section |= {key: facts["options"][key] for key in ("calibration_window",) if key in facts.get("options", {})}
    if text is not None and is_file_name(text.name):
        hashes[text.name] = text.sha256
    model = {"model": source.name} | ({"revision": source.revision} if source.revision else {})
    return recipe_text({**model, "seed": seed, "convert": section}, hashes)
