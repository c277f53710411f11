"""What the tests of publishing share: a converted checkpoint, and a hub to publish it to."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import here
import hub
import pytest
import tiny

from headpool import hub as client
from headpool.convert.run import convert_checkpoint


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted checkpoint in three files, with card and licence, beside its source `model`. Not to be changed."""
    folder = tmp_path_factory.mktemp("made")
    model = tiny.checkpoint(folder / "model", tokenizer=True, vocab_size=2048, max_shard_size="500KB")
    (model / "README.md").write_text("---\nlicense: mit\n---\n# The original\n")
    (model / "LICENSE").write_text("a licence")
    with pytest.MonkeyPatch.context() as patched:
        here.check_here(patched)
        convert_checkpoint(str(model), folder / "gqa", kv_heads=4)
    return folder / "gqa"


@pytest.fixture
def mine(made: Path, tmp_path: Path) -> Path:
    """A copy to change, under the name that its card has."""
    return Path(shutil.copytree(made, tmp_path / "gqa"))


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[hub.Hub]:
    """A hub for this process, of whose failures it does not rest."""
    here.check_here(monkeypatch)
    monkeypatch.setattr(client, "WAIT", 0.0)
    monkeypatch.setattr("headpool.uploading.WAIT", 0.0)
    with hub.serve() as one:
        one.client(monkeypatch, tmp_path / "home")
        yield one
