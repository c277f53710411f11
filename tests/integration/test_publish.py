"""`headpool publish` against a hub on the loopback: what goes up, and where."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import here
import hub
import pytest
import tiny
import torch
import transformers
from huggingface_hub import ModelCard
from published import LARGE, PUBLISHED
from typer.testing import CliRunner

from headpool.cli import app
from headpool.convert.run import convert_checkpoint
from headpool.errors import HeadpoolError
from headpool.publish import publish

STRAYS = (
    "optimizer.pt",
    "train.log",
    ".env",
    "tokenizer.pkl",
    "vocab.sqlite",
    "pytorch_model.bin",
    "cache/config.json",
)


def littered(folder: Path) -> Path:
    """With what must not go up beside what does."""
    (folder / "cache").mkdir()
    for name in STRAYS:
        (folder / name).write_bytes(b"stays")
    return folder


def test_what_goes_up_and_opens_again(made: Path, mine: Path, served: hub.Hub) -> None:
    seen: list[Any] = []
    result = publish(littered(mine), "me/gqa", announce=seen.append)
    files = served.files("me/gqa")
    assert set(files) == {".gitattributes", *PUBLISHED}
    for name in PUBLISHED - {"README.md"}:
        assert files[name] == (made / name).read_bytes(), name
    assert result.url == f"{served.url}/me/gqa"
    assert result.commit == served.repositories["me/gqa"].branches["main"][0].sha
    assert set(result.files) == PUBLISHED == set(seen[0].files)
    assert set(result.left_out) == set(STRAYS)
    assert len(served.received) == len(set(served.received)) == LARGE
    data = ModelCard(files["README.md"].decode()).data
    assert data.license == "mit"
    snippet = re.search(r"```python\n(.*?)```", files["README.md"].decode(), re.DOTALL)
    assert snippet is not None
    assert 'from_pretrained("me/gqa")' in snippet[1]
    space: dict[str, Any] = {}
    exec(snippet[1], space)
    assert isinstance(space["model"], transformers.LlamaForCausalLM)
    original = tiny.stock_model(made)
    torch.testing.assert_close(tiny.logits(space["model"].float()), tiny.logits(original), rtol=0, atol=0)


def test_again_sends_nothing(made: Path, served: hub.Hub) -> None:
    first = publish(made, "me/gqa")
    received = list(served.received)
    second = publish(made, "me/gqa")
    assert served.received == received
    assert first.commit == second.commit
    assert len(served.repositories["me/gqa"].branches["main"]) == 2, "the hub's own commit and ours"


def test_only_what_changed_is_committed_and_old_weights_go(mine: Path, served: hub.Hub, tmp_path: Path) -> None:
    publish(mine, "me/gqa")
    before = list(served.received)
    again = tmp_path / "again" / "gqa"
    convert_checkpoint(str(mine), again, kv_heads=4, max_shard_size=10**9)  # one file instead of three
    done = json.loads((mine / "headpool.json").read_text())
    (again / "headpool.json").write_text(json.dumps(done))
    publish(again, "me/gqa")
    assert [name for name in served.files("me/gqa") if name.startswith("model")] == ["model.safetensors"]
    assert len(served.received) == len(before) + 1


def test_a_dry_run_checks_and_sends_nothing(made: Path, served: hub.Hub) -> None:
    result = publish(made, "me/gqa", dry_run=True)
    assert (result.dry_run, result.commit, result.warnings) == (True, None, ())
    assert set(result.files) == PUBLISHED
    assert served.repositories == {}
    assert not [one for one in served.asked if one.startswith(("PUT", "POST /api/repos", "POST /api/models"))]


def test_a_dry_run_without_the_hub_says_what_was_not_checked(
    made: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here.check_here(monkeypatch)
    with hub.serve() as gone:
        gone.client(monkeypatch, tmp_path)
    result = publish(made, "me/gqa", dry_run=True)
    assert len(result.warnings) == 1
    assert re.search("the hub cannot be reached.*was not checked", result.warnings[0])
    with pytest.raises(HeadpoolError, match="cannot be reached") as caught:
        publish(made, "me/gqa")
    assert caught.value.exit_code == 1
    assert "\n" not in str(caught.value)


def test_private_branch_and_pull_request(made: Path, served: hub.Hub) -> None:
    publish(made, "me/secret", private=True)
    assert served.repositories["me/secret"].private
    publish(made, "me/secret", revision="v2")
    assert set(served.repositories["me/secret"].branches) == {"main", "v2"}
    served.add("someone/else", made.parent / "model")
    result = publish(made, "someone/else", create_pr=True)
    assert result.url == f"{served.url}/someone/else/discussions/1"
    assert set(served.repositories["someone/else"].pulls[0]) >= PUBLISHED
    assert "headpool.json" not in served.files("someone/else")


def test_an_edited_card_goes_up_as_it_is(mine: Path, served: hub.Hub) -> None:
    text = (mine / "README.md").read_text()
    (mine / "README.md").write_text(text.replace("## Limits", "## My own words\n\nThree cheers.\n\n## Limits"))
    publish(mine, "me/gqa")
    sent = served.files("me/gqa")["README.md"].decode()
    assert "Three cheers." in sent
    assert 'AutoModelForCausalLM.from_pretrained("me/gqa")' in sent
    assert (mine / "README.md").read_text().count("Three cheers.") == 1


def test_the_command(made: Path, mine: Path, served: hub.Hub) -> None:
    littered(mine)
    ran = CliRunner().invoke(app, ["publish", str(mine), "me/gqa", "--dry-run", "--json"], catch_exceptions=False)
    assert ran.stdout.count("\n") == 1
    told = json.loads(ran.stdout)
    sizes = {name: (made / name).stat().st_size for name in PUBLISHED - {"README.md"}}
    assert {one["name"]: one["bytes"] for one in told["files"] if one["name"] != "README.md"} == sizes
    assert (told["dry_run"], told["commit"], told["license"]) == (True, None, "mit")
    shown = CliRunner().invoke(app, ["publish", str(mine), "me/gqa"], catch_exceptions=False).stdout
    assert "optimizer.pt" in shown, "what stays is told"
    assert ".env (looks like a secret)" in shown
    assert shown.index("publishing") < shown.index("published")
    assert shown.rstrip().endswith(f"{served.url}/me/gqa")


@pytest.mark.skipif("HEADPOOL_HUB_TOKEN" not in os.environ, reason="HEADPOOL_HUB_TOKEN is not set")
def test_the_real_hub(made: Path, tmp_path: Path) -> None:
    """Publish to a private repository of the token's owner, fetch it again, delete it. The client's defaults hold."""
    script = f"""
import os
from huggingface_hub import HfApi, snapshot_download
from pathlib import Path
from headpool.publish import publish
token = os.environ["HEADPOOL_HUB_TOKEN"]
api = HfApi(token=token)
name = api.whoami()["name"] + "/headpool-test-{os.urandom(4).hex()}"
try:
    first = publish({str(made)!r}, name, private=True, token=token)
    assert publish({str(made)!r}, name, private=True, token=token).commit == first.commit
    folder = Path(snapshot_download(name, token=token))
    for file in first.files:
        assert file == "README.md" or (folder / file).read_bytes() == (Path({str(made)!r}) / file).read_bytes(), file
finally:
    api.delete_repo(name, missing_ok=True)
"""
    environment = {name: value for name, value in os.environ.items() if name not in ("HF_ENDPOINT", "HF_TOKEN")}
    environment |= {"HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)
