"""Models by hub id, all the way through the client, from a hub on the loopback that may fail."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import hub
import hub_http
import pytest
import tiny
import yaml
from huggingface_hub import ModelCard, constants
from typer.testing import CliRunner

from headpool.checkpoint import open_source
from headpool.cli import app
from headpool.convert.run import convert_checkpoint
from headpool.errors import RequestError
from headpool.eval.models import ModelSpec, open_candidate
from headpool.planning import plan
from headpool.publish import publish

CARD = "---\nlicense: mit\nlanguage: en\n---\n# The original\n"


@pytest.fixture
def served(served: hub.Hub, tmp_path: Path) -> hub.Hub:
    """With someone/model, in several files."""
    folder = tiny.checkpoint(tmp_path / "model", tokenizer=True, vocab_size=2048, max_shard_size="500KB")
    (folder / "README.md").write_text(CARD)
    (folder / "pytorch_model.bin").write_bytes(b"not this")
    served.add("someone/model", folder)
    return served


def fetched(served: hub.Hub) -> list[str]:
    return sorted(one.rsplit("/", 1)[1] for one in served.asked if one.startswith("GET") and "/resolve/" in one)


def test_plan_fetches_no_weights(served: hub.Hub) -> None:
    made = plan("someone/model", context=64)
    assert [option.kv_heads for option in made.options] == [12, 6, 4, 3, 2, 1]
    # parameters of the stock class, counted by PyTorch
    assert made.parameters == sum(one.numel() for one in tiny.model("llama", vocab_size=2048).parameters())
    commit = served.repositories["someone/model"].branches["main"][0]
    weights = sum(len(content) for name, content in commit.files.items() if name.endswith(".safetensors"))
    assert weights > 1e6
    ranges = [name for name in fetched(served) if name.endswith(".safetensors")]
    assert ranges, "headers were read"
    assert not list((Path(os.environ["HF_HOME"]) / "hub").rglob("*.safetensors"))


def test_convert_gives_what_a_local_copy_gives_and_says_where_it_is_from(served: hub.Hub, tmp_path: Path) -> None:
    convert_checkpoint("someone/model", tmp_path / "gqa", kv_heads=4)
    convert_checkpoint(str(tmp_path / "model"), tmp_path / "local", kv_heads=4)
    ours, theirs = tiny.tensors(tmp_path / "gqa"), tiny.tensors(tmp_path / "local")
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)
    assert "pytorch_model.bin" not in fetched(served)
    done = json.loads((tmp_path / "gqa" / "headpool.json").read_text())
    sha = served.repositories["someone/model"].branches["main"][0].sha
    assert (done["source"]["model"], done["source"]["revision"]) == ("someone/model", sha)
    card = ModelCard.load(tmp_path / "gqa" / "README.md")
    data = card.data
    assert (data.base_model, data.base_model_relation) == ("someone/model", "finetune")
    assert (data.license, data.language) == ("mit", "en")
    assert f"model: someone/model\nrevision: {sha}\n" in str(card), "the recipe pins the commit"
    assert (tmp_path / "gqa" / "SOURCE_README.md").read_text() == CARD


def test_a_published_model_is_a_model_like_any_other(served: hub.Hub, tmp_path: Path) -> None:
    """Its card is the source's card of what is made of it, and the base is the published model."""
    convert_checkpoint(str(tmp_path / "model"), tmp_path / "gqa", kv_heads=4)
    served.add("me/gqa", tmp_path / "gqa")
    assert open_candidate(ModelSpec("model", "me/gqa")).provenance.label == "converted, not yet uptrained"
    convert_checkpoint("me/gqa", tmp_path / "mqa", kv_heads=1)
    assert (tmp_path / "mqa" / "SOURCE_README.md").read_text() == (tmp_path / "gqa" / "README.md").read_text()
    assert ModelCard.load(tmp_path / "mqa" / "README.md").data.base_model == "me/gqa"


def test_failures_on_the_way(served: hub.Hub) -> None:
    served.fail("/api/models/someone/model/revision/", status=500, times=2)
    served.fail("/resolve/.*/config.json", method="GET", status=500)
    served.fail("/resolve/.*00002", method="GET", after_bytes=70_000)
    served.fail("/resolve/.*00001", method="GET", seconds=0.3)
    source = open_source("someone/model")
    assert [one.times for one in served.failures] == [0] * 4
    for name in source.shards:
        assert (source.directory / name).read_bytes() == served.files("someone/model")[name]
    again = list(fetched(served))
    open_source("someone/model")
    assert fetched(served) == again, "what is here is not fetched again"


def test_a_file_that_broke_off_goes_on_where_it_was(served: hub.Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 14)  # what the client keeps at a time: 10 MB
    served.fail("/resolve/.*00002", method="GET", after_bytes=70_000)
    ranges: list[str] = []
    answer = hub_http.Handler.resolve

    def note(self: Any, **names: str) -> Any:
        if self.command == "GET" and "00002" in names["name"]:
            ranges.append(self.headers.get("Range", ""))
        return answer(self, **names)

    with pytest.MonkeyPatch.context() as patched:
        routes = [(verb, path, note if one is answer else one) for verb, path, one in hub_http.ROUTES]
        patched.setattr(hub_http, "ROUTES", routes)
        open_source("someone/model")
    assert len(ranges) == 2
    assert int(re.fullmatch(r"bytes=(\d+)-", ranges[1])[1]) in range(1 << 14, 70_001), "not from the start"


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"status": 403}, "cannot be reached"),
        ({"status": 500, "times": 10**6}, "cannot be reached"),
        ({"lost": True, "times": 10**6}, "cannot be reached"),
    ],
)
def test_what_does_not_get_better_is_given_up(served: hub.Hub, how: dict[str, Any], says: str) -> None:
    served.fail("/api/models/someone/model/revision/", **how)
    with pytest.raises(RequestError, match=says) as caught:
        open_source("someone/model")
    assert "\n" not in str(caught.value)
    assert len(served.asked) < 20


def test_private_and_gated_models(served: hub.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served.add("someone/gated", tmp_path / "model", gated=True)
    served.add("someone/private", tmp_path / "model", private=True)
    assert open_source("someone/gated").config["num_key_value_heads"] == 12
    assert open_source("someone/private").config["num_key_value_heads"] == 12
    shutil.rmtree(tmp_path / "home")
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(RequestError, match="someone/gated is gated"):
        open_source("someone/gated")
    with pytest.raises(RequestError, match="no such model on the hub: someone/private"):
        open_source("someone/private")
    with pytest.raises(RequestError, match="has no revision 'v9'"):
        open_source("someone/model", "v9")


def headpool(served: hub.Hub, home: Path, *arguments: str, cwd: Path) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "headpool", *arguments, "--json"],
        capture_output=True, text=True, check=False, cwd=cwd, env=os.environ | served.environment(home),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_command_line_by_hub_id_and_a_report_on_the_published_card(
    served: hub.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.add("someone/quickstart", tiny.QUICKSTART)
    (tmp_path / "text.txt").write_text(tiny.NOVEL.read_text()[:2000])
    home = tmp_path / "fresh"
    assert headpool(served, home, "plan", "someone/quickstart", cwd=tmp_path)["kv_heads"] == 8
    headpool(served, home, "convert", "someone/quickstart", "gqa", "--kv-heads", "2", cwd=tmp_path)
    monkeypatch.chdir(tmp_path)
    arguments = ["eval", "gqa", "--baseline", "someone/quickstart", "--data", "text.txt", "--out", "report", "--json"]
    report = json.loads(CliRunner().invoke(app, arguments, catch_exceptions=False).stdout)
    sent = publish("gqa", "me/gqa", report=Path("report"))
    assert sent.base_model == "someone/quickstart"
    files = served.files("me/gqa")
    assert {"README.md", "report.json", "quality-against-cache.png", "cache-against-context.png"} <= set(files)
    data = ModelCard(files["README.md"].decode()).data
    recipe = re.search(r"```yaml\n(.*?)```", files["README.md"].decode(), re.DOTALL)
    assert recipe is not None
    assert re.search(f"#   text.txt  {hashlib.sha256((tmp_path / 'text.txt').read_bytes()).hexdigest()}", recipe[1])
    assert yaml.safe_load(recipe[1])["eval"] == {
        "data": "text.txt", "window": 512, "stride": 512, "batch_size": 8, "dtype": "float32",
    }  # fmt: skip
    assert [one.metric_value for one in data.eval_results] == [one["perplexity"] for one in report["models"]][::-1]
    assert str(tmp_path) not in files["report.json"].decode()
    assert not (tmp_path / "gqa" / "report.json").exists(), "publishing changes nothing here"
    (tmp_path / "other").mkdir()
    convert_checkpoint("someone/quickstart", tmp_path / "other" / "gqa", kv_heads=1)
    with pytest.raises(RequestError, match=r"is not what .* measured any more"):
        publish("other/gqa", "me/mqa", report=Path("report"))
