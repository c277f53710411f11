"""What of a checkpoint's folder goes up: files allowed by name, the card as it is to be, no keys."""

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headpool import card, card_parts
from headpool.check import Check, Report
from headpool.checkpoint import CARD, PROVENANCE, SIDECARS, SOURCE_CARD, Source, open_source
from headpool.errors import RequestError, first_line
from headpool.eval.schema import load

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

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

SECRETS = re.compile(
    rb"\b(?:hf_[A-Za-z0-9]{30,}|sk-[A-Za-z0-9_-]{32,}|AKIA[0-9A-Z]{16}|gh[pousr]_[A-Za-z0-9]{36,})\b"
    rb"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
"""What keys to this hub and to others look like."""

SECRET_NAMES = (".env", ".env.*", "*.pem", "*.key", "id_rsa", "id_ed25519", ".netrc", "credentials*", "token")
"""And files that hold them, by lower-case patterns."""

SNIPPET = re.compile(r'\w+\.from_pretrained\("([^"\n]*)"\)')
"""Where the card's code names the checkpoint; which class opens it depends on the model."""

LONGEST_TEXT = 1 << 20
"""Bytes of the longest file that is searched for keys: cards and configs are small."""

Content = Path | bytes


@dataclass(frozen=True)
class Parcel:
    """What is to go up, checked as far as that is possible without the hub. `secrets`: what of `left_out` looks like
    keys; `gated`: the source's card has marks of a gate; `base`: the original's hub id, where one is known.
    """

    source: Source
    files: Mapping[str, Content]
    left_out: tuple[str, ...]
    secrets: tuple[str, ...]
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

    @property
    def card(self) -> str:
        return _text(self.files[CARD])

    @property
    def legal(self) -> list[str]:
        """Its licence, notice and the like."""
        return [name for name in self.files if card_parts.LEGAL.match(name)]


def pack(directory: Path, repo_id: str, licence: Mapping[str, str], report: Path | None) -> Parcel:
    """Check a directory and everything in it that goes up.

    licence: the card's metadata on one that the source's card does not name. report: the folder of an evaluation that
    goes on the card. Raises RequestError with what is wrong, and what to do about it.
    """
    source = _open(directory)
    _check(source)
    found = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
    allowed = {name for name in found if name in source.shards or _is_allowed(name)}
    _refuse_links(directory, allowed)
    drawn, warnings = _drawn(directory, repo_id, licence, report)
    old = () if report is None else set(card.FILES) - set(drawn)  # what an earlier report has left
    names = sorted({*allowed, *drawn} - set(old))
    files: dict[str, Content] = {name: drawn.get(name, directory / name) for name in names}
    _refuse_secrets(files)
    left_out = tuple(sorted(found - set(files)))
    return Parcel(
        source=source,
        files=files,
        left_out=left_out,
        secrets=tuple(name for name in left_out if _is_secret(directory / name)),
        license=_licence(_text(files[CARD]), licence),
        base=card_parts.base_model(source.provenance or {}),
        gated=any(str(key).startswith("extra_gated") for key in card_parts.source_metadata(directory)),
        warnings=warnings,
    )


def is_replaced(name: str) -> bool:
    """Whether a file of an earlier publication must not outlive it: weights, and what an evaluation had left."""
    return name in card.FILES or bool(re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?", name))


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


def _check(source: Source) -> None:
    """The same check as after the conversion: the stock class has nothing to complain of but what it had to before."""
    done = source.provenance or {}
    known = Report.of(done["check"]) if "check" in done else None
    found = Check(source.directory, source.directory).result()
    if worse := found.beyond(known) if known else found:
        raise RequestError(f"{source.directory} does not fit its class: {worse}")


def _drawn(
    directory: Path, repo_id: str, licence: Mapping[str, str], report: Path | None
) -> tuple[dict[str, bytes], list[str]]:
    """What goes up otherwise than it lies there, and warnings: the card, which names the repository, and what a report
    adds.

    Without a report, a card that its owner has edited is kept but for the licence, and the name in the code.
    """
    if (directory / card.REPORT).is_file():
        load(directory)  # refuses what no card can be drawn from
    text = _text(directory / CARD) if (directory / CARD).is_file() else None
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
    if not kept.data.get("license"):
        for key, value in licence.items():
            kept.data[key] = value
    return {CARD: str(kept).encode()}, []


def _licence(text: str, wanted: Mapping[str, str]) -> str:
    """The licence on a card. Raises RequestError where there is none, or another than is wanted."""
    data = _parsed(text).data
    if not data.get("license"):
        raise RequestError(
            "the source's card names no licence; say which one holds, by the hub's identifier: --license apache-2.0"
        )
    for key, value in wanted.items():
        if data.get(key) != value:
            what, option = key.replace("license", "licence").replace("_", " "), key.replace("_", "-")
            raise RequestError(f"the {what} on the card is {data.get(key)}; --{option} {value} would contradict it")
    return card_parts.licence_name(data["license"])


def _parsed(text: str) -> "ModelCard":
    from huggingface_hub import ModelCard

    try:
        return ModelCard(text)
    except Exception as error:  # of YAML, and ValueError
        raise RequestError(f"{CARD}{_line(text, error)}: its metadata cannot be read: {_reason(error)}") from error


def _line(text: str, error: Exception) -> str:
    """Where in a card its metadata cannot be read, as `, line 3`; YAML's parser counts from where they begin."""
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    mark, block = getattr(error, "problem_mark", None), REGEX_YAML_BLOCK.search(text)
    return "" if mark is None or block is None else f", line {text.count(chr(10), 0, block.start(2)) + mark.line + 1}"


def _reason(error: Exception) -> str:
    return str(getattr(error, "problem", None) or first_line(error))


def _is_allowed(name: str) -> bool:
    """Whether a file may go up, by its path in the folder: `*` of a pattern must not stand for folders."""
    folder, _, base = name.rpartition("/")
    if folder:
        return any(folder == one.split("/")[0] and fnmatch.fnmatchcase(name, one) for one in TEMPLATES)
    if card_parts.LEGAL.match(base):
        return True
    return KINDS.fullmatch(base.lower()) is not None and _matches(base, NAMES)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name.lower(), one) for one in patterns)


def _refuse_links(directory: Path, names: Iterable[str]) -> None:
    """Files elsewhere were not meant to go up, and nobody who looks at the folder's listing expects them to."""
    root = directory.resolve()
    for name in sorted(names):
        if not (directory / name).resolve().is_relative_to(root):
            raise RequestError(f"{name} is a link to a file outside {directory}; put the file itself there")


def _refuse_secrets(files: Mapping[str, Content]) -> None:
    for name, content in files.items():
        if _holds_key(content):
            raise RequestError(f"{name} holds what looks like a key; take it out before the world sees it")


def _is_secret(path: Path) -> bool:
    """Whether a file that stays is worth a word."""
    try:
        return _matches(path.name, SECRET_NAMES) or _holds_key(path)
    except OSError:  # not even readable
        return False


def _holds_key(content: Content) -> bool:
    return _size(content) <= LONGEST_TEXT and SECRETS.search(_bytes(content)) is not None


def _size(content: Content) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def _bytes(content: Content) -> bytes:
    return content if isinstance(content, bytes) else content.read_bytes()


def _text(content: Content) -> str:
    """Of a card."""
    try:
        return _bytes(content).decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{CARD} is no text in UTF-8: {first_line(error)}") from error
