"""The recipes that come with headpool, and the schema of all."""

import json
from pathlib import Path
from typing import Annotated

import typer

from headpool.cli.options import Json, shipped
from headpool.console import show

app = typer.Typer(invoke_without_command=True)


@app.callback()
def recipes(context: typer.Context, as_json: Json = False) -> None:
    """List the recipes that come with headpool.

    Example: headpool recipes
    """
    if context.invoked_subcommand is not None:
        return
    from headpool.recipe import shipped_recipes

    commands = {name: f"headpool run {name}" for name in shipped_recipes()}
    listing = [{"name": name, "command": command} for name, command in commands.items()]
    show("\n".join(f"{name}    {command}" for name, command in commands.items()), {"recipes": listing}, as_json)


@app.command()
def copy(
    name: Annotated[
        str,
        typer.Argument(help="A name that `headpool recipes` lists.", show_default=False, autocompletion=shipped),
    ],
    as_json: Json = False,
) -> None:
    """Copy a recipe, with the data that it brings, into the current folder.

    Example: headpool recipes copy quickstart
    """
    from headpool.recipe import copy_recipe

    path = copy_recipe(name, Path.cwd())
    show(f"copied to {path}", {"recipe": str(path)}, as_json)


def schema(as_json: Annotated[bool, typer.Option("--json", help="As one line.")] = False) -> None:
    """The JSON Schema of recipes, with which editors complete and check them.

    Example: headpool schema > headpool.schema.json
    """
    from headpool.recipe import recipe_schema

    typer.echo(json.dumps(recipe_schema(), indent=None if as_json else 2))
