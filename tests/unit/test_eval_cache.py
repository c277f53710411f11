"""Cache bytes: what the stock cache holds, against the formula worked out here."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from headpool.errors import HeadpoolError
from headpool.eval.cache import allocated_cache_bytes, cache_report
from headpool.geometry import Layer

SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
FULL = (Layer("full", 4, 2, 16),) * 3
SLIDING = (Layer("sliding", 4, 2, 16, window=8),) * 3
TOKENS = list(range(40))
PER_TOKEN = 2 * 3 * 2 * 16  # keys and values, layers, K/V heads, head_dim: elements


@pytest.mark.parametrize(("dtype", "itemsize"), [(torch.float32, 4), (torch.bfloat16, 2), (torch.float64, 8)])
def test_full_attention_allocates_what_the_formula_says(dtype: torch.dtype, itemsize: int) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SMALL)).to(dtype)
    report = cache_report(model, FULL, TOKENS, torch.bfloat16)
    assert (report.dtype, report.formula) == (str(dtype).removeprefix("torch."), PER_TOKEN * itemsize)
    assert report.allocated == report.formula
    assert (report.checkpoint_dtype, report.formula_checkpoint) == ("bfloat16", PER_TOKEN * 2)
    assert (report.tokens, report.explanation, report.flagged) == (40, None, False)


def test_fewer_heads_allocate_less() -> None:
    config = GPT2Config(vocab_size=61, n_embd=64, n_layer=3, n_head=4, n_positions=64)
    all_heads = allocated_cache_bytes(GPT2LMHeadModel(config), torch.tensor([TOKENS]))
    half = allocated_cache_bytes(LlamaForCausalLM(LlamaConfig(**SMALL)), torch.tensor([TOKENS]))
    assert all_heads.decoding == 2 * half.decoding == 40 * 2 * PER_TOKEN * 4


def test_sliding_layers_hold_their_window_and_the_report_says_so() -> None:
    model = MistralForCausalLM(MistralConfig(**SMALL, sliding_window=8))
    measured = allocated_cache_bytes(model, torch.tensor([TOKENS]))
    assert measured.prefill == 39 * PER_TOKEN * 4  # the slices show 7 tokens and pin all
    assert measured.decoding == 8 * PER_TOKEN * 4
    report = cache_report(model, SLIDING, TOKENS, torch.float32)
    assert report.allocated == 8 * PER_TOKEN * 4 / 40 < report.formula == PER_TOKEN * 4
    assert report.explanation is not None
    assert report.explanation.startswith("3 of 3 layers hold at most 8 tokens")
    assert not report.flagged


def test_a_window_that_is_not_reached_needs_no_explanation() -> None:
    model = MistralForCausalLM(MistralConfig(**SMALL, sliding_window=8))
    report = cache_report(model, SLIDING, TOKENS[:8], torch.float32)
    assert report.allocated == report.formula
    assert report.explanation is None


@pytest.mark.parametrize(
    ("claimed", "difference"),
    [
        ((Layer("full", 4, 1, 16),) * 3, 8 * PER_TOKEN * 4 / 40 - PER_TOKEN * 4 / 2),
        ((Layer("sliding", 4, 2, 16, window=9),) * 3, 8 * PER_TOKEN * 4 / 40 - PER_TOKEN * 4),
    ],
)
def test_what_sliding_layers_do_not_explain_is_flagged(claimed: tuple[Layer, ...], difference: float) -> None:
    model = MistralForCausalLM(MistralConfig(**SMALL, sliding_window=8))
    report = cache_report(model, claimed, TOKENS, torch.float32)
    assert report.flagged
    assert report.explanation == (
        f"flag: allocated differs from the formula by {difference:+.1f} bytes per token, unexplained"
    )


def test_a_model_without_a_cache_is_refused() -> None:
    class Recurrent(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
            return SimpleNamespace(past_key_values=None)

    with pytest.raises(HeadpoolError, match="Recurrent gives no key/value cache with layers, but NoneType"):
        allocated_cache_bytes(Recurrent(), torch.tensor([TOKENS]))
