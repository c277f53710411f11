"""Rows of local files and hub data sets: by number from memory-mapped Arrow, or shard by shard as they stream."""

import glob
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from headpool import __version__
from headpool.errors import HeadpoolError, RequestError, first_line
from headpool.sections import DataSource
from headpool.text import WHOLE, Check, Part, check_column, divisible, is_local, iter_documents, text_value
from headpool.uptrain.encode import conversation

_VALUE = "value"
"""Column of the Arrow copies that are made of local files."""


@dataclass(frozen=True)
class Mapped:
    """Rows by number. `column` is a pyarrow ChunkedArray of strings, or of conversations (as JSON or as lists)."""

    column: Any
    name: str

    def where(self, row: int) -> str:
        """The row's name in errors."""
        return f"{self.name}, row {row}"


@dataclass(frozen=True)
class Shards:
    """Rows in `count` shards that can only be read in order: `read(shard, start)` gives those from row `start` on,
    checked, each with its name in errors.
    """

    count: int
    read: Callable[[int, int], Iterator[tuple[Any, str]]]
    name: str


def open_mapped(source: DataSource) -> Mapped:
    """Local files are read once into an Arrow file in the cache of `datasets`, all rows checked on the way.

    Raises RequestError for data that cannot be had, without the column, or with a row that is not what it should be.
    """
    column = _column(source)
    if is_local(source.path) or _is_glob(source.path):
        rows = _local(source, _files(source.path))
        return Mapped(rows.data.column(_VALUE), Path(source.path).name)
    rows = _load(source, streaming=False)
    check_column(source.path, column, rows.column_names)
    name = _hub_name(source)
    values = rows.select_columns([column]).data.column(column)
    if values.null_count:
        row = next(number for number, value in enumerate(values) if not value.is_valid)
        raise RequestError(f"{name}, row {row}: column {column!r} is empty (null)")
    return Mapped(_strings(values, name, source), name)


def open_shards(source: DataSource, wanted: int) -> Shards:
    """Shards are files, or parts of them where they are fewer than `wanted` and can be entered in the middle.

    Raises RequestError for data that cannot be had or whose first row is without the column.
    """
    if is_local(source.path) or _is_glob(source.path):
        files = _files(source.path)
        count = -(-wanted // len(files))
        parts = [(file, (i, n)) for file in files for n in [count if divisible(file) else 1] for i in range(n)]
        return Shards(len(parts), partial(_read_part, parts, source), Path(source.path).name)
    rows = _load(source, streaming=True)
    name = _hub_name(source)
    known = rows.column_names or list(next(_named_errors(rows, name), {}))
    check_column(source.path, _column(source), known)
    rows = rows.select_columns([_column(source)])
    if rows.num_shards < wanted:
        rows = rows.reshard()
    return Shards(rows.num_shards, partial(_read_shard, rows, source), name)


def _column(source: DataSource) -> str:
    return source.messages_column or source.text_column


def _check(source: DataSource) -> Check:
    return conversation if source.messages_column else text_value


def _is_glob(path: str) -> bool:
    return glob.has_magic(path)


def _files(path: str) -> list[Path]:
    """Sorted, so that every machine has them in one order."""
    matches = glob.glob(path, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
    found = [Path(path)] if Path(path).exists() else sorted(map(Path, matches))
    files = [one for one in found if len(found) == 1 or one.is_file()]
    if not files:
        raise RequestError(f"no file matches {path}" if _is_glob(path) else f"no such file: {path}")
    return files


def _local(source: DataSource, files: list[Path]) -> Any:
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    column, messages = _column(source), source.messages_column is not None
    stamps = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = json.dumps([__version__, stamps, column, messages])
    try:
        return datasets.Dataset.from_generator(
            partial(_values, files, source),
            features=datasets.Features({_VALUE: datasets.Value("large_string")}),
            fingerprint=hashlib.sha256(key.encode()).hexdigest()[:32],
        )
    except datasets.exceptions.DatasetGenerationError as error:
        cause = error.__cause__
        if isinstance(cause, HeadpoolError):
            raise cause from None
        raise HeadpoolError(f"{source.path}: its copy in the cache failed: {first_line(cause or error)}") from error
    except OSError as error:
        raise HeadpoolError(f"{source.path}: its copy in the cache failed: {first_line(error)}") from error


def _values(files: list[Path], source: DataSource) -> Iterator[dict[str, str]]:
    """Conversations as JSON: their fields differ from row to row."""
    empty = True
    for file in files:
        for value in iter_documents(file, _column(source), _check(source)):
            yield {_VALUE: value if isinstance(value, str) else json.dumps(value)}
            empty = False
    if empty:
        raise RequestError(f"{Path(source.path).name} holds no text")


def _read_part(
    parts: Sequence[tuple[Path, Part]], source: DataSource, shard: int, start: int
) -> Iterator[tuple[Any, str]]:
    file, part = parts[shard]
    of = "" if part == WHOLE else f"part {part[0] + 1} of {part[1]}, "
    for row, value in enumerate(iter_documents(file, _column(source), _check(source), part=part)):
        if row >= start:
            yield value, f"{file.name}, {of}document {row}"


def _read_shard(rows: Any, source: DataSource, shard: int, start: int) -> Iterator[tuple[Any, str]]:
    column, check = _column(source), _check(source)
    part = rows.shard(num_shards=rows.num_shards, index=shard).skip(start)
    for row, values in enumerate(_named_errors(part, _hub_name(source)), start):
        where = f"{_hub_name(source)}, shard {shard}, row {row}"
        yield check(values[column], where, column), where


def _named_errors(rows: Iterable[dict[str, Any]], name: str) -> Iterator[dict[str, Any]]:
    try:
        yield from rows
    except Exception as error:  # the network and data files fail in a dozen classes of exception
        raise HeadpoolError(f"{name}: reading on failed: {first_line(error)}") from error


def _load(source: DataSource, *, streaming: bool) -> Any:
    import datasets

    try:
        return datasets.load_dataset(source.path, source.config, split=source.split, streaming=streaming)
    except Exception as error:  # the hub, the network and data files fail in a dozen classes of exception
        raise RequestError(
            f"{source.path}: no such file, and no data set that could be loaded: {first_line(error)}"
        ) from error


def _hub_name(source: DataSource) -> str:
    return ":".join(filter(None, (source.path, source.config, source.split)))


def _strings(values: Any, name: str, source: DataSource) -> Any:
    """Texts have to be strings; conversations are looked at one by one when their turn comes."""
    import pyarrow as pa

    if source.messages_column or pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        return values
    raise RequestError(f"{name}: column {source.text_column!r} holds no strings but {values.type}")
