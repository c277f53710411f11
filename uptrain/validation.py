"""Perplexity on held-out text while training, by all processes together."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from headpool.errors import RequestError
from headpool.text import TextData
from headpool.uptrain.parallel import Workers
from headpool.uptrain.stream import IGNORED


class Validation:
    """Held-out text in blocks of `sequence_length` inputs, each token but the first of a text scored once.

    A text that is shorter, or ends within a block, is padded; nothing counts there. At most `tokens` are used.
    Raises RequestError where there is nothing to score.
    """

    def __init__(self, data: TextData, tokenizer: Any, sequence_length: int, tokens: int) -> None:
        bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        rows: list[tuple[list[int], list[int]]] = []
        left = tokens
        for text in data.texts:
            ids = (bos + tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])[: left + 1]
            starts = range(0, len(ids) - 1, sequence_length)
            rows += [(ids[at : at + sequence_length], ids[at + 1 : at + 1 + sequence_length]) for at in starts]
            left -= max(0, len(ids) - 1)
            if left <= 0:
                break
        if not rows:
            raise RequestError(f"{data.name}: nothing to validate on: no text is longer than one token")
        self._inputs = torch.zeros(len(rows), sequence_length, dtype=torch.long)
        self._labels = torch.full((len(rows), sequence_length), IGNORED)
        for row, (inputs, labels) in enumerate(rows):
            self._inputs[row, : len(labels)] = torch.tensor(inputs[: len(labels)])
            self._labels[row, : len(labels)] = torch.tensor(labels)

    def perplexity(self, model: Any, workers: Workers, rows: int) -> float:
        """exp(nats / tokens) of an objective, `rows` blocks at a time. Infinite where it is beyond floating point."""
        device = workers.accelerator.device
        sums = torch.zeros(2, dtype=torch.float64)
        model.eval()
        with torch.no_grad():
            for inputs, labels in self._share(workers, rows):
                found = model(inputs.to(device), labels.to(device))
                sums += torch.stack([found["sums"][0].double().cpu(), (labels != IGNORED).sum().double()])
        model.train()
        nats, tokens = workers.total(sums.to(device)).tolist()
        try:
            return math.exp(nats / tokens)
        except OverflowError:
            return math.inf

    def _share(self, workers: Workers, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's blocks. Every process gets as many batches: a sharded model needs them all at each."""
        rank, world = workers.accelerator.process_index, workers.world
        for at in range(0, len(self._inputs), rows * world):
            mine = slice(at + rank * rows, at + (rank + 1) * rows)
            inputs, labels = self._inputs[mine], self._labels[mine]
            if len(inputs) == 0:
                inputs, labels = self._inputs[:1], torch.full_like(self._labels[:1], IGNORED)
            yield inputs, labels
