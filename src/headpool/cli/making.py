"""Verbs that make checkpoints: convert, uptrain, run."""

import os
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from headpool.cli.options import Json, Model, Overrides, Recipe, Revision
from headpool.console import show, stdout_for_json
from headpool.defaults import CALIBRATION_TOKENS, HEAL_RATE, HEAL_STEPS


def convert(
    model: Model,
    out: Annotated[Path, typer.Argument(help="The new checkpoint directory.", show_default=False)],
    kv_heads: Annotated[int, typer.Option(help="K/V heads per layer of the result.", show_default=False)],
    method: Annotated[str, typer.Option(help="mean, first, random or aligned.")] = "mean",
    calibration: Annotated[
        str | None, typer.Option(help="Text like the training data, for aligned and for gains of every key head.")
    ] = None,
    text_column: Annotated[str, typer.Option(help="The column of --calibration that holds the text.")] = "text",
    calibration_tokens: Annotated[
        int, typer.Option(min=1, help="How many of its tokens are used.")
    ] = CALIBRATION_TOKENS,
    calibration_window: Annotated[
        int | None, typer.Option(min=8, help="Tokens per window; default: half the model's positions, at most 2048.")
    ] = None,
    groups: Annotated[str, typer.Option(help="Heads that share: search or contiguous.")] = "search",
    refit: Annotated[bool, typer.Option(help="Refit the output projection.")] = True,
    heal: Annotated[int, typer.Option(min=0, help="Steps of healing for each layer; 0: none.")] = HEAL_STEPS,
    heal_scope: Annotated[str, typer.Option(help="What is healed: layer or attention.")] = "layer",
    heal_learning_rate: Annotated[
        float, typer.Option(help="Of healing, at its peak, relative to the size of what is trained.")
    ] = HEAL_RATE,
    device: Annotated[str | None, typer.Option(help="For calibration; default: a GPU where there is one.")] = None,
    plot: Annotated[Path | None, typer.Option(help="With --dry-run --calibration: a PNG of what is predicted.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Dtype of the result; default: as the source.")] = None,
    transcode: Annotated[
        bool,
        typer.Option(
            "--transcode", help="Where its class cannot hold fewer K/V heads: as another of the same function, first."
        ),
    ] = False,
    revision: Revision = None,
    seed: Annotated[int, typer.Option(min=0, help="For method random, and for the order of calibration text.")] = 0,
    max_shard_size: Annotated[str | None, typer.Option(help="Such as 5GB; default: the source's division.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Validate and plan, write nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Convert a checkpoint to fewer K/V heads, shard by shard, into a checkpoint of the same stock class; with
    --transcode into one of another class that computes the same function, where its own cannot hold them.

    Example: headpool convert meta-llama/Llama-2-7b-hf llama-2-7b-gqa8 --kv-heads 8
    """
    if calibration is None and method != "aligned":  # pooling has threads of its own; torch's would only spin
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    from headpool.convert.aligned.options import Alignment
    from headpool.convert.run import convert_checkpoint
    from headpool.geometry import parse_size
    from headpool.progress import Progress
    from headpool.text import read_documents

    with stdout_for_json(as_json), Progress("tokens") as aligning, Progress("bytes") as progress:
        alignment = Alignment(
            calibration=read_documents(calibration, text_column) if calibration is not None else None,
            text_column=text_column,
            tokens=calibration_tokens,
            window=calibration_window,
            groups=groups,
            refit=refit,
            heal=heal,
            heal_scope=heal_scope,
            learning_rate=heal_learning_rate,
            device=device,
            plot=plot,
            progress=lambda done, total: aligning("align", done, total),
        )
        result = convert_checkpoint(
            model,
            out,
            kv_heads=kv_heads,
            method=method,
            dtype=dtype,
            revision=revision,
            seed=seed,
            max_shard_size=parse_size(max_shard_size) if max_shard_size is not None else None,
            overwrite=overwrite,
            dry_run=dry_run,
            transcode=transcode,
            alignment=alignment,
            progress=lambda done, total: progress("convert", done, total),
            transcoding=lambda done, total: progress("transcode", done, total),
        )
    show(result.describe(), result.to_dict(), as_json)


def uptrain(
    recipe: Recipe,
    overrides: Overrides = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over, whatever earlier attempts have saved.")] = False,
    replace: Annotated[
        bool, typer.Option("--replace", hidden=True, help="Drop what a finished training of other settings left.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, estimate memory and time.")] = False,
    as_json: Json = False,
) -> None:
    """Train what a recipe has converted; a stopped training goes on where it was. Also under accelerate launch.

    Example: headpool uptrain quickstart uptrain.learning_rate=5e-4
    """
    from headpool.progress import Progress
    from headpool.recipe import load_recipe

    parsed = load_recipe(recipe, overrides or [])
    with stdout_for_json(as_json), Progress("tokens") as progress:
        if dry_run:
            from headpool.uptrain.estimate import estimate

            result: Any = estimate(parsed)
        else:
            from headpool.uptrain.run import uptrain as run_training

            result = run_training(parsed, fresh=fresh, replace=replace, progress=partial(progress, "uptrain"))
    if os.environ.get("RANK", "0") == "0":
        show(result.describe(), result.to_dict(), as_json)


def run(
    recipe: Recipe,
    overrides: Overrides = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Do every stage again.")] = False,
    as_json: Json = False,
) -> None:
    """Run a recipe: convert, evaluate, uptrain. Stages that are done are skipped, so a killed run goes on.

    Example: headpool run quickstart convert.kv_heads=4 output=out
    """
    from headpool.pipeline import run_recipe
    from headpool.recipe import load_recipe

    parsed = load_recipe(recipe, overrides or [])
    with stdout_for_json(as_json):
        result = run_recipe(parsed, fresh=fresh)
    show(result.describe(), result.to_dict(), as_json)
