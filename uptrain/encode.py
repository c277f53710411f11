"""Pieces to tokens and targets: where a document begins and ends, and which tokens of a conversation count."""

import copy
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headpool.errors import RequestError, first_line
from headpool.uptrain.pieces import Piece

IGNORED = -100
"""Label of a position that no loss counts at; what torch's cross-entropy ignores by default."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Encoded:
    """Tokens of a piece and the target of each: the token after it, or IGNORED."""

    tokens: Ints
    labels: Ints


class Encoder:
    """Encodes with a tokenizer of its own, so that another thread may use the given one.

    A document is [BOS] tokens EOS, with BOS where the tokenizer has one other than EOS, and with nothing that its
    template would add. A conversation is what its chat template makes of it, and only the assistant's tokens count.

    Raises RequestError for a tokenizer without EOS or, when `chat`, without chat template.
    """

    def __init__(self, tokenizer: Any, *, chat: bool, vocab_size: int | None = None) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        self._vocab_size = vocab_size
        if tokenizer.eos_token_id is None:
            raise RequestError("the tokenizer has no end-of-sequence token (eos_token) to end documents with")
        if chat and not tokenizer.chat_template:
            raise RequestError("messages_column: the tokenizer has no chat template to put messages through")
        bos = tokenizer.bos_token_id
        self._bos = [] if bos in (None, tokenizer.eos_token_id) else [bos]
        self._marked = chat and bool(_GENERATION.search(str(tokenizer.chat_template)))

    def encode(self, pieces: Sequence[Piece]) -> list[Encoded]:
        """Each piece by itself; an empty text has no tokens at all.

        Raises RequestError for a token outside the vocabulary, and for a conversation of which the chat template
        cannot tell the assistant's tokens.
        """
        texts = [piece for piece in pieces if isinstance(piece.value, str)]
        tokens = iter(self._tokens([piece.value for piece in texts]) if texts else ())
        encoded = [
            self._document(piece, next(tokens)) if isinstance(piece.value, str) else self._conversation(piece)
            for piece in pieces
        ]
        for piece, one in zip(pieces, encoded, strict=True):
            largest = one.tokens.max(initial=-1)
            if self._vocab_size is not None and largest >= self._vocab_size:
                raise RequestError(
                    f"{piece.where}: the tokenizer gives token {largest}, but the model's vocabulary ends at "
                    f"{self._vocab_size - 1}: they do not belong together"
                )
        return encoded

    def _tokens(self, texts: list[str]) -> list[list[int]]:
        result: list[list[int]] = self._tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
        )["input_ids"]
        return result

    def _document(self, piece: Piece, tokens: list[int]) -> Encoded:
        if not tokens:
            return _encoded([], [])
        whole = [*(self._bos if piece.starts else ()), *tokens]
        if piece.ends:
            whole.append(self._tokenizer.eos_token_id)
        return _encoded(whole, [True] * len(whole))

    def _conversation(self, piece: Piece) -> Encoded:
        try:
            tokens, counted = (self._by_markers if self._marked else self._by_prefixes)(piece)
        except RequestError:
            raise
        except Exception as error:  # templates raise exceptions of jinja and of their own
            raise RequestError(f"{piece.where}: the chat template refuses it: {first_line(error)}") from error
        if not any(counted[1:]):
            raise RequestError(f"{piece.where}: no token of an assistant's message in it, so there is nothing to learn")
        return _encoded(tokens, counted)

    def _by_markers(self, piece: Piece) -> tuple[list[int], list[bool]]:
        """The template itself marks what the assistant generates."""
        made = self._tokenizer.apply_chat_template(
            piece.value, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return made["input_ids"], [bool(one) for one in made["assistant_masks"]]

    def _by_prefixes(self, piece: Piece) -> tuple[list[int], list[bool]]:
        """What an assistant's message adds to the prompt for it, where each is a prefix of the next."""
        messages = piece.value
        whole = self._chat(messages)
        counted = [False] * len(whole)
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._chat(messages[:number], add_generation_prompt=True)
            answered = self._chat(messages[: number + 1])
            if answered[: len(prompt)] != prompt or whole[: len(answered)] != answered:
                raise RequestError(
                    f"{piece.where}: the chat template rewrites earlier text as the conversation goes on, so the "
                    f"tokens of message {number} cannot be told; mark them with {{% generation %}} in the template"
                )
            counted[len(prompt) : len(answered)] = [True] * (len(answered) - len(prompt))
        return whole, counted

    def _chat(self, messages: list[Any], *, add_generation_prompt: bool = False) -> list[int]:
        made = self._tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, add_generation_prompt=add_generation_prompt
        )
        result: list[int] = made["input_ids"]
        return result


def conversation(value: object, where: object, column: str) -> list[dict[str, Any]]:
    """The messages of a row, without fields that are only there because other rows have them.

    Raises RequestError unless it is a list of messages with a role, one of them the assistant's.
    """
    messages = json.loads(value) if isinstance(value, str) and value.startswith("[") else value
    if not isinstance(messages, list) or not all(isinstance(one, dict) and "role" in one for one in messages):
        raise RequestError(f"{where}: column {column!r} holds no list of messages, each with role and content")
    if not any(one["role"] == "assistant" for one in messages):
        raise RequestError(f"{where}: column {column!r} holds no message of an assistant to learn from")
    return [{key: field for key, field in one.items() if field is not None} for one in messages]


def _encoded(tokens: Sequence[int], counted: Sequence[bool]) -> Encoded:
    """Targets are the next tokens, where those count; the last has none."""
    ids = np.asarray(tokens, dtype=np.int64)
    labels = np.full_like(ids, IGNORED)
    labels[:-1] = np.where(np.asarray(counted[1:], dtype=bool), ids[1:], IGNORED)
    return Encoded(ids, labels)
