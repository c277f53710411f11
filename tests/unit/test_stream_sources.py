"""Where training text comes from: files of every kind, data sets on the hub, and what is refused."""

import gzip
import itertools
import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from pydantic import TypeAdapter, ValidationError
from words import EOS, Words, rows_of

from headpool.errors import HeadpoolError, RequestError
from headpool.sections import DataSource, DataSources
from headpool.uptrain import rows, sources
from headpool.uptrain.order import chosen_source, permuted
from headpool.uptrain.pieces import pieces
from headpool.uptrain.stream import Stream

OPTIONS: dict[str, Any] = {"sequence_length": 4, "lanes": 2, "seed": 0}
TEXTS = rows_of([3] * 12)


def tokens(texts: Sequence[str]) -> list[int]:
    return sorted(token for text in texts for token in [*map(int, text.split()), EOS])


def first_epoch(*given_sources: DataSource, texts: Sequence[str] = TEXTS) -> list[int]:
    """The tokens of one epoch: with one lane and a block that holds them all."""
    stream = Stream(given_sources, Words(), sequence_length=len(tokens(texts)), lanes=1, seed=3)
    return sorted(stream.next().input_ids[0].tolist())


def jsonl(texts: Sequence[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def parquet_bytes(texts: Sequence[str]) -> bytes:
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table({"n": range(len(texts)), "text": list(texts)}), sink, row_group_size=2)
    return bytes(sink.getvalue().to_pybytes())


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["txt", "jsonl", "jsonl.gz", "parquet", "parquet.gz"])
def test_files_of_every_kind_by_name_and_by_glob(tmp_path: Path, kind: str, streaming: bool) -> None:
    write = {"txt": lambda texts: "\n \n".join(texts).encode(), "jsonl": jsonl, "parquet": parquet_bytes}
    for number in range(3):
        raw = write[kind.removesuffix(".gz")](TEXTS[number * 4 : number * 4 + 4])
        (tmp_path / f"{number}.{kind}").write_bytes(gzip.compress(raw) if kind.endswith("gz") else raw)
    assert first_epoch(DataSource(path=str(tmp_path / f"*.{kind}"), streaming=streaming)) == tokens(TEXTS)
    one = DataSource(path=str(tmp_path / f"1.{kind}"), streaming=streaming)
    assert first_epoch(one, texts=TEXTS[4:8]) == tokens(TEXTS[4:8])


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for texts in (TEXTS[:6], TEXTS[6:]):
        path.write_bytes(jsonl(texts))
        assert first_epoch(DataSource(path=str(path)), texts=texts) == tokens(texts)


@given(
    shards=st.integers(1, 9), rows=st.integers(1, 7), lanes=st.integers(1, 8), window=st.integers(1, 30),
    seed=st.integers(0, 9), shuffle=st.booleans(),
)  # fmt: skip
@settings(max_examples=60)
def test_streamed_rows_come_once_an_epoch(
    shards: int, rows: int, lanes: int, window: int, seed: int, shuffle: bool
) -> None:
    """There are as many readers as divide the lanes and have a shard each: their first shards together are the first
    epoch, as far as that divides evenly.
    """
    read = sources.Shards(shards, lambda shard, start: ((f"{shard} {row}", "") for row in range(start, rows)), "a test")
    readers = max(one for one in range(1, shards + 1) if lanes % one == 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "SHUFFLED_PIECES", window)
        source = sources.StreamedSource(read, sources.Order("source 0", lanes, seed, shuffle), range(lanes), 1000)
    dealt = (source.piece(number % lanes, number // lanes).value for number in itertools.count())
    rounds = shards // readers
    count = rounds * readers * rows
    for _ in range(2 if shards % readers == 0 else 1):
        got = list(itertools.islice(dealt, count))
        assert len(set(got)) == count
        if shards % readers == 0:
            assert set(got) == {f"{shard} {row}" for shard in range(shards) for row in range(rows)}


def hub(monkeypatch: pytest.MonkeyPatch, rows: Any) -> list[Any]:
    asked: list[Any] = []

    def load_dataset(name: str, config: str | None, *, split: str, streaming: bool) -> Any:
        asked.append((name, config, split, streaming))
        return rows

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def test_a_hub_data_set_is_loaded_by_config_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = hub(monkeypatch, datasets.Dataset.from_dict({"n": range(12), "body": TEXTS}))
    source = DataSource(path="owner/set", config="raw", text_column="body")
    assert first_epoch(source) == tokens(TEXTS)
    assert asked == [("owner/set", "raw", "train", False)]
    with pytest.raises(RequestError, match=r"^owner/set: no column 'text'; there are: n, body"):
        Stream([DataSource(path="owner/set")], Words(), **OPTIONS)
    with pytest.raises(RequestError, match=r"owner/set:train: column 'n' holds no strings but int64"):
        Stream([DataSource(path="owner/set", text_column="n")], Words(), **OPTIONS)


def test_an_empty_value_of_a_hub_data_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, datasets.Dataset.from_dict({"text": ["1", None]}))
    with pytest.raises(RequestError, match=r"^owner/set:train, row 1: column 'text' is empty \(null\)"):
        Stream([DataSource(path="owner/set")], Words(), **OPTIONS)


def test_streamed_files_are_divided_where_they_are_fewer_than_the_lanes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(parquet_bytes(TEXTS))
    rows = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
    hub(monkeypatch, rows)
    source = DataSource(path="owner/set", streaming=True)
    assert first_epoch(source) == tokens(TEXTS)

    read: list[set[int]] = []
    for rank in range(2):
        tokenizer = Words()
        stream = Stream([source], tokenizer, sequence_length=4, lanes=6, seed=0, rank=rank, world=2)
        assert stream.state_dict()["identity"]["data[0]"] == {"name": "owner/set:train", "shards": 6}
        for _ in range(2):
            stream.next()
        read.append({int(word) for text in tokenizer.seen for word in text.split()})
    assert read[0] and read[1] and not read[0] & read[1]
    with pytest.raises(RequestError, match=r"^owner/set: no column 'body'; there are: n, text"):
        Stream([DataSource(path="owner/set", text_column="body", streaming=True)], Words(), **OPTIONS)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_one_local_file_streams_to_two_processes_without_being_read_by_both(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"a.{kind}"
    path.write_bytes(jsonl(TEXTS) if kind == "jsonl" else parquet_bytes(TEXTS))
    read: list[list[str]] = [[], []]
    for rank in range(2):
        taken = read[rank]
        monkeypatch.setattr(rows, "text_value", lambda text, *_, taken=taken: taken.append(text) or text)
        stream = Stream(
            [DataSource(path=str(path), streaming=True)],
            Words(),
            sequence_length=4,
            lanes=2,
            seed=0,
            rank=rank,
            world=2,
        )
        stream.next()
    assert {*read[0]} | {*read[1]} == {*TEXTS}
    assert not {*read[0]} & {*read[1]}


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_file_of_one_row_streams_to_many_lanes(tmp_path: Path, shuffle: bool) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(TEXTS[:1]))
    for seed in range(2):
        source = DataSource(path=str(path), streaming=True)
        stream = Stream([source], Words(), sequence_length=4, lanes=48, seed=seed, shuffle=shuffle)
        assert stream.next().input_ids.tolist() == [[*map(int, TEXTS[0].split()), EOS]] * 48


def test_text_of_which_a_tokenizer_makes_nothing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(["  "] * 4))
    for streaming in (False, True):
        stream = Stream([DataSource(path=str(path), streaming=streaming)], Words(), **OPTIONS)
        with pytest.raises(RequestError, match="next to no tokens"):
            stream.next()


def test_a_stream_that_breaks_off_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows() -> Iterator[dict[str, str]]:
        yield from ({"text": text} for text in TEXTS)
        raise ConnectionError("the line is dead\nand a page more")

    hub(monkeypatch, datasets.IterableDataset.from_generator(rows))
    stream = Stream([DataSource(path="owner/set", streaming=True)], Words(), shuffle=False, **OPTIONS)
    with pytest.raises(HeadpoolError, match=r"^owner/set:train: reading on failed: the line is dead$"):
        for _ in range(20):
            stream.next()


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("name", "raw", "says"),
    [
        ("a.jsonl", b'{"text": "11"}\n{"text": null}\n', "a.jsonl, line 2: column 'text' holds no string but NoneType"),
        ("a.jsonl", b'{"text": "11"}\n{"b": "1", "n": 1}\n', "a.jsonl, line 2: no column 'text'; there are: b, n"),
        ("a.jsonl", b"", "a.jsonl holds no text"),
        ("a.jsonl", b'{"text": ""}\n' * 3, "a.jsonl holds no text"),
        ("a.txt", b" \n\n", "a.txt holds no text"),
        ("a.txt", b"11\n\xff", "a.txt: byte 3 is not UTF-8"),
        ("a.csv", b"text\n1\n", "a.csv: unknown file type"),
        ("a.jsonl.gz", b"no", "a.jsonl.gz cannot be read"),
        ("a.parquet", b"no", "a.parquet: not a readable parquet file"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, name: str, raw: bytes, says: str, streaming: bool) -> None:
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(RequestError, match=f"^{re.escape(says)}"):
        stream = Stream([DataSource(path=str(tmp_path / name), streaming=streaming)], Words(), **OPTIONS)
        for _ in range(9):
            stream.next()


@pytest.mark.parametrize("streaming", [False, True])
def test_what_is_not_there_is_refused_before_anything_is_trained(tmp_path: Path, streaming: bool) -> None:
    for path, says in (
        (str(tmp_path / "*.jsonl"), "no file matches .*jsonl"),
        (str(tmp_path / "gone.txt"), "no such file: .*gone.txt"),
        (str(tmp_path), "is a directory; name a file in it"),
    ):
        with pytest.raises(RequestError, match=says):
            Stream([DataSource(path=path, streaming=streaming)], Words(), **OPTIONS)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"body": "1", "n": 2}')
    with pytest.raises(RequestError, match=r"a\.jsonl, line 1: no column 'text'; there are: body, n"):
        Stream([DataSource(path=str(path), streaming=streaming)], Words(), **OPTIONS)


@given(text=st.text(st.sampled_from("ab \n…é漢"), max_size=300), limit=st.integers(16, 64))
def test_pieces_are_the_text_in_pieces_of_alike_size(text: str, limit: int) -> None:
    made = list(pieces(text, limit, "here"))
    assert "".join(piece.value for piece in made) == text
    assert [(piece.starts, piece.ends) for piece in made] == [
        (number == 0, number == len(made) - 1) for number in range(len(made))
    ]
    assert all(len(piece.value.encode()) <= 2 * limit for piece in made)
    assert len(made) == max(1, -(-len(text.encode()) // limit))


def test_words_are_not_cut() -> None:
    words = " ".join(str(random.Random(0).randrange(10**6)) for _ in range(500))
    made = [piece.value for piece in pieces(words, 64, "here")]
    assert [word for piece in made for word in piece.split()] == words.split()
    assert len(made) > 40


@given(size=st.integers(1, 300), key=st.integers())
def test_a_permutation_permutes(size: int, key: int) -> None:
    assert sorted(permuted(at, size, key) for at in range(size)) == list(range(size))


def test_permutations_are_drawn_evenly() -> None:
    drawn = [tuple(permuted(at, 3, key) for at in range(3)) for key in range(1200)]
    assert all(150 < drawn.count(one) < 250 for one in itertools.permutations(range(3)))  # of 200, deviation 13
    places = [permuted(0, 50, key) for key in range(1000)]
    assert all(2 < places.count(at) < 45 for at in range(50))  # of 20, deviation 4.4


@given(weights=st.lists(st.floats(0.01, 10), min_size=2, max_size=5), lanes=st.integers(1, 40), step=st.integers(0, 99))
def test_a_step_holds_each_source_within_one_block_of_its_share(weights: list[float], lanes: int, step: int) -> None:
    drawn = [chosen_source(weights, step, lane, lanes, 0) for lane in range(lanes)]
    for number, weight in enumerate(weights):
        assert abs(drawn.count(number) - lanes * weight / sum(weights)) < 1.000001


def test_data_of_a_recipe_may_be_a_path_a_mapping_or_a_list() -> None:
    parse = TypeAdapter(DataSources).validate_python
    plain = DataSource(path="a.txt")
    assert parse("a.txt") == parse({"path": "a.txt"}) == parse(["a.txt"]) == (plain,)
    both = parse(["a.txt", {"path": "b/*.jsonl", "weight": 2, "text_column": "body"}])
    assert both == (plain, DataSource(path="b/*.jsonl", weight=2, text_column="body"))
    for wrong in ([], {"path": "a", "weight": 0}, {"path": "a", "colour": 1}, 3, None, {"weight": 1}):
        with pytest.raises(ValidationError):
            parse(wrong)


def test_readers_go_on_from_a_place_without_reading_what_was_before() -> None:
    opened: list[tuple[int, int]] = []

    def read(shard: int, start: int) -> Iterator[tuple[str, str]]:
        opened.append((shard, start))
        return ((f"{shard} {row}", "") for row in range(start, 10))

    order = sources.Order("source 0", 1, 0, True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "SHUFFLED_PIECES", 4)
        source, resumed = (sources.StreamedSource(sources.Shards(1, read, ""), order, [0], 1000) for _ in range(2))
    for unit in range(6):
        source.piece(0, unit)
        source.release(0, unit)
    place = source.place(0, 6)
    opened.clear()
    resumed.seek({0: (6, place)})
    assert [resumed.piece(0, unit) for unit in range(6, 20)] == [source.piece(0, unit) for unit in range(6, 20)]
    assert opened[0] == (0, 4)  # the window of pieces 4 to 7
