"""A recipe as others can read it: every file of this machine by its name and SHA-256 instead of its path."""

import glob
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from headpool.checkpoint import open_source
from headpool.pinned import evaluation, pinned
from headpool.text import is_file_name

if TYPE_CHECKING:
    from headpool.recipe import Recipe

INPUTS = (
    "model", "convert.calibration", "eval.data", "eval.tasks", "uptrain.data", "uptrain.data.path",
    "uptrain.validation", "uptrain.validation.path", "uptrain.teacher",
)  # fmt: skip
"""Where a recipe may name files, by dotted keys; lists on the way are gone through."""

PRIVATE = ("main_process_ip", "aws_access_key_id", "aws_secret_access_key", "vm", "tpu_name", "env")
"""Options of `accelerate launch` that say where, and as whom."""

DATA = tuple(key for key in INPUTS if key.startswith(("convert.", "eval.data", "uptrain.data", "uptrain.validation")))
"""Those that are text."""


def portable(recipe: "Recipe", done: Mapping[str, Any], report: Mapping[str, Any] | None = None) -> str:
    """The recipe as YAML with each local path as the file's own name; a comment on top lists them with their SHA-256.

    done, report: headpool.json of what it made and the report.json on that, by which defaults, and the commit of a
    model from the hub, are pinned. Of a checkpoint directory the SHA-256 is that of config and headers. Where several
    have one name, as much of their folders as tells them apart stands before it. What `launch` says of machines and
    accounts is left out. Large files are read whole, once in the life of a process.
    """
    values = pinned(recipe, done, report) | {"output": Path(recipe.output).name}
    launch = (values.get("uptrain") or {}).get("launch") or {}
    if launch:
        public = {key: value for key, value in launch.items() if key.replace("-", "_") not in PRIVATE}
        values["uptrain"] = {**values["uptrain"], "launch": public or None}
    keys = [*INPUTS, *(f"uptrain.launch.{key}" for key in launch)]
    found = {value: _files(value) for value in inputs(values, keys)}
    local = [value for value, files in found.items() if files or value.startswith(("/", "~"))]
    names = _names({*local, *(str(path) for files in found.values() for path in files)})
    for key in keys:
        values = _replaced(values, key.split("."), lambda value: names.get(value, value))
    hashes = {
        names[str(path)]: _sha256(path)
        for files in found.values()
        for path in files
        if path.is_file() or (path / "config.json").is_file()
    }
    return recipe_text(values, hashes)


def _files(value: str) -> list[Path]:
    """What a recipe's text names on this machine."""
    if not value:
        return []
    return [Path(value)] if Path(value).exists() else sorted(map(Path, glob.glob(value, recursive=True)))  # noqa: PTH207


def _names(paths: Iterable[str]) -> dict[str, str]:
    """Each path by as many of its last parts as tell it from the others."""
    parts = {path: [part for part in Path(path).absolute().parts if part != "/"] or ["/"] for path in paths}
    count = dict.fromkeys(parts, 1)
    while True:
        held: dict[str, set[tuple[str, ...]]] = {}
        names = {path: "/".join(one[-count[path] :]) for path, one in parts.items()}
        for path, name in names.items():
            held.setdefault(name, set()).add(tuple(parts[path]))
        longer = [path for path, name in names.items() if len(held[name]) > 1 and count[path] < len(parts[path])]
        if not longer:
            return names
        for path in longer:
            count[path] += 1


def evaluated(recipe: str, report: Mapping[str, Any]) -> str:
    """A recipe that `portable` or a conversion has written, with the evaluation by a report that no recipe led to.

    As it is where another of its files has the name of the report's data.
    """
    values, hashes, data = yaml.safe_load(recipe), dict(_HASH.findall(recipe)), report["data"]
    if is_file_name(data["name"]):
        if hashes.get(data["name"], data["sha256"]) != data["sha256"]:
            return recipe
        hashes[data["name"]] = data["sha256"]
    training = {key: values.pop(key) for key in ("uptrain",) if key in values}
    return recipe_text({**values, "eval": evaluation(report), **training}, hashes)


_HASH = re.compile(r"(?m)^#   (.+)  ([0-9a-f]{64})$")
"""A line of `recipe_text`'s comment."""


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
