"""The estimate of a calibration: what its parts are made of, and that nothing starts that would not fit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from walking import stock

from headpool.checkpoint import open_source
from headpool.convert.aligned.estimate import Estimate, Task, check_resources, estimate, free_disk, free_memory
from headpool.convert.aligned.options import Alignment
from headpool.convert.aligned.run import kept_bytes, open_stock
from headpool.convert.plan import plan_conversion
from headpool.errors import RequestError
from headpool.headers import TensorRecord

TASK = Task(windows=8, tokens=32, batch=2)
GIB = 2**30


def of(directory: Path, task: Task = TASK) -> Estimate:
    built = stock(directory)
    return estimate(built.source, built.layout, task)


def test_disk_and_weights_are_counted(tmp_path: Path) -> None:
    found = of(tiny.checkpoint(tmp_path, "qwen2", num_hidden_layers=5))
    attention = 4 * 96 * 96 + 3 * 96
    layer = attention + 3 * 96 * 64 + 2 * 96
    assert found.disk == {"hidden states": 3 * 4 * 8 * 32 * 96, "results": 5 * 4 * attention}
    assert found.memory["decoder layer"] in (4 * layer, 4 * (layer + attention))
    assert found.memory["outside the layers"] == 4 * 96
    assert found.memory_bytes == sum(found.memory.values())


def test_more_work_takes_more(tmp_path: Path) -> None:
    tiny.checkpoint(tmp_path)
    plain = of(tmp_path, replace(TASK, refit=False))
    assert of(tmp_path).flops > plain.flops
    assert of(tmp_path, replace(TASK, heal_steps=100)).flops > of(tmp_path).flops
    assert of(tmp_path, replace(TASK, batch=8)).memory_bytes > of(tmp_path).memory_bytes
    assert of(tmp_path, replace(TASK, heal_steps=1, heal_batch=4096)).memory_bytes > of(tmp_path).memory_bytes
    assert of(tmp_path, replace(TASK, windows=16)).memory == of(tmp_path).memory
    scores = of(tmp_path, replace(TASK, scores=True)).memory["activations"] - of(tmp_path).memory["activations"]
    assert scores >= 4 * 2 * 12 * 32**2, "of a batch, in float32"
    healing = replace(TASK, heal_steps=1, heal_batch=4096)
    more = of(tmp_path, replace(healing, held_out=9)).memory_bytes - of(tmp_path, healing).memory_bytes
    assert more == 8 * 2 * 4 * 32 * 96, "inputs and outputs of the windows held out"
    assert of(tmp_path, replace(TASK, windows=16, refit=False)).flops == pytest.approx(2 * plain.flops)


def test_a_result_on_the_same_disk_counts_where_it_is_larger_than_what_makes_room_for_it(tmp_path: Path) -> None:
    tiny.checkpoint(tmp_path)
    alone = of(tmp_path).disk_bytes
    results = of(tmp_path).disk["results"]
    assert of(tmp_path, replace(TASK, output=100)).disk_bytes == alone
    assert of(tmp_path, replace(TASK, output=2 * alone)).disk_bytes == results + 2 * alone


@pytest.mark.parametrize(("family", "changes", "eager", "masks"), [
    ("llama", {}, False, 0), ("mistral", {}, False, 1), ("granite_swa", {}, True, 1),
])  # fmt: skip
def test_scores_and_masks_are_counted_where_there_are_any(
    tmp_path: Path, family: str, changes: dict[str, Any], eager: bool, masks: int
) -> None:
    plan = plan_conversion(open_source(str(tiny.checkpoint(tmp_path, family, **changes))), kv_heads=4, method="aligned")
    built = open_stock(plan, Alignment(device="cpu"))
    assert built.eager == eager
    assert kept_bytes(plan, built, (10, 32)) == 4 * 10 * 32 * (3 * 96 + masks * 32)
    assert kept_bytes(plan, built, (10**6, 2048)) == 0


def test_a_large_embedding_is_the_worst_moment(tmp_path: Path) -> None:
    built = stock(tiny.checkpoint(tmp_path, dtype=torch.bfloat16))

    def widened(record: TensorRecord) -> TensorRecord:
        return replace(record, shape=(1_000_000, 96)) if "embed_tokens" in record.name else record

    shards = {file: tuple(map(widened, records)) for file, records in built.source.shards.items()}
    found = estimate(replace(built.source, shards=shards), built.layout, TASK)
    assert found.memory["embedding"] == (4 + 2) * 96 * 1_000_000, "in float32, and while it is loaded as it is stored"
    assert "decoder layer" not in found.memory


def test_what_does_not_fit_is_refused_with_the_estimate() -> None:
    needed = Estimate({"decoder layer": 3 * GIB, "process": GIB}, {"hidden states": 2 * GIB}, 0.0)
    check_resources(needed, memory=4 * GIB, disk=2 * GIB, work=Path("work"))
    with pytest.raises(RequestError, match=r"4.00 GiB of memory, 3.00 GiB are free \(decoder layer 3.00 GiB, process"):
        check_resources(needed, memory=3 * GIB, disk=2 * GIB, work=Path("work"))
    with pytest.raises(RequestError, match=r"2.00 GiB of space beside work, 1.00 GiB are free \(hidden states"):
        check_resources(needed, memory=4 * GIB, disk=GIB, work=Path("work"))


def test_what_is_free_is_asked_of_the_system(tmp_path: Path) -> None:
    assert 2**20 < free_memory("cpu") < 2**50
    assert free_disk(tmp_path / "not" / "there") == free_disk(tmp_path) > 0
