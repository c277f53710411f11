"""`headpool publish`: everything is checked before the first byte goes up; then one commit holds it all."""

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headpool import __version__, card, card_parts
from headpool.check import Check, Report
from headpool.checkpoint import CARD, PROVENANCE, SIDECARS, SOURCE_CARD, Source, open_source
from headpool.errors import RequestError, first_line
from headpool.hub import patiently
from headpool.planning import format_bytes
from headpool.uploading import Held, Place, Progress, UnreachableError, hub_errors

if TYPE_CHECKING:
    from huggingface_hub import ModelCard
    from rich.console import RenderableType

NAMES = (
    "config.json", "model.safetensors.index.json", PROVENANCE, SOURCE_CARD.lower(),
    *(name.lower() for name in card.FILES), *SIDECARS,
)  # fmt: skip
"""What may go up besides the weights and licences, by lower-case patterns, each for a file in the folder itself.
Whatever else lies there stays: optimizer state, logs, caches, keys.
"""

TEMPLATES = ("chat_templates/*.jinja", "additional_chat_templates/*.jinja")
"""What may go up from below."""

KINDS = re.compile(r"[^.]*|.*\.(jinja|jsonl?|md|model|model\.v\d+|pdf|png|spm|tiktoken|txt)", re.DOTALL)
"""And only files that end so: patterns such as `tokenizer*` alone would let through more."""

SECRETS = re.compile(rb"\b(?:hf_[A-Za-z0-9]{30,}|sk-[A-Za-z0-9_-]{32,}|AKIA[0-9A-Z]{16})\b")
"""What keys to this hub and to others look like."""

SNIPPET = re.compile(r'AutoModelForCausalLM\.from_pretrained\("([^"\n]*)"\)')
"""Where the card's code names the checkpoint."""

LONGEST_TEXT = 1 << 20
"""Bytes of the longest file that is searched for keys: cards and configs are small."""

Content = Path | bytes


@dataclass(frozen=True)
class Publication:
    """What went up, or would. `url`: of the repository, or of the pull request; `commit`: the one that holds it all,
    None for a dry run. `files`: names and bytes; `left_out`: what lies beside them and stays.
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
        lines += [f"left out: {', '.join(self.left_out)}"] if self.left_out else []
        return Group(table, *lines, *(f"warning: {one}" for one in self.warnings))


@dataclass(frozen=True)
class _Parcel:
    """What is to go up, checked as far as that is possible without the hub."""

    source: Source
    files: Mapping[str, Content]
    left_out: tuple[str, ...]
    license: str
    base: str | None
    gated: bool
    warnings: list[str] = field(default_factory=list)

    @property
    def done(self) -> Mapping[str, Any]:
        return self.source.provenance or {}

    @property
    def sizes(self) -> dict[str, int]:
        return {name: _size(content) for name, content in self.files.items()}


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
    report: Path | None = None,
    announce: Callable[[Publication], None] = lambda publication: None,
    progress: Progress | None = None,
) -> Publication:
    """Upload a checkpoint that headpool made, with its card, plots and licence, in one commit.

    Interrupted, the same call goes on: weights that are up already are not sent again, and nothing is committed before
    all of it is there.

    Args:
        revision: a branch, made where it is not there. create_pr: propose the commit as a pull request.
        dry_run: check everything, send nothing. What only the hub can tell is left out, with a warning, where it does
            not answer.
        token: None takes the one that `hf auth login` has left.
        accept_base_license: you have accepted the licence of the gated model that this one was made from.
        license: the hub's identifier of the licence, where the source's card names none.
        report: the folder of an evaluation that measured the checkpoint, to go on its card; None keeps the card.
        announce: called with what goes up before it does. progress: None shows the client's own bars.

    Raises:
        RequestError: checkpoint, card, licence, token or repository do not allow it; nothing was sent.
        HeadpoolError: the hub failed or did not answer; nothing was committed.
    """
    parcel = _pack(Path(directory), repo_id, license, report)
    place = _place(repo_id, revision, private=private, create_pr=create_pr, token=token, dry_run=dry_run)
    held = Held()
    try:
        _check_consent(parcel, place, accepted=accept_base_license)
        place.check_card(_text(parcel.files[CARD]))
        held = place.check_repository(parcel.done)
    except UnreachableError as error:
        if not dry_run:
            raise
        parcel.warnings.append(f"{first_line(error).split(';')[0]}: what only it can tell was not checked")
    planned = Publication(
        repo_id=place.repo_id,
        url=place.url,
        commit=None,
        private=private,
        revision=revision,
        create_pr=create_pr,
        dry_run=dry_run,
        license=parcel.license,
        base_model=parcel.base,
        files=parcel.sizes,
        left_out=parcel.left_out,
        warnings=tuple(parcel.warnings),
    )
    if dry_run:
        return planned
    announce(planned)
    stale = [name for name in held.names if name not in parcel.files and _is_replaced(name) and not create_pr]
    message = f"Publish {Path(directory).resolve().name} with headpool {__version__}"
    commit = place.upload(parcel.files, stale, message, held.head, progress)
    return replace(planned, url=commit.pr_url or place.url, commit=commit.oid)


def _pack(directory: Path, repo_id: str, licence: str | None, report: Path | None) -> _Parcel:
    """Check a directory and everything in it that goes up."""
    source = _open(directory)
    done = source.provenance or {}
    _check(source, done)
    found = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
    allowed = {name for name in found if name in source.shards or _is_allowed(name)}
    _refuse_links(directory, allowed)
    drawn, warnings = _drawn(directory, repo_id, licence, report)
    old = () if report is None else set(card.FILES) - set(drawn)  # what an earlier report has left
    names = sorted({*allowed, *drawn} - set(old))
    files: dict[str, Content] = {name: drawn.get(name, directory / name) for name in names}
    _refuse_secrets(files)
    named = _parsed(_text(files[CARD])).data.get("license")
    if not named:
        raise RequestError(
            "the source's card names no licence; say which one holds, by the hub's identifier: --license apache-2.0"
        )
    if licence is not None and licence != named:
        raise RequestError(f"the licence on the card is {named}; --license {licence} would contradict it")
    marks = any(str(key).startswith("extra_gated") for key in card_parts.source_metadata(directory))
    left_out = tuple(sorted(found - set(files)))
    return _Parcel(source, files, left_out, str(named), card_parts.base_model(done), marks, warnings)


def _open(directory: Path) -> Source:
    """A checkpoint that headpool made. Raises RequestError with what to do instead."""
    if not directory.is_dir():
        raise RequestError(f"no such directory: {directory}")
    if not (directory / "config.json").is_file():
        inside = [name for name in ("uptrained", "converted") if (directory / name / "config.json").is_file()]
        hint = f"; publish {directory / inside[0]}" if inside else ""
        raise RequestError(f"{directory} holds no checkpoint{hint}")
    source = open_source(str(directory))
    if source.provenance is None:
        raise RequestError(f"{directory} was not made by headpool (it has no {PROVENANCE}); `hf upload` sends anything")
    if any(not name.endswith(".safetensors") for name in source.shards):
        raise RequestError(f"{directory} holds weights that are not safetensors; headpool writes none such")
    return source


def _check(source: Source, done: Mapping[str, Any]) -> None:
    """The same check as after the conversion: the stock class has nothing to complain of but what it had to before."""
    known = Report(**{kind: tuple(names) for kind, names in done.get("check", {}).items()}) if "check" in done else None
    found = Check(source.directory, source.directory).result()
    if worse := found.beyond(known) if known else found:
        raise RequestError(f"{source.directory} does not fit its class: {worse}")


def _drawn(
    directory: Path, repo_id: str, licence: str | None, report: Path | None
) -> tuple[dict[str, bytes], list[str]]:
    """What goes up otherwise than it lies there, and warnings: the card, which names the repository, and what a report
    adds.

    Without a report, a card that its owner has edited is kept but for the licence, and the name in the code.
    """
    path = directory / CARD
    text = path.read_text(encoding="utf-8") if path.is_file() else None
    named = SNIPPET.search(text or "")
    here = named[1] if named else directory.resolve().name  # the folder may have been renamed
    edited = text is not None and text != str(card.draw_card(directory, here))
    if report is not None:
        from headpool.measured import card_files

        lost = f"{CARD} was edited; --report draws it anew, and what was written there does not go up"
        return card_files(directory, report, place=repo_id, licence=licence), [lost] if edited else []
    if text is None or not edited:
        return {CARD: str(card.draw_card(directory, repo_id, licence=licence)).encode()}, []
    kept = _parsed(text.replace(f'from_pretrained("{here}")', f'from_pretrained("{repo_id}")'))
    kept.data["license"] = kept.data.get("license") or licence
    return {CARD: str(kept).encode()}, []


def _parsed(text: str) -> "ModelCard":
    from huggingface_hub import ModelCard

    try:
        return ModelCard(text)
    except Exception as error:  # of YAML, and ValueError
        raise RequestError(f"{CARD}: its metadata cannot be read: {first_line(error)}") from error


def _is_allowed(name: str) -> bool:
    """Whether a file may go up, by its path in the folder: `*` of a pattern must not stand for folders."""
    folder, _, base = name.rpartition("/")
    if folder:
        return any(folder == one.split("/")[0] and fnmatch.fnmatchcase(name, one) for one in TEMPLATES)
    if card_parts.LEGAL.match(base):
        return True
    lower = base.lower()
    return KINDS.fullmatch(lower) is not None and any(fnmatch.fnmatchcase(lower, one) for one in NAMES)


def _refuse_links(directory: Path, names: Iterable[str]) -> None:
    """Files elsewhere were not meant to go up, and nobody who looks at the folder's listing expects them to."""
    root = directory.resolve()
    for name in sorted(names):
        if not (directory / name).resolve().is_relative_to(root):
            raise RequestError(f"{name} is a link to a file outside {directory}; put the file itself there")


def _is_replaced(name: str) -> bool:
    """Whether a file of an earlier publication must not outlive it: weights, and what an evaluation had left."""
    return name in card.FILES or bool(re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?", name))


def _refuse_secrets(files: Mapping[str, Content]) -> None:
    for name, content in files.items():
        if _size(content) <= LONGEST_TEXT and SECRETS.search(_bytes(content)):
            raise RequestError(f"{name} holds what looks like a key; take it out before the world sees it")


def _place(
    repo_id: str, revision: str | None, *, private: bool, create_pr: bool, token: str | None, dry_run: bool
) -> Place:
    """The repository by its whole name. Raises RequestError without a token: reading alone would work, writing not."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.utils._validators import validate_repo_id

    with hub_errors(repo_id):
        validate_repo_id(repo_id)
    token = token or get_token()
    if token is None and not dry_run:
        raise RequestError("no token for the hub: log in with `hf auth login`, or pass --token")
    api = HfApi(token=token)
    if "/" not in repo_id and token is not None:
        try:
            with hub_errors(repo_id):
                repo_id = f"{patiently(api.whoami)['name']}/{repo_id}"
        except UnreachableError:
            if not dry_run:  # which then says what it could not look at
                raise
    return Place(repo_id, revision, private, create_pr, api)


def _check_consent(parcel: _Parcel, place: Place, *, accepted: bool) -> None:
    """What was made from a gated model needs its publisher's consent, and carries its licence along."""
    if not (parcel.gated or (parcel.base is not None and place.is_gated(parcel.base))):
        return
    name = parcel.base or parcel.source.name
    if not accepted:
        raise RequestError(
            f"{name} is gated: its licence holds for this model, too; pass --accept-base-license if you have accepted "
            "it and may publish what was made from it"
        )
    if not any(card_parts.LEGAL.match(one) for one in parcel.files):
        raise RequestError(
            f"{name} is gated, and its licence is not beside the checkpoint; put LICENSE, and NOTICE, there"
        )


def _size(content: Content) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def _bytes(content: Content) -> bytes:
    return content if isinstance(content, bytes) else content.read_bytes()


def _text(content: Content) -> str:
    return _bytes(content).decode("utf-8")
