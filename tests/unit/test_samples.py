"""Prompts from documents; greedy continuations against a loop without a cache."""

import pytest
import tiny
import torch
from transformers import AutoTokenizer

from headpool.eval.samples import continue_greedily, default_prompts

LONG = " ".join(f"w{number}" for number in range(40))


def test_prompts_are_beginnings_of_documents_spread_over_the_text() -> None:
    text = "\n\n".join(["CHAPTER I", *(f"{number} {LONG}" for number in range(9)), "THE END"])
    assert [prompt.split()[0] for prompt in default_prompts([text])] == ["0", "3", "6"]
    assert default_prompts([text])[0] == "0 " + " ".join(f"w{number}" for number in range(15))


def test_each_of_several_texts_is_a_document() -> None:
    texts = [f"  {name}\n{LONG}\n\nanother block {LONG}" for name in "ab"]
    assert [prompt.split()[0] for prompt in default_prompts(texts)] == ["a", "b"]
    assert default_prompts(texts)[0].startswith("a\nw0 w1")


def test_a_text_without_blank_lines_is_taken_by_its_lines() -> None:
    text = "\n".join(["A NOVEL", *(f"{number} {LONG}" for number in range(6))])
    assert [prompt.split()[0] for prompt in default_prompts([text])] == ["0", "2", "4"]


def test_texts_no_longer_than_a_prompt_give_none() -> None:
    assert default_prompts([" ".join("abcdefghijklmnop")]) == ()
    assert len(default_prompts([" ".join("abcdefghijklmnopq")])) == 1


@pytest.mark.parametrize("repetition_penalty", [1.0, 3.0])
def test_continuations_are_the_likeliest_tokens_one_by_one(repetition_penalty: float) -> None:
    model = tiny.model("llama", vocab_size=2048, eos_token_id=2047)
    model.generation_config.update(do_sample=True, temperature=5.0, repetition_penalty=repetition_penalty)
    tokenizer = AutoTokenizer.from_pretrained(tiny.QUICKSTART)
    grown = tokens = [0, 5, 300, 77]
    with torch.no_grad():
        for _ in range(12):
            grown = [*grown, int(model(torch.tensor([grown]), use_cache=False).logits[0, -1].argmax())]
    expected = tokenizer.decode(grown[len(tokens) :], skip_special_tokens=True)
    assert continue_greedily(model, tokenizer, tokens, 12) == expected
    assert model.generation_config.do_sample, "the model's own settings are back"


def test_a_continuation_ends_at_an_end_token() -> None:
    model = tiny.model("llama", vocab_size=2048)
    tokenizer = AutoTokenizer.from_pretrained(tiny.QUICKSTART)
    with torch.no_grad():
        first = int(model(torch.tensor([[0, 5, 300, 77]]), use_cache=False).logits[0, -1].argmax())
    model.generation_config.eos_token_id = first
    expected = tokenizer.decode([first], skip_special_tokens=True)
    assert continue_greedily(model, tokenizer, [0, 5, 300, 77], 12) == expected
