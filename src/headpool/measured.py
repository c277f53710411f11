"""An evaluation on the card of what was evaluated: report.json without this machine's paths, its plots, the card."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from headpool import __version__, plots
from headpool.card import PLOTS, REPORT, draw_card, replace_files
from headpool.checkpoint import CARD, open_source, read_provenance
from headpool.drawing import UNADAPTED
from headpool.errors import HeadpoolError, RequestError
from headpool.eval import wording
from headpool.eval.page import figures
from headpool.eval.schema import ReportFile, load
from headpool.portable import evaluated, portable
from headpool.recipe import Recipe


def card_files(
    directory: Path,
    report: Path,
    *,
    place: str | None = None,
    recipe: Recipe | None = None,
    licence: Mapping[str, str] | None = None,
) -> dict[str, bytes]:
    """What an evaluation puts beside a checkpoint, by file name: its plots, the card, report.json.

    directory: a checkpoint that headpool made; report: the folder with a report.json that measured it. Of the report's
    models only those stay that the card shows: the baseline, the checkpoint, and what that was trained from. place: how
    code on the card names the checkpoint, its folder where None. recipe: the one that was run, if any.
    licence: as for `draw_card`.

    Raises RequestError where there is no report, or none of this checkpoint as it is.
    """
    values = _published(directory, report)
    values["recipe"] = _recipe(read_provenance(directory) or {}, values, recipe)
    shown = ReportFile.model_validate(values)
    drawn = {plot.name: plots.png(plot.figure) for plot in figures(shown) if plot.name in PLOTS}
    place = place or directory.resolve().name
    card = draw_card(directory, place, report=values, plots=list(drawn), licence=licence)
    return {
        **{f"{name}.png": content for name, content in drawn.items()},
        CARD: str(card).encode(),
        REPORT: (json.dumps(values, indent=2, allow_nan=False) + "\n").encode(),
    }


def _recipe(done: Mapping[str, Any], report: Mapping[str, Any], recipe: Recipe | None) -> str | None:
    """The one that was run, else the report's, else that of what was measured with the evaluation added."""
    if recipe is None and report["recipe"] is not None:
        try:
            recipe = Recipe.model_validate(yaml.safe_load(report["recipe"]))
        except (yaml.YAMLError, ValidationError) as error:
            raise RequestError(
                f"{REPORT} holds a recipe that headpool {__version__} cannot read; evaluate again"
            ) from error
    if recipe is not None:
        return portable(recipe, done, report)
    made = done.get("uptrain", done).get("recipe")
    return None if made is None else evaluated(made, report)


def refresh_card(directory: Path, report: Path, recipe: Recipe) -> None:
    """Have an evaluation on the card of a checkpoint, and its plots and report.json beside it; those of an earlier one
    are replaced. Raises as `card_files`, and HeadpoolError where nothing can be written.
    """
    files = card_files(directory, report, recipe=recipe)
    try:
        replace_files(directory, files)
        for name in PLOTS:
            if f"{name}.png" not in files:
                (directory / f"{name}.png").unlink(missing_ok=True)
    except OSError as error:
        raise HeadpoolError(f"{directory} cannot be written: {error.strerror}") from error


def is_shown(directory: Path, report: Path) -> bool:
    """Whether a checkpoint's card shows this evaluation already. report.json is written last, so it tells."""
    held = directory / REPORT
    if not (held.is_file() and (directory / CARD).is_file()):
        return False
    found: dict[str, Any] = json.loads(held.read_text(encoding="utf-8"))
    return {**_published(directory, report), "recipe": None} == {**found, "recipe": None}


def _published(directory: Path, report: Path) -> dict[str, Any]:
    """report.json for a checkpoint's folder, but for its recipe: the models that its card shows, local ones by name."""
    parsed = load(report)
    values: dict[str, Any] = json.loads((report / REPORT).read_text(encoding="utf-8"))
    named = zip(values["models"], wording.names(parsed.models), strict=True)
    names = {one["path"]: name if _is_local(one["path"]) else one["path"] for one, name in named}
    chosen = _chosen(directory, values["models"], report)
    kept = {one["path"] for one in chosen}
    others = tuple(f"{path}:" for path in names if path not in kept)
    notes = [wording.without_paths(note, parsed) for note in values.get("notes", ()) if not note.startswith(others)]
    models = [{**one, "path": names[one["path"]]} for one in chosen]
    if not models[-1]["uptrained"]:
        values.pop("training", None)
    return {**values, "models": models, "comparison": models[-1].get("comparison"), "notes": notes}


def _chosen(directory: Path, models: Sequence[Mapping[str, Any]], report: Path) -> list[Mapping[str, Any]]:
    """The baseline, what the checkpoint was trained from, the checkpoint itself."""
    here = directory.resolve()
    measured = [one for one in models if one["role"] == "model"]
    ours = open_source(str(directory)).checkpoint_sha256()
    same = [one for one in measured if one.get("checkpoint_sha256") == ours]
    if not same:
        names = ", ".join(one["path"] for one in models)
        if any(Path(one["path"]).name == here.name for one in measured):
            raise RequestError(f"{directory} is not what {report / REPORT} measured any more; evaluate it again")
        raise RequestError(f"{report / REPORT} is of {names}, not of {directory}")
    this = next((one for one in same if Path(one["path"]).resolve() == here), same[0])
    before = [one for one in measured if one["label"] == UNADAPTED and _conversion(one) == _conversion(this)]
    return [*[one for one in models if one["role"] == "baseline"][:1], *before[: int(this["uptrained"])], this]


def _conversion(model: Mapping[str, Any]) -> list[Any]:
    return [model["kv_heads"], model["conversion"]]


def _is_local(path: str) -> bool:
    """Whether a model is named by a folder, there or gone, and not as the hub has it."""
    return Path(path).exists() or path.startswith(("/", "~", ".")) or path.count("/") > 1
