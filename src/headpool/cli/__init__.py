"""The command line: each verb parses, validates, calls. Heavy packages are imported by the verb that needs them."""

from collections.abc import Callable, Mapping
from typing import Annotated

import typer

from headpool.cli import making, measuring, publishing, recipes
from headpool.console import run_to_exit

VERBS: Mapping[str, Callable[..., None]] = {
    "plan": measuring.plan,
    "convert": making.convert,
    "eval": measuring.evaluate,
    "families": measuring.families,
    "report": measuring.report,
    "uptrain": making.uptrain,
    "run": making.run,
    "schema": recipes.schema,
    "publish": publishing.publish,
}
"""In the order in which `--help` lists them."""

app = typer.Typer(
    name="headpool",
    help="Fewer key/value heads for pretrained language models: plan, convert, uptrain, measure, publish.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for _name, _verb in VERBS.items():
    app.command(name=_name)(_verb)
app.add_typer(recipes.app, name="recipes")


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
