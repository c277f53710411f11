"""Arguments and options that several verbs have."""

from typing import Annotated

import typer


def shipped(incomplete: str) -> list[str]:
    """Names of recipes that come with headpool, to complete with."""
    from headpool.recipe import shipped_recipes

    return [name for name in shipped_recipes() if name.startswith(incomplete)]


Model = Annotated[str, typer.Argument(help="A checkpoint directory or a hub id.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")]
Recipe = Annotated[
    str,
    typer.Argument(help="A recipe's file, or the name of one that comes with headpool.", autocompletion=shipped),
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", show_default=False)]
