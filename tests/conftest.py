import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# pytest-xdist starts a process per core, and each process's threads would spin against the others'.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
import transformers
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
