"""Batches to train on: the same token ids in the same steps, however many processes share the work."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headpool.errors import RequestError
from headpool.sections import DataSource
from headpool.uptrain.encode import IGNORED, Encoder
from headpool.uptrain.order import chosen_source
from headpool.uptrain.packing import Block, Packer
from headpool.uptrain.pieces import Piece
from headpool.uptrain.sources import Order, Source, open_source

_CHARACTERS_PER_TOKEN = 4
"""Of most text; with fewer, the rest is fetched when it turns out to be missing."""

_MOST_ROUNDS = 100
"""In which a block should have been filled; some tokenizers make no token at all of some texts."""

__all__ = ["IGNORED", "Batch", "Stream", "merge_states"]


@dataclass(frozen=True)
class Batch:
    """Blocks of this rank, on the CPU; every tensor is int64 [B, T].

    `labels[b, t]` is the target of `input_ids[b, t]` (already shifted), IGNORED where no loss counts.
    `position_ids` restart at each document under `document_attention` and are 0..T-1 otherwise; `documents` numbers
    the documents of a block from 0, for attention that stays inside them.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    documents: Tensor


class Stream:
    """An endless stream of packed blocks, in `lanes` lanes: one block of each lane makes an optimizer step.

    Documents are tokenized as they are needed and packed end to end, in each lane by itself; no target crosses from one
    to the next. Long ones are cut into pieces of some eight blocks, which different lanes take, and of which each
    costs one target. Every piece comes once an epoch. In a mixture each block is of one source, chosen by weight, so
    weights are shares of tokens; a source that ends starts its next epoch.

    Rank r serves the lanes l with l % world == r, so a step's blocks are the same for every `world` that divides
    `lanes`, and so are those after a resume with another.

    Raises RequestError, before anything is trained, for data that is missing, empty or of the wrong columns (the
    columns are listed), for a tokenizer without end-of-sequence token or, where it is needed, chat template, for
    tokens outside `vocab_size`, and where `world` does not divide `lanes`.
    """

    def __init__(
        self,
        sources: Sequence[DataSource],
        tokenizer: Any,
        *,
        sequence_length: int,
        lanes: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        document_attention: bool = False,
        shuffle: bool = True,
        vocab_size: int | None = None,
    ) -> None:
        if lanes % world:
            raise RequestError(
                f"{lanes} sequences a step do not divide over {world} processes: batch_tokens / sequence_length has to "
                "be a multiple of their number"
            )
        chat = any(source.messages_column for source in sources)
        self._encoder = Encoder(tokenizer, chat=chat, vocab_size=vocab_size)
        self._length = sequence_length
        self._lanes = lanes
        self._seed = seed
        self._document_attention = document_attention
        self._weights = [source.weight for source in sources]
        self._own = range(rank, lanes, world)
        self._sources: list[Source] = [
            open_source(source, Order(f"source {number}", lanes, seed, shuffle), self._own, sequence_length)
            for number, source in enumerate(sources)
        ]
        self._packers = {lane: [Packer() for _ in sources] for lane in self._own}
        self._step = 0
        self._identity = {
            "sequence_length": sequence_length,
            "sequences per step": lanes,
            "seed": seed,
            "shuffle": shuffle,
            "document_attention": document_attention,
            "tokenizer": _fingerprint(tokenizer),
            "weights": self._weights,
            **{f"data[{number}]": source.identity for number, source in enumerate(self._sources)},
        }

    def next(self) -> Batch:
        """One block of each of this rank's lanes, in the order of lanes: B = lanes / world.

        Raises RequestError for what is wrong with a row that only now comes up.
        """
        numbers = {lane: chosen_source(self._weights, self._step, lane, self._lanes, self._seed) for lane in self._own}
        self._fill(numbers)
        blocks = [self._take(lane, number) for lane, number in numbers.items()]
        self._step += 1
        return _batch(blocks, document_attention=self._document_attention)

    def state_dict(self) -> dict[str, Any]:
        """The position of each of this rank's lanes, of JSON types; `merge_states` joins those of all ranks."""
        return {
            "identity": self._identity,
            "step": self._step,
            "lanes": {
                str(lane): [
                    [packer.unit, packer.offset, source.place(lane, packer.unit)]
                    for packer, source in zip(packers, self._sources, strict=True)
                ]
                for lane, packers in self._packers.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken: the merged state of all ranks, whatever their number was.

        Raises RequestError when it was taken with other data or settings, naming them.
        """
        _same(state["identity"], self._identity)
        self._step = state["step"]
        for lane, packers in self._packers.items():
            for packer, (unit, offset, _) in zip(packers, state["lanes"][str(lane)], strict=True):
                packer.seek(unit, offset)
        for number, source in enumerate(self._sources):
            held = {lane: state["lanes"][str(lane)][number] for lane in self._own}
            source.seek({lane: (unit, place) for lane, (unit, _, place) in held.items()})

    def _fill(self, numbers: Mapping[int, int]) -> None:
        """Tokenize what the lanes lack for a block, each from its source, in one call for all of them."""
        for _ in range(_MOST_ROUNDS):
            wanted = [
                (packer, self._ahead(lane, number, missing))
                for lane, number in numbers.items()
                if (missing := (packer := self._packers[lane][number]).missing(self._length))
            ]
            if not wanted:
                return
            encoded = iter(self._encoder.encode([piece for _, pieces in wanted for piece in pieces]))
            for packer, pieces in wanted:
                packer.add([next(encoded) for _ in pieces])
        raise RequestError("the tokenizer makes next to no tokens of this text: do they belong together?")

    def _ahead(self, lane: int, number: int, missing: int) -> list[Piece]:
        """The next pieces that together seem long enough for `missing` tokens."""
        unit = self._packers[lane][number].next_unit
        pieces: list[Piece] = []
        characters = 0
        while characters < _CHARACTERS_PER_TOKEN * missing:
            pieces.append(self._sources[number].piece(lane, unit + len(pieces)))
            value = pieces[-1].value
            characters += len(value if isinstance(value, str) else str(value))
        return pieces

    def _take(self, lane: int, number: int) -> Block:
        packer = self._packers[lane][number]
        block = packer.take(self._length)
        self._sources[number].release(lane, packer.unit)
        return block


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The state of the whole stream from those of all ranks, taken after the same step."""
    first, *others = states
    assert all((one["identity"], one["step"]) == (first["identity"], first["step"]) for one in others)
    return {**first, "lanes": {lane: place for one in (first, *others) for lane, place in one["lanes"].items()}}


def _batch(blocks: Sequence[Block], *, document_attention: bool) -> Batch:
    def stacked(arrays: Iterable[Any]) -> Tensor:
        return torch.from_numpy(np.stack(list(arrays)))

    input_ids = stacked(block.tokens for block in blocks)
    positions = (
        stacked(block.positions() for block in blocks)
        if document_attention
        else torch.arange(input_ids.shape[1]).repeat(len(blocks), 1)
    )
    return Batch(
        input_ids, stacked(block.labels for block in blocks), positions, stacked(block.documents for block in blocks)
    )


def _fingerprint(tokenizer: Any) -> str:
    """Of all that tells how it reads text: its vocabulary, its special tokens and its chat template."""
    held = (sorted(tokenizer.get_vocab().items()), tokenizer.special_tokens_map, tokenizer.chat_template)
    return hashlib.sha256(repr(held).encode()).hexdigest()[:16]


def _same(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    different = [key for key in {**then, **now} if then.get(key) != now.get(key)]
    if different:
        listed = "; ".join(f"{key} was {then.get(key)} and is {now.get(key)}" for key in different)
        raise RequestError(f"the checkpoint cannot go on with other data or settings (--fresh starts over): {listed}")
