"""Downloads from the hub: one commit, the right files, one clear line for every failure. The client is replaced."""

import errno
import fnmatch
import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import tiny
from huggingface_hub import errors

from headpool.checkpoint import open_source
from headpool.errors import HeadpoolError, RequestError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """A repository whose files `snapshot_download` copies, as the client does, into a snapshot by commit."""

    def __init__(self, repository: Path, cache: Path) -> None:
        self.repository, self.snapshot = repository, cache / "snapshots" / COMMIT
        self.asked: list[str | None] = []

    def snapshot_download(self, model: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        self.asked.append(revision)
        for path in self.repository.rglob("*"):
            name = str(path.relative_to(self.repository))
            if path.is_file() and any(fnmatch.fnmatchcase(name, pattern) for pattern in allow_patterns):
                (self.snapshot / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, self.snapshot / name)
        return str(self.snapshot)

    def fetched(self) -> set[str]:
        return {path.name for path in self.snapshot.rglob("*") if path.is_file()}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    repository = tiny.checkpoint(tmp_path / "repository", "llama", max_shard_size="100KB", tokenizer=True)
    for name in ("LICENSE", "Notice.txt", "README.md", "consolidated.safetensors", "fp16.safetensors", "x.py"):
        (repository / name).write_text("x")
    fake = FakeHub(repository, tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    return fake


def test_fetches_what_the_index_names_and_what_goes_along(hub: FakeHub) -> None:
    source = open_source("someone/model", "main")
    index = json.loads((hub.repository / "model.safetensors.index.json").read_text())
    assert hub.fetched() == {
        *index["weight_map"].values(), "model.safetensors.index.json", "config.json", "generation_config.json",
        "tokenizer.json", "tokenizer_config.json", "LICENSE", "Notice.txt", "README.md",
    }  # fmt: skip
    assert set(source.tensors) == set(index["weight_map"])
    assert (source.name, source.revision) == ("someone/model", COMMIT)
    assert hub.asked[0] == "main"
    assert set(hub.asked[1:]) == {COMMIT}, "a branch that moves meanwhile must not mix two versions"


def test_pickles_only_where_there_are_no_safetensors(hub: FakeHub) -> None:
    import torch

    torch.save(tiny.tensors(hub.repository), hub.repository / "pytorch_model.bin")
    open_source("someone/model")
    assert "pytorch_model.bin" not in hub.fetched()
    shutil.rmtree(hub.snapshot)
    for path in hub.repository.glob("*.safetensors*"):
        path.unlink()
    assert len(open_source("someone/model").tensors) > 10
    assert "pytorch_model.bin" in hub.fetched()


def response_error(kind: type[errors.HfHubHTTPError]) -> Exception:
    error = kind.__new__(kind)
    Exception.__init__(error, "a long story")
    return error


@pytest.mark.parametrize(
    ("failure", "kind", "says"),
    [
        (response_error(errors.GatedRepoError), RequestError, "someone/model is gated"),
        (response_error(errors.RepositoryNotFoundError), RequestError, "no such model on the hub: someone/model"),
        (response_error(errors.RevisionNotFoundError), RequestError, "has no revision 'v2'"),
        (errors.LocalEntryNotFoundError("offline"), RequestError, "the hub cannot be reached: someone/model"),
        (ConnectionError("reset"), RequestError, "the hub cannot be reached"),
        (TimeoutError("slow"), RequestError, "the hub cannot be reached"),
        (OSError(errno.ENOSPC, "full"), HeadpoolError, "the disk filled up while someone/model was downloaded"),
    ],
)
def test_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, failure: Exception, kind: type[HeadpoolError], says: str
) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise failure

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(kind, match=says) as caught:
        open_source("someone/model", "v2")
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)


@pytest.mark.network
def test_a_real_model_of_the_hub() -> None:
    source = open_source("hf-internal-testing/tiny-random-LlamaForCausalLM")
    assert source.config["model_type"] == "llama"
    assert source.revision is not None and len(source.revision) == 40
