"""A tokenizer of numbers, so that a test can see where every token came from: "17" is token 17, spaces are nothing."""

from typing import Any

EOS, BOS = 1, 2
FIRST = 10
"""Numbers below mean something else."""


class Words:
    """Has what training data needs of a tokenizer, and remembers the texts that it and its copies were given."""

    chat_template = None

    def __init__(self, *, bos: int | None = None, eos: int | None = EOS) -> None:
        self.bos_token_id = bos
        self.eos_token_id = eos
        self.special_tokens_map = {"bos": bos, "eos": eos}
        self.seen: list[str] = []

    def __deepcopy__(self, memo: Any) -> "Words":
        copied = Words(bos=self.bos_token_id, eos=self.eos_token_id)
        copied.seen = self.seen
        return copied

    def get_vocab(self) -> dict[str, int]:
        return {"1": 1}

    def __call__(self, texts: list[str], *, add_special_tokens: bool, **_: Any) -> dict[str, Any]:
        assert not add_special_tokens
        self.seen += texts
        return {"input_ids": [[int(word) for word in text.split()] for text in texts]}


def rows_of(lengths: list[int]) -> list[str]:
    """Texts of so many numbers, no number twice."""
    texts, start = [], FIRST
    for length in lengths:
        texts.append(" ".join(map(str, range(start, start + length))))
        start += length
    return texts
