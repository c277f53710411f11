"""Greedy continuations of a few prompts: what a reader compares by eye."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from headpool.text import documents

NEW_TOKENS = 48
PROMPTS, PROMPT_WORDS = 3, 16

_BEGINNING = re.compile(rf"\S+(?:\s+\S+){{{PROMPT_WORDS - 1}}}(?=\s+\S)")


@dataclass(frozen=True)
class Sample:
    """A prompt and what the model makes of it, without the prompt."""

    prompt: str
    text: str


def default_prompts(texts: Sequence[str]) -> tuple[str, ...]:
    """The first words of a few documents spread over the texts. Those of a single text are its blocks between blank
    lines, or its lines where there are too few of these. Documents no longer than a prompt (headings) are passed over.
    """
    divisions = [texts] if len(texts) > 1 else [documents(texts[0]), texts[0].splitlines()]
    beginnings = [
        [match[0] for document in division if (match := _BEGINNING.match(document.lstrip()))] for division in divisions
    ]
    found = next((one for one in beginnings if len(one) >= PROMPTS), max(beginnings, key=len))
    count = min(PROMPTS, len(found))
    return tuple(found[index * len(found) // count] for index in range(count))


@torch.inference_mode()
def continue_greedily(model: Any, tokenizer: Any, tokens: Sequence[int], new_tokens: int = NEW_TOKENS) -> str:
    """The text of at most `new_tokens` tokens that the model finds likeliest one by one, up to its end-of-text token.

    Settings in the checkpoint's generation config other than end tokens (sampling, penalties) play no part.
    """
    ends = model.generation_config.eos_token_id
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    own = model.generation_config
    model.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=new_tokens, eos_token_id=ends, pad_token_id=padding
    )
    try:
        prompt = torch.tensor([list(tokens)], device=model.device)
        grown = model.generate(prompt, attention_mask=torch.ones_like(prompt))
    finally:
        model.generation_config = own
    text: str = tokenizer.decode(grown[0, len(tokens) :], skip_special_tokens=True)
    return text
