import os
import shutil
import tempfile

os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="headpool-tests-")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# pytest-xdist starts a process per core, and each process's threads would spin against the others'.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path

import here
import pytest
import tiny
import torch
import transformers
from browser import BROWSER
from hypothesis import settings

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
settings.register_profile("default", deadline=None)
settings.load_profile("default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "network" in item.keywords and not os.environ.get("HEADPOOL_NETWORK"):
            item.add_marker(pytest.mark.skip(reason="HEADPOOL_NETWORK is not set"))
        if "serving" in item.keywords and not os.environ.get("HEADPOOL_VLLM_PYTHON"):
            item.add_marker(pytest.mark.skip(reason="run by `make serving`"))
        if "browser" in item.keywords and BROWSER is None:
            item.add_marker(pytest.mark.skip(reason="no Chromium and no Chrome is installed"))


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["HF_DATASETS_CACHE"], ignore_errors=True)


@pytest.fixture
def quick_check(monkeypatch: pytest.MonkeyPatch) -> None:
    here.check_here(monkeypatch)


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A float32 MHA checkpoint of 12 heads for each family, with a tokenizer, a card, a licence and things to leave
    behind.
    """
    root = tmp_path_factory.mktemp("sources")
    made = {}
    for family in tiny.FAMILIES:
        made[family] = folder = tiny.checkpoint(root / family, family, tokenizer=True)
        (folder / "README.md").write_text("a card")
        (folder / "LICENSE").write_text("a licence")
        (folder / "chat_template.jinja").write_text("{{ messages }}")
        for stray in (
            "optimizer.pt",
            "consolidated.safetensors",
            "modeling_x.py",
            "model.gguf",
            "training_args.bin",
        ):
            (folder / stray).write_bytes(b"left behind")
    return made
