"""Windows and nats against enumerations and loops written here from the definitions."""

import math
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from headpool import score as module
from headpool.errors import HeadpoolError, RequestError
from headpool.score import Window, score, sliding_windows

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart"
VOCABULARY = 61
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def seeded(model_class: Any, config: Any) -> Any:
    """A model with weights large enough that contexts matter."""
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
    return model


@pytest.fixture(scope="module")
def llama() -> Any:
    return seeded(LlamaForCausalLM, LlamaConfig(**SMALL))


def random_tokens(n: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (n,), generator=generator).tolist()


def naive_windows(n: int, window: int, stride: int) -> list[tuple[int, int, int]]:
    """The issue's sentence, word by word: (start, end, first token scored)."""
    found = [(0, min(window, n), 1)]
    i = 1
    while found[-1][1] != n:
        e = found[-1][1]
        found.append((min(i * stride, e - 1), min(i * stride + window, n), e))
        i += 1
    return found


def naive_nats(model: Any, tokens: list[int], windows: list[tuple[int, int, int]]) -> float:
    """One window at a time through the stock class, all logits, one token at a time."""
    total = 0.0
    for start, end, first in windows:
        with torch.no_grad():
            log_p = model(torch.tensor([tokens[start:end]])).logits[0].double().log_softmax(-1)
        total -= sum(log_p[t - 1 - start, tokens[t]].item() for t in range(first, end))
    return total


@given(n=st.integers(2, 300), window=st.integers(1, 70), data=st.data())
def test_windows_are_those_of_the_definition(n: int, window: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, window))
    windows = sliding_windows(n, window, stride)
    assert [(one.start, one.end, one.first) for one in windows] == naive_windows(n, window, stride)
    assert [t for one in windows for t in range(one.first, one.end)] == list(range(1, n))
    assert windows[-1].end == n
    assert [one.end for one in windows].count(n) == 1
    for one in windows:
        assert one.start < one.first
        assert one.end - 1 - one.start <= window  # what the model is fed


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (0, []),
        (1, []),
        (2, [Window(0, 2, 1)]),
        (8, [Window(0, 8, 1)]),
        (9, [Window(0, 8, 1), Window(7, 9, 8)]),
        (16, [Window(0, 8, 1), Window(7, 16, 8)]),
        (17, [Window(0, 8, 1), Window(7, 16, 8), Window(15, 17, 16)]),
    ],
)
def test_windows_side_by_side(n: int, expected: list[Window]) -> None:
    assert sliding_windows(n, 8, 8) == expected


def test_overlapping_windows_keep_their_context() -> None:
    assert sliding_windows(11, 8, 3) == [Window(0, 8, 1), Window(3, 11, 8)]
    assert sliding_windows(12, 8, 3) == [Window(0, 8, 1), Window(3, 11, 8), Window(6, 12, 11)]


@pytest.mark.parametrize(("window", "stride"), [(8, 9), (8, 0), (8, -1), (0, 0)])
def test_impossible_strides_are_refused(window: int, stride: int) -> None:
    with pytest.raises(RequestError, match=f"window {window}, stride {stride}"):
        sliding_windows(100, window, stride)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=4),
    window=st.integers(1, 40),
    batch=st.integers(1, 9),
    chunk=st.integers(1, 60),
    data=st.data(),
)
def test_nats_equal_an_unbatched_loop_over_the_stock_class(
    llama: Any, lengths: list[int], window: int, batch: int, chunk: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(max(1, window // 4), window))
    texts = [random_tokens(n, seed) for seed, n in enumerate(lengths)]
    plans = [naive_windows(n, window, stride) if n > 1 else [] for n in lengths]
    expected = [naive_nats(llama, text, plan) for text, plan in zip(texts, plans, strict=True)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "CHUNK_LOGITS", 1)
        patched.setattr(module, "CHUNK_ROWS", chunk)
        result = score(llama, texts, [sliding_windows(n, window, stride) for n in lengths], batch)
    assert result.tokens == sum(max(0, n - 1) for n in lengths)
    assert result.nats == pytest.approx(sum(expected), rel=1e-6)
    assert [sum(nats) for nats in result.window_nats] == pytest.approx(expected, rel=1e-6)
    assert [len(nats) for nats in result.window_nats] == [len(plan) for plan in plans]


def test_a_float64_model_is_scored_in_float64() -> None:
    model = seeded(LlamaForCausalLM, LlamaConfig(**SMALL)).double()
    tokens = random_tokens(100)
    result = score(model, [tokens], [sliding_windows(100, 16, 5)], 4)
    assert result.nats == pytest.approx(naive_nats(model, tokens, naive_windows(100, 16, 5)), rel=1e-13)


def test_a_model_that_knows_nothing_costs_ln_v_a_token() -> None:
    model = seeded(LlamaForCausalLM, LlamaConfig(**SMALL))
    torch.nn.init.zeros_(model.lm_head.weight)
    result = score(model, [random_tokens(50)], [sliding_windows(50, 16, 16)], 3)
    assert result.nats == pytest.approx(49 * math.log(VOCABULARY), rel=1e-6)
    assert result.perplexity == pytest.approx(VOCABULARY, rel=1e-6)


def test_logits_exist_at_scored_positions_only_and_a_chunk_at_a_time(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, ...]] = []
    read: list[tuple[int, ...]] = []
    handles = [
        llama.lm_head.register_forward_hook(lambda _module, _inputs, output: made.append(tuple(output.shape))),
        llama.model.layers[0].register_forward_hook(lambda _module, inputs, _: read.append(tuple(inputs[0].shape))),
    ]
    texts = [random_tokens(n) for n in (60, 32, 5)]  # no window that would be padded
    windows = [sliding_windows(len(text), 16, 4) for text in texts]
    trial = [(1, 9, VOCABULARY), (1, 4, VOCABULARY), (1, 4, VOCABULARY), (1, 1, VOCABULARY)]
    try:
        reference = score(llama, texts, windows, 8)
        assert made[:4] == trial
        assert sum(rows * positions for rows, positions, _ in made[4:]) == reference.tokens
        assert max(rows for rows, _, _ in made) == 8
        batches = read[2:]
        made.clear()
        read.clear()
        monkeypatch.setattr(module, "CHUNK_LOGITS", 1)
        monkeypatch.setattr(module, "CHUNK_ROWS", 10)
        limited = score(llama, texts, windows, 8)
    finally:
        for handle in handles:
            handle.remove()
    assert max(rows * positions for rows, positions, _ in made[4:]) <= 10
    assert sum(rows * positions for rows, positions, _ in made[4:]) == reference.tokens
    assert len(made[4:]) > len(batches)
    assert read[2:] == batches, "the backbone reads every batch once, however many chunks its logits come in"
    assert limited.nats == pytest.approx(reference.nats, rel=1e-6)
    assert "forward" not in vars(llama.model)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma2", {"final_logit_softcapping": 2.0}),
        ("cohere", {"logit_scale": 0.3}),
        ("granite", {"logits_scaling": 3.0}),
        ("gpt2", {}),
        ("bloom", {}),
        ("mixtral", {"output_router_logits": True}),
    ],
)
def test_every_path_from_hidden_states_to_logits_is_taken_in_chunks(
    family: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Soft caps, scales and tied embeddings are the class's own; so is what it does beside the logits."""
    model = tiny.model(family, **changes)
    rows: list[int] = []
    handle = model.get_output_embeddings().register_forward_hook(lambda *args: rows.append(args[2].shape[1]))
    monkeypatch.setattr(module, "CHUNK_LOGITS", 1)
    monkeypatch.setattr(module, "CHUNK_ROWS", 5)
    tokens = random_tokens(70)
    result = score(model, [tokens], [sliding_windows(70, 30, 20)], 3)
    handle.remove()
    assert max(rows[4:]) <= 5
    assert result.nats == pytest.approx(naive_nats(model, tokens, naive_windows(70, 30, 20)), rel=1e-6)


def test_a_head_that_minds_which_positions_it_is_given_is_taken_at_once(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Centred(LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, input_ids: torch.Tensor, use_cache: bool = False, logits_to_keep: Any = 0) -> Any:
            output = super().forward(input_ids=input_ids, use_cache=use_cache, logits_to_keep=logits_to_keep)
            output.logits = output.logits - output.logits.mean(dim=1, keepdim=True)
            return output

    model = Centred(llama.config).eval()
    model.load_state_dict(llama.state_dict())
    monkeypatch.setattr(module, "CHUNK_LOGITS", 1)
    monkeypatch.setattr(module, "CHUNK_ROWS", 5)
    tokens = random_tokens(64)
    with torch.no_grad():
        log_p = model(torch.tensor([tokens[:-1]])).logits[0].double().log_softmax(-1)
    expected = -sum(log_p[t - 1, tokens[t]].item() for t in range(1, 64))
    assert score(model, [tokens], [[Window(0, 64, 1)]], 1).nats == pytest.approx(expected, rel=1e-6)


def test_where_logits_come_at_once_fewer_windows_share_a_batch(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    monkeypatch.setattr(module, "_head_takes_chunks", lambda *_: False)
    monkeypatch.setattr(module, "WHOLE_LOGITS", 3 * 16 * VOCABULARY + 1)
    tokens = random_tokens(160)
    handle = llama.lm_head.register_forward_hook(lambda *args: rows.append(args[2].shape[0]))
    try:
        result = score(llama, [tokens], [sliding_windows(160, 16, 16)], 8)
    finally:
        handle.remove()
    assert max(rows) == 3
    assert result.nats == pytest.approx(naive_nats(llama, tokens, naive_windows(160, 16, 16)), rel=1e-6)


def test_short_texts_share_batches_without_much_padding(llama: Any) -> None:
    read: list[tuple[int, ...]] = []
    handle = llama.model.layers[0].register_forward_hook(lambda _module, inputs, _: read.append(tuple(inputs[0].shape)))
    texts = [random_tokens(n, n) for n in (9, 40, 5, 38, 21, 39)]
    windows = [sliding_windows(len(text), 64, 64) for text in texts]
    try:
        result = score(llama, texts, windows, 3)
    finally:
        handle.remove()
    # 40, 39, 38 | 21 (9 is shorter than half of it) | 9, 5
    assert [shape[:2] for shape in read[2:]] == [(3, 39), (1, 20), (2, 8)]
    for text, nats in zip(texts, result.window_nats, strict=True):
        assert nats[0] == pytest.approx(naive_nats(llama, text, [(0, len(text), 1)]), rel=1e-6)


def test_token_nats_stand_by_window_in_the_order_of_the_text(llama: Any) -> None:
    texts = [random_tokens(40), random_tokens(11, 1)]
    windows = [sliding_windows(len(text), 16, 5) for text in texts]
    result = score(llama, texts, windows, 4)
    for text, of_text, nats in zip(texts, windows, result.token_nats, strict=True):
        for one, values in zip(of_text, nats, strict=True):
            expected = [naive_nats(llama, text, [(one.start, t + 1, t)]) for t in range(one.first, one.end)]
            assert values.dtype == torch.float64
            assert values.tolist() == pytest.approx(expected, rel=1e-5)


def test_a_class_without_logits_to_keep_scores_the_same(llama: Any) -> None:
    class Plain(torch.nn.Module):
        config, dtype, device = llama.config, llama.dtype, llama.device

        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
            assert not use_cache
            return llama(input_ids=input_ids, use_cache=False)

    tokens = random_tokens(60)
    windows = [sliding_windows(60, 16, 5)]
    assert score(Plain(), [tokens], windows, 4).nats == pytest.approx(score(llama, [tokens], windows, 4).nats, rel=1e-6)


def test_batches_do_not_mix_lengths_where_lengths_change_the_rotation() -> None:
    config = Phi3Config(
        **{**SMALL, "pad_token_id": 0},
        original_max_position_embeddings=16,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 16,
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
        },
    )
    model = seeded(Phi3ForCausalLM, config)
    texts = [random_tokens(n, n) for n in (60, 12, 40, 9, 12)]
    windows = [sliding_windows(len(text), 64, 64) for text in texts]
    alone = [score(model, [text], [plan], 1).nats for text, plan in zip(texts, windows, strict=True)]
    together = score(model, texts, windows, 8)
    assert [sum(nats) for nats in together.window_nats] == pytest.approx(alone, rel=1e-6)


def test_dropout_is_off_while_scoring_and_training_goes_on_after() -> None:
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    model = seeded(GPT2LMHeadModel, config)
    tokens, windows = random_tokens(40), [sliding_windows(40, 16, 16)]
    expected = score(model, [tokens], windows, 2).nats
    model.train()
    assert score(model, [tokens], windows, 2).nats == expected
    assert model.training


def test_progress_counts_tokens_up_to_all(llama: Any) -> None:
    seen: list[tuple[int, int]] = []
    score(llama, [random_tokens(50)], [sliding_windows(50, 10, 10)], 2, lambda *counts: seen.append(counts))
    assert seen[-1] == (49, 49)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


@pytest.mark.parametrize("wrong", [Window(0, 11, 1), Window(3, 8, 3), Window(-1, 5, 1), Window(0, 4, 5)])
def test_windows_that_do_not_fit_are_refused(llama: Any, wrong: Window) -> None:
    with pytest.raises(ValueError, match="does not fit the 10 tokens of text 0"):
        score(llama, [random_tokens(10)], [[wrong]], 1)


def test_scores_that_are_not_finite_are_refused() -> None:
    model = seeded(LlamaForCausalLM, LlamaConfig(**SMALL))
    torch.nn.init.constant_(model.lm_head.weight, math.nan)
    with pytest.raises(HeadpoolError, match=r"text 0, Window\(start=0, end=10, first=1\): nan nats"):
        score(model, [random_tokens(10)], [sliding_windows(10, 16, 16)], 1)


def test_the_bundled_model_reaches_the_perplexity_of_its_card() -> None:
    """64 windows of 256 tokens from the start of Mansfield Park, no BOS, the first of each not scored."""
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "model")
    text = (QUICKSTART / "test.txt").read_bytes()[:80_000].decode()
    tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(QUICKSTART / "model", dtype=torch.float32)
    windows = [Window(start, start + 256, start + 1) for start in range(0, 64 * 256, 256)]
    result = score(model, [tokens], [windows], 16)
    assert result.tokens == 64 * 255
    assert f"{result.perplexity:.2f}" == "30.95"
