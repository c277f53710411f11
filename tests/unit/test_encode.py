"""Documents and conversations as tokens and targets: what begins, what ends, and what counts."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tiny import QUICKSTART
from words import BOS, EOS, Words

from headpool.errors import RequestError
from headpool.sections import DataSource
from headpool.uptrain.encode import Encoded, Encoder
from headpool.uptrain.pieces import Piece
from headpool.uptrain.stream import Stream

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|endoftext|>{% endgeneration %}{% else %}{{ m.content }}<|endoftext|>{% endif %}"
    "{{ '\\n' }}{% endfor %}"
)
FORGETFUL = "{% for m in messages %}<{{ m.role }}>{{ m.content if loop.last else 'it was said' }}\n{% endfor %}"

TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": "A governess, sir."},
    {"role": "user", "content": "And your name?"},
    {"role": "assistant", "content": "Jane."},
]


def tokenizer(template: str | None = None) -> Any:
    made = transformers.AutoTokenizer.from_pretrained(QUICKSTART)
    made.chat_template = template
    return made


def encode(made: Any, value: Any, *, chat: bool = False, **place: bool) -> Encoded:
    (encoded,) = Encoder(made, chat=chat).encode([Piece(value, "a.jsonl, row 3", **place)])
    return encoded


@pytest.mark.parametrize(
    ("bos", "place", "tokens"),
    [
        (None, {}, [11, 12, EOS]),
        (BOS, {}, [BOS, 11, 12, EOS]),
        (EOS, {}, [11, 12, EOS]),  # one token for both is not doubled
        (BOS, {"ends": False}, [BOS, 11, 12]),
        (BOS, {"starts": False}, [11, 12, EOS]),
        (BOS, {"starts": False, "ends": False}, [11, 12]),
    ],
)
def test_where_documents_begin_and_end(bos: int | None, place: dict[str, bool], tokens: list[int]) -> None:
    encoded = encode(Words(bos=bos), "11 12", **place)
    assert encoded.tokens.tolist() == tokens
    assert encoded.labels.tolist() == [*tokens[1:], -100]
    assert encode(Words(bos=bos), "", **place).tokens.tolist() == []


def test_the_bundled_tokenizer_adds_its_one_token_at_the_end_only() -> None:
    made = tokenizer()
    text = "Reader, I married him."
    assert encode(made, text).tokens.tolist() == [*made.backend_tokenizer.encode(text).ids, made.eos_token_id]


@pytest.mark.parametrize("template", [CHAT, MARKED])
def test_only_what_the_assistant_says_counts(template: str) -> None:
    made = tokenizer(template)
    encoded = encode(made, TALK, chat=True)
    whole = "".join(f"<{one['role']}>{one['content']}<|endoftext|>\n" for one in TALK)
    assert encoded.tokens.tolist() == made.backend_tokenizer.encode(whole).ids
    counted = encoded.labels != -100
    assert (encoded.labels[counted] == encoded.tokens[1:][counted[:-1]]).all()
    # Unmarked, the line's end belongs to the message.
    end = "<|endoftext|>" if template is MARKED else "<|endoftext|>\n"
    assert made.decode(encoded.labels[counted]) == f"A governess, sir.{end}Jane.{end}"


def test_a_template_that_rewrites_what_was_said_is_refused() -> None:
    with pytest.raises(RequestError, match=r"a\.jsonl, row 3: .*rewrites.*message 2 cannot be told.*generation"):
        encode(tokenizer(FORGETFUL), TALK, chat=True)


def test_what_a_template_raises_becomes_one_line() -> None:
    with pytest.raises(RequestError, match=r"a\.jsonl, row 3: the chat template refuses it: no systems"):
        encode(tokenizer("{{ raise_exception('no systems') }}"), TALK, chat=True)


def test_tokenizers_that_cannot_do_it_are_refused() -> None:
    with pytest.raises(RequestError, match="no end-of-sequence token"):
        Encoder(Words(eos=None), chat=False)
    with pytest.raises(RequestError, match="no chat template"):
        Encoder(tokenizer(), chat=True)
    with pytest.raises(RequestError, match=r"a\.txt: .* token 12, but the model's vocabulary ends at 11"):
        Encoder(Words(), chat=False, vocab_size=12).encode([Piece("11 12", "a.txt")])


@pytest.mark.parametrize("streaming", [False, True])
def test_conversations_of_a_file(tmp_path: Path, streaming: bool) -> None:
    path = tmp_path / "talks.jsonl"
    rows = [{"talk": TALK}, {"n": 1, "talk": [*TALK[1:3], {"role": "user", "content": "Oh", "tool": {"a": 1}}]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = DataSource(path=str(path), messages_column="talk", streaming=streaming)
    made = tokenizer(MARKED)
    stream = Stream([source], made, sequence_length=100, lanes=1, seed=0, shuffle=False)
    batch = stream.next()
    assert made.decode(batch.input_ids[0]).startswith("<system>Be kind.<|endoftext|>\n<user>Who are you?")
    said = made.decode(batch.labels[batch.labels != -100])
    assert said.startswith("A governess, sir.<|endoftext|>Jane.<|endoftext|>A governess, sir.<|endoftext|>")


@pytest.mark.parametrize(
    ("talk", "says"),
    [
        ("hello", "holds no list of messages"),
        ([{"content": "x"}], "holds no list of messages"),
        (None, "holds no list of messages"),
        (TALK[:2], "holds no message of an assistant"),
        ([], "holds no message of an assistant"),
    ],
)
def test_rows_without_a_conversation_are_named(tmp_path: Path, talk: Any, says: str) -> None:
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps({"talk": TALK}) + "\n" + json.dumps({"talk": talk}) + "\n")
    source = DataSource(path=str(path), messages_column="talk")
    with pytest.raises(RequestError, match=rf"talks\.jsonl, line 2: column 'talk' {says}"):
        Stream([source], tokenizer(CHAT), sequence_length=8, lanes=1, seed=0)
