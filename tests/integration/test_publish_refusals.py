"""What publishing refuses before anything goes up: names, licences, checkpoints, repositories, tokens."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hub
import pytest
from huggingface_hub import ModelCard
from published import SHARDS
from typer.testing import CliRunner

from headpool.cli import app
from headpool.convert.run import convert_checkpoint
from headpool.errors import RequestError
from headpool.publish import publish

IMPOSSIBLE = [
    (["gqa"], r"'gqa' does not say whose it is; give USER/gqa"),
    (["a/b/c"], "'a/b/c' is no name for a repository"),
    (["me/gqa.git"], "'me/gqa.git' is no name for a repository"),
    (["me/gqa", "--license", "Apache 2.0"], "'Apache 2.0' is no licence .* did you mean apache-2.0?"),
    (["me/gqa", "--license", "my-own"], "'my-own' is no licence .* --license other --license-name NAME"),
    (["me/gqa", "--license", "other"], "--license other needs --license-name NAME"),
    (["me/gqa", "--license", "mit", "--license-name", "x"], "leave --license-name out"),
    (["me/gqa", "--license-name", "x"], "is for --license other"),
    (["me/gqa", "--revision", "refs/pr/1"], "'refs/pr/1' is no branch to publish to"),
    (["me/gqa", "--revision", "c0ffee" * 6 + "c0ff"], "is no branch to publish to"),
    *(
        (["me/gqa", f"--revision={name}"], "cannot be the name of a branch")
        for name in ("", "a b", "a..b", "a~1", "a:b", "-a", "a.lock", "a/.b", "/a", "a/", "a//b", "a.", "@", "a@{1}")
    ),
]


@pytest.mark.parametrize("dry", [True, False], ids=["dry", "for real"])
@pytest.mark.parametrize(("arguments", "says"), IMPOSSIBLE)
def test_names_that_cannot_be_are_refused_without_asking_the_hub(
    made: Path, served: hub.Hub, arguments: list[str], says: str, dry: bool
) -> None:
    ran = CliRunner().invoke(app, ["publish", str(made), *arguments, *(["--dry-run"] if dry else [])])
    assert isinstance(ran.exception, RequestError)
    assert ran.exception.exit_code == 2
    assert re.search(says, str(ran.exception))
    assert "\n" not in str(ran.exception)
    assert served.asked == []


@pytest.mark.parametrize("branch", ["v1.0", "feature/x", "a-b_c"])
def test_branches_of_any_name_that_can_be(made: Path, served: hub.Hub, branch: str) -> None:
    publish(made, "me/gqa", revision=branch)
    assert "headpool.json" in served.files("me/gqa", branch)
    assert "headpool.json" not in served.files("me/gqa")


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
        (lambda folder: (folder / "README.md").write_text("---\nlicense: [\n---\n"), "README.md, line 2: its metadata"),
        (lambda folder: (folder / "README.md").write_bytes(b"\xff"), r"README.md is no text in UTF-8: .*0xff"),
        (
            lambda folder: (folder / "report.json").write_text("{}"),
            "report.json is no report of headpool eval",
        ),
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


def test_several_licences(mine: Path, served: hub.Hub) -> None:
    (mine / "SOURCE_README.md").write_text("---\nlicense: [mit, apache-2.0]\n---\n")
    (mine / "README.md").unlink()
    assert publish(mine, "me/gqa").license == "mit, apache-2.0"
    text = served.files("me/gqa")["README.md"].decode()
    assert ModelCard(text).data.license == ["mit", "apache-2.0"]
    assert "The original's licence, mit, apache-2.0, holds for this model, too" in text


def test_a_licence_of_its_own(mine: Path, served: hub.Hub) -> None:
    without_licence(mine)
    assert publish(mine, "me/gqa", license="other", license_name="tiny-licence").license == "other"
    data = ModelCard(served.files("me/gqa")["README.md"].decode()).data
    assert (data.license, data.license_name) == ("other", "tiny-licence")
    (mine / "README.md").write_bytes(served.files("me/gqa")["README.md"])
    with pytest.raises(RequestError, match="the licence name on the card is tiny-licence; --license-name big-licence"):
        publish(mine, "me/gqa", license="other", license_name="big-licence")


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


@pytest.mark.parametrize(("private", "says"), [(False, "holds other content already"), (True, "exists and is public")])
def test_a_repository_that_somebody_makes_after_the_look_is_looked_at(
    made: Path, served: hub.Hub, private: bool, says: str
) -> None:
    def meanwhile(_: Any) -> None:
        served.add("me/gqa", made.parent / "model")

    before = sorted(path.name for path in (made.parent / "model").iterdir())
    with pytest.raises(RequestError, match=says):
        publish(made, "me/gqa", private=private, announce=meanwhile)
    assert sorted(served.files("me/gqa")) == sorted([".gitattributes", *before])
    assert served.received == []


def test_a_private_repository_is_called_so_when_it_is_there(made: Path, served: hub.Hub) -> None:
    served.add("me/gqa", private=True)
    assert publish(made, "me/gqa", dry_run=True).private
    assert not publish(made, "me/new", dry_run=True).private


def test_tokens(made: Path, served: hub.Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="does not accept the token"):
        publish(made, "me/gqa", token="hf_wrong")
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(RequestError, match=r"no token.*hf auth login.*--token"):
        publish(made, "me/gqa")
    assert publish(made, "me/gqa", token=hub.TOKEN).repo_id == "me/gqa"
