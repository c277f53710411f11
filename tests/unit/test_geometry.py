"""Layers from configs, and the arithmetic of the cache in closed form."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headpool import geometry
from headpool.errors import RequestError
from headpool.geometry import Layer

KIB, GIB = 2**10, 2**30
LLAMA_70B_MHA = [Layer("full", heads=64, kv_heads=64, head_dim=128)] * 80


def llama(**fields: Any) -> dict[str, Any]:
    return {
        "model_type": "llama", "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 8,
        "hidden_size": 64, "max_position_embeddings": 128,
    } | fields  # fmt: skip


# The arithmetic


@pytest.mark.parametrize(("kv_heads", "gib", "saved"), [(64, 20, 0), (8, 2.5, 0.875), (1, 0.3125, 0.984375)])
def test_cache_of_80_layers_of_64_heads_of_128_over_8192_tokens(kv_heads: int, gib: float, saved: float) -> None:
    layers = geometry.regroup(LLAMA_70B_MHA, kv_heads)
    cache = geometry.cache_bytes(layers, tokens=8192, batch=1, itemsize=2)
    assert cache == gib * GIB
    assert 1 - cache / (20 * GIB) == saved


def test_cache_of_one_layer_of_32_heads_of_16_over_4096_tokens_in_float32() -> None:
    layer = [Layer("full", heads=32, kv_heads=32, head_dim=16)]
    assert geometry.cache_bytes(layer, tokens=4096, batch=1, itemsize=4) == 16384 * KIB
    assert geometry.cache_bytes(geometry.regroup(layer, 1), tokens=4096, batch=1, itemsize=4) == 512 * KIB


@given(
    st.tuples(st.integers(1, 90), st.integers(1, 64), st.integers(1, 256), st.sampled_from([1, 2, 4])),
    st.integers(1, 10**6),
    st.integers(1, 512),
)
def test_cache_is_the_product(model: tuple[int, int, int, int], tokens: int, batch: int) -> None:
    layers, kv_heads, head_dim, itemsize = model
    held = [Layer("full", kv_heads, kv_heads, head_dim)] * layers
    per_token = 2 * layers * kv_heads * head_dim * itemsize
    assert geometry.cache_bytes_per_token(held, itemsize) == per_token
    cache = geometry.cache_bytes(held, tokens=tokens, batch=batch, itemsize=itemsize)
    assert cache == per_token * tokens * batch


@pytest.mark.parametrize(
    ("positions", "last"), [(1, 1), (48, 32), (64, 64), (131_071, 65_536), (10**6, 131_072), (None, 131_072)]
)
def test_the_curve_of_the_cache_ends_with_the_positions(positions: int | None, last: int) -> None:
    full, sliding = Layer("full", 4, 2, 8), Layer("sliding", 4, 4, 8, window=20)
    curve = geometry.cache_curve([full, sliding, sliding], itemsize=2, positions=positions)
    assert curve == tuple((2**n, 64 * 2**n + 2 * 128 * min(2**n, 20)) for n in range(last.bit_length()))
    assert curve[-1][0] == last


def test_sliding_layers_hold_their_window_and_sharing_or_other_layers_nothing() -> None:
    full, sliding = Layer("full", 4, 2, 8), Layer("sliding", 4, 2, 8, window=10)
    shared, none = Layer("full", 4, 2, 8, shares=0), Layer("none", 4, 2, 8)
    held = [full, sliding, shared, none]
    assert geometry.cache_bytes_per_token(held, 2) == 2 * (2 * 2 * 8 * 2)
    assert geometry.cache_bytes(held, tokens=10, batch=1, itemsize=2) == 64 * (10 + 10)
    assert geometry.cache_bytes(held, tokens=25, batch=3, itemsize=2) == 3 * 64 * (25 + 10)


def test_every_divisor_is_an_option_and_9_goes_to_3_to_1() -> None:
    assert geometry.options([Layer("full", 12, 12, 8)]) == [12, 6, 4, 3, 2, 1]
    nine = [Layer("full", 9, 9, 8)] * 2
    three = geometry.regroup(nine, 3)
    assert geometry.options(nine) == [9, 3, 1]
    assert geometry.options(three) == [3, 1]
    assert [(layer.kv_heads, layer.group_size) for layer in geometry.regroup(three, 1)] == [(1, 9)] * 2


def test_layers_with_fewer_heads_stay() -> None:
    held = [Layer("full", 8, 8, 4), Layer("full", 8, 2, 4), Layer("none", 8, 8, 4)]
    assert [layer.kv_heads for layer in geometry.regroup(held, 4)] == [4, 2, 8]
    assert [layer.kv_heads for layer in geometry.regroup(held, 1)] == [1, 1, 8]
    assert geometry.options(held) == [8, 4, 2, 1]


@pytest.mark.parametrize(("kv_heads", "said"), [(0, "at least 1"), (-2, "at least 1"), (24, "the model has 12")])
def test_impossible_counts_are_refused_with_both_numbers_and_the_possible(kv_heads: int, said: str) -> None:
    with pytest.raises(RequestError, match=f"{kv_heads} K/V heads asked for, {said}.* 12, 6, 4, 3, 2, 1$"):
        geometry.regroup([Layer("full", 12, 12, 8)], kv_heads)


def test_an_indivisible_count_names_the_layer_and_both_numbers() -> None:
    held = [Layer("full", 12, 12, 8), Layer("full", 12, 6, 8)]
    with pytest.raises(RequestError, match=r"layer 1 has 6 K/V heads, which do not divide into 4.*12, 6, 3, 2, 1$"):
        geometry.regroup(held, 4)


# Layers from a config


def test_layers_of_a_config() -> None:
    assert geometry.layers(llama()) == (Layer("full", 8, 8, 8),) * 3
    assert geometry.layers(llama(num_key_value_heads=2))[0].group_size == 4


def test_explicit_head_dim_wins_and_null_counts_follow_the_heads() -> None:
    assert geometry.layers(llama(head_dim=32))[0].head_dim == 32
    assert geometry.layers(llama(num_key_value_heads=None, head_dim=None))[0] == Layer("full", 8, 8, 8)
    omitted = {key: value for key, value in llama().items() if key != "num_key_value_heads"}
    assert geometry.layers(omitted)[0].kv_heads == 8


def test_class_defaults_fill_what_a_config_omits() -> None:
    assert geometry.layers({"model_type": "gemma"}) == (Layer("full", 16, 16, 256),) * 28
    assert geometry.layers({"model_type": "mistral"}) == (Layer("sliding", 32, 8, 128, window=4096),) * 32
    assert geometry.layers({"model_type": "mistral", "sliding_window": None})[0] == Layer("full", 32, 8, 128)


def test_qwen2_slides_from_max_window_layers_on_when_switched_on() -> None:
    config = {
        "model_type": "qwen2", "num_hidden_layers": 4, "max_window_layers": 3, "sliding_window": 7,
        "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32,
    }  # fmt: skip
    assert [layer.window for layer in geometry.layers(config)] == [None] * 4
    assert [layer.window for layer in geometry.layers(config | {"use_sliding_window": True})] == [None] * 3 + [7]


def test_gemma2_alternates_and_explicit_layer_types_win() -> None:
    config = {"model_type": "gemma2", "num_hidden_layers": 3, "sliding_window": 9}
    assert [layer.window for layer in geometry.layers(config)] == [9, None, 9]
    explicit = config | {"layer_types": ["full_attention", "full_attention", "sliding_attention"]}
    assert [layer.window for layer in geometry.layers(explicit)] == [None, None, 9]


def test_chunked_layers_hold_their_chunk() -> None:
    config = {"model_type": "llama4_text", "num_hidden_layers": 4, "attention_chunk_size": 100}
    assert [layer.window for layer in geometry.layers(config)] == [100, 100, 100, None]


def test_layers_that_differ_in_heads() -> None:
    listed = geometry.layers(llama(num_key_value_heads=[8, 4, 1]))
    assert [layer.kv_heads for layer in listed] == [8, 4, 1]


def test_layers_share_the_last_unshared_one_of_their_kind() -> None:
    kinds = ["sliding_attention", "full_attention"] * 3
    config = {
        "model_type": "gemma3n_text", "num_hidden_layers": 6, "num_kv_shared_layers": 2, "layer_types": kinds,
    }  # fmt: skip
    assert [layer.shares for layer in geometry.layers(config)] == [None, None, None, None, 2, 3]


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    (llama(num_key_value_heads=3), "num_attention_heads 8 does not divide by num_key_value_heads 3"),
    (llama(num_key_value_heads=16), "num_attention_heads 8 does not divide by num_key_value_heads 16"),
    (llama(num_key_value_heads=0), "num_key_value_heads must be a whole number of 1 or more, found 0"),
    (llama(num_key_value_heads="8"), "found '8'"),
    (llama(num_attention_heads=True), "found True"),
    (llama(num_hidden_layers=None), "num_hidden_layers must be a whole number"),
    (llama(hidden_size=65), "hidden_size 65 does not divide by num_attention_heads 8"),
    (
        llama(num_key_value_heads=[8, 8, 3]),
        "layer 2: num_attention_heads 8 does not divide by num_key_value_heads 3",
    ),
    (llama(num_key_value_heads=[8, 8]), "num_key_value_heads lists 2 layers, num_hidden_layers is 3"),
    (llama(layer_types=["full_attention"]), "layer_types must be a list of 3"),
    (llama(layer_types=["full_attention", "x", "y"]), "layer_types holds 'x'; known are full_attention"),
    (llama(layer_types=[[], "full_attention", "y"]), "layer_types holds []"),
    (llama(sliding_window="4k"), "sliding_window must be a whole number"),
    (
        {"model_type": "exaone4", "sliding_window_pattern": "LLLG"},
        "sliding_window_pattern must be a whole number",
    ),
    (
        {"model_type": "lfm2", "full_attn_idxs": [2, 5]},
        "no layer_types, and how Lfm2ForCausalLM computes them from",
    ),
    (
        {"model_type": "qwen2_moe", "use_sliding_window": True},
        "computes them from use_sliding_window is not known",
    ),
]


@pytest.mark.parametrize(("config", "said"), CONTRADICTIONS, ids=[said for _, said in CONTRADICTIONS])
def test_contradictions_are_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError) as error:
        geometry.layers(config)
    assert said in str(error.value)


# Sizes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GiB", 80 * GIB),
        ("24GB", 24 * 10**9),
        ("512MiB", 512 * 2**20),
        ("1.5 TiB", 3 * 2**39),
        ("7", 7),
        ("3 kb", 3000),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert geometry.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "0", "0.1", "12 parsecs", "1e3", "1,5GB", "8GiBs"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="is no size; write it as 80GiB"):
        geometry.parse_size(text)
