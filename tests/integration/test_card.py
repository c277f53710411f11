"""The model card of what convert, uptrain and run made: its figures, its metadata, and no path of this machine."""

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import here
import pytest
import reports
import tiny
import training
import yaml
from huggingface_hub import ModelCard

from headpool import __version__
from headpool.card import cache_plot, draw_card
from headpool.card_parts import base_model
from headpool.columns import columns, table
from headpool.convert.run import convert_checkpoint
from headpool.errors import RequestError
from headpool.measured import card_files
from headpool.pipeline import run_recipe
from headpool.recipe import Recipe, load_recipe

SOURCE = """---
license: other
license_name: tiny-licence
license_link: LICENSE
language: [en, de]
tags: [novels, gqa]
pipeline_tag: text-generation
---
# The original
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a recipe that was run all the way; its output is `run`."""
    with pytest.MonkeyPatch.context() as patched:
        here.check_here(patched)
        folder = tmp_path_factory.mktemp("card")
        path = training.recipe_file(folder)
        (folder / "model" / "README.md").write_text(SOURCE)
        path.write_text(path.read_text() + "eval: {data: valid.txt, window: 64, contexts: [8, 32]}\n")
        run_recipe(recipe(folder))
        yield folder


def recipe(folder: Path, *overrides: str) -> Recipe:
    own = [f"output={folder / 'run'}", "uptrain.tokens=512", "uptrain.eval_every=1"]
    return training.load(folder / "my.yaml", *own, *overrides)


def held(directory: Path, name: str) -> Any:
    return json.loads((directory / name).read_text())


def numbers(value: Any) -> Iterator[float]:
    """Every number in a JSON value, those in its texts too."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from numbers(key)
            yield from numbers(one)
    elif isinstance(value, list):
        for one in value:
            yield from numbers(one)
    elif isinstance(value, str):
        yield from (float(one) for one in re.findall(r"(?<![\w.])\d+(?:\.\d+)?", value))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


UNITS = {"bytes": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "ms": 1e-3, "": 1.0}


def foreign(card: str, files: list[Any]) -> list[str]:
    """The figures on a card that no number of the JSON files rounds to."""
    text = re.sub(r"```bibtex.*?```|`[0-9a-f]{16,}`|\]\([^)]*\)", "", card, flags=re.DOTALL)
    text = re.sub(r"(?m)^#   \S+  [0-9a-f]{64}$|sha256: [0-9a-f]{64}", "", text)  # a file's name and hash
    known = [one for file in files for one in numbers(file)]
    missing = []
    for figure, unit in re.findall(r"(?<![\w.-])(\d[\d,]*(?:\.\d+)*(?:e-?\d+)?)k?(?: (bytes|KiB|MiB|GiB|ms))?", text):
        plain = figure.replace(",", "").rstrip(".")
        if plain.count(".") > 1:  # a version
            if not any(plain in json.dumps(file) for file in files):
                missing.append(figure)
            continue
        decimals = len(plain.partition(".")[2].partition("e")[0])
        digits = len(plain.replace(".", "").lstrip("0"))
        step = max(10.0**-decimals, 10.0 ** (len(plain.partition(".")[0]) - 4) if digits >= 4 and not decimals else 0)
        value = float(plain)
        if not any(abs(one / UNITS[unit] - value) <= step / 2 * 1.000001 for one in known):
            missing.append(f"{figure} {unit}")
    return missing


@pytest.mark.parametrize("name", ["converted", "uptrained"])
def test_every_figure_is_in_one_of_the_files_beside_it(ran: Path, name: str) -> None:
    directory = ran / "run" / name
    card = (directory / "README.md").read_text()
    files = [held(directory, "headpool.json"), held(directory, "report.json")]
    assert foreign(card, files) == []
    assert foreign(card + "\nIts perplexity is 7.77.", files) == ["7.77 "], "the test can tell"
    perplexities = [f"{model['perplexity']:.4g}" for model in files[1]["models"]]
    row = next(line for line in card.splitlines() if line.startswith("| perplexity"))
    assert [float(cell.replace(",", "")) for cell in row.split("|")[2:-1]] == [float(one) for one in perplexities]


def test_the_columns_are_the_original_and_what_became_of_it(ran: Path) -> None:
    converted = (ran / "run" / "converted" / "README.md").read_text()
    assert "|  | original | converted, not yet uptrained |\n" in converted
    assert "**Converted, not yet uptrained.**" in converted
    uptrained = (ran / "run" / "uptrained" / "README.md").read_text()
    assert "|  | original | converted, not yet uptrained | converted and uptrained |\n" in uptrained
    assert "**Converted, not yet uptrained.**" not in uptrained
    # 2 layers x 2 x 12, 4 and 4 K/V heads x 8 x 4 bytes
    assert "| K/V cache per token | 1.5 KiB | 512 bytes | 512 bytes |" in uptrained
    assert "| K/V cache at 128 tokens | 192 KiB | 64 KiB | 64 KiB |" in uptrained
    assert re.search(r"\| decode step at 32 tokens, batch 1 \| [\d.]+ ms \| [\d.]+ ms \| [\d.]+ ms \|", uptrained)


def test_metadata(ran: Path) -> None:
    report = held(ran / "run" / "uptrained", "report.json")
    data = ModelCard.load(ran / "run" / "uptrained" / "README.md").data
    assert (data.license, data.license_name, data.license_link) == ("other", "tiny-licence", "LICENSE")
    assert (data.language, data.pipeline_tag, data.library_name) == (["en", "de"], "text-generation", "transformers")
    assert data.tags == ["novels", "gqa", "headpool"]
    assert data.base_model is None, "a folder of this machine is no hub id"
    assert "base_model" not in data.to_dict()
    assert "base_model_relation" not in data.to_dict()
    assert data.datasets is None, "a file of this machine is no data set on the hub"
    results = data.eval_results
    assert [one.metric_value for one in results] == [one["perplexity"] for one in reversed(report["models"])]
    assert {one.metric_type for one in results} == {"perplexity"}
    assert {one.dataset_name for one in results} == {"valid.txt"}
    assert {one.dataset_args["sha256"] for one in results} == {report["data"]["sha256"]}


@pytest.mark.parametrize("name", ["converted", "uptrained"])
def test_no_path_of_this_machine(ran: Path, name: str) -> None:
    for file in ("README.md", "headpool.json", "report.json"):
        text = (ran / "run" / name / file).read_text()
        assert str(ran) not in text, file
        assert not re.search(r"(?<![\w.:/<)])/(?:tmp|home|root|usr|var|private)\b", text), file


def recipe_on(card: str) -> str:
    found = re.search(r"```yaml\n(.*?)```", card, re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.usefixtures("quick_check")
def test_the_recipe_on_the_card_makes_it_again_elsewhere(
    ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another folder, and on a machine that would compute in another precision if it were left to itself."""
    text = recipe_on((ran / "run" / "uptrained" / "README.md").read_text())
    digests = dict(re.findall(r"(?m)^#   (\S+)  ([0-9a-f]{64})$", text))
    assert set(digests) == {"model", "train.txt", "valid.txt"}
    for name in ("train.txt", "valid.txt"):
        shutil.copyfile(ran / name, tmp_path / name)
        assert hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() == digests[name]
    (tmp_path / "model").symlink_to(ran / "model")
    (tmp_path / "recipe.yaml").write_text(text)
    monkeypatch.setattr("headpool.uptrain.plan.default_precision", lambda: "bf16")
    monkeypatch.setattr("headpool.uptrain.parallel.default_precision", lambda: "bf16")
    monkeypatch.chdir(tmp_path)
    assert run_recipe(load_recipe("recipe.yaml", ["eval=null"])).output == "run"
    first, again = ran / "run" / "uptrained", tmp_path / "run" / "uptrained"
    assert (again / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()
    values = {key: value for key, value in yaml.safe_load(text).items() if key != "eval"}
    assert yaml.safe_load(recipe_on((again / "README.md").read_text())) == values


def test_the_recipe_on_the_card_holds_what_defaults_became(ran: Path) -> None:
    values = yaml.safe_load(recipe_on((ran / "run" / "uptrained" / "README.md").read_text()))
    assert values["seed"] == 0
    assert values["convert"] == {"kv_heads": 4, "method": "mean"}
    assert values["eval"] == {
        "data": "valid.txt", "window": 64, "stride": 64, "batch_size": 8, "dtype": "float32", "contexts": [8, 32],
        "batches": [1],
    }  # fmt: skip
    chosen = values["uptrain"]
    assert (chosen["precision"], chosen["optimizer"], chosen["betas"], chosen["clip"]) == (
        "fp32", "adamw", [0.9, 0.95], 1.0,
    )  # fmt: skip
    assert chosen["schedule"] == {"shape": "cosine", "warmup": 0.05, "final": 0.1, "decay": 0.2}
    converted = yaml.safe_load(recipe_on((ran / "run" / "converted" / "README.md").read_text()))
    assert converted == {key: value for key, value in values.items() if key != "uptrain"}


@pytest.mark.parametrize("text", ["model: [", "model: a\nconvert: {kv_heads: 2, of_tomorrow: 1}\n", "just words"])
def test_a_report_s_recipe_that_this_version_cannot_read_is_told_in_a_line(
    ran: Path, tmp_path: Path, text: str
) -> None:
    report = held(ran / "run" / "report", "report.json")
    (tmp_path / "report.json").write_text(json.dumps(report | {"recipe": text}))
    with pytest.raises(RequestError, match=r"report\.json holds a recipe that .* cannot read; evaluate") as told:
        card_files(ran / "run" / "uptrained", tmp_path)
    assert "\n" not in str(told.value)


def test_the_card_names_the_machine_and_the_versions_to_install(ran: Path) -> None:
    assert "- Uptraining, machine: device cpu, processes 1\n" in (ran / "run" / "uptrained" / "README.md").read_text()
    versions = {name: metadata.version(name).split("+")[0] for name in ("torch", "transformers", "accelerate")}
    wanted = " ".join(
        ["pip install", *(f"{name}=={one}" for name, one in {"headpool": __version__, **versions}.items())]
    )
    assert f"`{wanted}`" in (ran / "run" / "uptrained" / "README.md").read_text()


def test_what_lies_beside_the_card(ran: Path) -> None:
    converted, uptrained = ran / "run" / "converted", ran / "run" / "uptrained"
    for directory, plots in (
        (converted, {"quality-against-cache.png", "cache-against-context.png"}),
        (uptrained, {"quality-against-cache.png", "cache-against-context.png", "learning-curve.png"}),
    ):
        assert {path.name for path in directory.glob("*.png")} == plots
        card = (directory / "README.md").read_text()
        for plot in plots:
            assert (directory / plot).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
            assert f"]({plot})" in card
        assert (directory / "SOURCE_README.md").read_text() == SOURCE
        assert "(SOURCE_README.md)" in card
        assert "[LICENSE](LICENSE)" in card
        assert not list(directory.glob(".*")), "nothing half-written"
        tiny.load(directory)


@pytest.mark.usefixtures("quick_check")
def test_a_conversion_s_card_shows_the_cache_before_any_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 layers of 12, then 4 K/V heads of 8 in float32, keys and values: 1536 and 512 bytes a token, up to 128."""
    monkeypatch.setattr("headpool.card.cache_plot", cache_plot)
    drawn: list[Any] = []
    monkeypatch.setattr("headpool.plots.png", lambda figure: drawn.append(figure) or b"\x89PNG")
    convert_checkpoint(str(tiny.checkpoint(tmp_path / "model")), tmp_path / "out", kv_heads=4)
    assert (tmp_path / "out" / "cache-against-context.png").read_bytes() == b"\x89PNG"
    assert "](cache-against-context.png)" in (tmp_path / "out" / "README.md").read_text()
    (figure,) = drawn
    curves = {line.get_label(): line.get_xydata().tolist() for line in figure.axes[0].lines}
    lengths = [2**power for power in range(8)]
    assert curves["12 K/V heads"] == [[tokens, 1536 * tokens] for tokens in lengths]
    assert curves["4 K/V heads (converted, not yet uptrained)"] == [[tokens, 512 * tokens] for tokens in lengths]
    kept = held(tmp_path / "out", "headpool.json")["cache"]["output"]["bytes_at"]
    assert kept == {str(tokens): 512 * tokens for tokens in lengths}


def test_nothing_is_drawn_where_no_cache_is_kept() -> None:
    empty = {"dtype": "float32", "kv_heads": 4, "bytes_per_token": 0, "bytes_at": {"1": 0, "2": 0}}
    assert cache_plot({"method": "mean", "cache": {"source": empty, "output": empty}}) == {}
    assert cache_plot({}) == {}


def test_a_card_is_outside_fingerprints_and_drawn_again_where_it_is_gone(ran: Path) -> None:
    card = ran / "run" / "uptrained" / "README.md"
    before = card.read_text()
    card.write_text("mine")
    assert all(stage.skipped for stage in run_recipe(recipe(ran)).stages)
    assert card.read_text() == "mine", "what its owner wrote is kept"
    card.unlink()
    assert all(stage.skipped for stage in run_recipe(recipe(ran)).stages)
    assert card.read_text() == before


def test_base_model_of_what_was_made_of_a_hub_model() -> None:
    hub = {"model": "someone/model", "revision": "c0ffee"}
    assert base_model({"source": hub}) == "someone/model"
    assert base_model({"source": {"model": "converted", "revision": None, "source": hub}}) == "someone/model"
    assert base_model({"source": {"model": "model", "revision": None}}) is None
    assert base_model({}) is None


@pytest.mark.usefixtures("quick_check")
def test_a_second_conversion_keeps_the_original_and_its_card(ran: Path, tmp_path: Path) -> None:
    convert_checkpoint(str(ran / "run" / "converted"), tmp_path / "mqa", kv_heads=1)
    assert (tmp_path / "mqa" / "SOURCE_README.md").read_text() == SOURCE
    done = held(tmp_path / "mqa", "headpool.json")
    assert done["source"]["model"] == "converted"
    assert done["source"]["source"]["model"] == "model"
    card = ModelCard.load(tmp_path / "mqa" / "README.md")
    assert card.data.tags == ["novels", "gqa", "mqa", "headpool"]
    assert card.data.eval_results is None
    assert foreign(str(card), [done]) == []
    text = re.search(r"```yaml\n(.*?)```", str(card), re.DOTALL)
    assert text is not None
    assert yaml.safe_load(text[1])["convert"] == {"kv_heads": 1, "method": "mean"}


@pytest.mark.parametrize(
    "text", ["no metadata", "---\nlicense: [\n---\n", "---\n- a list\n---\n", "---\nlicense: mit", "\xff"]
)
@pytest.mark.usefixtures("quick_check")
def test_a_source_card_that_cannot_be_read_is_kept_and_inherits_nothing(tmp_path: Path, text: str) -> None:
    model = tiny.checkpoint(tmp_path / "model")
    (model / "README.md").write_bytes(text.encode("latin-1"))
    convert_checkpoint(str(model), tmp_path / "out", kv_heads=4)
    assert (tmp_path / "out" / "SOURCE_README.md").read_bytes() == text.encode("latin-1")
    data = ModelCard.load(tmp_path / "out" / "README.md").data
    assert data.license is None
    assert data.tags == ["gqa", "headpool"]


def test_data_sets_of_the_hub_are_named_in_the_metadata(ran: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(ran / "run" / "uptrained", tmp_path / "out"))
    done, report = held(directory, "headpool.json"), held(directory, "report.json")
    done["source"] |= {"model": "someone/model", "revision": "c0ffee"}
    report["recipe"] = yaml.safe_dump(
        {
            "model": "someone/model",
            "convert": {"kv_heads": 4, "method": "aligned", "calibration": "big/text"},
            "uptrain": {"data": [{"path": "big/text", "weight": 0.5}, {"path": "mine.jsonl"}, "other/words"]},
            "eval": {"data": "Salesforce/wikitext", "data_config": "wikitext-2-raw-v1"},
        }
    )
    report["data"]["name"] = "Salesforce/wikitext:wikitext-2-raw-v1:test"
    (directory / "headpool.json").write_text(json.dumps(done))
    (directory / "report.json").write_text(json.dumps(report))
    data = ModelCard(str(draw_card(directory, "out"))).data
    assert (data.base_model, data.base_model_relation) == ("someone/model", "finetune")
    assert data.datasets == ["big/text", "Salesforce/wikitext", "other/words"]
    result = data.eval_results[0]
    assert (result.dataset_type, result.dataset_config, result.dataset_split) == (
        "Salesforce/wikitext",
        "wikitext-2-raw-v1",
        "test",
    )


def test_the_table_of_a_long_model() -> None:
    """32 layers of 32, then 8 K/V heads of 128 in float16: 512 and 128 KiB a token, 8192 and 32768 tokens of them."""
    lines = table(columns({}, reports.run())).splitlines()
    assert "| K/V cache per token | 512 KiB | 128 KiB | 128 KiB |" in lines
    assert "| K/V cache at 8k tokens | 4 GiB | 1 GiB | 1 GiB |" in lines
    assert "| K/V cache at 32k tokens | 16 GiB | 4 GiB | 4 GiB |" in lines
    assert "| perplexity | 5.470 | 9.810 | 5.710 |" in lines
    assert "| hellaswag, acc_norm | 0.7000 ± 0.0043 | 0.7000 ± 0.0043 | 0.7000 ± 0.0043 |" in lines
    timed = next(line for line in lines if line.startswith("| decode step at 32k tokens, batch 8 |"))
    seconds = [(13.5e9 + 8 * 32768 * kib * 1024) / 2.9e12 * 1.1 for kib in (512, 128, 128)]
    assert [float(cell.split()[0]) for cell in timed.split("|")[2:-1]] == [
        pytest.approx(one * 1e3, rel=5e-3) for one in seconds
    ]


def test_what_would_break_a_table_does_not() -> None:
    report = reports.run()
    report["models"][1]["tasks"][0]["metric"] = "a|b\nc"
    lines = table(columns({}, report)).splitlines()
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1
