"""A recipe that says what its defaults became when it was run, by headpool.json and report.json."""

from collections.abc import Mapping
from typing import Any

import yaml

from headpool.recipe import EvalSection, Recipe
from headpool.sections import Section, UptrainSection
from headpool.text import is_file_name

TEXTS = ("data", "validation", "teacher")
"""Keys under which headpool.json has names only, where a recipe says more."""

SETTINGS = ("window", "stride", "batch_size", "dtype")
"""What an evaluation's figures depend on, under the names that report.json and recipes have in common."""


def pinned(recipe: Recipe, done: Mapping[str, Any], report: Mapping[str, Any] | None) -> dict[str, Any]:
    """The values of a recipe, as those of its file, in which nothing that was run depends on a default or a machine.

    done: headpool.json of what the recipe made; report: the report.json of its evaluation, None before there is one.
    What was not run yet stays as it is; a training that comes after what was made is left out. So are devices, which
    are a machine's.
    """
    given = recipe.model_dump(mode="json", exclude_defaults=True)
    values: dict[str, Any] = {"model": recipe.model}
    if (revision := _commit(recipe, done)) is not None:
        values["revision"] = revision
    values |= {"output": recipe.output, "seed": recipe.seed}
    if "convert" in given:
        values["convert"] = _anywhere(_conversion(given["convert"], done))
    if "eval" in given:
        values["eval"] = _anywhere(_evaluation(recipe, given["eval"], report))
    if "uptrain" in given and not ("convert" in given and "uptrain" not in done):
        values["uptrain"] = _training(recipe, given["uptrain"], done)
    return values


def evaluation(report: Mapping[str, Any]) -> dict[str, Any]:
    """The eval section of a recipe that makes a report again, where none led to it. Without its tasks and prompts: a
    report does not tell whether they were files, and whether anybody asked for them.
    """
    data, timed = report["data"], report["models"][-1].get("decode", ())
    name, *place = [data["name"]] if is_file_name(data["name"]) else data["name"].split(":")
    lists = {
        "contexts": sorted({row["context"] for row in timed}),
        "batches": sorted({row["batch"] for row in timed}),
    }
    values = {
        "data": name,
        "data_config": place[0] if len(place) > 1 else None,
        "split": place[-1] if place else None,
        "text_column": None if data.get("column", "text") == "text" else data["column"],
        **{key: report["settings"][key] for key in SETTINGS},
        **{key: held or None for key, held in lists.items()},
    }
    return {key: value for key, value in values.items() if value is not None}


def _commit(recipe: Recipe, done: Mapping[str, Any]) -> str | None:
    """Of a model that came from the hub."""
    source = done.get("source", {})
    held = source.get("revision") if source.get("model") == recipe.model else None
    return recipe.revision if held is None else str(held)


def _conversion(given: Mapping[str, Any], done: Mapping[str, Any]) -> dict[str, Any]:
    """As the conversion itself has noted it, with the text where the recipe has it."""
    noted: Any = yaml.safe_load(done.get("recipe") or "") or {}
    text = {key: given[key] for key in ("calibration",) if key in given}
    return {**(noted.get("convert") or given), **text}


def _evaluation(recipe: Recipe, given: Mapping[str, Any], report: Mapping[str, Any] | None) -> dict[str, Any]:
    if report is None or recipe.eval is None:
        return dict(given)
    timed = {"batches": list(recipe.eval.batches)} if recipe.eval.contexts else {}
    return _ordered(EvalSection, {**given, **{key: report["settings"][key] for key in SETTINGS}, **timed})


def _training(recipe: Recipe, given: Mapping[str, Any], done: Mapping[str, Any]) -> dict[str, Any]:
    if "uptrain" not in done or recipe.uptrain is None:
        return dict(given)
    resolved = done["uptrain"]["options"]
    values = {**given, "micro_batch": recipe.uptrain.micro_batch}
    for key, field in UptrainSection.model_fields.items():
        if key in resolved and key not in TEXTS and (resolved[key] is not None or field.default is not None):
            values[key] = resolved[key]
    return _ordered(UptrainSection, values)


def _ordered(section: type[Section], values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: values[key] for key in section.model_fields if key in values}


def _anywhere(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != "device"}
