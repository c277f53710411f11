"""Check what `python -m build` has made: the files in wheel and sdist, and one version everywhere.

    python tools/check_dist.py dist [--tag v1.2.3]

With the tag of a release, CHANGELOG.md has to tell of it. Exits 1 and lists what is wrong.
"""

import argparse
import re
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

SDIST_ALSO = ("CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml", "docs/publish.md", "tests/hub.py", "Makefile")
"""What an sdist brings besides the package."""

LARGEST = 20_000_000
"""Bytes of a wheel; the bundled model and its texts are most of it."""


def expected_files(root: Path) -> set[str]:
    """The package's files by their names in a wheel: every module, and the data that pyproject.toml names."""
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    found = set()
    for package, folder in settings["package-dir"].items():
        patterns = ["*.py", *settings["package-data"].get(package, [])]
        for path in {path for pattern in patterns for path in (root / folder).glob(pattern) if path.is_file()}:
            if "__pycache__" not in path.parts and path.suffix != ".pyc":
                found.add(f"{package.replace('.', '/')}/{path.relative_to(root / folder)}")
    return found


def version(root: Path) -> str:
    """The version, from its one place."""
    found = re.search(r'^__version__ = "(.+)"$', (root / "src/headpool/__init__.py").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def problems(dist: Path, root: Path, tag: str | None = None) -> Iterator[str]:
    """What is wrong with the files in `dist`, a line each."""
    number = version(root)
    wheels, sdists = sorted(dist.glob("*.whl")), sorted(dist.glob("*.tar.gz"))
    names = [path.name for path in (*wheels, *sdists)]
    wanted = [f"headpool-{number}-py3-none-any.whl", f"headpool-{number}.tar.gz"]
    if names != wanted:
        yield f"there is {', '.join(names) or 'nothing'}, not {', '.join(wanted)}"
        return
    with zipfile.ZipFile(wheels[0]) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    yield from _differences("the wheel", held, expected_files(root))
    if wheels[0].stat().st_size > LARGEST:
        yield f"the wheel has {wheels[0].stat().st_size:,} bytes, more than {LARGEST:,}"
    with tarfile.open(sdists[0]) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    yield from (f"the sdist lacks {name}" for name in SDIST_ALSO if name not in files)
    if tag is not None and tag != f"v{number}":
        yield f"the tag is {tag}, the version {number}"
    if tag is not None and f"## [{number}]" not in (root / "CHANGELOG.md").read_text(encoding="utf-8"):
        yield f"CHANGELOG.md does not tell of {number}"


def _differences(what: str, held: set[str], wanted: set[str]) -> Iterator[str]:
    yield from (f"{what} lacks {name}" for name in sorted(wanted - held))
    yield from (f"{what} holds {name}" for name in sorted(held - wanted))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dist", type=Path)
    parser.add_argument("--tag")
    arguments = parser.parse_args()
    found = list(problems(arguments.dist, ROOT, arguments.tag))
    print("\n".join(found) or f"headpool {version(ROOT)}: all files are there, and no others")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
