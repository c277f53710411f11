"""A hub on the loopback: what huggingface_hub's client asks of the real one, with Xet switched off, kept in memory.

    with hub.serve() as served:
        served.client(monkeypatch, tmp_path)        # the client in this process
        subprocess.run(..., env=os.environ | served.environment(tmp_path))
        served.fail("/api/models/me/model/commit/", status=500, times=2)

It keeps repositories with branches and commits, objects of large files, pull requests; refuses what has no token, and
checks a card's metadata as far as tests need it. `asked` tells what was asked for, `received` which contents came.
Not spoken: Xet, multipart uploads, anything but models.
"""

import base64
import contextlib
import hashlib
import itertools
import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import huggingface_hub
import pytest
import yaml

TOKEN = "hf_" + "x" * 8
USER = "me"

Tree = dict[str, bytes]


@dataclass
class Commit:
    sha: str
    title: str
    files: Tree


@dataclass
class Repository:
    """Branches, each a list of commits, the last one first; `pulls` are the trees that pull requests propose."""

    private: bool = False
    gated: bool = False
    branches: dict[str, list[Commit]] = field(default_factory=dict)
    pulls: list[Tree] = field(default_factory=list)
    large: set[str] = field(default_factory=set)
    """Names of the files that were uploaded as large ones."""


@dataclass
class Failure:
    """What happens instead of an answer, or after it: a status; a connection dropped after so many bytes of what goes
    either way; seconds of waiting. `lost`: the request is carried out, and its answer never arrives.
    """

    pattern: str
    times: int
    status: int | None = None
    after_bytes: int | None = None
    seconds: float = 0.0
    lost: bool = False
    method: str = ""


class Hub:
    """What the server knows, and what it is told to do wrong."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.received: list[str] = []
        self.refused: set[str] = set()
        self.failures: list[Failure] = []
        self.lock = threading.Lock()
        self._shas = (hashlib.sha1(str(number).encode()).hexdigest() for number in itertools.count())
        self.url = ""

    def add(
        self, repo_id: str, folder: Path | None = None, *, private: bool = False, gated: bool = False
    ) -> Repository:
        """A repository with what a folder holds; its large files are weights and tokenizers, as the hub has it."""
        repository = self.repositories[repo_id] = Repository(private, gated)
        files = {".gitattributes": b"*.safetensors filter=lfs\n"}
        for path in sorted(folder.rglob("*")) if folder is not None else ():
            if path.is_file():
                files[str(path.relative_to(folder))] = path.read_bytes()  # type: ignore[arg-type]
        repository.large = {name for name in files if self.is_large(name)}
        repository.branches["main"] = [Commit(next(self._shas), "initial commit", files)]
        return repository

    def files(self, repo_id: str, revision: str = "main") -> Tree:
        return self.repositories[repo_id].branches[revision][0].files

    def fail(self, pattern: str, *, times: int = 1, **how: Any) -> None:
        """Do wrong with the next `times` requests whose path matches a regular expression."""
        self.failures.append(Failure(pattern, times, **how))

    def failure(self, method: str, path: str) -> Failure | None:
        with self.lock:
            for one in self.failures:
                if one.times > 0 and one.method in ("", method) and re.search(one.pattern, path):
                    one.times -= 1
                    return one
        return None

    def commit(self, repo_id: str, revision: str, title: str, files: Tree) -> str:
        sha = next(self._shas)
        self.repositories[repo_id].branches[revision].insert(0, Commit(sha, title, files))
        return sha

    @staticmethod
    def is_large(name: str) -> bool:
        return name.endswith((".safetensors", ".png", ".bin")) or name == "tokenizer.json"

    def find(self, repo_id: str, revision: str) -> Commit | None:
        repository = self.repositories[repo_id]
        if revision in repository.branches:
            return repository.branches[revision][0]
        commits = (one for branch in repository.branches.values() for one in branch)
        return next((one for one in commits if one.sha == revision), None)

    def environment(self, home: Path) -> dict[str, str]:
        """What a process needs in its environment to take this hub for the real one."""
        return {
            "HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1",
        }  # fmt: skip

    def client(self, patched: pytest.MonkeyPatch, home: Path) -> None:
        """Have the client in this process, whose settings were read long ago, take this hub for the real one."""
        from huggingface_hub import constants
        from huggingface_hub.utils import _http

        for name, value in self.environment(home).items():
            patched.setenv(name, value)
        settings = {
            "ENDPOINT": self.url, "HUGGINGFACE_CO_URL_TEMPLATE": self.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True, "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"), "HF_TOKEN_PATH": str(home / "token"), "HF_HUB_DISABLE_TELEMETRY": True,
        }  # fmt: skip
        for name, value in settings.items():
            patched.setattr(constants, name, value)
        patched.setattr(huggingface_hub.hf_api.api, "endpoint", self.url)
        patched.setattr(_http, "time", SimpleNamespace(sleep=lambda seconds: None, time=time.time))
        huggingface_hub.close_session()


@contextlib.contextmanager
def serve() -> Iterator[Hub]:
    """A hub that listens while the block runs."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _DroppedError(Exception):
    """The connection is to be closed without another byte."""


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"
    repo = r"(?P<repo>[\w.-]+/[\w.-]+)"

    def log_message(self, *_: Any) -> None:
        pass

    def handle_one_request(self) -> None:
        with contextlib.suppress(ConnectionError, _DroppedError, ValueError):
            super().handle_one_request()
            return
        self.close_connection = True

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

    def _serve(self) -> None:
        url = urlsplit(self.path)
        path, self.query = url.path, parse_qs(url.query)
        self.hub.asked.append(f"{self.command} {path}")
        self.wrong = self.hub.failure(self.command, path)
        if self.wrong:
            time.sleep(self.wrong.seconds)
        self.body = self._read()
        if self.wrong and self.wrong.status:
            self._send(self.wrong.status, {"error": "told to fail"})
            return
        for method, pattern, answer in ROUTES:
            if method == self.command and (match := re.fullmatch(pattern, path)):
                with self.hub.lock:
                    status, content, headers = answer(
                        self, **{key: unquote(one) for key, one in match.groupdict().items()}
                    )
                if self.wrong and self.wrong.lost:
                    raise _DroppedError
                self._send(status, content, headers)
                return
        self._send(404, {"error": f"the hub of the tests does not speak {self.command} {path}"})

    def _read(self) -> bytes:
        """The body, its length given or in chunks; or as much of it as a failure lets through."""
        most = self.wrong.after_bytes if self.wrong and self.command == "PUT" else None
        if most is not None:
            self.rfile.read(most)
            raise _DroppedError
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _send(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        headers = {"Content-Type": "application/json", "Content-Length": str(len(data)), **(headers or {})}
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.wrong and self.wrong.after_bytes is not None:
            self.wfile.write(data[: self.wrong.after_bytes])
            self.wfile.flush()
            raise _DroppedError
        self.wfile.write(data)

    # Answers: (status, content, headers)

    @property
    def known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _error(self, status: int, code: str) -> tuple[int, Any, dict[str, str]]:
        return status, {"error": code}, {"X-Error-Code": code, "X-Error-Message": code}

    def _may_see(self, repo: str) -> bool:
        return repo in self.hub.repositories and (self.known or not self.hub.repositories[repo].private)

    def _commit_of(self, repo: str, revision: str) -> Commit | tuple[int, Any, dict[str, str]]:
        if not self._may_see(repo):
            return self._error(404 if self.known else 401, "RepoNotFound")
        return self.hub.find(repo, revision) or self._error(404, "RevisionNotFound")

    def whoami(self) -> tuple[int, Any, dict[str, str]]:
        if not self.known:
            return 401, {"error": "Invalid user token."}, {}
        return 200, {"name": USER, "type": "user", "auth": {"accessToken": {"role": "write"}}}, {}

    def validate(self) -> tuple[int, Any, dict[str, str]]:
        """The rules of the hub's validator that cards have run into."""
        content = json.loads(self.body)["content"]
        found = re.match(r"---\r?\n(.*?)\r?\n---", content, re.DOTALL)
        data = yaml.safe_load(found[1]) if found else {}
        faults = []
        if isinstance(data.get("license"), str) and not re.fullmatch(r"[a-z0-9.-]+", data["license"]):
            faults.append('"license" must be one of [apache-2.0, mit, ...]')
        for base in [data["base_model"]] if isinstance(data.get("base_model"), str) else data.get("base_model") or []:
            if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", base):
                faults.append(
                    f'"base_model" with value "{base}" is not valid. Use a model id from https://hf.co/models.'
                )
        if "model-index" in data and not all("name" in one for one in data["model-index"]):
            faults.append('"model-index[0].name" is required')
        if faults:
            return 400, {"errors": [{"message": one} for one in faults], "warnings": []}, {}
        return 200, {"errors": [], "warnings": []}, {}

    def create(self) -> tuple[int, Any, dict[str, str]]:
        asked = json.loads(self.body)
        repo = f"{asked.get('organization') or USER}/{asked['name']}"
        if not self.known:
            return 401, {"error": "Invalid user token."}, {}
        if repo in self.hub.repositories:
            return 409, {"error": "You already created this model repo", "url": f"{self.hub.url}/{repo}"}, {}
        if not repo.startswith(f"{USER}/"):
            return 403, {"error": "You don't have the rights to create a model under this namespace"}, {}
        private = asked.get("private") or asked.get("visibility") == "private"
        self.hub.add(repo, private=bool(private))
        return 200, {"url": f"{self.hub.url}/{repo}", "name": repo, "id": repo}, {}

    def info(self, repo: str, revision: str = "main") -> tuple[int, Any, dict[str, str]]:
        commit = self._commit_of(repo, revision)
        if not isinstance(commit, Commit):
            return commit
        held = self.hub.repositories[repo]
        siblings = [{"rfilename": name} for name in commit.files]
        gated = "auto" if held.gated else False
        values = {"_id": "0", "id": repo, "modelId": repo, "sha": commit.sha, "private": held.private, "gated": gated}
        return 200, {**values, "tags": [], "downloads": 0, "likes": 0, "siblings": siblings}, {}

    def _entry(self, repo: str, name: str, content: bytes) -> dict[str, Any]:
        entry = {"type": "file", "path": name, "size": len(content), "oid": _git_sha(content)}
        if name in self.hub.repositories[repo].large:
            entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
        return entry

    def tree(self, repo: str, revision: str) -> tuple[int, Any, dict[str, str]]:
        commit = self._commit_of(repo, revision)
        if not isinstance(commit, Commit):
            return commit
        return 200, [self._entry(repo, name, content) for name, content in commit.files.items()], {}

    def paths(self, repo: str, revision: str) -> tuple[int, Any, dict[str, str]]:
        commit = self._commit_of(repo, revision)
        if not isinstance(commit, Commit):
            return commit
        form = parse_qs(self.body.decode())
        wanted = form.get("paths") or json.loads(self.body).get("paths", [])
        return 200, [self._entry(repo, one, commit.files[one]) for one in wanted if one in commit.files], {}

    def commits(self, repo: str, revision: str) -> tuple[int, Any, dict[str, str]]:
        rows = self.hub.repositories[repo].branches[revision]
        date = "2026-01-01T00:00:00.000Z"
        return (
            200,
            [{"id": one.sha, "authors": [], "date": date, "title": one.title, "message": ""} for one in rows],
            {},
        )

    def _may_write(self, repo: str) -> tuple[int, Any, dict[str, str]] | None:
        if not self.known:
            return 401, {"error": "Invalid user token."}, {}
        if repo not in self.hub.repositories:
            return self._error(404, "RepoNotFound")
        if not repo.startswith(f"{USER}/") and "create_pr" not in self.query:
            return 403, {"error": "Forbidden"}, {}
        return None

    def branch(self, repo: str, revision: str) -> tuple[int, Any, dict[str, str]]:
        held = self.hub.repositories[repo]
        if refused := self._may_write(repo):
            return refused
        if revision in held.branches:
            return 409, {"error": "Reference already exists"}, {}
        held.branches[revision] = list(held.branches["main"])
        return 200, {}, {}

    def preupload(self, repo: str, revision: str) -> tuple[int, Any, dict[str, str]]:
        if refused := self._may_write(repo):
            return refused
        commit = self.hub.find(repo, revision)
        files = []
        for one in json.loads(self.body)["files"]:
            held = commit.files.get(one["path"]) if commit else None
            large = self.hub.is_large(one["path"])
            oid = None if held is None else hashlib.sha256(held).hexdigest() if large else _git_sha(held)
            mode = "lfs" if large else "regular"
            files.append({"path": one["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return 200, {"files": files, "commitOid": commit.sha if commit else None}, {}

    def batch(self, repo: str) -> tuple[int, Any, dict[str, str]]:
        if not self.known or repo not in self.hub.repositories:
            return 401, {"error": "Invalid user token."}, {}
        objects = []
        for one in json.loads(self.body)["objects"]:
            actions = {"upload": {"href": f"{self.hub.url}/objects/{one['oid']}"}}
            held = one["oid"] in self.hub.objects
            objects.append({"oid": one["oid"], "size": one["size"], **({} if held else {"actions": actions})})
        return 200, {"transfer": "basic", "objects": objects}, {"Content-Type": "application/vnd.git-lfs+json"}

    def store(self, oid: str) -> tuple[int, Any, dict[str, str]]:
        if hashlib.sha256(self.body).hexdigest() != oid:
            return 400, {"error": "the content is not what was announced"}, {}
        self.hub.objects[oid] = self.body
        self.hub.received.append(oid)
        return 200, b"", {"ETag": f'"{oid}"'}

    def commit(self, repo: str, revision: str) -> tuple[int, Any, dict[str, str]]:
        if refused := self._may_write(repo):
            return refused
        lines = [json.loads(line) for line in self.body.splitlines()]
        header, held = lines[0]["value"], self.hub.repositories[repo]
        head = self.hub.find(repo, revision)
        if head is None:
            return self._error(404, "RevisionNotFound")
        if header.get("parentCommit") not in (None, head.sha):
            return 412, {"error": "A commit has happened since. Please refresh and try again."}, {}
        files = dict(head.files)
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    return 400, {"error": f"LFS object {value['oid']} does not exist"}, {}
                files[value["path"]] = self.hub.objects[value["oid"]]
                held.large.add(value["path"])
            elif files.pop(value["path"], None) is None:
                return self._error(404, "EntryNotFound")
        values: dict[str, Any] = {"success": True}
        if "create_pr" in self.query:
            held.pulls.append(files)
            values |= {"commitOid": "0" * 40, "pullRequestUrl": f"{self.hub.url}/{repo}/discussions/{len(held.pulls)}"}
        else:
            values["commitOid"] = self.hub.commit(repo, revision, header["summary"], files)
        return 200, {**values, "commitUrl": f"{self.hub.url}/{repo}/commit/{values['commitOid']}"}, {}

    def resolve(self, repo: str, revision: str, name: str) -> tuple[int, Any, dict[str, str]]:
        commit = self._commit_of(repo, revision)
        if not isinstance(commit, Commit):
            return commit
        if self.hub.repositories[repo].gated and not self.known:
            return self._error(401, "GatedRepo")
        if name not in commit.files:
            status, content, headers = self._error(404, "EntryNotFound")
            return status, content, {**headers, "X-Repo-Commit": commit.sha}
        content = commit.files[name]
        large = name in self.hub.repositories[repo].large
        oid = hashlib.sha256(content).hexdigest() if large else _git_sha(content)
        headers = {"X-Repo-Commit": commit.sha, "ETag": f'"{oid}"', "Content-Type": "application/octet-stream"}
        headers |= {"Accept-Ranges": "bytes"}
        if large:
            headers |= {"X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(len(content))}
        if found := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(found[1]), min(int(found[2] or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            return 206, content[first : last + 1], headers
        return 200, content, headers


def _git_sha(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


_MODEL = f"/api/models/{_Handler.repo}"
_REVISION = "(?P<revision>[^/]+)"
ROUTES = [
    ("GET", "/api/whoami-v2", _Handler.whoami),
    ("POST", "/api/validate-yaml", _Handler.validate),
    ("POST", "/api/repos/create", _Handler.create),
    ("GET", _MODEL, _Handler.info),
    ("GET", f"{_MODEL}/revision/{_REVISION}", _Handler.info),
    ("GET", f"{_MODEL}/tree/{_REVISION}", _Handler.tree),
    ("GET", f"{_MODEL}/commits/{_REVISION}", _Handler.commits),
    ("POST", f"{_MODEL}/paths-info/{_REVISION}", _Handler.paths),
    ("POST", f"{_MODEL}/branch/{_REVISION}", _Handler.branch),
    ("POST", f"{_MODEL}/preupload/{_REVISION}", _Handler.preupload),
    ("POST", f"{_MODEL}/commit/{_REVISION}", _Handler.commit),
    ("POST", f"/{_Handler.repo}\\.git/info/lfs/objects/batch", _Handler.batch),
    ("PUT", "/objects/(?P<oid>[0-9a-f]{64})", _Handler.store),
    ("HEAD", f"/{_Handler.repo}/resolve/{_REVISION}/(?P<name>.+)", _Handler.resolve),
    ("GET", f"/{_Handler.repo}/resolve/{_REVISION}/(?P<name>.+)", _Handler.resolve),
]
