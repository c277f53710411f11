"""A recipe as others can read it: every file of this machine by its name and SHA-256 instead of its path."""

import glob
import hashlib
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from headpool.checkpoint import open_source

if TYPE_CHECKING:
    from headpool.recipe import Recipe

INPUTS = (
    "model", "convert.calibration", "eval.data", "eval.tasks", "uptrain.data", "uptrain.data.path",
    "uptrain.validation", "uptrain.validation.path", "uptrain.teacher", "uptrain.launch.config_file",
)  # fmt: skip
"""Where a recipe may name files, by dotted keys; lists on the way are gone through."""

DATA = tuple(key for key in INPUTS if key.startswith(("convert.", "eval.data", "uptrain.data", "uptrain.validation")))
"""Those that are text."""


def portable(recipe: "Recipe", *, revision: str | None = None) -> str:
    """The recipe as YAML with each local path as the file's own name; a comment on top lists them with their SHA-256.

    Of a checkpoint directory it is that of config and headers. revision: the commit of a model from the hub that the
    recipe does not pin. Large files are read whole, once in the life of a process.
    """
    values = recipe.model_dump(mode="json", exclude_defaults=True) | {"output": Path(recipe.output).name}
    if revision is not None:
        values["revision"] = revision
    hashes: dict[str, str] = {}

    def name_only(value: str) -> str:
        files = [Path(value)] if Path(value).exists() else sorted(map(Path, glob.glob(value, recursive=True)))  # noqa: PTH207
        hashes.update({path.name: _sha256(path) for path in files})
        return Path(value).name if files or Path(value).is_absolute() else value

    for key in INPUTS:
        values = _replaced(values, key.split("."), name_only)
    return recipe_text(values, hashes)


def recipe_text(values: Mapping[str, Any], hashes: Mapping[str, str]) -> str:
    """YAML for a recipe's file, opened by the command that runs it and what has to lie beside it."""
    lines = ["# headpool run recipe.yaml"]
    if hashes:
        lines += ["# with these beside it, by SHA-256 (of a checkpoint: of its config and headers):"]
        lines += [f"#   {name}  {digest}" for name, digest in hashes.items()]
    body = yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)
    return "\n".join(lines) + "\n" + body


def inputs(values: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
    """What a recipe, read from its YAML, names under some dotted keys, each once."""
    found: dict[str, None] = {}

    def note(value: str) -> str:
        found[value] = None
        return value

    for key in keys:
        _replaced(dict(values), key.split("."), note)
    return list(found)


def _replaced(values: Any, keys: list[str], replace: Callable[[str], str]) -> Any:
    """`values` with `replace` of the text, or of each text in a list, that stands under `keys`."""
    if isinstance(values, list):
        return [_replaced(one, keys, replace) for one in values]
    if not keys:
        return replace(values) if isinstance(values, str) else values
    if not isinstance(values, dict) or keys[0] not in values:
        return values
    return {**values, keys[0]: _replaced(values[keys[0]], keys[1:], replace)}


def _sha256(path: Path) -> str:
    if path.is_dir():
        return open_source(str(path), weights=False).headers_sha256()
    return file_sha256(path)


def file_sha256(path: Path) -> str:
    """Of a file's bytes, which are read once in the life of a process as long as they stay the same."""
    status = path.stat()
    return _file_sha256(path, status.st_size, status.st_mtime_ns)


@cache
def _file_sha256(path: Path, size: int, changed: int) -> str:
    with path.open("rb") as stored:
        return hashlib.file_digest(stored, "sha256").hexdigest()
