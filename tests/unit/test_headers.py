"""Headers of weight files: what is true is read, what lies is refused with the file and the tensor named."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from headpool.errors import RequestError
from headpool.headers import BITS, read_index, read_pickle_header, read_safetensors_header


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("headers")


def test_reads_what_the_library_wrote(folder: Path) -> None:
    held = {
        "a": torch.arange(6, dtype=torch.float32).view(2, 3),
        "b": torch.arange(5, dtype=torch.int64),
        "c": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "empty": torch.empty(0, 4, dtype=torch.float16),
    }
    path = folder / "library.safetensors"
    save_file(held, path)
    raw = path.read_bytes()
    for record in read_safetensors_header(path):
        expected = held[record.name]
        assert record.shape == tuple(expected.shape)
        stored = raw[record.offset : record.offset + record.nbytes]
        assert stored == expected.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    assert {record.name for record in read_safetensors_header(path)} == set(held)


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data", "length", "says"),
    [
        (b"", b"", None, "not valid JSON"),
        (b"[]", b"", None, "object was expected"),
        (b"{", b"", None, "not valid JSON"),
        (b"\xff{}", b"", None, "not valid JSON"),
        (b"{}", b"", 1 << 40, "truncated"),
        (b'{"a": 1, "a": 1}', b"", None, "'a' stands twice"),
        (b"[" * 100_000, b"", None, "not valid JSON"),
        ({"a": ONE}, b"1234567", None, "truncated.*'a'"),
        ({"a": ONE}, b"123456789", None, "longer"),
        ({"a": {**ONE, "dtype": "F31"}}, b"12345678", None, "'a'.*F31"),
        ({"a": {**ONE, "dtype": ["F32"]}}, b"12345678", None, "'a'.*dtype"),
        ({"a": {**ONE, "shape": [3]}}, b"12345678", None, "'a'.*does not fill"),
        ({"a": {**ONE, "shape": [-2]}}, b"12345678", None, "'a'.*natural"),
        ({"a": {**ONE, "shape": [True, 2]}}, b"12345678", None, "'a'.*natural"),
        ({"a": {**ONE, "shape": "2"}}, b"12345678", None, "'a'.*natural"),
        ({"a": {**ONE, "data_offsets": [0, 8, 9]}}, b"12345678", None, "'a'.*natural"),
        ({"a": {**ONE, "data_offsets": [8, 0]}}, b"12345678", None, "'a'.*does not fill"),
        ({"a": {**ONE, "shape": [2**62, 2**62]}}, b"12345678", None, "'a'.*does not fill"),
        ({"a": 7}, b"", None, "'a'.*must hold"),
        ({"a": {"dtype": "F32"}}, b"", None, "'a'.*must hold"),
        ({"a": {**ONE, "more": 1}}, b"12345678", None, "'a'.*must hold"),
        ({"a": {**ONE, "shape": [1] * 80_000}}, b"12345678", None, "'a'.*natural numbers, 64 at most"),
        ({"a": {**ONE, "shape": [10**400]}}, b"12345678", None, "'a'.*natural"),
        ({"\ud800": ONE}, b"12345678", None, "cannot be printed"),
        ({"a" * 5000: {**ONE, "dtype": "F31"}}, b"12345678", None, "F31"),
        ({"__metadata__": 3}, b"", None, "__metadata__"),
        ({"a": ONE, "b": {**ONE, "data_offsets": [4, 12]}}, b"0" * 12, None, "'b' overlaps"),
        ({"a": ONE, "b": {**ONE, "data_offsets": [12, 20]}}, b"0" * 20, None, "'b' leaves a gap"),
    ],
)
def test_refuses_lies(folder: Path, header: Any, data: bytes, length: int | None, says: str) -> None:
    path = write(folder / "lie.safetensors", header, data, length)
    with pytest.raises(RequestError, match=says) as caught:
        read_safetensors_header(path)
    assert "lie.safetensors" in str(caught.value)
    assert len(str(caught.value)) < 400


def test_refuses_a_file_too_short_for_its_length_and_one_that_is_missing(folder: Path) -> None:
    short = folder / "short.safetensors"
    short.write_bytes(b"1234567")
    for path in (short, folder / "none.safetensors"):
        with pytest.raises(RequestError, match=path.name):
            read_safetensors_header(path)


def test_refuses_a_header_over_the_limit_without_reading_it(folder: Path) -> None:
    path = folder / "huge.safetensors"
    with path.open("wb") as stream:
        stream.write((200_000_000).to_bytes(8, "little"))
        stream.truncate(300_000_000)
    with pytest.raises(RequestError, match="the limit is 100000000"):
        read_safetensors_header(path)


entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*BITS, "F31", 3]),
        "shape": st.lists(st.integers(-1, 5), max_size=3) | st.just("x"),
        "data_offsets": st.lists(st.integers(-2, 40), min_size=1, max_size=3),
    }
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    header=st.dictionaries(st.text(max_size=8), entries | json_values, max_size=4),
    data=st.binary(max_size=48),
)
@example(header={}, data=b"")
def test_any_header_is_read_as_the_library_reads_it_or_refused(folder: Path, header: Any, data: bytes) -> None:
    path = write(folder / "fuzz.safetensors", header, data)
    try:
        records = read_safetensors_header(path)
    except RequestError as error:
        assert "fuzz.safetensors" in str(error)
        return
    end = path.stat().st_size - len(data)
    for record in records:
        assert record.offset == end
        assert record.nbytes * 8 == math.prod(record.shape) * BITS[record.dtype]
        end += record.nbytes
    assert end == path.stat().st_size
    # Whatever we accept, the safetensors library has to accept too, except for what it knows in its own versions only.
    if all(BITS[record.dtype] >= 8 for record in records):
        try:
            with safe_open(path, framework="pt") as opened:
                assert set(opened.keys()) == {record.name for record in records}
        except SafetensorError as error:
            assert "__metadata__" in header or "metadata" in str(error).lower()


@given(raw=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(folder: Path, raw: bytes) -> None:
    path = folder / "bytes.safetensors"
    path.write_bytes(raw)
    try:
        read_safetensors_header(path)
    except RequestError as error:
        assert "bytes.safetensors" in str(error)


@given(
    names=st.dictionaries(
        st.text(max_size=6),
        st.text(max_size=6)
        | st.sampled_from(["../x", "/etc/passwd", "a/b", "..", ".", "", "a\\b", "ok.safetensors"])
        | json_values,
        max_size=4,
    )
)
def test_an_index_names_plain_files_or_is_refused(folder: Path, names: Any) -> None:
    path = folder / "index.json"
    path.write_text(json.dumps({"weight_map": names}))
    try:
        weight_map = read_index(path)
    except RequestError as error:
        assert "index.json" in str(error)
        return
    assert weight_map == names
    for file in weight_map.values():
        assert (folder / file).resolve().parent == folder.resolve()


@given(raw=st.binary(max_size=80) | json_values.map(lambda value: json.dumps(value).encode()))
def test_any_index_bytes_are_read_or_refused(folder: Path, raw: bytes) -> None:
    path = folder / "raw.json"
    path.write_bytes(raw)
    try:
        read_index(path)
    except RequestError as error:
        assert "raw.json" in str(error)


def test_pickles_by_their_offsets(folder: Path) -> None:
    shared = torch.arange(12, dtype=torch.float32)
    held = {
        "embed": shared.view(3, 4),
        "bf16": torch.randn(5, 2).bfloat16(),
        "tail": shared[8:],
        "tied": shared.view(3, 4),
    }
    path = folder / "pytorch_model.bin"
    torch.save(held, path)
    records = {record.name: record for record in read_pickle_header(path)}
    assert set(records) == set(held)
    assert records["tied"].offset == records["embed"].offset
    raw = path.read_bytes()
    for name, record in records.items():
        expected = held[name].contiguous().flatten().view(torch.uint8).numpy().tobytes()
        assert raw[record.offset : record.offset + record.nbytes] == expected


class Hostile:
    def __reduce__(self) -> Any:
        return (print, ("this must never run",))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"a": Hostile()}, "weights_only"),
        ([torch.ones(2)], "dictionary"),
        ({"a": 3}, "'a'.*not a tensor"),
        ({"a": torch.ones(2, 3).t()}, "'a'.*row-major"),
        ({"a": torch.ones(2, 3).to_sparse()}, "'a'|weights_only"),
    ],
)
def test_pickles_that_are_refused(folder: Path, value: Any, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "bad.bin"
    torch.save(value, path)
    with pytest.raises(RequestError, match=says):
        read_pickle_header(path)
    assert capsys.readouterr().out == ""


def test_truncated_and_legacy_pickles_are_refused(folder: Path) -> None:
    path = folder / "model.bin"
    torch.save({"a": torch.ones(1000)}, path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(RequestError, match=r"model\.bin"):
        read_pickle_header(path)
    torch.save({"a": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(RequestError, match="zip format"):
        read_pickle_header(path)
