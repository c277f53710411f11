"""`headpool publish`: everything is checked before the first byte goes up; then one commit holds it all."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headpool import __version__, licences
from headpool.errors import RequestError, first_line
from headpool.parcel import Parcel, is_replaced, pack
from headpool.planning import format_bytes
from headpool.uploading import Held, Place, Progress, UnreachableError, check_names

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from rich.console import RenderableType


MOST_TOLD = 40
"""How many of the files that stay are told by name; --json has them all."""


@dataclass(frozen=True)
class Publication:
    """What went up, or would. `url`: of the repository, or of the pull request; `commit`: the one that holds it all,
    None for a dry run. `files`: names and bytes; `left_out`: what lies beside them and stays, `secrets` what of that
    looks like keys.
    """

    repo_id: str
    url: str
    commit: str | None
    private: bool
    revision: str | None
    create_pr: bool
    dry_run: bool
    license: str
    base_model: str | None
    files: Mapping[str, int]
    left_out: tuple[str, ...]
    secrets: tuple[str, ...]
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        files = [{"name": name, "bytes": size} for name, size in self.files.items()]
        return {**asdict(self), "files": files}

    def describe(self) -> "RenderableType":
        """For a person: the files that go up, or where they went."""
        from rich.console import Group
        from rich.table import Table

        size, kind = format_bytes(sum(self.files.values())), "private" if self.private else "public"
        where = f"{self.repo_id} ({kind}, licence {self.license})"
        if self.commit is not None:
            return f"published {size} in {where}\n{self.url}"
        table = Table("file")
        table.add_column("size", justify="right")
        for name, bytes_ in self.files.items():
            table.add_row(name, format_bytes(bytes_))
        lines = [f"{'would publish' if self.dry_run else 'publishing'} {size} in {where}"]
        lines += [f"left out: {self._stays()}"] if self.left_out else []
        return Group(table, *lines, *(f"warning: {one}" for one in self.warnings))

    def _stays(self) -> str:
        """What looks like a key first, and not every file of a large folder."""
        others = [name for name in self.left_out if name not in self.secrets]
        told = [*(f"{name} (looks like a secret)" for name in self.secrets), *others]
        more = f" and {len(told) - MOST_TOLD} more" if len(told) > MOST_TOLD else ""
        return ", ".join(told[:MOST_TOLD]) + more


def publish(
    directory: Path | str,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    create_pr: bool = False,
    dry_run: bool = False,
    token: str | None = None,
    accept_base_license: bool = False,
    license: str | None = None,  # noqa: A002 - the hub's word
    license_name: str | None = None,
    report: Path | str | None = None,
    announce: Callable[[Publication], None] = lambda publication: None,
    progress: Progress | None = None,
) -> Publication:
    """Upload a checkpoint that headpool made, with its card, plots and licence, in one commit.

    Interrupted, the same call goes on: weights that are up already are not sent again, and nothing is committed before
    all of it is there.

    Args:
        repo_id: USER/NAME, or an organisation's. revision: a branch, made where it is not there. create_pr: propose
            the commit as a pull request.
        dry_run: check everything, send nothing. What only the hub can tell is left out, with a warning, where it does
            not answer.
        token: None takes the one that `hf auth login` has left.
        accept_base_license: you have accepted the licence of the gated model that this one was made from.
        license: the hub's identifier of the licence, where the source's card names none; license_name: what it is
            called where that is "other".
        report: the folder of an evaluation that measured the checkpoint, to go on its card; None keeps the card.
        announce: called with what goes up before it does. progress: None shows the client's own bars.

    Raises:
        RequestError: names, checkpoint, card, licence, token or repository do not allow it; nothing was sent.
        HeadpoolError: the hub failed or did not answer; nothing was committed.
    """
    check_names(repo_id, revision)
    licence = licences.metadata(license, license_name)
    parcel = pack(Path(directory), repo_id, licence, None if report is None else Path(report))
    place = Place(repo_id, revision, private, create_pr, _client(token, dry_run=dry_run))
    held = _ask(place, parcel, accepted=accept_base_license, dry_run=dry_run)
    planned = _planned(place, parcel, held, dry_run=dry_run)
    if dry_run:
        return planned
    announce(planned)
    held = place.prepare(held, parcel.done)
    stale = [name for name in held.names if name not in parcel.files and is_replaced(name) and not create_pr]
    message = f"Publish {Path(directory).resolve().name} with headpool {__version__}"
    commit = place.upload(parcel.files, stale, message, held.head, progress)
    return replace(planned, url=commit.pr_url or place.url, commit=commit.oid)


def _client(token: str | None, *, dry_run: bool) -> "HfApi":
    """Raises RequestError without a token: reading alone would work, writing not."""
    from huggingface_hub import HfApi, get_token

    token = token or get_token()
    if token is None and not dry_run:
        raise RequestError("no token for the hub: log in with `hf auth login`, or pass --token")
    return HfApi(token=token)


def _ask(place: Place, parcel: Parcel, *, accepted: bool, dry_run: bool) -> Held:
    """What only the hub can tell: of the base, of the card, of the repository. A dry run does without an answer."""
    try:
        _check_consent(parcel, place, accepted=accepted)
        place.check_card(parcel.card)
        return place.check_repository(parcel.done)
    except UnreachableError as error:
        if not dry_run:
            raise
        parcel.warnings.append(f"{first_line(error).split(';')[0]}: what only it can tell was not checked")
        return Held()


def _check_consent(parcel: Parcel, place: Place, *, accepted: bool) -> None:
    """What was made from a gated model needs its publisher's consent, and carries its licence along."""
    if not (parcel.gated or (parcel.base is not None and place.is_gated(parcel.base))):
        return
    name = parcel.base or parcel.source.name
    if not accepted:
        raise RequestError(
            f"{name} is gated: its licence holds for this model, too; pass --accept-base-license if you have accepted "
            "it and may publish what was made from it"
        )
    if not parcel.legal:
        raise RequestError(
            f"{name} is gated, and its licence is not beside the checkpoint; put LICENSE, and NOTICE, there"
        )


def _planned(place: Place, parcel: Parcel, held: Held, *, dry_run: bool) -> Publication:
    return Publication(
        repo_id=place.repo_id,
        url=place.url,
        commit=None,
        private=place.private if held.private is None else held.private,
        revision=place.revision,
        create_pr=place.create_pr,
        dry_run=dry_run,
        license=parcel.license,
        base_model=parcel.base,
        files=parcel.sizes,
        left_out=parcel.left_out,
        secrets=parcel.secrets,
        warnings=tuple(parcel.warnings),
    )
