"""`headpool publish` against a hub on the loopback: what goes up, what is refused, what happens when the hub fails."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import here
import hub
import pytest
import tiny
import torch
import transformers
from huggingface_hub import ModelCard
from typer.testing import CliRunner

from headpool import hub as client
from headpool import publish as publishing
from headpool.cli import app
from headpool.convert.run import convert_checkpoint
from headpool.errors import HeadpoolError, RequestError
from headpool.publish import publish

CARD = "---\nlicense: mit\n---\n# The original\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted checkpoint in three files, with card and licence, beside what must not go up."""
    folder = tmp_path_factory.mktemp("made")
    model = tiny.checkpoint(folder / "model", tokenizer=True, vocab_size=2048, max_shard_size="500KB")
    (model / "README.md").write_text(CARD)
    (model / "LICENSE").write_text("a licence")
    with pytest.MonkeyPatch.context() as patched:
        here.check_here(patched)
        convert_checkpoint(str(model), folder / "gqa", kv_heads=4)
    for name in (
        "optimizer.pt",
        "train.log",
        ".env",
        "tokenizer.pkl",
        "vocab.sqlite",
        "pytorch_model.bin",
    ):
        (folder / "gqa" / name).write_bytes(b"stays")
    (folder / "gqa" / "cache").mkdir()
    (folder / "gqa" / "cache" / "config.json").write_text("{}")
    return folder / "gqa"


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[hub.Hub]:
    here.check_here(monkeypatch)
    monkeypatch.setattr(publishing, "Check", here.CheckHere)
    monkeypatch.setattr(client, "WAIT", 0.0)
    monkeypatch.setattr("headpool.uploading.WAIT", 0.0)
    with hub.serve() as one:
        one.client(monkeypatch, tmp_path / "home")
        yield one


@pytest.fixture
def mine(made: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(made, tmp_path / "gqa"))


SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
PUBLISHED = {
    *SHARDS, "model.safetensors.index.json", "config.json", "generation_config.json", "tokenizer.json",
    "tokenizer_config.json", "headpool.json", "README.md", "SOURCE_README.md", "LICENSE",
}  # fmt: skip


def large(folder: Path) -> int:
    return sum(hub.Hub.is_large(name) for name in PUBLISHED)


def test_what_goes_up_and_opens_again(made: Path, served: hub.Hub, tmp_path: Path) -> None:
    seen: list[Any] = []
    result = publish(made, "me/gqa", announce=seen.append)
    files = served.files("me/gqa")
    assert set(files) == {".gitattributes", *PUBLISHED}
    for name in PUBLISHED - {"README.md"}:
        assert files[name] == (made / name).read_bytes(), name
    assert result.url == f"{served.url}/me/gqa"
    assert result.commit == served.repositories["me/gqa"].branches["main"][0].sha
    assert set(result.files) == PUBLISHED == set(seen[0].files)
    assert set(result.left_out) >= {"optimizer.pt", "train.log", ".env", "tokenizer.pkl", "cache/config.json"}
    assert len(served.received) == len(set(served.received)) == large(made)
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
    monkeypatch.setattr(publishing, "Check", here.CheckHere)
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


def without_licence(folder: Path) -> None:
    (folder / "SOURCE_README.md").write_text("# no metadata\n")
    (folder / "README.md").unlink()


def with_a_licence_of_no_name(folder: Path) -> None:
    (folder / "SOURCE_README.md").write_text("---\nlicense: Some Words\n---\n")
    (folder / "README.md").unlink()


def with_a_tensor_too_small(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 6}))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda folder: (folder / "headpool.json").unlink(), "was not made by headpool"),
        (lambda folder: (folder / "config.json").unlink(), "holds no checkpoint"),
        (lambda folder: (folder / SHARDS[1]).unlink(), "names model-00002-of-00003.safetensors, which is not there"),
        (with_a_tensor_too_small, "does not fit its class: mismatched: .*k_proj"),
        (without_licence, "names no licence.*--license"),
        (with_a_licence_of_no_name, "the hub does not accept the card's metadata: .*license"),
        (lambda folder: (folder / "README.md").write_text("---\nlicense: [\n---\n"), "metadata cannot be read"),
        (lambda folder: (folder / "LICENSE").write_text("key hf_" + "A" * 34), "LICENSE holds what looks like a key"),
    ],
)
def test_what_is_refused_before_anything_goes_up(
    mine: Path, served: hub.Hub, change: Callable[[Path], Any], says: str
) -> None:
    change(mine)
    with pytest.raises(RequestError, match=says) as caught:
        publish(mine, "me/gqa")
    assert "\n" not in str(caught.value)
    assert served.repositories == {}
    assert served.received == []


def test_a_run_s_folder_is_not_a_checkpoint(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path / "out" / "uptrained")
    with pytest.raises(RequestError, match=f"publish {re.escape(str(tmp_path / 'out' / 'uptrained'))}"):
        publish(tmp_path / "out", "me/gqa")
    with pytest.raises(RequestError, match="no such directory"):
        publish(tmp_path / "nowhere", "me/gqa")


def test_licence(mine: Path, served: hub.Hub) -> None:
    with pytest.raises(RequestError, match=r"the licence on the card is mit; --license apache-2\.0 would contradict"):
        publish(mine, "me/gqa", license="apache-2.0")
    without_licence(mine)
    assert publish(mine, "me/gqa", license="apache-2.0").license == "apache-2.0"
    assert ModelCard(served.files("me/gqa")["README.md"].decode()).data.license == "apache-2.0"


def made_from_hub(folder: Path, base: str) -> None:
    done = json.loads((folder / "headpool.json").read_text())
    done["source"] |= {"model": base, "revision": "c0ffee"}
    (folder / "headpool.json").write_text(json.dumps(done))
    (folder / "README.md").unlink()


def test_a_gated_base_needs_consent_and_its_licence(mine: Path, served: hub.Hub) -> None:
    served.add("big/base", gated=True)
    made_from_hub(mine, "big/base")
    with pytest.raises(RequestError, match=r"big/base is gated.*--accept-base-license"):
        publish(mine, "me/gqa")
    result = publish(mine, "me/gqa", accept_base_license=True)
    assert result.base_model == "big/base"
    assert "LICENSE" in served.files("me/gqa")
    data = ModelCard(served.files("me/gqa")["README.md"].decode()).data
    assert (data.base_model, data.base_model_relation) == ("big/base", "finetune")
    (mine / "LICENSE").unlink()
    with pytest.raises(RequestError, match="its licence is not beside"):
        publish(mine, "me/gqa", accept_base_license=True)
    served.add("open/base")
    made_from_hub_again = json.loads((mine / "headpool.json").read_text())
    made_from_hub_again["source"]["model"] = "open/base"
    (mine / "headpool.json").write_text(json.dumps(made_from_hub_again))
    assert publish(mine, "me/other").base_model == "open/base"


def test_marks_of_a_gate_on_the_source_s_card_are_enough(mine: Path, served: hub.Hub) -> None:
    (mine / "SOURCE_README.md").write_text("---\nlicense: mit\nextra_gated_prompt: Agree\n---\n")
    (mine / "README.md").unlink()
    with pytest.raises(RequestError, match="is gated"):
        publish(mine, "me/gqa")


def test_repositories_that_are_not_ours(made: Path, served: hub.Hub, tmp_path: Path) -> None:
    served.add("me/full", made.parent / "model")
    with pytest.raises(RequestError, match=r"me/full holds other content already; .*--create-pr"):
        publish(made, "me/full")
    assert "headpool.json" not in served.files("me/full")
    convert_checkpoint(str(made.parent / "model"), tmp_path / "mqa", kv_heads=1)
    publish(tmp_path / "mqa", "me/mqa")
    with pytest.raises(RequestError, match="holds model at 1 K/V heads already, not model at 4 K/V heads"):
        publish(made, "me/mqa")
    served.add("me/empty")
    publish(made, "me/empty")
    served.add("me/public")
    with pytest.raises(RequestError, match="exists and is public"):
        publish(made, "me/public", private=True)
    with pytest.raises(RequestError, match="no right to write to someone/new"):
        publish(made, "someone/new")
    with pytest.raises(RequestError, match="no repository me/nothing to open a pull request in"):
        publish(made, "me/nothing", create_pr=True)
    with pytest.raises(RequestError, match="no name for a repository"):
        publish(made, "a/b/c")


def test_tokens(made: Path, served: hub.Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="does not accept the token"):
        publish(made, "me/gqa", token="hf_wrong")
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(RequestError, match=r"no token.*hf auth login.*--token"):
        publish(made, "me/gqa")
    assert publish(made, "gqa", token=hub.TOKEN).repo_id == "me/gqa"


def test_forbidden_in_the_middle(made: Path, served: hub.Hub) -> None:
    served.fail("/commit/", status=403)
    with pytest.raises(RequestError, match="no right to write to me/gqa"):
        publish(made, "me/gqa")
    received = list(served.received)
    publish(made, "me/gqa")
    assert served.received == received, "the weights were up already"
    assert set(served.files("me/gqa")) == {".gitattributes", *PUBLISHED}


EVERY_STEP = (
    "/api/validate-yaml", "/api/models/me/gqa$", "/api/repos/create", "/preupload/", "/lfs/objects/batch", "/objects/",
    "/commit/",
)  # fmt: skip


@pytest.mark.parametrize("step", EVERY_STEP)
def test_a_hub_that_fails_twice_is_asked_again(made: Path, served: hub.Hub, step: str) -> None:
    served.fail(step, status=500, times=2)
    publish(made, "me/gqa")
    assert served.failures[0].times == 0, "it was asked"
    assert set(served.files("me/gqa")) == {".gitattributes", *PUBLISHED}
    assert len(served.received) == large(made)
    assert len(served.repositories["me/gqa"].branches["main"]) == 2


def test_a_hub_that_goes_on_failing_is_given_up(made: Path, served: hub.Hub) -> None:
    served.fail("/commit/", status=503, times=10**6)
    with pytest.raises(HeadpoolError, match=r"the hub failed \(503.*run the same command again") as caught:
        publish(made, "me/gqa")
    assert caught.value.exit_code == 1
    assert sum("/commit/" in one for one in served.asked) == client.ATTEMPTS


def test_a_connection_that_breaks_in_the_middle_of_a_file(made: Path, served: hub.Hub) -> None:
    served.fail("/objects/", after_bytes=70_000)
    publish(made, "me/gqa")
    assert set(served.files("me/gqa")) == {".gitattributes", *PUBLISHED}
    assert len(served.received) == len(set(served.received)) == large(made)


def test_interrupted_in_the_middle_the_same_command_goes_on(made: Path, served: hub.Hub) -> None:
    def stop(what: str, done: int, total: int) -> None:
        if len(served.received) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publish(made, "me/gqa", progress=stop)
    assert set(served.files("me/gqa")) == {".gitattributes"}, "nothing is committed before all of it is there"
    first = list(served.received)
    shown: list[tuple[int, int]] = []
    publish(made, "me/gqa", progress=lambda what, done, total: shown.append((done, total)))
    assert len(served.received) == len(set(served.received)) == large(made)
    assert served.received[:2] == first
    assert [done for done, _ in shown] == sorted(done for done, _ in shown)
    assert (
        shown[-1][0]
        == shown[-1][1]
        == sum(len(one) for name, one in served.files("me/gqa").items() if name in PUBLISHED)
    )


def test_a_commit_whose_answer_is_lost_is_not_made_twice(made: Path, served: hub.Hub) -> None:
    served.fail("/commit/", lost=True)
    result = publish(made, "me/gqa")
    commits = served.repositories["me/gqa"].branches["main"]
    assert [one.title for one in commits].count(commits[0].title) == 1
    assert result.commit == commits[0].sha


def test_a_slow_hub_is_waited_for(made: Path, served: hub.Hub) -> None:
    served.fail("/commit/", seconds=1.0)
    served.fail("/objects/", seconds=0.3, times=2)
    publish(made, "me/gqa")
    assert set(served.files("me/gqa")) == {".gitattributes", *PUBLISHED}


def test_the_command(made: Path, served: hub.Hub) -> None:
    ran = CliRunner().invoke(app, ["publish", str(made), "me/gqa", "--dry-run", "--json"], catch_exceptions=False)
    assert ran.stdout.count("\n") == 1
    told = json.loads(ran.stdout)
    sizes = {name: (made / name).stat().st_size for name in PUBLISHED - {"README.md"}}
    assert {one["name"]: one["bytes"] for one in told["files"] if one["name"] != "README.md"} == sizes
    assert (told["dry_run"], told["commit"], told["license"]) == (True, None, "mit")
    shown = CliRunner().invoke(app, ["publish", str(made), "me/gqa"], catch_exceptions=False).stdout
    assert "optimizer.pt" in shown, "what stays is told"
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
