"""Calibration windows: full, in the text's own words, the same for the same seed."""

from pathlib import Path

import pytest
import tiny
import torch
from transformers import AutoTokenizer

from headpool import checkpoint
from headpool.convert.aligned.calibration import calibration, pack
from headpool.errors import RequestError
from headpool.text import TextData

NOVEL = tiny.NOVEL.read_text(encoding="utf-8")[:60_000]
DOCUMENTS = [block for block in NOVEL.split("\n\n") if block.strip()][:40]


class Letters:
    """A tokenizer with a token for each character, 1 for BOS and 2 for EOS."""

    bos_token_id: int | None = 1
    eos_token_id: int | None = 2

    def __call__(self, text: str, *, add_special_tokens: bool, verbose: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(letter) for letter in text]}


def test_windows_are_the_documents_end_to_end() -> None:
    windows = pack(Letters(), ["abc", "de"], count=9, window=3, seed=0)
    assert windows.tolist() == [[1, 97, 98], [99, 2, 1], [100, 101, 2]]
    assert pack(Letters(), ["abc", "de"], count=2, window=4, seed=0).tolist() == [[1, 97, 98, 99], [2, 1, 100, 101]]
    assert pack(Letters(), ["abc"], count=2, window=6, seed=0).shape == (0, 6)
    shared = Letters()
    shared.eos_token_id = 1
    assert pack(shared, ["ab", "c"], count=9, window=5, seed=0).tolist() == [[1, 97, 98, 1, 99]]


def test_a_long_document_is_cut_into_runs_that_lose_nothing() -> None:
    text = " ".join(str(number) for number in range(3000))
    windows = pack(Letters(), [text], count=10**6, window=10, seed=3)
    held = [token for token in windows.flatten().tolist() if token > 2]
    assert sorted(held) != held
    missing = len(text) + 2 - windows.numel()
    assert 0 <= missing < 10
    assert len(held) >= len(text) - 10
    assert windows.flatten().tolist().count(1) <= 1
    first = "".join(chr(token) for token in windows[:12].flatten().tolist())
    assert first.strip("\x01\x02") in text.replace("\x01", "")


def test_the_seed_decides_which_runs_are_taken() -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny.QUICKSTART)
    one, same, other = (pack(tokenizer, [NOVEL], count=4, window=64, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    whole = tokenizer(NOVEL, add_special_tokens=False)["input_ids"]
    joined = " ".join(map(str, whole))
    assert " ".join(map(str, one[1].tolist()[8:56])) in joined, "text in the order in which it was written"


def data(texts: list[str]) -> TextData:
    return TextData(texts, "hash", "novel.txt")


def test_calibration_takes_whole_windows(tmp_path: Path) -> None:
    source = checkpoint.open_source(str(tiny.checkpoint(tmp_path, vocab_size=2048, tokenizer=True)))
    made = calibration(source, data(DOCUMENTS), tokens=1000, needed=96)
    assert made.tokens.shape == (16, 64)  # half the model's positions, and 1000 tokens rounded up
    assert made.tokens.dtype == torch.int64
    assert (made.data, made.data_sha256) == ("novel.txt", "hash")
    again = calibration(source, data(DOCUMENTS), tokens=1000, needed=96)
    assert again.sha256 == made.sha256
    assert calibration(source, data(DOCUMENTS), tokens=1000, needed=96, seed=1).sha256 != made.sha256


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        (["too short"], {}, r"novel.txt is too short .*: 0 tokens in windows of 64, at least 96 are needed"),
        (
            DOCUMENTS,
            {"tokens": 100, "window": 20, "needed": 500},
            r"the 100 tokens asked for are too short .*: 100 tok",
        ),
        (DOCUMENTS, {"window": 129}, "windows of 129 tokens; .* has 128 positions"),
    ],
)
def test_what_is_impossible_is_said(texts: list[str], options: dict[str, int], message: str, tmp_path: Path) -> None:
    source = checkpoint.open_source(str(tiny.checkpoint(tmp_path, vocab_size=2048, tokenizer=True)))
    with pytest.raises(RequestError, match=message):
        calibration(source, data(texts), **{"tokens": 1000, "needed": 96, **options})


def test_a_tokenizer_must_be_there_and_fit(tmp_path: Path) -> None:
    bare = checkpoint.open_source(str(tiny.checkpoint(tmp_path / "bare")))
    with pytest.raises(RequestError, match="no tokenizer there"):
        calibration(bare, data(DOCUMENTS), tokens=1000, needed=96)
    small = checkpoint.open_source(str(tiny.checkpoint(tmp_path / "small", tokenizer=True)))
    with pytest.raises(RequestError, match="vocabulary ends at 299: they do not belong together"):
        calibration(small, data(DOCUMENTS), tokens=1000, needed=96)
