"""Recipes: strict, all errors at once, near misses suggested, inputs relative to the file."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headpool.errors import RequestError
from headpool.recipe import copy_recipe, find_recipe, load_recipe

GOOD = """# headpool run my.yaml
model: m
convert: {kv_heads: 2}
eval: {data: t.txt}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "m").mkdir()
    (tmp_path / "t.txt").write_text("text")
    path = tmp_path / "my.yaml"
    path.write_text(GOOD)
    return path


def test_inputs_are_relative_to_the_recipe_and_output_to_the_current_directory(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed = load_recipe(str(recipe))
    assert parsed.eval is not None
    assert (Path(parsed.model), Path(parsed.eval.data)) == (tmp_path / "m", tmp_path / "t.txt")
    assert parsed.output == "headpool-out/my"
    assert (parsed.convert.method, parsed.seed) == ("mean", 0)
    assert load_recipe(str(recipe), ["model=some/hub-id"]).model == "some/hub-id"
    monkeypatch.chdir(tmp_path)
    assert load_recipe("my.yaml").output == "headpool-out/my"


def test_overrides_win_and_are_typed(recipe: Path) -> None:
    parsed = load_recipe(
        str(recipe), ["convert.kv_heads=4", "eval.window=128", "output=o", "seed=3", "convert.dtype=bfloat16"]
    )
    assert parsed.eval is not None
    assert (parsed.convert.kv_heads, parsed.eval.window, parsed.output, parsed.seed) == (4, 128, "o", 3)
    assert load_recipe(str(recipe), ["eval=null"]).eval is None


def test_all_errors_are_reported_together(recipe: Path) -> None:
    recipe.write_text(
        "modle: m\nconvert: {kv_head: 2, method: median}\neval: {data: t.txt, window: none, colour: red}\n"
    )
    with pytest.raises(RequestError) as caught:
        load_recipe(str(recipe), ["seed=-1", "nonsense"])
    lines = str(caught.value).splitlines()
    assert lines[0] == "my.yaml: 9 error(s)"
    for expected in (
        "unknown key modle; did you mean model?",
        "missing key model",
        "unknown key convert.kv_head; did you mean kv_heads?",
        "missing key convert.kv_heads",
        "convert.method: input should be 'mean', 'first', 'random' or 'aligned', found 'median'",
        "eval.window:",
        "unknown key eval.colour; known are data,",
        "seed: input should be greater than or equal to 0, found -1",
        "'nonsense' is not of the form key=value",
    ):
        assert sum(line.strip().startswith(expected) for line in lines) == 1, expected


def test_unknown_keys_of_data_sources_are_named_with_their_place(recipe: Path) -> None:
    given = ["uptrain={tokens: 9, data: [a.txt, {path: b.txt, weights: 2}], validation: {pth: c.txt}}"]
    with pytest.raises(RequestError) as caught:
        load_recipe(str(recipe), given)
    assert [line.strip() for line in str(caught.value).splitlines()[1:]] == [
        "unknown key uptrain.data[1].weights; did you mean weight?",
        "missing key uptrain.validation.path",
        "unknown key uptrain.validation.pth; did you mean path?",
    ]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (["eval.window=8", "eval.stride=9"], "eval: stride 9 is larger than window 8"),
        (["convert.max_shard_size=much"], "convert.max_shard_size: .*much"),
        (["convert.heal=9", "convert.groups=search"], "convert: groups, heal: for method aligned, not for mean"),
        (
            ["convert.method=random", "convert.calibration=a.txt"],
            "convert: calibration: for method aligned, not for random",
        ),
        (["convert.calibration_tokens=9"], "convert: calibration_tokens: for method aligned, not for mean"),
        (
            ["convert.calibration=a.txt", "convert.calibration_tokens=9", "convert.heal=9"],
            "convert: heal: for method aligned, not for mean",
        ),
    ],
)
def test_values_that_do_not_go_together(recipe: Path, override: list[str], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        load_recipe(str(recipe), override)


def test_pooling_may_have_text_for_the_gains_of_norms(recipe: Path) -> None:
    told = ["convert.calibration=a.txt", "convert.calibration_tokens=9", "convert.calibration_window=8"]
    section = load_recipe(str(recipe), told).convert
    assert section is not None
    assert (section.method, section.calibration, section.calibration_tokens) == ("mean", "a.txt", 9)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a\n", "a mapping was expected"),
        ("model: [\n", "not a recipe"),
        ("model: a\nmodel: b\n", "the key 'model' stands twice"),
        ("", "a mapping was expected"),
    ],
)
def test_what_is_no_recipe(recipe: Path, text: str, says: str) -> None:
    recipe.write_text(text)
    with pytest.raises(RequestError, match=says):
        load_recipe(str(recipe))


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("a", "not of the form"),
        ("a..b=1", "not of the form"),
        ("model.x=1", "model is no section"),
        ("seed=[", "not a YAML value"),
    ],
)
def test_overrides_that_make_no_sense(recipe: Path, override: str, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        load_recipe(str(recipe), [override])


@given(text=st.text(max_size=80))
def test_any_text_is_a_recipe_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(text, encoding="utf-8", errors="ignore")
    with pytest.raises(RequestError):
        load_recipe(str(path))


def test_unknown_names_list_the_shipped_ones() -> None:
    with pytest.raises(
        RequestError, match=r"no recipe 'quickstart/gqa3'.*quickstart/gqa2.*did you mean quickstart/gqa2"
    ):
        find_recipe("quickstart/gqa3")
    assert find_recipe("quickstart") == find_recipe("quickstart/gqa2")


def test_copying_brings_the_inputs_along(tmp_path: Path) -> None:
    path = copy_recipe("quickstart", tmp_path)
    assert path == tmp_path / "quickstart" / "gqa2.yaml"
    assert Path(load_recipe(str(path)).model) == tmp_path / "quickstart" / "model"
    assert (tmp_path / "quickstart" / "model" / "model.safetensors").is_file()
    with pytest.raises(RequestError, match="exists"):
        copy_recipe("quickstart", tmp_path)
