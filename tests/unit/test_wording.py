"""A report in words: names, the headline, figures for people, and what is no report at all."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import reports

from headpool.drawing import figure
from headpool.errors import RequestError
from headpool.eval import wording
from headpool.eval.schema import ReportFile, load


def parsed(report: dict[str, Any]) -> ReportFile:
    return ReportFile.model_validate(report)


def named(*paths: str, revisions: tuple[str | None, ...] = ()) -> list[str]:
    models = [reports.model(path) for path in paths]
    for model, revision in zip(models, revisions, strict=False):
        model["revision"] = revision
    return wording.names(parsed(reports.report(models)).models)


def test_models_are_called_by_what_tells_them_apart() -> None:
    assert named("/a/b/c") == ["c"]
    assert named("meta-llama/Llama-2-7b-hf", "./out/converted/") == ["Llama-2-7b-hf", "converted"]
    assert named("/a/x/m", "/a/y/m", "/a/x/n") == ["x/m", "y/m", "n"]
    assert named("m", "/a/m") == ["m", "a/m"]
    assert named("org/m", "org/m", "n", revisions=("main", None, "v1")) == ["m@main", "m", "n"]
    assert named("/", ".") == ["/", "."]


def test_the_headline_of_a_run_is_about_what_was_uptrained() -> None:
    assert wording.headline(parsed(reports.run())) == (
        "uptrained beside Llama-2-7b-hf: 8 K/V heads instead of 32, 128 KiB of cache per token instead of 512 KiB "
        "(−75%), decoding 1.80 times as fast, perplexity 5.710 instead of 5.470 (+4.39%)."  # noqa: RUF001
    )


def test_the_headline_without_a_baseline_and_with_several_models() -> None:
    single = wording.headline(parsed(reports.single()))
    assert single == "Llama-2-7b-hf: perplexity 5.470 with 512 KiB of K/V cache per token."
    several = wording.headline(parsed(reports.several()))
    assert several == (
        "5 models beside mha, 2 of them not yet uptrained: the cache is 3.12% to 50% of the original's, "
        "perplexity 1.009 to 1,485 times as high."
    )


def test_the_headline_says_what_is_not_yet_uptrained() -> None:
    assert wording.headline(parsed(reports.pair())).startswith(
        "llama-2-7b-gqa8 (converted, not yet uptrained) beside Llama-2-7b-hf: 8 K/V heads instead of 32, "
    )


def test_other_tokenizers_are_compared_in_bits_per_byte() -> None:
    report = reports.pair()
    report["models"][1]["comparison"]["perplexity_ratio"] = None
    report["models"][1] |= {"bits_per_byte": 0.5}
    report["models"][0] |= {"bits_per_byte": 0.4}
    report["models"][1]["comparison"]["bits_per_byte_ratio"] = 1.25
    assert wording.headline(parsed(report)).endswith("0.5000 bits per byte instead of 0.4000 (+25%).")


def test_several_models_of_which_one_has_another_tokenizer_are_compared_in_bits_per_byte() -> None:
    report = reports.several()
    models = [one for one in report["models"] if one["comparison"]]
    for number, one in enumerate(models):
        one["comparison"]["bits_per_byte_ratio"] = 1.25 + number
    models[-1]["comparison"]["perplexity_ratio"] = None
    assert wording.headline(parsed(report)).endswith(f"bits per byte 1.250 to {0.25 + len(models):.3f} times as many.")


def test_a_report_of_before_there_was_a_comparison_for_each_model() -> None:
    report = reports.pair()
    for model in report["models"]:
        for later in ("comparison", "cache_curve", "decode", "positions", "tasks", "samples", "conversion"):
            del model[later]
    report["comparison"] = {"perplexity_ratio": 217.0, "bits_per_byte_ratio": 4.2, "cache_ratio": 0.25}
    assert "(217 times as high)" in wording.headline(parsed(report))


@pytest.mark.parametrize(
    ("value", "text"),
    [(5.47, "5.470"), (1187.3, "1,187"), (123456.7, "123,457"), (0.0123456, "0.01235"), (0, "0"), (2e-9, "2.000e-09"),
     (3e15, "3.000e+15"), (9.9999, "10.000"), (-0.5, "-0.5000")],
)  # fmt: skip
def test_figures_have_four_digits(value: float, text: str) -> None:
    assert figure(value) == text


def test_times_and_rates() -> None:
    assert wording.milliseconds(0.00675) == "6.75 ms"
    assert (wording.duration(0.5), wording.duration(2.2116)) == ("500 ms", "2.21 s")
    assert wording.bandwidth(2.636e12) == "2,636 GB/s"
    assert (wording.speedup(0.9504), wording.speedup(8.479), wording.speedup(12.345)) == ("0.95", "8.48", "12.3")


def test_no_path_of_the_machine_is_shown() -> None:
    report = parsed(reports.run())
    for text, shown in {
        "/srv/out/converted: no BOS": "converted: no BOS",
        "calibration: /srv/private/c4.jsonl, x": "calibration: c4.jsonl, x",
        "see ~/models/it": "see it",
        "https://example.org/a/b and 3/4 and a/b/c": "https://example.org/a/b and 3/4 and a/b/c",
        "meta-llama/Llama-2-7b-hf": "meta-llama/Llama-2-7b-hf",
    }.items():
        assert wording.without_paths(text, report) == shown


def test_the_command_names_all_that_was_asked_for() -> None:
    report = reports.run()
    assert wording.command(parsed(report)) == (
        "headpool eval converted uptrained --baseline meta-llama/Llama-2-7b-hf --data wikitext-2-raw-v1 --split test "
        "--out report --window 2048 --stride 2048 --batch-size 8 --dtype float32 --device cpu "
        "--contexts 512,2048,8192,32768 --batches 1,8 --tasks hellaswag,piqa,wikitext"
    )
    report["data"]["name"] = "my text; rm.txt"
    assert "--data 'my text; rm.txt' --out" in wording.command(parsed(report))
    report["data"]["name"] = "Salesforce/wikitext:wikitext-2-raw-v1:test"
    command = wording.command(parsed(report))
    assert "--data Salesforce/wikitext --data-config wikitext-2-raw-v1 --split test --out" in command


def test_the_cache_is_tabulated_where_models_reach() -> None:
    assert wording.cache_lengths(parsed(reports.run())) == [8192, 32768]
    assert wording.cache_lengths(parsed(reports.pair())) == [4096]


def without(*keys: Any) -> str:
    report: Any = copy.deepcopy(reports.pair())
    part = report
    for key in keys[:-1]:
        part = part[key]
    del part[keys[-1]]
    return json.dumps(report)


def changed(*keys: Any, value: Any) -> str:
    report: Any = copy.deepcopy(reports.pair())
    part = report
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = value
    return json.dumps(report)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not JSON"),
        ("\udcff", "not JSON in UTF-8"),
        ("[" * 100_000, "not JSON"),
        ("[]", "no report of headpool eval: the whole"),
        ("{}", "no report of headpool eval: models: Field required"),
        (without("data", "sha256"), "data.sha256: Field required"),
        (without("models", 1, "perplexity"), "models.1.perplexity: Field required"),
        (changed("models", value=[]), "models: List should have at least 1 item"),
        (changed("models", 0, "perplexity", value="low"), "models.0.perplexity: Input should be a valid number"),
        (changed("models", 0, "perplexity", value=float("inf")), "models.0.perplexity: Input should be a finite"),
        (changed("models", 0, "perplexity", value=0), "models.0.perplexity: Input should be greater than 0"),
        (changed("models", 0, "cache_bytes_per_token", "formula", value=-1), "formula: Input should be greater"),
    ],
)
def test_what_is_no_report_is_refused_in_one_line(content: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(RequestError) as error:
        load(tmp_path)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_without_a_report(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(RequestError, match=r"no report\.json in .*: headpool eval writes one"):
            load(folder)
    (tmp_path / "report.json").mkdir()
    with pytest.raises(RequestError, match="cannot be read"):
        load(tmp_path)


def test_what_no_page_can_hold_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(changed("notes", value=["a\x00b\ud800c\x85d\ttab 模型"]))
    assert load(tmp_path).notes == ["a\ufffdb\ufffdc\ufffdd\ttab 模型"]
