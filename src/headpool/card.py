"""The model card of what headpool made: README.md, drawn from headpool.json, report.json and the source's card.

No figure stands on a card that is not in one of the two JSON files beside it, and no path of this machine.
"""

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headpool import checkpoint
from headpool.card_parts import Parts, source_metadata
from headpool.checkpoint import CARD, SOURCE_CARD
from headpool.columns import columns, heads_in_words, table
from headpool.drawing import UNADAPTED
from headpool.headers import read_json_object

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

REPORT = "report.json"
"""The evaluation that a card shows, beside it."""

PLOTS = {
    "quality-against-cache": "Perplexity against the size of the K/V cache",
    "learning-curve": "Learning curve of the uptraining",
    "cache-against-context": "K/V cache against the length of the context",
}
"""Plots that a card shows where they lie beside it, by the stem of their file, and what stands for them in words."""

FILES = (CARD, REPORT, *(f"{name}.png" for name in PLOTS))
"""What is written into a finished checkpoint later on: it does not count when checkpoints are compared."""


def write_card(directory: Path, place: str, config: Mapping[str, Any] | None = None) -> None:
    """Draw README.md of a checkpoint that headpool has just made, at one stroke, from the files beside it; and the plot
    that needs no evaluation.

    As `draw_card`. Raises OSError where it cannot be written; an earlier card is then still whole.
    """
    replace_files(directory, first_card(directory, place, config))


def first_card(directory: Path, place: str, config: Mapping[str, Any] | None = None) -> dict[str, bytes]:
    """What `write_card` writes, by file name; nothing is written."""
    drawn = cache_plot(checkpoint.read_provenance(directory) or {})
    card = draw_card(directory, place, config=config, plots=list(drawn))
    return {**{f"{name}.png": content for name, content in drawn.items()}, CARD: str(card).encode()}


def cache_plot(done: Mapping[str, Any]) -> dict[str, bytes]:
    """The cache against the context by headpool.json, as PNG under its name in PLOTS; empty where no cache is kept."""
    from headpool import plots

    known = columns(done, None)
    if not any(size for one in known for size in one.bytes_at.values()):
        return {}
    models = [
        {
            "label": f"{heads_in_words(one.kv_heads)} K/V heads",
            "unadapted": one.title == UNADAPTED,
            "curve": [{"tokens": tokens, "bytes": size} for tokens, size in one.bytes_at.items()],
        }
        for one in known
    ]
    return {"cache-against-context": plots.png(plots.cache_against_context(models))}


def replace_files(directory: Path, files: Mapping[str, bytes]) -> None:
    """Write files beside their places, then rename them, in their order. Raises OSError."""
    partials = {directory / name: directory / f".{name}.partial" for name in files}
    try:
        for partial, content in zip(partials.values(), files.values(), strict=True):
            partial.write_bytes(content)
        for path, partial in partials.items():
            partial.replace(path)
    finally:
        for partial in partials.values():
            partial.unlink(missing_ok=True)


def draw_card(
    directory: Path,
    place: str,
    *,
    config: Mapping[str, Any] | None = None,
    report: Mapping[str, Any] | None = None,
    plots: Sequence[str] | None = None,
    licence: Mapping[str, str] | None = None,
) -> "ModelCard":
    """The card of a checkpoint that headpool made.

    place: how code is to name the checkpoint, a folder or a hub id. config, report, plots: what is going to lie beside
    the card as config.json, report.json and PNG; None takes what does. licence: metadata on one that the source's card
    does not name. Raises RequestError for what cannot be read.
    """
    from huggingface_hub import ModelCard

    done = checkpoint.read_provenance(directory) or {}
    if report is None and (directory / REPORT).is_file():
        report = read_json_object((directory / REPORT).read_bytes(), REPORT)
    if plots is None:
        plots = [name for name in PLOTS if (directory / f"{name}.png").is_file()]
    config = config or checkpoint.read_config(directory)[1]
    inherited = source_metadata(directory)
    given = {} if licence is None or inherited.get("license") else licence
    parts = Parts(directory, done, report, config, {**inherited, **given})
    template = (resources.files("headpool") / "card.md.jinja").read_text(encoding="utf-8")
    card: ModelCard = ModelCard.from_template(
        parts.metadata(),
        template_str=template,
        title=parts.title,
        base=parts.base,
        origin=parts.origin(),
        steps=parts.steps(),
        unadapted=parts.unadapted,
        table=table(parts.columns),
        notes=parts.notes(),
        plots=[{"file": f"{name}.png", "text": PLOTS[name]} for name in plots],
        architecture=next(iter(config.get("architectures") or ["AutoModelForCausalLM"])),
        **parts.opening(),
        place=place,
        opens=parts.opens(),
        source_card=f"[its card]({SOURCE_CARD})" if (directory / SOURCE_CARD).is_file() else "",
        limits=parts.limits(),
        facts=list(parts.facts()),
        recipe=parts.recipe.rstrip(),
        install=parts.install(),
        unpinned=list(parts.unpinned()),
        licence=parts.licence(),
    )
    return card
