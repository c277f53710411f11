"""The layout of the design: which folders are installed under which name, and which way imports point."""

import ast
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from tiny import ROOT

CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
FOLDERS = {name: ROOT / folder for name, folder in CONFIG["package-dir"].items()}

BASE = {
    "errors", "family", "families", "geometry", "planning", "reference", "headers", "jsonpatch", "checkpoint",
    "destination", "hub", "kv_fields", "progress", "drawing", "plots", "text", "score", "recipe", "sections", "check",
    "rounding", "loading", "tensors", "card", "columns", "portable", "pinned", "uploading", "console", "family_data",
    "composite", "opening", "card_parts", "licences", "attention", "defaults", "instead",
    "__init__",
}  # fmt: skip
LEVELS = {
    "convert": 1,
    "uptrain": 1,
    "eval": 1,
    "launch": 2,
    "catalogue": 2,
    "measured": 2,
    "parcel": 3,
    "publish": 4,
    "pipeline": 4,
    "cli": 5,
    "__main__": 6,
}
"""What may import what: a module imports from its own part or from lower levels. The base is level 0."""


def test_the_mapping_is_the_folders_on_disk() -> None:
    assert set(CONFIG["packages"]) == set(FOLDERS)
    for name, folder in FOLDERS.items():
        assert (folder / "__init__.py").is_file(), name
        assert name.rsplit(".", 1)[-1] == folder.name
    packages = {
        path.parent
        for pattern in ("*/__init__.py", "*/*/__init__.py", "src/*/*/__init__.py")
        for path in ROOT.glob(pattern)
    }
    assert packages == set(FOLDERS.values())


def modules() -> dict[str, Path]:
    """Every module of the package by its path below `headpool`, such as convert.plan."""
    found = {}
    for package, folder in FOLDERS.items():
        inside = package.removeprefix("headpool").lstrip(".")
        for path in folder.glob("*.py"):
            found[f"{inside}.{path.stem}".lstrip(".")] = path
    return found


def imports(path: Path) -> set[str]:
    """The modules below `headpool` that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module} if node.module != "headpool" else {f"headpool.{alias.name}" for alias in node.names}
    return {name.removeprefix("headpool.") for name in found if name.startswith("headpool.")}


def part(module: str) -> str:
    return module.split(".", maxsplit=1)[0]


def test_imports_point_one_way() -> None:
    checked = 0
    for module, path in modules().items():
        assert part(module) in BASE | set(LEVELS) | {"recipes"}, f"{module} has no place in the order yet"
        for other in imports(path):
            here, there = LEVELS.get(part(module), 0), LEVELS.get(part(other), 0)
            assert there < here or part(other) == part(module) or there == here == 0, f"{module} imports {other}"
            checked += 1
    assert checked > 40


def test_nothing_imports_the_checkout_by_accident() -> None:
    for path in [
        *ROOT.glob("src/**/*.py"),
        *(p for f in FOLDERS.values() for p in f.glob("*.py")),
        *ROOT.glob("tests/**/*.py"),
    ]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & {"convert", "uptrain", "eval", "recipes"}, path


def test_files_stay_readable() -> None:
    for path in [*modules().values(), *ROOT.glob("tools/*.py"), *ROOT.glob("benchmarks/*.py")]:
        assert len(path.read_text().splitlines()) <= 400, path


@pytest.mark.wheel
def test_the_wheel_holds_the_package_and_no_module_of_another_name(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"  # without what earlier builds left in build/
    checkout.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, checkout / name)
    for name in ("src", "convert", "uptrain", "eval", "recipes"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(tmp_path), str(checkout)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    assert {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")} == {"headpool"}
    assert not list(site.rglob("__pycache__"))
    installed = {str(path.relative_to(site / "headpool")) for path in site.rglob("*.py")}
    assert installed == {f"{module.replace('.', '/')}.py" for module in modules()}
    for data in (
        "py.typed",
        "class_defaults.json",
        "eval/report.html.jinja",
        "recipes/quickstart/gqa2.yaml",
        "recipes/quickstart/model/model.safetensors",
        "recipes/accelerate/fsdp2.yaml",
    ):
        assert (site / "headpool" / data).is_file(), data
    script = """
import importlib.util, sys
sys.path.insert(0, sys.argv[1])
assert [importlib.util.find_spec(name) for name in ("convert", "uptrain", "eval", "recipes")] == [None] * 4
import headpool.convert, headpool.uptrain, headpool.eval
assert headpool.convert.__file__.startswith(sys.argv[1]), headpool.convert.__file__
from headpool.recipe import shipped_recipes
assert set(shipped_recipes()) >= {"quickstart/gqa2", "llama-2-7b/gqa8", "phi-2/mqa"}, shipped_recipes()
"""
    subprocess.run([sys.executable, "-P", "-c", script, str(site)], check=True, cwd=tmp_path)
