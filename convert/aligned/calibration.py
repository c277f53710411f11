"""Calibration text as windows of tokens of one length, all full.

Text is taken in runs of neighbouring documents (of pieces of a long one), in an order that a seed decides, tokenized as
it is needed and packed end to end: before a document its BOS, after it its EOS, where the tokenizer has them.
"""

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headpool.checkpoint import Source
from headpool.errors import RequestError
from headpool.loading import load_tokenizer, position_limit, read_config
from headpool.text import TextData

DEFAULT_WINDOW = 2048
"""Tokens of a window where the model has positions for twice so many."""

_RUN_CHARACTERS = 16
"""A run holds so many characters for each token of a window, so that it fills a few."""


@dataclass(frozen=True)
class Calibration:
    """`tokens` [N, T], int64; `sha256` identifies them, `data` is the name of the text and `data_sha256` its hash."""

    tokens: Tensor
    sha256: str
    data: str
    data_sha256: str


def calibration(
    source: Source, data: TextData, *, tokens: int, needed: int, window: int | None = None, seed: int = 0
) -> Calibration:
    """At least `tokens` tokens of the text in whole windows, or what it has where it has fewer.

    window: tokens of each window, by default the smaller of half the model's positions and DEFAULT_WINDOW: no config
    tells in which windows a model was pretrained, and beyond those healing learns from what the model does badly
    (docs/method.md). needed: how many tokens there must be at least. Raises RequestError where the text, or `tokens`,
    is too short for that, for a tokenizer that cannot be read or is another model's, and for a window beyond the
    model's positions.
    """
    config = read_config(source).get_text_config()
    positions, vocabulary = position_limit(config) or 1 << 62, config.vocab_size
    window = min(max(2, positions // 2), DEFAULT_WINDOW) if window is None else window
    if not 1 < window <= positions:
        raise RequestError(f"calibration windows of {window} tokens; {source.model} has {positions} positions")
    count = -(-tokens // window)
    tokens_NT = pack(load_tokenizer(source), data.texts, count=count, window=window, seed=seed)
    if tokens_NT.numel() < needed:
        held = f"the {tokens} tokens asked for are" if len(tokens_NT) == count else f"{data.name} is"
        raise RequestError(
            f"{held} too short to calibrate {source.model} on: {tokens_NT.numel():,} tokens in windows of {window}, at "
            f"least {needed:,} are needed, as many as a layer's heads have dimensions together"
        )
    if int(tokens_NT.max()) >= vocabulary:
        raise RequestError(
            f"{source.model}: its tokenizer gives token {int(tokens_NT.max())}, but its model's vocabulary ends at "
            f"{vocabulary - 1}: they do not belong together"
        )
    digest = hashlib.sha256(tokens_NT.numpy().tobytes()).hexdigest()
    return Calibration(tokens_NT, digest, data.name, data.sha256)


def pack(tokenizer: Any, texts: Sequence[str], *, count: int, window: int, seed: int) -> Tensor:
    """`count` windows [count, window] of int64 tokens, or as many as the texts fill."""
    runs = list(_runs(texts, window * _RUN_CHARACTERS))
    random.Random(seed).shuffle(runs)
    held: list[int] = []
    for run in runs:
        for piece in run:
            held += _tokens(tokenizer, piece)
        if len(held) >= count * window:
            break
    full = min(count, len(held) // window)
    return torch.tensor(held[: full * window], dtype=torch.int64).view(full, window)


class _Piece(NamedTuple):
    """A part of a document; `first` and `last` say whether the document begins and ends with it."""

    text: str
    first: bool
    last: bool


def _tokens(tokenizer: Any, piece: _Piece) -> list[int]:
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    before = [bos] if piece.first and bos is not None else []
    after = [eos] if piece.last and eos is not None and eos != bos else []
    return [*before, *tokenizer(piece.text, add_special_tokens=False, verbose=False)["input_ids"], *after]


def _runs(texts: Sequence[str], characters: int) -> Iterator[list[_Piece]]:
    """Neighbouring pieces of `characters` together, or a little more."""
    run: list[_Piece] = []
    size = 0
    for text in texts:
        for piece in _pieces(text, characters):
            run.append(piece)
            size += len(piece.text)
            if size >= characters:
                yield run
                run, size = [], 0
    if run:
        yield run


def _pieces(text: str, characters: int) -> Iterator[_Piece]:
    """A document cut at spaces into pieces of about `characters`."""
    begin = 0
    while begin < len(text):
        cut = text.find(" ", begin + characters)
        end = len(text) if cut < 0 else cut
        yield _Piece(text[begin:end], begin == 0, end == len(text))
        begin = end
