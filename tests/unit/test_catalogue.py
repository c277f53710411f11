"""The table of families: one row a model type, saying what convert says, in step with the docs."""

import json
import re
from typing import Any

import pytest
import registry
import tiny
from transformers.models.auto import modeling_auto
from typer.testing import CliRunner

from headpool import catalogue, cli, opening
from headpool.convert.transcode.find import SOURCES
from headpool.errors import RequestError
from headpool.families import families, family_of
from headpool.headers import read_json_object

ROWS = {row.name: row for row in catalogue.rows()}


def test_every_model_type_that_transformers_lists_has_a_row() -> None:
    if registry.MEASURED:
        assert {
            *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            *modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        } <= set(ROWS)
    assert len(ROWS) > 250


def test_every_family_that_converts_is_tested_whole_and_every_other_says_why() -> None:
    """By test_every_family.py and test_fused.py, whose lists these are."""
    fused = {name for name, family in families().items() if family.fused is not None}
    if registry.MEASURED:
        converting = {name for name, row in ROWS.items() if row.status == "converts"}
        assert converting - fused == {*registry.LANGUAGE, *registry.COMPOSITE}
    assert {name for name, row in ROWS.items() if row.status == "transcodes"} == set(SOURCES)
    for row in ROWS.values():
        assert (row.status == "refused") == (row.reason is not None) == (row.nearest is not None)
        assert (row.status == "transcodes") == bool(row.to)
        assert (row.status == "refused") == (not row.opens_in)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", ("separate", None, "half-split")),
        ("qwen3", ("separate", "per head", "half-split")),
        ("olmo2", ("separate", "gains for every key head", "half-split")),
        ("cohere", ("separate", "gains for every key head", "interleaved")),
        ("phi3", ("fused (qkv_proj)", None, "half-split")),
        ("gemma3", ("separate", "per head", "half-split")),
    ],
)
def test_what_a_row_says_of_attention(name: str, expected: tuple[str | None, ...]) -> None:
    row = ROWS[name]
    assert (row.layout, row.key_norm, row.rotary) == expected


@pytest.mark.parametrize("name", ["bloom", "mpt", "persimmon", "xglm", "t5", "bert", "deepseek_v3", "mamba", "rwkv"])
def test_a_refused_row_says_what_convert_says(name: str) -> None:
    with pytest.raises(RequestError) as refused:
        family_of({"model_type": name})
    works = ROWS[name].nearest or ""
    instead = "" if works.startswith("nothing") else f"; instead: {works}"
    assert str(refused.value) == f"model_type {name!r}: {ROWS[name].reason}{instead}"


@pytest.mark.parametrize("row", [row for row in ROWS.values() if row.status == "refused"], ids=lambda row: row.name)
def test_a_reason_is_a_phrase_for_people(row: catalogue.Row) -> None:
    """Not the text of an exception, nor cut off."""
    for text in (str(row.reason), str(row.nearest)):
        assert not re.search(
            r"\w(Error|Exception|Warning)\b|NoneType|Traceback|\bdef\b|`|pip install|object has no", text
        )
        assert text.count("(") == text.count(")")
        assert text[0].islower() or text.startswith("nothing")
        assert re.search(r"[\w)\]]$", text)
    assert len(str(row.reason)) < 500


def test_what_works_instead_of_a_composite_does() -> None:
    pattern = re.compile(r"its language model alone, saved as a causal model \((.+)\), which converts")
    found = {row.name: held[1] for row in ROWS.values() if (held := pattern.fullmatch(row.nearest or ""))}
    assert {"gemma3n": "gemma3n_text", "perception_lm": "llama"}.items() <= found.items()
    assert all(ROWS[name].status == "converts" for name in found.values())
    assert ROWS["kimi_k25"].reason == ROWS["deepseek_v3"].reason


def test_the_page_in_docs_is_what_the_table_says() -> None:
    assert (tiny.ROOT / "docs" / "families.md").read_text(encoding="utf-8") == catalogue.markdown([*ROWS.values()])


def test_the_verb_prints_one_object() -> None:
    result = CliRunner().invoke(cli.app, ["families", "--json"])
    assert result.exit_code == 0
    printed = read_json_object(result.stdout.encode(), "stdout")["families"]
    fields = {"name", "status", "to", "layout", "key_norm", "rotary", "opens_in", "reason"}
    assert all(fields <= row.keys() for row in printed)
    assert [row["name"] for row in printed] == sorted(ROWS)
    assert json.loads(result.stdout)["families"] == printed
    shown = CliRunner().invoke(cli.app, ["families"]).stdout
    assert all(part in shown for part in ("qkv_proj", "transcodes to", "PhiForCausalLM", "MLA"))


def test_only_what_was_tried_is_said_to_open() -> None:
    assert set(opening.served()) <= {name for name, row in ROWS.items() if row.status == "converts"}
    usual: dict[str, Any] = {"model_type": "llava", "text_config": {"model_type": "llama"}}
    other: dict[str, Any] = {"model_type": "llava", "text_config": {"model_type": "qwen2"}}
    assert opening.warnings(usual) == ()
    with_code = usual | {"auto_map": {"AutoConfig": "configuration.Config"}}
    assert [one.split(": ")[1] for one in opening.warnings(with_code)] == ["open it without trust_remote_code"]
    assert opening.opens_in(other) == []
    assert "llava around a language model of type qwen2" in opening.warnings(other)[0]


def test_the_readme_and_the_changelog_count_what_converts() -> None:
    count = sum(row.status == "converts" for row in ROWS.values())
    for page in ("README.md", "CHANGELOG.md"):
        assert f"{count} model types" in (tiny.ROOT / page).read_text(encoding="utf-8")
