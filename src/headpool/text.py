"""Text to evaluate on, calibrate on and train on, from a local file or a hub data set.

Local files: `.txt` (one text, newlines kept, or its blank-line-separated blocks as documents), `.jsonl` and
`.parquet` (each row a text of its own), UTF-8, each also compressed (`.gz`, `.bz2`, `.xz`, `.zst`). A path that
exists is read; anything else is taken as a hub id.
"""

import bz2
import gzip
import hashlib
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from headpool.errors import RequestError, first_line


@dataclass(frozen=True)
class TextData:
    """Texts, and what identifies them in a report.

    `sha256` is of a local file's bytes as stored; of a hub data set it is that of the texts in UTF-8, joined
    by NUL. `name` is the file's own name or the hub id (`id:config:split`), never a path. `column` is the one that
    holds the texts, in tables.
    """

    texts: Sequence[str]
    sha256: str
    name: str
    column: str = "text"

    @property
    def bytes(self) -> int:
        """Length of all texts together in UTF-8."""
        return sum(len(text.encode()) for text in self.texts)


def read_texts(source: str | Path, column: str = "text", *, config: str | None = None, split: str = "test") -> TextData:
    """All texts of a file or of one split of a hub data set, in order; `column` names their column in
    tables.

    Raises RequestError for a file that is missing, of no known type or malformed (with its line or row), for
    a column that is not there (with those that are), for a data set that the hub does not give, and where
    there is no text.
    """
    path = Path(source)
    if path.exists():
        data = _read_file(path, column)
    elif is_local(str(source)):
        raise RequestError(f"no such file: {source}")
    else:
        data = _read_hub(str(source), column, config, split)
    if not any(data.texts):
        raise RequestError(f"{data.name} holds no text")
    return data


def read_documents(
    source: str | Path, column: str = "text", *, config: str | None = None, split: str = "train"
) -> TextData:
    """As `read_texts`, for training and calibration: the blank-line-separated blocks of a .txt file are documents.

    Raises RequestError as `read_texts` does.
    """
    data = read_texts(source, column, config=config, split=split)
    if Path(source).exists() and _file_type(Path(source))[0] == ".txt":
        return replace(data, texts=documents(data.texts[0]))
    return data


def documents(text: str) -> list[str]:
    """The blocks of `text` that blank lines separate, without white space at their ends, none of them empty."""
    return [block for part in re.split(r"\n\s*\n", text) if (block := part.strip())]


Check = Callable[[object, object, str], Any]
"""What makes a row's value what is wanted, or refuses it; the others are where it stands, in words, and its column."""


Part = tuple[int, int]
"""(i, n): the i-th of n parts."""

WHOLE: Part = (0, 1)


def iter_documents(
    path: Path, column: str = "text", check: Check | None = None, *, part: Part = WHOLE
) -> Iterator[Any]:
    """The documents of a local file one after another, in memory that does not grow with the file (a compressed
    .parquet file is held whole): blocks of a .txt file, of others what `check` makes of each row's `column`, which by
    default has to be text. Of a divisible file no more than `part` is read; all parts together are the file.

    Raises RequestError as `read_texts` does, when it gets there.
    """
    kind, stream = _open(path)
    with _errors_named(path), stream:
        if kind == ".txt":
            yield from _blocks(stream, path.name)
        else:
            yield from _ROWS[kind](stream, path.name, column, check or text_value, part)


def divisible(path: Path) -> bool:
    """Whether a file can be entered in the middle: lines of .jsonl, row groups of .parquet, not compressed."""
    kind, compression = _file_type(path)
    return kind in _ROWS and not compression


def is_local(source: str) -> bool:
    """Whether `source` names a local file, there or not, rather than a data set on the hub."""
    return Path(source).exists() or is_file_name(source) or not _HUB_ID.fullmatch(source)


def is_file_name(name: str) -> bool:
    """Whether a name ends as the files do that are read here."""
    return _file_type(Path(name))[0] in _READERS


def _read_file(path: Path, column: str) -> TextData:
    kind, stream = _open(path)
    with _errors_named(path):
        with stream:
            texts = _READERS[kind](stream, path.name, column)
        with path.open("rb") as stored:
            digest = hashlib.file_digest(stored, "sha256").hexdigest()
    return TextData(texts, digest, path.name, column)


def _open(path: Path) -> tuple[str, Any]:
    """The suffix that tells a file's content, and its bytes decompressed."""
    kind, compression = _file_type(path)
    if path.is_dir():
        raise RequestError(f"{path} is a directory; name a file in it")
    if kind not in _READERS:
        raise RequestError(
            f"{path.name}: unknown file type; headpool reads {', '.join(_READERS)}, "
            f"each also with {', '.join(filter(None, _OPENERS))}"
        )
    with _errors_named(path):
        return kind, _OPENERS[compression](path)


@contextmanager
def _errors_named(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise RequestError(f"{path.name} cannot be read: {first_line(error)}") from error


def _file_type(path: Path) -> tuple[str, str]:
    """The suffix that tells the content and the one that tells the compression: (".jsonl", ".gz")."""
    name = Path(path.name.lower())
    compression = name.suffix if name.suffix in _OPENERS else ""
    return Path(name.name.removesuffix(compression)).suffix, compression


def _open_plain(path: Path) -> BinaryIO:
    return path.open("rb")


def _open_zst(path: Path) -> Any:
    import pyarrow

    # pyarrow's own stream does not iterate over lines.
    return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd"), 1 << 20)


def _read_txt(stream: BinaryIO, name: str, column: str) -> list[str]:
    try:
        return [stream.read().decode("utf-8")]
    except UnicodeDecodeError as error:
        raise RequestError(f"{name}: byte {error.start} is not UTF-8") from error


def _blocks(stream: BinaryIO, name: str) -> Iterator[str]:
    """As `documents` of the whole."""
    lines: list[str] = []
    start = 0
    for raw in stream:
        try:
            lines.append(raw.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise RequestError(f"{name}: byte {start + error.start} is not UTF-8") from error
        start += len(raw)
        if not lines[-1].strip():
            yield from filter(None, ["".join(lines).strip()])
            lines = []
    yield from filter(None, ["".join(lines).strip()])


def _jsonl_rows(stream: BinaryIO, name: str, column: str, check: Check, part: Part) -> Iterator[Any]:
    for where, line in _lines(stream, name, part):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{where}: not JSON in UTF-8: {error}") from error
        if not isinstance(row, dict):
            raise RequestError(f"{where}: not a JSON object")
        check_column(where, column, list(row))
        yield check(row[column], where, column)


def _lines(stream: BinaryIO, name: str, part: Part) -> Iterator[tuple[object, bytes]]:
    """Lines, and where each stands. A part's are those that begin in its share of the bytes."""
    # Bytes are split at newlines alone; str.splitlines would also split at U+2028 inside a string.
    if part == WHOLE:
        yield from ((f"{name}, line {number}", line) for number, line in enumerate(stream, start=1))
        return
    size = stream.seek(0, io.SEEK_END)
    begin, end = (size * number // part[1] for number in (part[0], part[0] + 1))
    at = stream.seek(max(0, begin - 1))
    at += len(stream.readline()) if begin else 0
    while at < end and (line := stream.readline()):
        yield _Line(stream, name, at), line
        at += len(line)


@dataclass(frozen=True)
class _Line:
    """The line that begins at byte `at`, which is counted out only when it has to be told."""

    stream: BinaryIO
    name: str
    at: int

    def __str__(self) -> str:
        self.stream.seek(0)
        blocks = (self.stream.read(min(_BLOCK, self.at - start)) for start in range(0, self.at, _BLOCK))
        before = sum(block.count(b"\n") for block in blocks)
        return f"{self.name}, line {before + 1}"


def _parquet_rows(stream: BinaryIO, name: str, column: str, check: Check, part: Part) -> Iterator[Any]:
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(stream if stream.seekable() else io.BytesIO(stream.read()))
        check_column(name, column, file.schema_arrow.names)
        begin, end = (file.num_row_groups * number // part[1] for number in (part[0], part[0] + 1))
        number = sum(file.metadata.row_group(group).num_rows for group in range(begin))
        for batch in file.iter_batches(columns=[column], row_groups=range(begin, end)):
            for value in batch.column(0).to_pylist():
                yield check(value, f"{name}, row {number}", column)
                number += 1
    except (pyarrow.ArrowException, ValueError) as error:
        raise RequestError(f"{name}: not a readable parquet file: {first_line(error)}") from error


def _read_rows(rows: Callable[..., Iterator[str]], stream: BinaryIO, name: str, column: str) -> list[str]:
    return list(rows(stream, name, column, text_value, WHOLE))


def _read_hub(name: str, column: str, config: str | None, split: str) -> TextData:
    import datasets

    try:
        rows = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # the hub, the network and data files fail in a dozen classes of exception
        raise RequestError(
            f"{name}: no such file, and no data set that could be loaded: {first_line(error)}"
        ) from error
    check_column(name, column, rows.column_names)
    texts = _rows(rows.select_columns([column])[column], name, column)
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    return TextData(texts, digest, ":".join(filter(None, (name, config, split))), column)


def _rows(values: Sequence[object], name: str, column: str) -> list[str]:
    return [text_value(value, f"{name}, row {number}", column) for number, value in enumerate(values)]


def check_column(where: object, column: str, columns: Sequence[str]) -> None:
    """Raises RequestError, with the columns that are there, when `column` is not one of them."""
    if column not in columns:
        raise RequestError(f"{where}: no column {column!r}; there are: {', '.join(columns) or 'none'}")


def text_value(value: object, where: object, column: str) -> str:
    """`value` as it is, if it is text that UTF-8 can hold; else raises RequestError."""
    if not isinstance(value, str):
        raise RequestError(f"{where}: column {column!r} holds no string but {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{where}: column {column!r} holds half a surrogate pair") from error
    return value


_BLOCK = 1 << 20

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")

_OPENERS: Mapping[str, Callable[[Path], Any]] = {
    "": _open_plain,
    ".gz": gzip.GzipFile,
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": _open_zst,
}

_ROWS: Mapping[str, Callable[[BinaryIO, str, str, Check, Part], Iterator[Any]]] = {
    ".jsonl": _jsonl_rows,
    ".parquet": _parquet_rows,
}

_READERS: Mapping[str, Callable[[BinaryIO, str, str], list[str]]] = {
    ".txt": _read_txt,
    **{kind: partial(_read_rows, rows) for kind, rows in _ROWS.items()},
}
