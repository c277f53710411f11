"""A repository of the hub as a place to publish in: what it holds, one commit into it, one line for each failure."""

import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headpool.checkpoint import PROVENANCE, read_provenance
from headpool.errors import HeadpoolError, RequestError, first_line
from headpool.hub import ATTEMPTS, WAIT, patiently, status_of

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi

Progress = Callable[[str, int, int], None]
"""Called with what goes up, how many bytes of it are up and how many there are."""

HARMLESS = {".gitattributes", "README.md"}
"""What the hub itself puts into a new repository."""


SMALL = 100_000
"""Bytes of a file that is sent together with others."""


class UnreachableError(HeadpoolError):
    """The hub did not answer."""


@contextmanager
def hub_errors(what: str) -> Iterator[None]:
    """Translate the client's exceptions about `what`, a repository. Raises RequestError for what the hub refuses,
    HeadpoolError for its failures, UnreachableError where it does not answer.
    """
    try:
        yield
    except HeadpoolError:
        raise
    except Exception as error:
        raise _explained(error, what) from error


REFUSALS = {
    401: "the hub does not accept the token; log in with `hf auth login`, or pass --token",
    403: "the token has no right to write to {}; use one with the role write",
    404: "there is no repository {}, or the token may not see it",
}
"""What the hub's statuses mean for a request about a repository."""

CONFLICTS = (409, 412)
"""The repository is not what it was at the first look."""


def _explained(error: BaseException, what: str) -> HeadpoolError:
    status = status_of(error)
    if status in REFUSALS:
        return RequestError(REFUSALS[status].format(what))
    if status in CONFLICTS:
        return HeadpoolError(f"{what} was changed meanwhile; run the same command again")
    if status is not None:
        return HeadpoolError(f"the hub failed ({status}: {_message(error)}); run the same command again to go on")
    if not _is_network(error):
        return HeadpoolError(f"the hub's answer makes no sense ({type(error).__name__}: {first_line(error)})")
    return UnreachableError(f"the hub cannot be reached ({first_line(error)}); run the same command again to go on")


def _is_network(error: BaseException | None) -> bool:
    """Whether an exception, or what it was raised from, tells of a connection (the client has had several libraries for
    HTTP).
    """
    while error is not None:
        if isinstance(error, OSError) or type(error).__module__.split(".")[0] in ("httpx", "httpx2", "httpcore"):
            return True
        error = error.__cause__
    return False


def _message(error: Any) -> str:
    return str(getattr(error, "server_message", None) or first_line(error))


NO_BRANCH = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//|^[-/]|[/.]$|(^|/)\.|\.lock(/|$)|^@$")
"""What git allows in no name of a branch (git-check-ref-format)."""


def check_names(repo_id: str, branch: str | None) -> None:
    """RequestError for a repository that is not named USER/NAME, and for a branch that cannot exist."""
    from huggingface_hub import errors
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except errors.HFValidationError as error:
        raise RequestError(f"{repo_id!r} is no name for a repository: {first_line(error)}") from error
    if "/" not in repo_id:
        raise RequestError(f"{repo_id!r} does not say whose it is; give USER/{repo_id}, or an organisation's")
    if branch is None:
        return
    if not branch or NO_BRANCH.search(branch):
        raise RequestError(f"{branch!r} cannot be the name of a branch")
    if branch.startswith("refs/") or re.fullmatch("[0-9a-f]{40}", branch):
        raise RequestError(f"{branch!r} is no branch to publish to; name one, such as main")


@dataclass(frozen=True)
class Held:
    """What a repository holds already, by name, the commit that it was seen in, and whether it is private; None where
    there is none.
    """

    names: tuple[str, ...] = ()
    head: str | None = None
    private: bool | None = None


@dataclass(frozen=True)
class Place:
    """Where to publish: a model repository, made where it is not there, and in it a branch (main where None)."""

    repo_id: str
    revision: str | None
    private: bool
    create_pr: bool
    api: "HfApi"

    @property
    def url(self) -> str:
        branch = f"/tree/{self.revision}" if self.revision else ""
        return f"{self.api.endpoint}/{self.repo_id}{branch}"

    def is_gated(self, model: str) -> bool:
        """Whether the hub gives a model only to those who accept its licence."""
        from huggingface_hub import errors

        with hub_errors(model):
            try:
                return bool(patiently(lambda: self.api.model_info(model)).gated)
            except errors.GatedRepoError:
                return True
            except errors.RepositoryNotFoundError:
                return False

    def check_card(self, text: str) -> None:
        """Have the hub's own validator look at a card. Raises RequestError with what it finds."""
        from huggingface_hub import ModelCard

        with hub_errors(self.repo_id):
            try:
                patiently(ModelCard(text, ignore_metadata_errors=True).validate)
            except ValueError as error:
                raise RequestError(
                    f"the hub does not accept the card's metadata: {' '.join(str(error).split())}"
                ) from error

    def check_repository(self, done: Mapping[str, Any]) -> Held:
        """What the repository holds already; nothing where there is none.

        done: headpool.json of what is to be published. Raises RequestError where the repository holds another model, is
        public though a private one is asked for, or is not there for a pull request.
        """
        from huggingface_hub import errors

        with hub_errors(self.repo_id):
            try:
                info = patiently(lambda: self.api.model_info(self.repo_id))
            except errors.RepositoryNotFoundError:
                if self.create_pr:
                    raise RequestError(f"there is no repository {self.repo_id} to open a pull request in") from None
                return Held()
            if self.private and not info.private:
                raise RequestError(f"{self.repo_id} exists and is public; make it private in its settings first")
            try:
                head = patiently(lambda: self.api.model_info(self.repo_id, revision=self.revision)).sha
            except errors.RevisionNotFoundError:
                if self.create_pr:
                    raise RequestError(
                        f"{self.repo_id} has no revision {self.revision} to propose changes to"
                    ) from None
                head = info.sha  # a branch that is going to be made of main
            names = self._names(head)
            if not self.create_pr:
                self._refuse_other_content(names, head, done)
            return Held(tuple(sorted(names)), head, info.private)

    def _names(self, revision: str | None) -> set[str]:
        from huggingface_hub.hf_api import RepoFile

        tree = patiently(lambda: list(self.api.list_repo_tree(self.repo_id, recursive=True, revision=revision)))
        return {entry.path for entry in tree if isinstance(entry, RepoFile)}

    def _refuse_other_content(self, held: set[str], revision: str | None, done: Mapping[str, Any]) -> None:
        if held <= HARMLESS:
            return
        remedy = "choose another name, or --create-pr"
        if PROVENANCE not in held:
            raise RequestError(f"{self.repo_id} holds other content already; {remedy}")
        with tempfile.TemporaryDirectory() as folder:
            file = self.api.hf_hub_download(self.repo_id, PROVENANCE, revision=revision, cache_dir=folder)
            theirs = read_provenance(Path(file).parent) or {}
        if _model(theirs) != _model(done):
            old, new = ("{} at {} K/V heads".format(*_model(one)) for one in (theirs, done))
            other = f"another {new}" if old == new else f"{old} already, not {new}"
            raise RequestError(f"{self.repo_id} holds {other}; {remedy}")

    def prepare(self, held: Held, done: Mapping[str, Any]) -> Held:
        """Make the repository and the branch where they are not there, and give what is held then.

        held, done: of `check_repository`. A new repository is looked at again, for somebody else may have made it in
        the meantime. Raises as `hub_errors` and `check_repository` do.
        """
        if self.create_pr:
            return held
        with hub_errors(self.repo_id):
            if held.head is None:
                patiently(lambda: self.api.create_repo(self.repo_id, private=self.private, exist_ok=True))
                held = self.check_repository(done)
            if (branch := self.revision) is not None:
                patiently(lambda: self.api.create_branch(self.repo_id, branch=branch, exist_ok=True))
        if held.head is None:
            raise HeadpoolError(f"{self.repo_id} was made and is not there yet; run the same command again to go on")
        return held

    def upload(
        self,
        files: Mapping[str, Path | bytes],
        gone: Sequence[str],
        message: str,
        parent: str | None,
        progress: Progress | None,
    ) -> "CommitInfo":
        """Send files, and commit them all at once without those that are `gone`. What is up already is not sent again.

        parent: the commit that was looked at; where another has followed it, nothing is committed.

        Raises as `hub_errors` does; nothing is committed then, and the same call goes on.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        with hub_errors(self.repo_id):
            additions = [CommitOperationAdd(name, content) for name, content in files.items()]
            self._send(additions, progress)
            return self._commit([*additions, *map(CommitOperationDelete, gone)], message, parent)

    def _send(self, additions: Sequence["CommitOperationAdd"], progress: Progress | None) -> None:
        """The content of files, before they are committed; small ones travel with the commit."""
        from huggingface_hub.utils.tqdm import disable_progress_bars

        if progress is not None:
            disable_progress_bars()  # the client's own
        small = [one for one in additions if one.upload_info.size <= SMALL]
        done, total = 0, sum(one.upload_info.size for one in additions)
        # Large files one by one: the client's threads, which take several at a time, cannot be interrupted.
        for part in (small, *([one] for one in additions if one.upload_info.size > SMALL)):
            self.api.preupload_lfs_files(
                self.repo_id, part, revision=self.revision, create_pr=self.create_pr, free_memory=False
            )
            done += sum(one.upload_info.size for one in part)
            if progress is not None:
                progress("publish", done, total)

    def _commit(self, operations: Sequence[Any], message: str, head: str | None) -> "CommitInfo":
        """Commit on top of `head`, again where the hub fails; never twice, as `head` has moved once it is there."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self.api.create_commit(
                    self.repo_id,
                    operations,
                    commit_message=message,
                    revision=self.revision,
                    create_pr=self.create_pr,
                    parent_commit=head,
                )
            except Exception as error:
                status = status_of(error)
                lost = status in CONFLICTS or (status is None and _is_network(error))
                if attempt > 1 and lost and (landed := self._landed(message, head)):
                    return landed
                if attempt == ATTEMPTS or self.create_pr or not (lost or (status is not None and status >= 500)):
                    raise
            time.sleep(WAIT * 2 ** (attempt - 1))
        raise AssertionError("the last attempt returns or raises")

    def _landed(self, message: str, head: str | None) -> "CommitInfo | None":
        """The commit that a lost answer was about, None where it did not arrive."""
        from huggingface_hub import CommitInfo

        last = patiently(lambda: self.api.list_repo_commits(self.repo_id, revision=self.revision))[0]
        if last.commit_id == head or last.title != message:
            return None
        url = f"{self.api.endpoint}/{self.repo_id}/commit/{last.commit_id}"
        return CommitInfo(url, commit_message=message, commit_description="", oid=last.commit_id)


def _model(done: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """What makes a published model the same one, made anew: its source and its K/V heads. A folder's name alone says
    little, so that of one its headers' hash counts, too.
    """
    source = done.get("source", {})
    local = source.get("headers_sha256") if source.get("revision") is None else None
    return source.get("model"), done.get("kv_heads"), local
