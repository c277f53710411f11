"""Every command and every Python snippet of README and docs works, in the order in which a reader meets them.

Each page has a folder of its own, with what the page takes for granted and a hub on the loopback that has the models it
names. Commands run in this process, as the command line would run them; what they take is made smaller
(LIGHTER), and what cannot run here is held to what can be known of it (ELSEWHERE).
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import here
import hub
import pytest
import tiny
import typer.main
import yaml
from typer.testing import CliRunner

from headpool import drawing
from headpool.cli import app
from headpool.eval import measure
from headpool.sections import UptrainSection

PAGES = sorted([tiny.ROOT / "README.md", *(tiny.ROOT / "docs").glob("*.md")])
assert {page.stem for page in PAGES} >= {"README", "convert", "uptrain", "eval", "publish", "method"}

MODELS: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-2-7b-hf": {
        "family": "llama", "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_size": 256,
        "max_position_embeddings": 4096,
    },
    "allenai/OLMo-2-1124-7B": {
        "family": "olmo2", "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_size": 256,
    },
    "EleutherAI/pythia-1.4b": {"family": "gpt_neox", "num_attention_heads": 16, "hidden_size": 128},
}  # fmt: skip
"""What the hub has for pages that name it: small models of the same classes. All of them are gated, as Llama is."""

QUICKER = "uptrain.alpha=0.0003 uptrain.validation_tokens=512"

LIGHTER = {
    r"--calibration \S+": "--calibration-tokens 2048 --calibration-window 64",
    r"--method aligned --calibration": "--heal 2",
    r"^headpool (run|uptrain) quickstart/gqa2.yaml": QUICKER,
    r"^headpool (run|uptrain) my.yaml": "uptrain.alpha=1e-9 uptrain.batch_tokens=512 uptrain.sequence_length=64 "
    "eval.contexts=[16] eval.batches=[1] eval.tasks=[]",
}
"""What is added to commands that match, so that they take seconds."""

REPLACED = {
    "--contexts 512,2048,4096 --batches 1,8 --tasks hellaswag,arc_easy": "--contexts 16",  # data sets of the real hub
    '["output=headpool-out/quickstart"]': json.dumps(["output=headpool-out/quickstart", *QUICKER.split()]),
    "USER/": f"{hub.USER}/",
}

ELSEWHERE = {
    r"make (quickstart|test|quality)": "targets of the Makefile, which CI runs",
    r"accelerate launch .*-m headpool uptrain \S+": "several processes: test_uptrain_processes.py",
}
"""Commands that are not run here, and why."""


def blocks(page: Path, *languages: str) -> list[tuple[str, str]]:
    """Fenced code of some languages, in the page's order: language, text."""
    found = re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [(language, text) for language, text in found if language in languages]


def commands(text: str) -> list[str]:
    lines = text.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


@pytest.fixture
def folder(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a reader sits: with a hub, and the files that the pages take for granted."""
    here.check_here(monkeypatch)
    monkeypatch.setattr(measure, "NEW_TOKENS", 4)
    monkeypatch.setitem(drawing.STYLE, "savefig.dpi", 20)
    work = tmp_path / "work"
    work.mkdir()
    text = tiny.NOVEL.read_text()[:3000]
    (work / "test.txt").write_text(text)
    (work / "train.txt").write_text(text * 4)
    (work / "train.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in text.split("\n\n")))
    with hub.serve() as served:
        served.client(monkeypatch, tmp_path / "home")
        for name in (name for name in MODELS if name in page.read_text(encoding="utf-8")):
            model = tiny.checkpoint(tmp_path / name, tokenizer=True, vocab_size=2048, **MODELS[name])
            (model / "README.md").write_text("---\nlicense: llama2\n---\n")
            (model / "LICENSE").write_text("a licence")
            served.add(name, model, gated=True)
        monkeypatch.chdir(work)
        if "llama-2-7b-gqa4" in page.read_text(encoding="utf-8"):
            run("headpool convert meta-llama/Llama-2-7b-hf llama-2-7b-gqa4 --kv-heads 4")
        yield work


def replaced(text: str) -> str:
    for old, new in REPLACED.items():
        text = text.replace(old, new)
    return text


def run(command: str) -> str:
    words = shlex.split(replaced(command), comments=True)
    if words[0] == "headpool" and ">" not in words:
        words += [
            one for pattern, more in LIGHTER.items() if re.search(pattern, shlex.join(words)) for one in more.split()
        ]
        done = CliRunner().invoke(app, words[1:], catch_exceptions=False)
        assert done.exit_code == 0, (command, done.output)
        return done.stdout
    if words[0] == "headpool":
        at = words.index(">")
        Path(words[at + 1]).write_text(run(shlex.join(words[:at])))
        return ""
    assert words[0] in ("mkdir", "echo", "cat"), f"{command}: neither run here nor among what is not"
    return subprocess.run(["bash", "-c", command], check=True, capture_output=True, text=True).stdout


def shorten(folder: Path) -> None:
    """Leave of the bundled novels what can be worked through in a moment."""
    for path in folder.rglob("quickstart/*.txt"):
        text = path.read_text(encoding="utf-8")
        if len(text) > 4000:
            path.write_text(text[:4000], encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_works_from_its_top_to_its_end(page: Path, folder: Path) -> None:
    ran = 0
    for _, text in blocks(page, "yaml"):
        if named := re.match(r"# headpool run (\S+\.yaml)", text):
            (folder / named[1]).write_text(text)
    for language, text in blocks(page, "sh", "python"):
        if language == "python":
            exec(compile(replaced(text), str(page), "exec"), {})
            ran += 1
            continue
        for command in commands(text):
            if not any(re.match(pattern, command) for pattern in ELSEWHERE):
                run(command)
                shorten(folder)
                ran += 1
    assert ran >= 1


def test_a_page_of_docs_begins_with_a_command_on_the_bundled_model() -> None:
    for page in PAGES:
        if page.stem in ("convert", "uptrain", "eval", "publish", "method"):
            lines = page.read_text(encoding="utf-8").splitlines()
            assert lines[0].startswith("# ")
            assert lines[2] == "```sh"
            assert "quickstart" in blocks(page, "sh")[0][1]


def test_what_is_not_run_is_written_somewhere_and_is_what_it_seems() -> None:
    everything = [one for page in PAGES for _, text in blocks(page, "sh", "python") for one in commands(text)]
    targets = re.findall(r"^([a-z]+):", (tiny.ROOT / "Makefile").read_text(), re.MULTILINE)
    for pattern in ELSEWHERE:
        matching = [one for one in everything if re.match(pattern, one)]
        assert matching, f"no page has {pattern} any more"
        for one in matching:
            words = shlex.split(one, comments=True)
            if words[0] == "make":
                assert words[1] in targets
            for name in (word for word in words if word.startswith("accelerate/")):
                assert (tiny.ROOT / "recipes" / name).is_file()
    for old in REPLACED:
        assert any(old in one for one in everything)
    for pattern in LIGHTER:
        assert any(re.search(pattern, one) for one in everything), pattern


# What is written in the text


def verbs() -> dict[str, Any]:
    return dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def options(command: Any) -> set[str]:
    return {name for one in command.params for name in (*one.opts, *one.secondary_opts)} | {"--help"}


def test_every_command_in_running_text_exists_with_its_options() -> None:
    seen = set()
    for page in PAGES:
        for text in re.findall(r"`(headpool [^`]*)`", page.read_text(encoding="utf-8")):
            words = text.split()[1:]
            if words[0].startswith("--"):
                assert words[0] in {"--help", "--version", "--install-completion"}
                continue
            command = verbs()[words[0]]
            seen.add(words[0])
            if len(words) > 1 and hasattr(command, "commands"):
                command = command.commands[words[1]]
            assert set(re.findall(r"--[a-z-]+", text)) <= options(command), text
    assert len(seen) >= 7


def table(title: str) -> list[list[str]]:
    """The rows of the README's table under these words, a list of cells each."""
    readme = (tiny.ROOT / "README.md").read_text(encoding="utf-8")
    rows = readme[readme.index(title) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def test_the_table_of_commands_is_the_code_s() -> None:
    named = [re.match(r"`headpool ([a-z]+)", row[0]) for row in table("| command | does |")]
    assert all(named)
    assert {one[1] for one in named if one} == set(verbs())


def test_the_table_of_uptrain_s_keys_is_the_code_s() -> None:
    keys = [key for row in table("| key | default | meaning |") for key in re.findall(r"`(\w+)", row[0])]
    own = set(UptrainSection.model_fields)
    assert {"data", *keys} >= own
    assert set(keys) <= own | {"data"}


def test_options_in_the_tables_of_docs_exist() -> None:
    for name in ("convert", "eval"):
        rows = re.findall(r"^\| `(--[a-z-]+[^`]*)`", (tiny.ROOT / "docs" / f"{name}.md").read_text(), re.MULTILINE)
        for row in rows:
            assert set(re.findall(r"--[a-z-]+", row)) <= options(verbs()[name])


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if "://" in target:
                continue
            file, _, anchor = target.partition("#")
            path = page.parent / file if file else page
            assert path.exists(), f"{page.name}: {target}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
                slugs = {re.sub(r"[^\w\s-]", "", one).strip().lower().replace(" ", "-") for one in headings}
                assert anchor in slugs, f"{page.name}: {target}"


def test_yaml_in_the_pages_is_yaml() -> None:
    for page in PAGES:
        for _, text in blocks(page, "yaml"):
            assert isinstance(yaml.safe_load(text), dict)


@pytest.mark.parametrize(
    ("asked", "offered"),
    [
        ({"_HEADPOOL_COMPLETE": "complete_bash", "COMP_WORDS": "headpool pub", "COMP_CWORD": "1"}, r"publish\n"),
        ({"_HEADPOOL_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "headpool pub"}, r'.*"publish":.*\n'),
        (
            {"_HEADPOOL_COMPLETE": "complete_bash", "COMP_WORDS": "headpool run quick", "COMP_CWORD": "2"},
            r"quickstart/\S+(\nquickstart/\S+)*\n",
        ),
    ],
    ids=["bash", "zsh", "recipes"],
)
def test_completion(tmp_path: Path, asked: dict[str, str], offered: str) -> None:
    script = shutil.which("headpool", path=str(Path(sys.executable).parent))
    assert script is not None, "headpool is not installed"
    done = subprocess.run([script], capture_output=True, text=True, check=False, cwd=tmp_path, env=asked)
    assert re.fullmatch(offered, done.stdout), (done.stdout, done.stderr)
