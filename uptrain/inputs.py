"""What a run reads, opened before any weight is: tokenizers, data, held-out text."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headpool import families
from headpool.loading import load_tokenizer
from headpool.portable import file_sha256
from headpool.text import read_texts
from headpool.uptrain.models import check_same_tokens
from headpool.uptrain.plan import Plan, local_files
from headpool.uptrain.stream import Stream
from headpool.uptrain.validation import Validation


@dataclass(frozen=True)
class Inputs:
    """`validation` is None without held-out text."""

    stream: Stream
    validation: Validation | None


def open_inputs(plan: Plan, rank: int = 0, world: int = 1) -> Inputs:
    """Raises RequestError for data that is missing, empty or has not the columns that were named (those that it has are
    listed), and for a teacher that reads text as other tokens.
    """
    section = plan.section
    tokenizer = load_tokenizer(plan.source)
    if plan.teacher is not None:
        check_same_tokens(tokenizer, load_tokenizer(plan.teacher), plan.teacher.model)
    stream = Stream(
        section.data,
        tokenizer,
        sequence_length=plan.sequence_length,
        lanes=plan.lanes,
        seed=plan.recipe.seed,
        rank=rank,
        world=world,
        document_attention=section.document_attention,
        vocab_size=int(families.get(plan.source.config, plan.family, "vocab_size")),
    )
    if section.validation is None:
        return Inputs(stream, None)
    held_out = section.validation
    text = read_texts(held_out.path, held_out.text_column, config=held_out.config, split=held_out.split)
    return Inputs(stream, Validation(text, tokenizer, plan.sequence_length, section.validation_tokens))


def describe_data(plan: Plan, stream: Stream) -> dict[str, Any]:
    """What identifies the data in headpool.json: what the stream says of it, and SHA-256 of local files' bytes."""
    held = dict(stream.state_dict()["identity"])
    for number, source in enumerate(plan.section.data):
        if files := local_files(source.path):
            held[f"data[{number}]"] = {**held[f"data[{number}]"], "sha256": _sha256(files)}
    return held


def _sha256(files: Iterable[Path]) -> str:
    """Of one file; of several, that of their digests."""
    digests = [file_sha256(file) for file in files]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
