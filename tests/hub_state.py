"""What the hub on the loopback knows, and what it is told to do wrong."""

import hashlib
import itertools
import re
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

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
