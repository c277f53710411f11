"""The stream: an independent packer's blocks, every token once an epoch, and the same whatever the number of processes
and of interruptions.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from words import BOS, EOS, Words, rows_of

import headpool.uptrain.sources
from headpool.errors import RequestError
from headpool.sections import DataSource
from headpool.uptrain.prefetch import Prefetcher
from headpool.uptrain.stream import Batch, Stream, merge_states

FIELDS = ("input_ids", "labels", "position_ids", "documents")


def write(path: Path, texts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"id": 0, "text": text}) + "\n" for text in texts))
    return path


def streams(world: int, sources: Sequence[DataSource], **options: Any) -> list[Stream]:
    return [Stream(sources, Words(), rank=rank, world=world, **options) for rank in range(world)]


def step(ranks: Sequence[Stream]) -> dict[str, torch.Tensor]:
    """The global batch, in the order of lanes: rank r's blocks are those of the lanes r, r + world, ..."""
    batches = [rank.next() for rank in ranks]
    return {name: torch.stack([getattr(one, name) for one in batches], dim=1).flatten(0, 1) for name in FIELDS}


def saved(ranks: Sequence[Stream]) -> Any:
    return json.loads(json.dumps(merge_states([rank.state_dict() for rank in ranks])))


@pytest.mark.parametrize("document_attention", [False, True])
def test_blocks_are_those_of_a_naive_packer(tmp_path: Path, document_attention: bool) -> None:
    lengths = [5, 1, 0, 7, 3, 2, 9, 4]
    path = write(tmp_path / "a.jsonl", rows_of(lengths))
    tokenizer = Words(bos=BOS)
    stream = Stream(
        [DataSource(path=str(path))], tokenizer, sequence_length=6, lanes=1, seed=0, shuffle=False,
        document_attention=document_attention,
    )  # fmt: skip

    inputs: list[int] = []
    targets: list[int] = []
    numbers: list[int] = []
    for number, text in enumerate(filter(None, rows_of(lengths) * 3)):
        document = [BOS, *map(int, text.split()), EOS]
        inputs += document
        targets += [*document[1:], -100]
        numbers += [number] * len(document)
    for at in range(0, 60, 6):
        batch = stream.next()
        held = numbers[at : at + 6]
        ranks = [sorted(set(held)).index(number) for number in held]
        restarted = [ranks[:place].count(number) for place, number in enumerate(ranks)]
        assert batch.input_ids.tolist() == [inputs[at : at + 6]]
        assert batch.labels.tolist() == [targets[at : at + 6]]
        assert batch.documents.tolist() == [ranks]
        assert batch.position_ids.tolist() == [restarted if document_attention else list(range(6))]
    assert all(getattr(batch, name).dtype == torch.int64 for name in FIELDS)


@given(
    lengths=st.lists(st.integers(0, 120), min_size=1, max_size=25).filter(any),
    lanes=st.integers(1, 8),
    seed=st.integers(0, 9),
    shuffle=st.booleans(),
)
@settings(max_examples=25)
def test_every_token_comes_once_an_epoch_whatever_the_rows_and_lanes(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], lanes: int, seed: int, shuffle: bool
) -> None:
    """Seen from outside: a piece ends where a label is missing, and the lanes' pieces, one of each in turn, make up
    the epochs.
    """
    texts = rows_of(lengths)
    path = write(tmp_path_factory.mktemp("rows") / "a.jsonl", texts)
    stream = Stream([DataSource(path=str(path))], Words(), sequence_length=4, lanes=lanes, seed=seed, shuffle=shuffle)
    epoch = sum(-(-len(text) // (8 * 4 * 4)) for text in texts)  # eight blocks of four tokens of four bytes

    dealt: list[list[list[int]]] = [[[]] for _ in range(lanes)]
    while min(map(len, dealt)) <= -(-2 * epoch // lanes):
        batch = stream.next()
        for lane, *block in zip(dealt, batch.input_ids.tolist(), batch.labels.tolist(), strict=True):
            for token, label in zip(*block, strict=True):
                lane[-1].append(token)
                assert label in (token + 1, EOS, -100)
                if label == -100:
                    lane.append([])
    every_token = [token for text in texts if text for token in [*map(int, text.split()), EOS]]
    for start in (0, epoch):
        items = [dealt[item % lanes][item // lanes] for item in range(start, start + epoch)]
        got = [token for piece in items for token in piece]
        assert sorted(got) == sorted(every_token)
        assert shuffle or got == every_token


def places(draw: Any, tmp: Path) -> list[DataSource]:
    lengths = st.lists(st.integers(0, 60), min_size=1, max_size=12).filter(any)
    sources = []
    for number in range(draw(st.integers(1, 3))):
        folder = tmp / str(number)
        folder.mkdir()
        for file in range(draw(st.integers(1, 4))):
            write(folder / f"{file}.jsonl", rows_of(draw(lengths)))
        weight, streaming = draw(st.floats(0.1, 5)), draw(st.booleans())
        sources.append(DataSource(path=str(folder / "*.jsonl"), weight=weight, streaming=streaming))
    return sources


@given(data=st.data())
@settings(max_examples=25)
def test_neither_processes_nor_interruptions_change_what_is_trained_on(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    sources = places(data.draw, tmp_path_factory.mktemp("data"))
    lanes = data.draw(st.sampled_from([2, 4, 6]))
    options: dict[str, Any] = {
        "sequence_length": data.draw(st.integers(1, 24)),
        "lanes": lanes,
        "seed": data.draw(st.integers(0, 99)),
        "shuffle": data.draw(st.booleans()),
        "document_attention": data.draw(st.booleans()),
    }
    window = data.draw(st.integers(1, 40))
    cuts = sorted(data.draw(st.lists(st.integers(0, 12), min_size=2, max_size=3)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(headpool.uptrain.sources, "SHUFFLED_PIECES", window)
        interrupt(data, sources, options, cuts)


def interrupt(data: st.DataObject, sources: Sequence[DataSource], options: dict[str, Any], cuts: list[int]) -> None:
    whole = streams(1, sources, **options)
    expected = [step(whole) for _ in range(12)]
    state = None
    for start, stop in zip([0, *cuts], [*cuts, 12], strict=True):
        ranks = streams(data.draw(st.sampled_from([1, 2])), sources, **options)
        if state is not None:
            for rank in ranks:
                rank.load_state_dict(state)
        for batch in expected[start:stop]:
            got = step(ranks)
            assert all(torch.equal(got[name], batch[name]) for name in FIELDS)
        state = saved(ranks)
    assert state == saved(whole)


def test_a_text_is_tokenized_by_one_process_only(tmp_path: Path) -> None:
    sources = [
        DataSource(path=str(write(tmp_path / "a.jsonl", rows_of([3] * 40)))),
        DataSource(path=str(write(tmp_path / "b.jsonl", rows_of([4] * 40))), streaming=True),
    ]
    tokenizers = [Words(), Words()]
    for rank, tokenizer in enumerate(tokenizers):
        stream = Stream(sources, tokenizer, sequence_length=8, lanes=4, seed=1, rank=rank, world=2)
        for _ in range(5):
            stream.next()
    first, second = ({*tokenizer.seen} for tokenizer in tokenizers)
    assert first and second and not first & second


def test_the_order_is_the_seeds_and_every_epochs_own(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", rows_of([3] * 32))

    def epochs(seed: int, *, streaming: bool) -> tuple[list[int], list[int]]:
        source = DataSource(path=str(path), streaming=streaming)
        stream = Stream([source], Words(), sequence_length=4 * 32, lanes=1, seed=seed)
        first, second = (stream.next().input_ids[0].tolist() for _ in range(2))
        return first, second

    for streaming in (False, True):
        first, second = epochs(0, streaming=streaming)
        assert sorted(first) == sorted(second)
        assert first != second
        assert first != sorted(first)
        assert epochs(0, streaming=streaming) == (first, second)
        assert epochs(1, streaming=streaming)[0] != first


def test_weights_are_shares_of_tokens(tmp_path: Path) -> None:
    long, short = rows_of([900, 2])
    sources = [
        DataSource(path=str(write(tmp_path / "long.jsonl", [long])), weight=3),
        DataSource(path=str(write(tmp_path / "short.jsonl", [short])), weight=1),
    ]
    stream = Stream(sources, Words(), sequence_length=8, lanes=8, seed=0)
    from_long = torch.zeros(8)
    for _ in range(100):
        ids = stream.next().input_ids
        lanes = ((ids < 910) & (ids != EOS)).any(dim=1)
        assert lanes.sum() == 6  # of 8 in every step
        from_long += lanes
    assert ((from_long / 100 - 0.75).abs() < 0.15).all()  # and over time in every lane


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"sequence_length": 9}, r"sequence_length was 8 and is 9$"),
        ({"lanes": 2, "seed": 5}, r"sequences per step was 4 and is 2; seed was 0 and is 5$"),
        ({"shuffle": False}, r"shuffle was True and is False$"),
    ],
)
def test_other_settings_are_refused_by_name(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    source = DataSource(path=str(write(tmp_path / "a.jsonl", rows_of([3] * 9))))
    options: dict[str, Any] = {"sequence_length": 8, "lanes": 4, "seed": 0}
    state = Stream([source], Words(), **options).state_dict()
    with pytest.raises(RequestError, match=says):
        Stream([source], Words(), **{**options, **change}).load_state_dict(state)


def test_other_data_or_another_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", rows_of([3] * 9))
    options: dict[str, Any] = {"sequence_length": 8, "lanes": 4, "seed": 0}
    state = Stream([DataSource(path=str(path))], Words(), **options).state_dict()
    with pytest.raises(RequestError, match="tokenizer was"):
        Stream([DataSource(path=str(path))], Words(bos=BOS), **options).load_state_dict(state)
    write(path, rows_of([3] * 10))
    with pytest.raises(RequestError, match=r"data\[0\] was .*'rows': 9.* and is .*'rows': 10"):
        Stream([DataSource(path=str(path))], Words(), **options).load_state_dict(state)


def test_lanes_have_to_divide_over_the_processes(tmp_path: Path) -> None:
    source = DataSource(path=str(write(tmp_path / "a.jsonl", rows_of([3]))))
    with pytest.raises(RequestError, match="16 sequences a step do not divide over 3 processes"):
        Stream([source], Words(), sequence_length=8, lanes=16, seed=0, world=3)


def same(one: Batch, other: Batch) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in FIELDS)


def test_what_is_made_ahead_does_not_show_in_the_state(tmp_path: Path) -> None:
    source = DataSource(path=str(write(tmp_path / "a.jsonl", rows_of([5] * 50))))
    options: dict[str, Any] = {"sequence_length": 8, "lanes": 2, "seed": 0}
    plain = Stream([source], Words(), **options)
    with Prefetcher(Stream([source], Words(), **options), depth=3) as ahead:
        assert ahead.state_dict() == plain.state_dict()
        for _ in range(4):
            assert same(ahead.next(), plain.next())
            assert ahead.state_dict() == plain.state_dict()
        state = ahead.state_dict()
        following = [ahead.next() for _ in range(3)]
        ahead.load_state_dict(state)
        assert all(same(ahead.next(), batch) for batch in following)
    with Prefetcher(Stream([source], Words(), **options)) as resumed:
        resumed.load_state_dict(state)
        assert same(resumed.next(), plain.next())


def test_errors_of_the_thread_come_out_of_next(tmp_path: Path) -> None:
    good = [json.dumps({"text": text}) for text in rows_of([8, 8, 8])]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([*good, '{"body": ""}']))
    source = DataSource(path=str(path), streaming=True)
    with Prefetcher(Stream([source], Words(), sequence_length=4, lanes=1, seed=0, shuffle=False)) as ahead:
        for _ in range(2):
            with pytest.raises(RequestError, match=r"a\.jsonl, line 4: no column 'text'; there are: body"):
                for _ in range(9):
                    ahead.next()
