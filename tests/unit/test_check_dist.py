"""The check of a release's files finds what is missing, what is too much, and versions that disagree."""

import io
import tarfile
import zipfile
from pathlib import Path

import check_dist
import pytest
from tiny import ROOT

import headpool


@pytest.fixture
def dist(tmp_path: Path) -> Path:
    """A wheel and an sdist as they should be, by name."""
    write_wheel(tmp_path, check_dist.expected_files(ROOT))
    with tarfile.open(tmp_path / f"headpool-{headpool.__version__}.tar.gz", "w:gz") as archive:
        for name in check_dist.SDIST_ALSO:
            archive.addfile(tarfile.TarInfo(f"headpool-{headpool.__version__}/{name}"), io.BytesIO())
    return tmp_path


def write_wheel(folder: Path, names: set[str], version: str = headpool.__version__) -> None:
    with zipfile.ZipFile(folder / f"headpool-{version}-py3-none-any.whl", "w") as archive:
        for name in [*sorted(names), f"headpool-{version}.dist-info/METADATA"]:
            archive.writestr(name, "")


def test_nothing_is_wrong_with_what_is_as_it_should_be(dist: Path) -> None:
    assert list(check_dist.problems(dist, ROOT)) == []


def test_what_the_package_is_made_of() -> None:
    files = check_dist.expected_files(ROOT)
    assert {
        "headpool/__init__.py", "headpool/py.typed", "headpool/card.md.jinja", "headpool/class_defaults.json",
        "headpool/convert/aligned/keys.py", "headpool/eval/report.html.jinja", "headpool/uptrain/loop.py",
        "headpool/recipes/quickstart/model/model.safetensors", "headpool/recipes/accelerate/fsdp2.yaml",
    } <= files  # fmt: skip
    assert not [name for name in files if "__pycache__" in name or name.startswith("tests/")]


@pytest.mark.parametrize(
    ("more", "fewer", "says"),
    [
        ({"headpool/secret.env"}, set(), "the wheel holds headpool/secret.env"),
        ({"eval/__init__.py"}, set(), "the wheel holds eval/__init__.py"),
        (set(), {"headpool/card.md.jinja"}, "the wheel lacks headpool/card.md.jinja"),
    ],
)
def test_other_files(dist: Path, more: set[str], fewer: set[str], says: str) -> None:
    write_wheel(dist, check_dist.expected_files(ROOT) - fewer | more)
    assert list(check_dist.problems(dist, ROOT)) == [says]


def test_versions_and_changelog(dist: Path) -> None:
    assert next(iter(check_dist.problems(dist, ROOT, "v99"))) == f"the tag is v99, the version {headpool.__version__}"
    told = f"## [{headpool.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    found = list(check_dist.problems(dist, ROOT, f"v{headpool.__version__}"))
    assert found == ([] if told else [f"CHANGELOG.md does not tell of {headpool.__version__}"])
    write_wheel(dist, set(), "99")
    assert "headpool-99" in next(iter(check_dist.problems(dist, ROOT)))


def test_the_version_has_one_place() -> None:
    assert check_dist.version(ROOT) == headpool.__version__
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in pyproject
    assert headpool.__version__ not in pyproject.split("[tool.setuptools]")[0].split("dependencies")[0]
