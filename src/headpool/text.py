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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from headpool.errors import RequestError, first_line


@dataclass(frozen=True)
class TextData:
    """Texts, and what identifies them in a report.

    `sha256` is of a local file's bytes as stored; of a hub data set it is that of the texts in UTF-8, joined
    by NUL. `name` is the file's own name or the hub id (`id:config:split`), never a path.
    """

    texts: Sequence[str]
    sha256: str
    name: str

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
    elif _file_type(path)[0] in _READERS or not _HUB_ID.fullmatch(str(source)):
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


def _read_file(path: Path, column: str) -> TextData:
    kind, compression = _file_type(path)
    if path.is_dir():
        raise RequestError(f"{path} is a directory; name a file in it")
    if kind not in _READERS:
        raise RequestError(
            f"{path.name}: unknown file type; headpool reads {', '.join(_READERS)}, "
            f"each also with {', '.join(filter(None, _OPENERS))}"
        )
    try:
        with _OPENERS[compression](path) as stream:
            texts = _READERS[kind](stream, path.name, column)
        with path.open("rb") as stored:
            digest = hashlib.file_digest(stored, "sha256").hexdigest()
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise RequestError(f"{path.name} cannot be read: {first_line(error)}") from error
    return TextData(texts, digest, path.name)


def _file_type(path: Path) -> tuple[str, str]:
    """The suffix that tells the content and the one that tells the compression: (".jsonl", ".gz")."""
    name = Path(path.name.lower())
    compression = name.suffix if name.suffix in _OPENERS else ""
    return Path(name.name.removesuffix(compression)).suffix, compression


def _open_plain(path: Path) -> BinaryIO:
    return path.open("rb")


def _open_zst(path: Path) -> Any:
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")


def _read_txt(stream: BinaryIO, name: str, column: str) -> list[str]:
    try:
        return [stream.read().decode("utf-8")]
    except UnicodeDecodeError as error:
        raise RequestError(f"{name}: byte {error.start} is not UTF-8") from error


def _read_jsonl(stream: BinaryIO, name: str, column: str) -> list[str]:
    return list(_jsonl_texts(stream, name, column))


def _jsonl_texts(stream: BinaryIO, name: str, column: str) -> Iterator[str]:
    # Bytes are split at newlines alone; str.splitlines would also split at U+2028 inside a string.
    for number, line in enumerate(stream.read().split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        try:
            row = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{where}: not JSON in UTF-8: {error}") from error
        if not isinstance(row, dict):
            raise RequestError(f"{where}: not a JSON object")
        _check_column(where, column, list(row))
        yield _text(row[column], where, column)


def _read_parquet(stream: BinaryIO, name: str, column: str) -> list[str]:
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(stream if stream.seekable() else io.BytesIO(stream.read()))
        _check_column(name, column, file.schema_arrow.names)
        values = file.read(columns=[column]).column(column).to_pylist()
    except (pyarrow.ArrowException, ValueError) as error:
        raise RequestError(f"{name}: not a readable parquet file: {first_line(error)}") from error
    return _rows(values, name, column)


def _read_hub(name: str, column: str, config: str | None, split: str) -> TextData:
    import datasets

    try:
        rows = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # the hub, the network and data files fail in a dozen classes of exception
        raise RequestError(
            f"{name}: no such file, and no data set that could be loaded: {first_line(error)}"
        ) from error
    _check_column(name, column, rows.column_names)
    texts = _rows(rows.select_columns([column])[column], name, column)
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    return TextData(texts, digest, ":".join(filter(None, (name, config, split))))


def _rows(values: Sequence[object], name: str, column: str) -> list[str]:
    return [_text(value, f"{name}, row {number}", column) for number, value in enumerate(values)]


def _check_column(where: str, column: str, columns: Sequence[str]) -> None:
    if column not in columns:
        raise RequestError(f"{where}: no column {column!r}; there are: {', '.join(columns) or 'none'}")


def _text(value: object, where: str, column: str) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{where}: column {column!r} holds no string but {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{where}: column {column!r} holds half a surrogate pair") from error
    return value


_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")

_OPENERS: Mapping[str, Callable[[Path], Any]] = {
    "": _open_plain,
    ".gz": gzip.GzipFile,
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": _open_zst,
}

_READERS: Mapping[str, Callable[[BinaryIO, str, str], list[str]]] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}
