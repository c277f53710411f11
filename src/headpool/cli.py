"""The command line: each verb parses, validates, calls. Heavy packages are imported by the verb that needs them."""

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from headpool.console import run_to_exit, show, stdout_for_json

app = typer.Typer(
    name="headpool",
    help="Fewer key/value heads for pretrained language models: plan, convert, uptrain, measure, publish.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
recipes_app = typer.Typer(invoke_without_command=True)
app.add_typer(recipes_app, name="recipes")

Model = Annotated[str, typer.Argument(help="A checkpoint directory or a hub id.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")]


def main() -> None:
    """Run the command line; exits 0, 1 (it failed), 2 (impossible) or 128 + n (stopped by signal n)."""
    run_to_exit(app)


def _version(wanted: bool) -> None:
    if wanted:
        from headpool import __version__

        typer.echo(f"headpool {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def plan(
    model: Model,
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens per sequence; default: the model's positions.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 1,
    memory: Annotated[str | None, typer.Option(help="Memory for weights and cache, such as 80GiB.")] = None,
    revision: Revision = None,
    as_json: Json = False,
) -> None:
    """What each possible number of K/V heads would save. Reads only config.json and headers.

    Example: headpool plan meta-llama/Llama-2-7b-hf --context 4096 --batch 16 --memory 80GiB
    """
    from headpool.geometry import parse_size
    from headpool.planning import plan as make_plan
    from headpool.planning import plan_table

    size = parse_size(memory) if memory is not None else None
    result = make_plan(model, context=context, batch=batch, memory=size, revision=revision)
    show(plan_table(result), result.to_dict(), as_json)


@app.command()
def convert(
    model: Model,
    out: Annotated[Path, typer.Argument(help="The new checkpoint directory.", show_default=False)],
    kv_heads: Annotated[int, typer.Option(help="K/V heads per layer of the result.", show_default=False)],
    method: Annotated[str, typer.Option(help="mean, first, random or aligned.")] = "mean",
    calibration: Annotated[
        str | None, typer.Option(help="Text like the training data, for aligned and for gains of every key head.")
    ] = None,
    text_column: Annotated[str, typer.Option(help="The column of --calibration that holds the text.")] = "text",
    calibration_tokens: Annotated[int, typer.Option(min=1, help="How many of its tokens are used.")] = 524_288,
    calibration_window: Annotated[
        int | None, typer.Option(min=8, help="Tokens per window; default: half the model's positions, at most 2048.")
    ] = None,
    groups: Annotated[str, typer.Option(help="Heads that share: search or contiguous.")] = "search",
    refit: Annotated[bool, typer.Option(help="Refit the output projection.")] = True,
    heal: Annotated[int, typer.Option(min=0, help="Steps of healing for each layer; 0: none.")] = 800,
    heal_scope: Annotated[str, typer.Option(help="What is healed: layer or attention.")] = "layer",
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


@app.command(name="eval")
def evaluate(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL...", help="Checkpoint directories or hub ids.", show_default=False)
    ],
    data: Annotated[
        str,
        typer.Option(help="A .txt, .jsonl or .parquet file, compressed or not, or a data set on the hub."),
    ],
    out: Annotated[Path, typer.Option(help="Directory for the report.")],
    baseline: Annotated[str | None, typer.Option(help="The model to compare with.")] = None,
    text_column: Annotated[str, typer.Option(help="The column that holds the text.")] = "text",
    data_config: Annotated[str | None, typer.Option(help="Configuration of a data set on the hub.")] = None,
    split: Annotated[str, typer.Option(help="Split of a data set on the hub.")] = "test",
    window: Annotated[
        int | None, typer.Option(help="Tokens per window; default: the model's positions, at most 2048.")
    ] = None,
    stride: Annotated[int | None, typer.Option(help="Tokens between windows; default: the window.")] = None,
    batch_size: Annotated[int, typer.Option(help="Windows per forward pass.")] = 8,
    dtype: Annotated[str | None, typer.Option(help="Default: float32 on a CPU, the checkpoint's on a GPU.")] = None,
    device: Annotated[str | None, typer.Option(help="Such as cpu or cuda:0; default: a GPU if any.")] = None,
    contexts: Annotated[
        str | None,
        typer.Option(help="Time decoding at these lengths, such as 512,2048; all models are in memory then."),
    ] = None,
    batches: Annotated[str, typer.Option(help="Sequences decoded at a time, such as 1,8.")] = "1",
    tasks: Annotated[str | None, typer.Option(help="Tasks of lm-evaluation-harness, or their YAML files: a,b.")] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option("--prompt", help="Continue this greedily; may be repeated. Default: beginnings in the data."),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of MODEL on the hub.")] = None,
    as_json: Json = False,
) -> None:
    """Perplexity, K/V-cache bytes, samples, decode time and tasks of models, beside those of a baseline.

    Example: headpool eval llama-2-7b-gqa8 --baseline meta-llama/Llama-2-7b-hf --data test.txt --out report
    """
    if revision is not None and len(models) > 1:
        raise typer.BadParameter("--revision belongs to one MODEL; give its directory instead")
    lengths, sizes = _numbers("--contexts", contexts), _numbers("--batches", batches)
    with stdout_for_json(as_json):
        from headpool.eval.measure import evaluate as run_evaluation
        from headpool.eval.models import ModelSpec
        from headpool.eval.page import draw
        from headpool.eval.report import check_out, read_report, write_report
        from headpool.eval.tables import table
        from headpool.progress import Progress
        from headpool.text import read_texts

        check_out(out)
        texts = read_texts(data, text_column, config=data_config, split=split)
        specs = [ModelSpec("baseline", baseline)] if baseline is not None else []
        with Progress("tokens") as progress:
            report = run_evaluation(
                [*specs, *(ModelSpec("model", model, revision) for model in models)],
                texts,
                window=window,
                stride=stride,
                batch_size=batch_size,
                dtype=dtype,
                device=device,
                contexts=lengths,
                batches=sizes,
                tasks=[task.strip() for task in tasks.split(",")] if tasks else (),
                prompts=prompts or None,
                progress=progress,
            )
        values = read_report(write_report(report, out))
        page = draw(out)[-1]
    show(table(values), values, as_json)
    if not as_json:
        typer.echo(f"report: {page}")


@app.command(name="families")
def list_families(as_json: Json = False) -> None:
    """List every model type: whether it converts, why not, and where the result opens.

    Example: headpool families
    """
    from headpool import catalogue

    found = catalogue.rows()
    show(catalogue.table(found), catalogue.to_dict(found), as_json)


@app.command(name="report")
def draw_report(
    directory: Annotated[Path, typer.Argument(help="A folder with a report.json.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Draw report.html and its plots anew from the report.json that eval or run wrote.

    Example: headpool report headpool-out/quickstart/report
    """
    from headpool.eval.page import draw

    files = [str(path) for path in draw(directory)]
    show("\n".join(files), {"files": files}, as_json)


@app.command()
def uptrain(
    recipe: Annotated[str, typer.Argument(help="A recipe's file, or the name of one that comes with headpool.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", show_default=False)] = None,
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


@app.command()
def run(
    recipe: Annotated[str, typer.Argument(help="A recipe's file, or the name of one that comes with headpool.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", show_default=False)] = None,
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


@app.command()
def schema(as_json: Annotated[bool, typer.Option("--json", help="As one line.")] = False) -> None:
    """The JSON Schema of recipes, with which editors complete and check them.

    Example: headpool schema > headpool.schema.json
    """
    from headpool.recipe import recipe_schema

    typer.echo(json.dumps(recipe_schema(), indent=None if as_json else 2))


@app.command()
def publish(
    directory: Annotated[Path, typer.Argument(help="A checkpoint that headpool made.", show_default=False)],
    repo_id: Annotated[str, typer.Argument(help="Where it goes on the hub: USER/NAME.", show_default=False)],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    revision: Annotated[str | None, typer.Option(help="A branch; made where it is not there.")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Propose it as a pull request.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, show what would go up.")] = False,
    token: Annotated[str | None, typer.Option(help="Default: the one that `hf auth login` left.")] = None,
    accept_base_license: Annotated[
        bool, typer.Option("--accept-base-license", help="You have accepted the licence of the gated original.")
    ] = False,
    license: Annotated[  # noqa: A002
        str | None, typer.Option(help="The hub's identifier of the licence, where the source's card names none.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="The folder of an evaluation, to go on the card.")] = None,
    as_json: Json = False,
) -> None:
    """Check a checkpoint and its card, and upload them in one commit. Interrupted, the same command goes on.

    Example: headpool publish headpool-out/quickstart/uptrained USER/NAME --dry-run
    """
    from headpool.progress import Progress
    from headpool.publish import publish as upload

    with stdout_for_json(as_json), Progress("bytes") as progress:
        result = upload(
            directory,
            repo_id,
            private=private,
            revision=revision,
            create_pr=create_pr,
            dry_run=dry_run,
            token=token,
            accept_base_license=accept_base_license,
            license=license,
            report=report,
            announce=lambda planned: None if as_json else show(planned.describe(), {}, False),
            progress=None if sys.stderr.isatty() else progress,
        )
    show(result.describe(), result.to_dict(), as_json)


@recipes_app.callback()
def recipes(context: typer.Context, as_json: Json = False) -> None:
    """List the recipes that come with headpool.

    Example: headpool recipes
    """
    if context.invoked_subcommand is not None:
        return
    from headpool.recipe import shipped_recipes

    shipped = {name: f"headpool run {name}" for name in shipped_recipes()}
    listing = [{"name": name, "command": command} for name, command in shipped.items()]
    show("\n".join(f"{name}    {command}" for name, command in shipped.items()), {"recipes": listing}, as_json)


@recipes_app.command()
def copy(
    name: Annotated[str, typer.Argument(help="A name that `headpool recipes` lists.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Copy a recipe, with the data that it brings, into the current folder.

    Example: headpool recipes copy quickstart
    """
    from headpool.recipe import copy_recipe

    path = copy_recipe(name, Path.cwd())
    show(f"copied to {path}", {"recipe": str(path)}, as_json)


def _numbers(option: str, text: str | None) -> list[int]:
    """The whole numbers in "512,2048"."""
    try:
        return [int(number) for number in text.split(",")] if text else []
    except ValueError:
        raise typer.BadParameter(f"{option}: {text!r} is no list of whole numbers such as 512,2048") from None
