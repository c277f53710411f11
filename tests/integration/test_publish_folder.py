"""`headpool publish` by what lies in the folder and in the repository: names, links, cards, old files, other models."""

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import hub
import pytest
import reports
from rich.console import Console

from headpool.checkpoint import open_source
from headpool.errors import HeadpoolError, RequestError
from headpool.publish import publish

STAYS = (
    "checkpoints/optimizer.model", "tokenizer_wandb/run.json", "secrets/x.model", "vocab_work/state.json",
    "licenses/key.txt", "chat_templates/notes.txt", "old_chat_templates/x.jinja", "chat_templates/deep/x.jinja",
    "cache/config.json", "tokenizer.pkl", "tokenizer.model.partial", "model.py", "readme.md.bak",
)  # fmt: skip
GOES = (
    "LICENSE.llama", "NOTICE.third-party", "Copyright", "tokenizer.model", "tokenizer.model.v3", "vocab.txt",
    "chat_templates/tool_use.jinja", "additional_chat_templates/rag.jinja", "video_preprocessor_config.json",
)  # fmt: skip


def test_names_that_go_up_and_that_stay(mine: Path, served: hub.Hub) -> None:
    before = set(publish(mine, "me/gqa", dry_run=True).files)
    for name in (*STAYS, *GOES):
        (mine / name).parent.mkdir(parents=True, exist_ok=True)
        (mine / name).write_bytes(b"{}")
    result = publish(mine, "me/gqa")
    assert set(result.files) - before == set(GOES)
    assert set(result.left_out) == set(STAYS)
    assert set(served.files("me/gqa")) == {".gitattributes", *before, *GOES}


@pytest.mark.parametrize("name", ["NOTICE", "README.md", "chat_templates/x.jinja", "chat_templates"])
def test_a_link_out_of_the_folder_is_refused(mine: Path, served: hub.Hub, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    if name == "chat_templates":
        outside.mkdir()
        (outside / "x.jinja").write_text("secret")
    else:
        outside.write_text("secret")
    (mine / name).parent.mkdir(exist_ok=True)
    (mine / name).unlink(missing_ok=True)
    (mine / name).symlink_to(outside)
    if name == "chat_templates":  # nothing is looked for behind a folder that is a link
        assert not [one for one in publish(mine, "me/gqa").files if "jinja" in one]
        return
    with pytest.raises(RequestError, match=f"{name} is a link to a file outside"):
        publish(mine, "me/gqa")
    assert served.repositories == {}


def test_links_inside_the_folder_and_a_linked_folder_are_fine(mine: Path, served: hub.Hub, tmp_path: Path) -> None:
    (mine / "LICENSE").write_text("a licence")
    (mine / "NOTICE").symlink_to("LICENSE")
    (tmp_path / "link").symlink_to(mine)
    publish(tmp_path / "link", "me/gqa")
    assert served.files("me/gqa")["NOTICE"] == b"a licence"


def test_a_renamed_folder_is_published_under_the_repository_s_name(mine: Path, served: hub.Hub) -> None:
    assert 'from_pretrained("gqa")' in (mine / "README.md").read_text()
    renamed = mine.rename(mine.parent / "renamed")
    publish(renamed, "me/one")
    publish(mine := Path(shutil.copytree(renamed, renamed.parent / "gqa")), "me/two")
    first, second = (served.files(name)["README.md"].decode() for name in ("me/one", "me/two"))
    assert first == second.replace("me/two", "me/one"), "it does not count as edited"
    (renamed / "README.md").write_text((renamed / "README.md").read_text() + "\nThree cheers.\n")
    publish(renamed, "me/three")
    edited = served.files("me/three")["README.md"].decode()
    assert "Three cheers." in edited
    assert 'AutoModelForCausalLM.from_pretrained("me/three")' in edited
    assert 'from_pretrained("gqa")' not in edited


def evaluated(directory: Path, folder: Path, **changes: Any) -> Path:
    """A folder with a made-up report on a checkpoint as it is now."""
    done = json.loads((directory / "headpool.json").read_text())
    one = reports.model(str(directory), kv_heads=4, label="converted, not yet uptrained")
    one["conversion"] = {"method": done["method"], "layers": done["layers"]}
    one["checkpoint_sha256"] = open_source(str(directory)).checkpoint_sha256()
    original = reports.model(str(directory.parent / "gone" / "original"), role="baseline", label=None)
    folder.mkdir()
    (folder / "report.json").write_text(json.dumps(reports.report([original, {**one, **changes}])))
    return folder


def test_whatever_class_opens_it_the_code_names_the_repository(mine: Path, served: hub.Hub) -> None:
    renamed = mine.rename(mine.parent / "renamed")
    text = (renamed / "README.md").read_text().replace("AutoModelForCausalLM", "LlavaForConditionalGeneration")
    (renamed / "README.md").write_text(text)
    publish(renamed, "me/gqa")
    sent = served.files("me/gqa")["README.md"].decode()
    assert 'LlavaForConditionalGeneration.from_pretrained("me/gqa")' in sent
    assert 'from_pretrained("gqa")' not in sent


KEYS = {
    ".env": "A=1", "deploy.pem": "x", "id_rsa": "x", "notes.md.bak": f"my token is hf_{'a' * 34}",
    "work/log": "-----BEGIN OPENSSH PRIVATE KEY-----",
}  # fmt: skip


def test_what_stays_and_looks_like_a_key_is_told(mine: Path, served: hub.Hub) -> None:
    (mine / "work").mkdir()
    for name, text in {**KEYS, "optimizer.pt": "A=1", "work/state": "hf_ is no key"}.items():
        (mine / name).write_text(text)
    result = publish(mine, "me/gqa")
    assert set(result.secrets) == set(KEYS)
    assert set(result.left_out) == {*KEYS, "optimizer.pt", "work/state"}
    assert not set(KEYS) & set(served.files("me/gqa"))
    for number in range(60):
        (mine / "work" / f"{number:02}.pt").write_bytes(b"")
    shown = Console(width=10**6, file=io.StringIO())
    shown.print(publish(mine, "me/gqa", dry_run=True).describe())
    (told,) = re.findall("left out: (.*)", shown.file.getvalue())  # type: ignore[attr-defined]
    assert all(f"{name} (looks like a secret)" in told for name in KEYS)
    assert told.count(", ") == 39
    assert told.rstrip().endswith(f" and {len(KEYS) + 2 + 60 - 40} more")


def test_what_an_earlier_evaluation_left_goes(mine: Path, served: hub.Hub, tmp_path: Path) -> None:
    publish(mine, "me/gqa", report=evaluated(mine, tmp_path / "report"))
    left = {"report.json", "cache-against-context.png"}
    assert left <= set(served.files("me/gqa"))
    assert not left & {path.name for path in mine.iterdir()}
    publish(mine, "me/gqa")
    assert not left & set(served.files("me/gqa"))
    assert "report.json](" not in served.files("me/gqa")["README.md"].decode()


def test_a_report_warns_where_it_replaces_an_edited_card(mine: Path, served: hub.Hub, tmp_path: Path) -> None:
    report = evaluated(mine, tmp_path / "report")
    assert publish(mine, "me/gqa", report=report, dry_run=True).warnings == ()
    (mine / "README.md").write_text((mine / "README.md").read_text() + "\nThree cheers.\n")
    (warning,) = publish(mine, "me/gqa", report=report, dry_run=True).warnings
    assert "README.md was edited; --report draws it anew" in warning
    assert publish(mine, "me/gqa", dry_run=True).warnings == ()


def test_a_report_of_another_checkpoint_is_refused(mine: Path, served: hub.Hub, tmp_path: Path) -> None:
    report = evaluated(mine, tmp_path / "report")
    other = Path(shutil.copytree(mine, tmp_path / "elsewhere" / "gqa"))
    publish(other, "me/same", report=report)  # a copy is the same model
    done = json.loads((mine / "headpool.json").read_text())
    for changed in ({**done, "headpool": "0.0.9"}, {**done, "source": {**done["source"], "headers_sha256": "0" * 64}}):
        (other / "headpool.json").write_text(json.dumps(changed))
        with pytest.raises(RequestError, match=r"gqa is not what .*report\.json measured any more; evaluate it again"):
            publish(other, "me/other", report=report)
    (mine / "headpool.json").write_text(json.dumps({**done, "seed": 2}))  # made anew in its place
    with pytest.raises(RequestError, match=r"measured any more; evaluate it again"):
        publish(mine, "me/other", report=report)
    renamed = other.rename(tmp_path / "renamed")
    with pytest.raises(RequestError, match=r"report\.json is of .*gqa, not of .*renamed"):
        publish(renamed, "me/other", report=report)
    old = evaluated(mine, tmp_path / "old", checkpoint_sha256=None)
    with pytest.raises(RequestError, match="evaluate it again"):
        publish(mine, "me/other", report=old)
    assert "me/other" not in served.repositories


def test_a_published_report_names_what_is_gone(mine: Path, served: hub.Hub, tmp_path: Path) -> None:
    publish(mine, "me/gqa", report=evaluated(mine, tmp_path / "report"))
    text = served.files("me/gqa")["report.json"].decode()
    assert str(tmp_path) not in text
    assert [one["path"] for one in json.loads(text)["models"]] == ["original", "gqa"]


def test_another_local_model_of_the_same_name_is_another_model(mine: Path, served: hub.Hub) -> None:
    publish(mine, "me/gqa")
    done = json.loads((mine / "headpool.json").read_text())
    done["source"]["headers_sha256"] = "0" * 64
    (mine / "headpool.json").write_text(json.dumps(done))
    with pytest.raises(RequestError, match="me/gqa holds another model at 4 K/V heads; choose another name"):
        publish(mine, "me/gqa")
    done["source"] |= {"model": "big/base", "revision": "c0ffee"}
    (mine / "headpool.json").write_text(json.dumps(done))
    publish(mine, "me/hub")
    done["source"] |= {"headers_sha256": "1" * 64, "revision": "decaf"}
    (mine / "headpool.json").write_text(json.dumps(done))
    publish(mine, "me/hub")  # a later commit of the same model


@pytest.mark.parametrize("revision", [None, "v2"])
def test_what_came_after_the_look_is_not_overwritten(mine: Path, served: hub.Hub, revision: str | None) -> None:
    publish(mine, "me/gqa")
    (mine / "LICENSE").write_text("new")

    def meanwhile(_: Any) -> None:
        served.commit("me/gqa", "main", "someone else's", {"theirs": b""})

    with pytest.raises(HeadpoolError, match="me/gqa was changed meanwhile; run the same command again"):
        publish(mine, "me/gqa", revision=revision, announce=meanwhile)
    assert set(served.files("me/gqa")) == {"theirs"}
