"""report.html as a person gets it: its numbers are report.json's, it fetches nothing, it is the same file each time.

Tests with the marker `browser` open it in headless Chromium or Chrome, where there is one.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import reports
from browser import Node, Parser, browse

from headpool.errors import HeadpoolError
from headpool.eval.page import draw

NONE = "\N{EN DASH}"
"""What stands where there is no figure."""


def drawn(folder: Path, report: dict[str, Any]) -> Node:
    (folder / "report.json").write_text(json.dumps(report))
    draw(folder)
    return Parser((folder / "report.html").read_text(encoding="utf-8")).root


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], Path]]:
    made = {}
    for make in (reports.single, reports.pair, reports.run, reports.several):
        folder = tmp_path_factory.mktemp(make.__name__)
        drawn(folder, make())
        made[make.__name__] = (make(), folder)
    return made


def dom(pages: dict[str, tuple[dict[str, Any], Path]], name: str) -> tuple[dict[str, Any], Node]:
    report, folder = pages[name]
    return report, Parser((folder / "report.html").read_text(encoding="utf-8")).root


def section(page: Node, name: str) -> Node:
    (found,) = page.all("section", id=name)
    return found


def table(node: Node) -> list[list[str]]:
    rows = [row for body in node.all("tbody") for row in body.all("tr")]
    return [[cell.words for cell in row.children if isinstance(cell, Node)] for row in rows]


def number(text: str) -> float:
    """The first number of a cell."""
    match = re.search(r"-?[\d,]+(\.\d+)?(e[+-]?\d+)?", text)
    assert match is not None, text
    return float(match[0].replace(",", ""))


SIZES = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def size(text: str) -> float:
    return number(text) * SIZES[text.split()[1]]


def seconds(text: str) -> float:
    return number(text) * {"ms": 1e-3, "s": 1}[text.split()[1]]


def check_models(report: dict[str, Any], page: Node) -> None:
    """Every number of the table of models is the report's."""
    rows = table(section(page, "models"))
    assert len(rows) == len(report["models"])
    longest = max((row["context"] for row in report["models"][0]["decode"]), default=None)
    for row, model in zip(rows, report["models"], strict=True):
        assert row[0].endswith(model["label"] or ("original" if model["role"] == "baseline" else "by headpool"))
        assert number(row[1]) == model["kv_heads"]
        assert number(row[2]) == pytest.approx(model["perplexity"], rel=5e-4)
        assert number(row[4]) == pytest.approx(model["bits_per_byte"], abs=5e-5)
        assert size(row[5]) == model["cache_bytes_per_token"]["formula_in_checkpoint_dtype"]
        curve = {point["tokens"]: point["bytes"] for point in model["cache_curve"]}
        lengths = [8192, 32768] if 8192 in curve else [4096]
        assert [size(cell) for cell in row[6 : 6 + len(lengths)]] == [curve[length] for length in lengths]
        ratios = model["comparison"]
        if ratios is None:
            assert row[3] == NONE
        else:
            assert number(row[3]) == pytest.approx(ratios["perplexity_ratio"], rel=5e-4)
            assert number(row[5].split()[-1]) == pytest.approx(100 * ratios["cache_ratio"], rel=5e-3)
        if longest:
            (timed,) = (one for one in model["decode"] if (one["context"], one["batch"]) == (longest, 1))
            assert seconds(row[-2]) == pytest.approx(timed["seconds_per_token"], rel=5e-3)
            if timed["speedup"] is None:
                assert row[-1] == NONE
            else:
                assert number(row[-1]) == pytest.approx(timed["speedup"], abs=5e-3)


@pytest.mark.parametrize("name", ["single", "pair", "run", "several"])
def test_the_table_of_models_is_the_report(pages: dict[str, tuple[dict[str, Any], Path]], name: str) -> None:
    check_models(*dom(pages, name))


@pytest.mark.parametrize("name", ["run", "several"])
def test_timings_tasks_and_samples_are_the_reports(pages: dict[str, tuple[dict[str, Any], Path]], name: str) -> None:
    report, page = dom(pages, name)
    models = report["models"]
    order = sorted(models[0]["decode"], key=lambda row: (row["batch"], row["context"]))
    for kind, field in (("decode-step-times", "seconds_per_token"), ("prefill-times", "prefill_seconds")):
        (times,) = page.all("table", id=kind)
        rows = table(times)
        assert len(rows) == 8
        for row, at in zip(rows, order, strict=True):
            assert row[1] == str(at["batch"])
            for cell, model in zip(row[2:], models, strict=True):
                (one,) = (x for x in model["decode"] if (x["context"], x["batch"]) == (at["context"], at["batch"]))
                assert seconds(cell) == pytest.approx(one[field], rel=5e-3)
                if one["speedup"] and field == "seconds_per_token":
                    assert number(cell.split()[2]) == pytest.approx(one["speedup"], abs=5e-3)
    rows = table(section(page, "tasks"))
    assert [(row[0], row[1]) for row in rows] == [(one["task"], one["metric"]) for one in models[0]["tasks"]]
    for row, place in zip(rows, range(3), strict=True):
        for cell, model in zip(row[2:], models, strict=True):
            score = model["tasks"][place]
            assert number(cell) == pytest.approx(score["value"], rel=5e-4)
            assert ("±" in cell) == (score["stderr"] is not None)
            assert score["stderr"] is None or number(cell.split("±")[1]) == pytest.approx(score["stderr"], rel=0.05)
    prompts = list(section(page, "samples").all("div", **{"class": "sample"}))
    assert len(prompts) == len(models[0]["samples"])
    for place, shown in enumerate(prompts):
        assert next(shown.all("h3")).text == models[0]["samples"][place]["prompt"]
        assert [one.text for one in shown.all("p")] == [model["samples"][place]["text"] for model in models]


def test_sections_without_data_are_absent(pages: dict[str, tuple[dict[str, Any], Path]]) -> None:
    present = {name: {one.attributes["id"] for one in dom(pages, name)[1].all("section")} for name in pages}
    always = {"models", "plots", "again", "conditions"}
    assert present["single"] == always
    assert present["pair"] == always | {"notes"}
    assert present["run"] == present["several"] == always | {"notes", "decode", "tasks", "samples"}
    figures = {name: {one.attributes["id"] for one in dom(pages, name)[1].all("figure")} for name in pages}
    assert figures["single"] == {"cache-against-context"}
    assert figures["pair"] == {"cache-against-context", "quality-against-cache"}
    all_plots = {"decode-against-context", "perplexity-by-position", "block-errors-1"} | figures["pair"]
    assert figures["several"] == all_plots  # five conversions alike have one plot
    assert figures["run"] == all_plots | {"learning-curve"}
    for name, (_, folder) in pages.items():
        written = {path.name for path in folder.iterdir()}
        assert written == {"report.json", "report.html", *(f"{plot}.png" for plot in figures[name])}


def test_what_is_not_yet_uptrained_is_called_so_wherever_it_is_shown(
    pages: dict[str, tuple[dict[str, Any], Path]],
) -> None:
    _, page = dom(pages, "run")
    label = "converted, not yet uptrained"
    assert "Converted, not yet uptrained: converted." in next(page.all("p", **{"class": "warning"})).words
    shown = [cell for cell in page.all("th") if any(one.text == "converted" for one in cell.all("bdi"))]
    assert len(shown) == 6  # each table has it in a row or a column
    assert all(label in cell.words for cell in shown)
    for one in page.all("figure"):
        assert label in one.text or one.attributes["id"] == "learning-curve"
    for sample in section(page, "samples").all("div", **{"class": "texts"}):
        assert label in sample.text


def test_the_recipe_the_command_and_the_conditions(pages: dict[str, tuple[dict[str, Any], Path]]) -> None:
    report, page = dom(pages, "run")
    (recipe,) = page.all("pre", id="recipe")
    assert recipe.text == report["recipe"].replace("/srv/private/", "")
    (command,) = page.all("pre", id="command")
    assert command.text.startswith("headpool eval converted uptrained --baseline meta-llama/Llama-2-7b-hf --data")
    conditions = section(page, "conditions").words
    for text in (report["data"]["sha256"], "1,290,590 bytes in 62 texts", "window 2048, stride 2048", "torch 2.13.0"):
        assert text in conditions
    assert "209,715,200 tokens in 400 steps" in conditions


@pytest.mark.parametrize("name", ["single", "pair", "run", "several"])
def test_the_page_shows_no_path_and_refers_to_nothing_outside(
    pages: dict[str, tuple[dict[str, Any], Path]], name: str
) -> None:
    _, page = dom(pages, name)
    source = (pages[name][1] / "report.html").read_text(encoding="utf-8")
    for text in ("/somewhere", "/srv/", "/a/b", str(Path.home())):
        assert text not in source
    for element in page.all():
        for attribute in ("src", "href", "xlink:href", "srcset", "data", "action", "poster", "background"):
            value = element.attributes.get(attribute, "#")
            assert value.startswith(("#", "data:")), value
        assert element.tag not in ("script", "iframe", "object", "embed", "form", "img")
        assert not [key for key in element.attributes if key.startswith("on")]
    assert "@import" not in source
    assert not re.search(r"url\((?!#)", source)
    identities = [one.attributes["id"] for one in page.all() if "id" in one.attributes]
    assert len(identities) == len(set(identities))


def test_hostile_texts_are_shown_as_they_are(pages: dict[str, tuple[dict[str, Any], Path]]) -> None:
    _, page = dom(pages, "several")
    assert reports.HOSTILE in [one.text for one in section(page, "samples").all("h3")]
    assert [one.text for one in section(page, "notes").all("li")] == [reports.HOSTILE]
    (recipe,) = page.all("pre", id="recipe")
    assert reports.HOSTILE in recipe.text
    assert not list(page.all("script"))


def test_the_same_report_gives_the_same_bytes(pages: dict[str, tuple[dict[str, Any], Path]], tmp_path: Path) -> None:
    report, folder = pages["pair"]
    drawn(tmp_path, report)
    for path in folder.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name


def test_what_stays_the_same_is_not_touched(pages: dict[str, tuple[dict[str, Any], Path]]) -> None:
    """So that `headpool run` still knows a report for its own after `headpool report`."""
    folder = pages["pair"][1]
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    draw(folder)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_drawing_again_replaces_all_and_leaves_nothing_stale(tmp_path: Path) -> None:
    drawn(tmp_path, reports.pair())
    assert (tmp_path / "quality-against-cache.png").exists()
    for name in ("mine.png", "block-errors-2.png"):
        (tmp_path / name).write_bytes(b"earlier")
    drawn(tmp_path, reports.single())
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"report.json", "report.html", "cache-against-context.png", "mine.png"}


def test_a_full_disk_leaves_the_earlier_report_whole(
    pages: dict[str, tuple[dict[str, Any], Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(pages["pair"][1], tmp_path, dirs_exist_ok=True)
    (tmp_path / "report.json").write_text(json.dumps(reports.single()))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(HeadpoolError, match="No space left"):
        draw(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.browser
@pytest.mark.parametrize("name", ["run", "several"])
def test_a_browser_shows_the_numbers_and_has_nothing_to_complain_of(
    pages: dict[str, tuple[dict[str, Any], Path]], name: str, tmp_path: Path
) -> None:
    report, folder = pages[name]
    content, console = browse(folder / "report.html", tmp_path)
    assert console == []
    page = Parser(content).root
    check_models(report, page)
    assert len(list(page.all("svg"))) == len(list(page.all("figure"))) >= 5
    assert not list(page.all("script"))


@pytest.mark.browser
def test_a_browser_would_tell_of_what_is_fetched(pages: dict[str, tuple[dict[str, Any], Path]], tmp_path: Path) -> None:
    """The page's own policy stops what would be fetched, and the console has it: the test above can fail."""
    source = (pages["pair"][1] / "report.html").read_text(encoding="utf-8")
    changed = tmp_path / "changed.html"
    changed.write_text(source.replace("</body>", '<img src="http://example.invalid/x.png"></body>'), encoding="utf-8")
    _, console = browse(changed, tmp_path / "profile")
    assert any("http://example.invalid/x.png" in line for line in console)


@pytest.mark.browser
@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_is_wider_than_the_page(
    pages: dict[str, tuple[dict[str, Any], Path]], width: int, tmp_path: Path
) -> None:
    """Measured in a frame of that width, by a script that the page's own policy would not let run."""
    source = (pages["several"][1] / "report.html").read_text(encoding="utf-8")
    content = re.sub(r"<meta http-equiv=.*?>\n", "", source)
    (tmp_path / "page.html").write_text(content, encoding="utf-8")
    outer = tmp_path / "outer.html"
    outer.write_text(
        f'<iframe src="page.html" style="border:0;width:{width}px;height:900px"></iframe><p id="found"></p><script>'
        "onload = () => { const page = frames[0].document.documentElement;"
        " found.textContent = `${page.clientWidth} ${page.scrollWidth}`; };</script>"
    )
    content, _ = browse(outer, tmp_path / "profile", "--allow-file-access-from-files", "--virtual-time-budget=3000")
    (found,) = Parser(content).root.all("p", id="found")
    visible, needed = map(int, found.text.split())
    assert visible in range(width - 20, width + 1)
    assert needed == visible
