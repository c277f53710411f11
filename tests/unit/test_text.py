"""Readers of evaluation text: every container gives the texts that went in; bad input is named."""

import bz2
import gzip
import hashlib
import json
import lzma
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from headpool.errors import RequestError
from headpool.text import divisible, documents, is_local, iter_documents, read_documents, read_texts

TEXTS = ["One\r\ntwo\n\nthree\u2028four", "", "naïve — ψ\n", "{}"]


def zst(raw: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(raw)
    return bytes(sink.getvalue().to_pybytes())


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zst,
}


def jsonl(texts: list[str]) -> bytes:
    # ensure_ascii=False leaves U+2028 bare inside a line, which is valid JSON.
    return "".join(json.dumps({"id": 1, "text": text}, ensure_ascii=False) + "\n" for text in texts).encode()


def parquet_bytes(texts: list[str]) -> bytes:
    sink = pyarrow.BufferOutputStream()
    table = pyarrow.table({"text": pyarrow.array(texts, pyarrow.string()), "id": list(range(len(texts)))})
    parquet.write_table(table, sink, row_group_size=2)
    return bytes(sink.getvalue().to_pybytes())


CONTENTS = {
    ".txt": (TEXTS[0].encode(), TEXTS[:1]),
    ".jsonl": (jsonl(TEXTS), TEXTS),
    ".parquet": (parquet_bytes(TEXTS), TEXTS),
}


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("kind", CONTENTS)
def test_every_container_gives_the_texts_that_went_in(tmp_path: Path, kind: str, compression: str) -> None:
    raw, texts = CONTENTS[kind]
    path = tmp_path / f"some.file{kind.upper()}{compression}"
    path.write_bytes(COMPRESS[compression](raw))
    data = read_texts(path)
    assert list(data.texts) == texts
    assert data.bytes == len("".join(texts).encode())
    assert data.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert data.name == path.name


@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1).filter(any))
def test_jsonl_round_trip(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_bytes(jsonl(texts).replace(b"\n", b"\n \n"))  # blank lines hold no row
    assert list(read_texts(path).texts) == texts


def test_the_column_is_selected_before_anything_else_is_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "drift.jsonl"
    path.write_text('{"body": "a", "meta": 1}\n{"meta": {"other": []}, "body": "b"}\n', encoding="utf-8")
    assert list(read_texts(path, "body").texts) == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "raw", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', "a.jsonl, line 2: not JSON"),
        ("a.jsonl", b'{"text": "x"}\n\n[1]\n', "a.jsonl, line 3: not a JSON object"),
        ("a.jsonl", b'{"text": "x"}\n{"i": 1, "b": 2}', "a.jsonl, line 2: no column 'text'; there are: i, b"),
        ("a.jsonl", b'{"text": null}\n', "a.jsonl, line 1: column 'text' holds no string but NoneType"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "a.jsonl, line 1: column 'text' holds half a surrogate pair"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}\n', "a.jsonl, line 2: not JSON in UTF-8"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl, line 1: not JSON"),
        ("a.jsonl", b'{"text": ""}\n', "a.jsonl holds no text"),
        ("a.jsonl", b"\n", "a.jsonl holds no text"),
        ("a.txt", b"", "a.txt holds no text"),
        ("a.txt", b"ab\xffcd", "a.txt: byte 2 is not UTF-8"),
        ("a.csv", b"text\n1\n", "a.csv: unknown file type; headpool reads .txt, .jsonl, .parquet"),
        ("a.gz", b"", "a.gz: unknown file type"),
        ("a.txt.gz", b"not compressed", "a.txt.gz cannot be read"),
        ("a.txt.gz", gzip.compress(b"abc" * 100, mtime=0)[:-9], "a.txt.gz cannot be read"),
        ("a.txt.xz", b"not compressed", "a.txt.xz cannot be read"),
        ("a.txt.bz2", b"not compressed", "a.txt.bz2 cannot be read"),
        ("a.txt.zst", b"not compressed", "a.txt.zst cannot be read"),
        ("a.txt.zst", zst(bytes(range(256)) * 9)[:-40], "a.txt.zst cannot be read"),
        ("a.parquet", b"PAR1 not parquet PAR1", "a.parquet: not a readable parquet file"),
    ],
)  # fmt: skip
def test_bad_files_are_refused_by_name(tmp_path: Path, name: str, raw: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(RequestError, match=f"^{re.escape(message)}"):
        read_texts(tmp_path / name)


def test_parquet_columns_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"body": ["x", None], "n": [1, 2]}), path)
    with pytest.raises(RequestError, match=r"a\.parquet: no column 'text'; there are: body, n"):
        read_texts(path)
    with pytest.raises(RequestError, match=r"a\.parquet, row 1: column 'body' holds no string but NoneType"):
        read_texts(path, "body")
    with pytest.raises(RequestError, match=r"a\.parquet, row 0: column 'n' holds no string but int"):
        read_texts(path, "n")


def test_paths_that_are_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: object, **kwargs: object) -> None:
        raise AssertionError("the hub was asked for a file")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    for name in ("gone.txt", "data/gone.jsonl.gz", str(tmp_path / "gone"), "../gone", "a/b/c"):
        with pytest.raises(RequestError, match=r"^no such file: "):
            read_texts(name)
    with pytest.raises(RequestError, match="is a directory"):
        read_texts(tmp_path)


def test_hub_data_sets_are_loaded_by_config_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def load_dataset(name: str, config: str | None, *, split: str) -> datasets.Dataset:
        asked.append((name, config, split))
        return datasets.Dataset.from_dict({"id": [1, 2], "body": ["a", "bé"]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = read_texts("owner/set", "body", config="raw", split="validation")
    assert asked == [("owner/set", "raw", "validation")]
    assert list(data.texts) == ["a", "bé"]
    assert data.name == "owner/set:raw:validation"
    assert data.sha256 == hashlib.sha256(b"a\0b\xc3\xa9").hexdigest()
    with pytest.raises(RequestError, match="owner/set: no column 'text'; there are: id, body"):
        read_texts("owner/set")


def test_what_the_hub_says_becomes_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: object, **kwargs: object) -> None:
        raise ConnectionError("Couldn't reach 'owner/set' on the Hub\nand a page more")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(RequestError) as caught:
        read_texts("owner/set")
    assert str(caught.value).startswith("owner/set: no such file, and no data set that could be loaded: Couldn't")
    assert "\n" not in str(caught.value)


def test_importing_the_module_loads_nothing_heavy() -> None:
    code = "import sys, headpool.text; print([m for m in ('torch', 'pyarrow', 'datasets') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_documents_of_a_txt_file_are_its_blocks_and_of_other_files_its_rows(tmp_path: Path) -> None:
    blocks = tmp_path / "blocks.txt"
    blocks.write_bytes(b"\n\nOne\r\ntwo\r\n\r\nthree\n \t\n\n    four\n")
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(jsonl(["a\n\nb", "c"]))
    assert read_documents(blocks).texts == ["One\r\ntwo", "three", "four"]
    assert read_documents(blocks).sha256 == hashlib.sha256(blocks.read_bytes()).hexdigest()
    assert read_documents(rows).texts == ["a\n\nb", "c"]


@given(st.lists(st.text("ab \n", min_size=1).map(str.strip).filter(bool).filter(lambda text: "\n\n" not in text)))
def test_blank_lines_put_between_blocks_part_them(blocks: list[str]) -> None:
    assert [line for block in documents("\n \n".join(blocks)) for line in block.split()] == " ".join(blocks).split()
    assert len(documents("\n\n".join(["x", *["y"] * len(blocks)]))) == len(blocks) + 1


@given(
    text=st.text(st.sampled_from("ab \n\t\r\u2028é"), max_size=60),
    rows=st.lists(st.text("xy\n", max_size=5), max_size=5),
)
@settings(max_examples=25)
def test_documents_one_by_one_are_the_documents(
    tmp_path_factory: pytest.TempPathFactory, text: str, rows: list[str]
) -> None:
    folder = tmp_path_factory.getbasetemp()
    for compression, compress in COMPRESS.items():
        blocks, table = folder / f"a.txt{compression}", folder / f"a.parquet{compression}"
        blocks.write_bytes(compress(text.encode()))
        table.write_bytes(compress(parquet_bytes(rows)))
        assert list(iter_documents(blocks)) == documents(text)
        assert list(iter_documents(table)) == rows


@given(rows=st.lists(st.text("xy\u2028 é", max_size=40), max_size=9), parts=st.integers(1, 12))
@settings(max_examples=40)
def test_the_parts_of_a_file_are_the_file(
    tmp_path_factory: pytest.TempPathFactory, rows: list[str], parts: int
) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / "p.jsonl").write_bytes(jsonl(rows).rstrip(b"\n"))
    (folder / "p.parquet").write_bytes(parquet_bytes(rows))
    for path in (folder / "p.jsonl", folder / "p.parquet"):
        assert divisible(path)
        assert [row for i in range(parts) for row in iter_documents(path, part=(i, parts))] == rows
    assert not divisible(Path("a.jsonl.gz")) and not divisible(Path("a.txt"))


def test_a_part_names_what_is_wrong_by_its_line_or_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "x"}\n' * 3 + b'{"text": 3}\n')
    with pytest.raises(RequestError, match=r"a\.jsonl, line 4: column 'text' holds no string but int"):
        list(iter_documents(path, part=(1, 2)))
    table = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["a", "b", "c", "d", None]}), table, row_group_size=2)
    with pytest.raises(RequestError, match=r"a\.parquet, row 4: column 'text' holds no string"):
        list(iter_documents(table, part=(2, 3)))


def test_what_is_local() -> None:
    assert [is_local(name) for name in ("a.txt", "x/y.jsonl.gz", "/data", "owner/set", "wikitext")] == [
        True, True, True, False, False
    ]  # fmt: skip
