"""Decode timing, tested for what it counts and sees; what it takes is the machine's business."""

import functools
import itertools
from typing import Any

import pytest
import tiny
import torch
from transformers import DynamicCache

from headpool.errors import HeadpoolError
from headpool.eval import decode
from headpool.eval.decode import Timing, decode_steps, preallocates, time_decoding
from headpool.geometry import Layer

HEADS, HEAD_DIM, HIDDEN, LAYERS, VOCABULARY = 12, 8, 96, 2, 300


def layers(kv_heads: int) -> tuple[Layer, ...]:
    return (Layer("full", HEADS, kv_heads, HEAD_DIM),) * LAYERS


def timed(model: Any, kv_heads: int, context: int = 40, batch: int = 2) -> Timing:
    return time_decoding([model], [layers(kv_heads)], context, batch, repeats=1)[0]


@pytest.mark.parametrize(("context", "steps"), [(2, 1), (5, 2), (40, 20), (64, 32), (4096, 32)])
def test_steps_never_pass_the_context(context: int, steps: int) -> None:
    assert decode_steps(context) == steps


def test_models_take_turns_over_the_same_tokens_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "preallocates", lambda _: True)
    calls: list[tuple[str, int, list[int]]] = []
    models = {"mha": tiny.model("llama"), "gqa": tiny.model("llama", num_key_value_heads=4)}
    for name, model in models.items():
        model.register_forward_pre_hook(
            lambda _, __, options, name=name: calls.append(
                (name, options["input_ids"].shape[1], options["input_ids"][0].tolist())
            ),
            with_kwargs=True,
        )
    seen: list[tuple[int, int]] = []
    found = time_decoding(
        list(models.values()), [layers(12), layers(4)], 10, 3, lambda *counts: seen.append(counts), repeats=2
    )
    run = [5, 1, 1, 1, 1, 1]
    assert [(name, length) for name, length, _ in calls] == [
        (name, length) for _ in range(3) for name in models for length in run
    ]
    tokens = [list(itertools.chain.from_iterable(ids for _, _, ids in calls[at : at + 6])) for at in range(0, 36, 6)]
    assert tokens == [tokens[0]] * 6
    assert len(tokens[0]) == 10
    assert [(one.context, one.batch, one.steps, one.repeats) for one in found] == [(10, 3, 5, 2)] * 2
    assert seen == [(30 * done, 180) for done in range(1, 7)]


def test_seconds_are_medians_and_a_steps_share(monkeypatch: pytest.MonkeyPatch) -> None:
    # Three readings a run: before the prefill, between, after the last of the 4 steps.
    laps = iter([0, 10, 14, 100, 101, 113, 200, 202, 210])
    monkeypatch.setattr(decode.time, "perf_counter", lambda: float(next(laps)))
    model = tiny.model("llama")
    (found,) = time_decoding([model], [layers(12)], 8, 1, repeats=3)
    assert (found.prefill_seconds, found.prefill_spread) == (2.0, (1.0, 10.0))
    assert (found.seconds_per_token, found.seconds_per_token_spread) == (2.0, (1.0, 3.0))
    assert found.bandwidth == found.bytes_per_token / 2.0


@pytest.mark.parametrize(("dtype", "itemsize"), [(torch.float32, 4), (torch.bfloat16, 2)])
@pytest.mark.parametrize("kv_heads", [12, 4, 1])
def test_bytes_are_those_of_the_weights_that_are_read_and_of_the_cache(
    kv_heads: int, dtype: torch.dtype, itemsize: int
) -> None:
    found = timed(tiny.model("llama", dtype=dtype, num_key_value_heads=kv_heads), kv_heads)
    cache = 2 * LAYERS * kv_heads * HEAD_DIM * 40 * 2 * itemsize
    attention = 2 * HIDDEN * HEADS * HEAD_DIM + 2 * HIDDEN * kv_heads * HEAD_DIM
    weights = LAYERS * (attention + 3 * HIDDEN * 64 + 2 * HIDDEN) + HIDDEN + HIDDEN * VOCABULARY
    rows = 2 * HIDDEN  # of the input embedding, one for each of two tokens
    assert found.preallocated
    assert found.cache_bytes == cache
    assert found.bytes_per_token == cache + (weights + rows) * itemsize


def test_tied_embeddings_are_read_once_and_whole() -> None:
    tied = timed(tiny.model("llama", tie_word_embeddings=True), 12)
    untied = timed(tiny.model("llama"), 12)
    assert untied.bytes_per_token - tied.bytes_per_token == 2 * HIDDEN * 4


def test_sliding_layers_keep_their_window() -> None:
    found = timed(tiny.model("mistral", num_key_value_heads=4), 4)
    assert found.preallocated
    assert found.cache_bytes == 2 * LAYERS * 4 * HEAD_DIM * 16 * 2 * 4


@pytest.mark.parametrize(
    ("kv_heads", "implementation", "grouped", "says"),
    [
        (12, "sdpa", True, "nothing to expand"),
        (4, "sdpa", True, "4 K/V heads were read as they lie"),
        (4, "eager", False, "4 K/V heads were expanded to 12"),
        (12, "eager", True, "nothing to expand"),
    ],
)
@pytest.mark.parametrize("preallocated", [True, False])
def test_the_kernel_is_seen_at_work(
    kv_heads: int, implementation: str, grouped: bool, says: str, preallocated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager attention repeats K/V heads (transformers' repeat_kv); under sdpa the kernel takes them grouped."""
    monkeypatch.setattr(decode, "preallocates", lambda _: preallocated)
    model = tiny.model("llama", num_key_value_heads=kv_heads)
    model.set_attn_implementation(implementation)
    found = timed(model, kv_heads)
    assert found.kernel.name.split(":")[0] == implementation
    assert ("scaled_dot_product" in found.kernel.name) == (implementation == "sdpa")
    assert found.kernel.grouped is grouped
    assert says in found.kernel.explanation
    assert found.preallocated is preallocated
    assert found.cache_bytes == 2 * LAYERS * kv_heads * HEAD_DIM * 40 * 2 * 4


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "bloom", "gemma2"])
def test_classes_of_many_kinds_take_a_preallocated_cache(family: str) -> None:
    assert preallocates(tiny.model(family))


def test_a_class_that_reads_a_preallocated_cache_wrongly_gets_one_that_grows() -> None:
    model = tiny.model("llama")
    forward = model.forward

    @functools.wraps(forward)
    def disturbed(*args: Any, **options: Any) -> Any:
        output = forward(*args, **options)
        if options.get("use_cache") and not isinstance(options.get(decode.cache_name(model)), DynamicCache):
            output.logits = output.logits + 0.1
        return output

    model.forward = disturbed
    assert not preallocates(model)


def test_logits_as_large_as_expanded_heads_are_not_taken_for_them() -> None:
    """A vocabulary of heads x head_dim x tokens entries: the logits have as many elements as expanded keys would."""
    context = 20
    model = tiny.model("llama", num_key_value_heads=4, vocab_size=HEADS * HEAD_DIM * context)
    model.set_attn_implementation("sdpa")
    assert timed(model, 4, context=context).kernel.grouped


def test_memory_that_is_not_there_is_named_by_context_and_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(decode._Run, "warm_up", full)
    with pytest.raises(HeadpoolError, match="context 10 with batch size 3: out of memory; take smaller"):
        time_decoding([tiny.model("llama")], [layers(12)], 10, 3, repeats=1)
