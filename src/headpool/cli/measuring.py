"""Verbs that tell something: plan, eval, report, families."""

from pathlib import Path
from typing import Annotated

import typer

from headpool.cli.options import Json, Model, Revision
from headpool.console import show, stdout_for_json


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


def report(
    directory: Annotated[Path, typer.Argument(help="A folder with a report.json.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Draw report.html and its plots anew from the report.json that eval or run wrote.

    Example: headpool report headpool-out/quickstart/report
    """
    from headpool.eval.page import draw

    files = [str(path) for path in draw(directory)]
    show("\n".join(files), {"files": files}, as_json)


def families(as_json: Json = False) -> None:
    """List every model type: whether it converts, why not, and where the result opens.

    Example: headpool families
    """
    from headpool import catalogue

    found = catalogue.rows()
    show(catalogue.table(found), catalogue.to_dict(found), as_json)


def _numbers(option: str, text: str | None) -> list[int]:
    """The whole numbers in "512,2048"."""
    try:
        return [int(number) for number in text.split(",")] if text else []
    except ValueError:
        raise typer.BadParameter(f"{option}: {text!r} is no list of whole numbers such as 512,2048") from None
