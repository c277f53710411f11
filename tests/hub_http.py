"""The hub's API as huggingface_hub's client uses it, spoken from what hub_state.py keeps."""

import base64
import contextlib
import hashlib
import json
import re
import time
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml
from hub_state import TOKEN, USER, Commit, Hub


class _DroppedError(Exception):
    """The connection is to be closed without another byte."""


class Handler(BaseHTTPRequestHandler):
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


_MODEL = f"/api/models/{Handler.repo}"
_REVISION = "(?P<revision>[^/]+)"
ROUTES = [
    ("GET", "/api/whoami-v2", Handler.whoami),
    ("POST", "/api/validate-yaml", Handler.validate),
    ("POST", "/api/repos/create", Handler.create),
    ("GET", _MODEL, Handler.info),
    ("GET", f"{_MODEL}/revision/{_REVISION}", Handler.info),
    ("GET", f"{_MODEL}/tree/{_REVISION}", Handler.tree),
    ("GET", f"{_MODEL}/commits/{_REVISION}", Handler.commits),
    ("POST", f"{_MODEL}/paths-info/{_REVISION}", Handler.paths),
    ("POST", f"{_MODEL}/branch/{_REVISION}", Handler.branch),
    ("POST", f"{_MODEL}/preupload/{_REVISION}", Handler.preupload),
    ("POST", f"{_MODEL}/commit/{_REVISION}", Handler.commit),
    ("POST", f"/{Handler.repo}\\.git/info/lfs/objects/batch", Handler.batch),
    ("PUT", "/objects/(?P<oid>[0-9a-f]{64})", Handler.store),
    ("HEAD", f"/{Handler.repo}/resolve/{_REVISION}/(?P<name>.+)", Handler.resolve),
    ("GET", f"/{Handler.repo}/resolve/{_REVISION}/(?P<name>.+)", Handler.resolve),
]
