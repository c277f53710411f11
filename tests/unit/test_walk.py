"""Walking layer by layer gives what the stock model gives, and a killed walk goes on where it was."""

from pathlib import Path

import pytest
import tiny
import torch
from walking import KINDS, WINDOWS, stock

from headpool.convert.aligned.walk import Walk
from headpool.convert.aligned.work import Work
from headpool.errors import RequestError


def hidden_states(directory: Path) -> tuple[torch.Tensor, ...]:
    """What each layer of the whole model gets, from transformers itself."""
    model = tiny.stock_model(directory)
    with torch.no_grad():
        result: tuple[torch.Tensor, ...] = model(WINDOWS, output_hidden_states=True).hidden_states
    return result


@pytest.mark.parametrize("family", KINDS)
def test_a_walk_sees_what_the_stock_model_computes(family: str, tmp_path: Path) -> None:
    tiny.checkpoint(tmp_path, family, num_hidden_layers=3, **KINDS[family])
    expected = hidden_states(tmp_path)
    walk = Walk(stock(tmp_path), WINDOWS, batch=2)
    seen = 0
    for layer in walk:
        for rows in walk.batches():
            torch.testing.assert_close(
                walk.hidden(layer.index, rows), expected[layer.index][rows], rtol=1e-6, atol=1e-6
            )
            seen += rows.stop - rows.start
    assert seen == 3 * len(WINDOWS)


@pytest.mark.parametrize("files", ["5GB", "100KB"])
def test_pickles_and_shards_are_walked_as_well(files: str, tmp_path: Path) -> None:
    folder = tiny.checkpoint(tmp_path / "source", "qwen2", max_shard_size=files)
    expected = hidden_states(folder)
    if files == "5GB":
        torch.save(tiny.tensors(folder), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    for layer in (walk := Walk(stock(folder), WINDOWS, batch=5)):
        found = walk.hidden(layer.index, slice(0, 5))
        torch.testing.assert_close(found, expected[layer.index], rtol=1e-6, atol=1e-6)


def run_of(work: Work, folder: Path, stop: int | None = None) -> dict[int, torch.Tensor]:
    """What each layer of a walk gets, up to one in which the run is killed, or to the end."""
    walk = Walk(stock(folder), WINDOWS, batch=2, work=work)
    seen = {}
    for layer in walk:
        seen[layer.index] = walk.hidden(layer.index, slice(0, 5)).clone()
        layer.advance(record=layer.index % 2 == 0)
        if layer.index == stop:
            break
    return seen


def test_a_killed_walk_goes_on_at_its_layer(tmp_path: Path) -> None:
    folder = tiny.checkpoint(tmp_path / "source", "gemma3_text", num_hidden_layers=4, sliding_window=8)
    with Work(tmp_path / "whole", {}) as work:
        expected = run_of(work, folder)
    for stop in range(4):
        with Work(tmp_path / f"killed-{stop}", {}) as work:
            run_of(work, folder, stop)
        with Work(tmp_path / f"killed-{stop}", {}) as work:
            rest = run_of(work, folder)
        assert list(rest) == list(range(stop, 4))
        assert all(torch.equal(rest[index], expected[index]) for index in rest)
    with Work(tmp_path / "killed-2", {"another": "run"}) as work:
        assert len(run_of(work, folder)) == 4


def test_weights_that_are_missing_or_broken_are_named(tmp_path: Path) -> None:
    tiny.checkpoint(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    kept = tiny.tensors(tmp_path)[name]
    tiny.rewrite(tmp_path, {name: torch.full_like(kept, 1e38)})
    with pytest.raises(RequestError, match=r"layer 1 of .* not finite"):
        for layer in Walk(stock(tmp_path), WINDOWS, batch=2):
            layer.advance()
    tiny.rewrite(tmp_path, {name: None})
    with pytest.raises(RequestError, match=r"up_proj.weight' in layer 1 is missing"):
        for _ in Walk(stock(tmp_path), WINDOWS, batch=2):
            pass


def test_a_work_directory_serves_one_process_and_nothing_else(tmp_path: Path) -> None:
    with Work(tmp_path / "work", {}), pytest.raises(RequestError, match="another process"):
        Work(tmp_path / "work", {})
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(RequestError, match="holds something else"):
        Work(tmp_path, {})
    assert (tmp_path / "letter.txt").exists()


def test_what_was_kept_is_found_by_the_same_run_alone(tmp_path: Path) -> None:
    work = tmp_path / "work"
    tensors = {"a": torch.arange(6.0).view(2, 3).mT, "b": torch.ones(2, dtype=torch.bfloat16)}
    with Work(work, {"seed": 1}) as held:
        held.save("layer", tensors, {"loss": 0.5, "partition": [[0, 2], [1, 3]]})
        held.path("other.partial").write_text("half")
    with Work(work, {"seed": 1}) as held:
        found = held.load("layer")
        assert found is not None
        assert found[1] == {"loss": 0.5, "partition": [[0, 2], [1, 3]]}
        assert all(torch.equal(found[0][name], tensors[name]) for name in tensors)
        assert held.load("other") is None
    with Work(work, {"seed": 2}) as held:
        assert held.load("layer") is None
