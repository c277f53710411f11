"""The verb that uploads: publish."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from headpool.cli.options import Json
from headpool.console import show, stdout_for_json


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
    license_name: Annotated[str | None, typer.Option(help="What a licence is called where --license is other.")] = None,
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
            license_name=license_name,
            report=report,
            announce=lambda planned: None if as_json else show(planned.describe(), {}, False),
            progress=None if sys.stderr.isatty() else progress,
        )
    show(result.describe(), result.to_dict(), as_json)
