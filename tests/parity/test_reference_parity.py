"""The NumPy specification against stock attention classes."""

from typing import Any

import numpy as np
import pytest
import torch
from stock_layers import (
    FAMILIES,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    MASKS,
    WINDOW,
    Layer,
    assert_close,
    check_in_pieces,
    check_layer,
    check_mean_pooled,
    check_pooling,
    layer_weights,
    randomise,
    stock_layer,
)
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from headpool import reference


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kv_heads", KV_HEADS)
@pytest.mark.parametrize("name", FAMILIES)
def test_equals_the_stock_layer(name: str, kv_heads: int, mask: reference.Mask) -> None:
    check_layer(reference, name, kv_heads, mask)


@pytest.mark.parametrize("mask", ["causal", "sliding"])
@pytest.mark.parametrize("kv_heads", KV_HEADS)
def test_in_pieces_equals_the_stock_layer_all_at_once(kv_heads: int, mask: reference.Mask) -> None:
    check_in_pieces(reference, kv_heads, mask)


@pytest.mark.parametrize("kv_heads", KV_HEADS)
def test_without_rotation_equals_the_stock_layer_given_none(kv_heads: int) -> None:
    layer = stock_layer(FAMILIES["llama"], kv_heads)
    cos, sin = layer.position_embeddings
    still = Layer(layer.module, layer.x, (torch.ones_like(cos), torch.zeros_like(sin)))
    y, _ = reference.attention(layer.x[0].numpy(), layer_weights(reference, layer.module))
    assert_close(y, still.output("causal"), 1e-10)
    assert abs(y - layer.output("causal")).max() > 1e-3


def test_pooling_undoes_the_stock_repeat() -> None:
    check_pooling(reference)


def test_mean_pooled_equals_the_stock_layer_with_overwritten_heads() -> None:
    check_mean_pooled(reference)


# Whole models


def rms_norm(x_TE: reference.Array, weight_E: reference.Array, eps: float) -> reference.Array:
    return x_TE / np.sqrt((x_TE**2).mean(axis=-1, keepdims=True) + eps) * weight_E


def whole_model(model: torch.nn.Module, ids: list[int]) -> reference.Array:
    """Logits [T, vocabulary] of a Llama, or of a Mistral with a sliding window, in NumPy."""
    config = model.config
    w = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    theta = config.rope_parameters["rope_theta"] ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = np.tile(np.arange(len(ids))[:, None] * theta, 2)
    rotary = reference.Rotary(np.cos(angles), np.sin(angles))
    window = getattr(config, "sliding_window", None)
    mask: reference.Mask = "causal" if window is None else "sliding"
    x = w["model.embed_tokens.weight"][ids]
    for index, layer in enumerate(model.model.layers):
        prefix = f"model.layers.{index}."
        weights = layer_weights(reference, layer.self_attn)
        normed = rms_norm(x, w[prefix + "input_layernorm.weight"], config.rms_norm_eps)
        x = x + reference.attention(normed, weights, mask=mask, window=window, rotary=rotary)[0]
        normed = rms_norm(x, w[prefix + "post_attention_layernorm.weight"], config.rms_norm_eps)
        gate, up = (normed @ w[prefix + f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + gate / (1 + np.exp(-gate)) * up @ w[prefix + "mlp.down_proj.weight"].T
    logits: reference.Array = rms_norm(x, w["model.norm.weight"], config.rms_norm_eps) @ w["lm_head.weight"].T
    return logits


@pytest.mark.parametrize(
    ("config_class", "model_class", "kv_heads", "options"),
    [
        (LlamaConfig, LlamaForCausalLM, HEADS, {}),
        (LlamaConfig, LlamaForCausalLM, 4, {}),
        (LlamaConfig, LlamaForCausalLM, 1, {}),
        (MistralConfig, MistralForCausalLM, 4, {"sliding_window": WINDOW}),
    ],
)
def test_whole_model_equals_the_stock_model(
    config_class: type, model_class: type, kv_heads: int, options: dict[str, Any]
) -> None:
    config = config_class(
        vocab_size=50,
        hidden_size=HIDDEN,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=kv_heads,
        head_dim=HEAD_DIM,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        **options,
    )
    model = model_class(config).double().eval()
    randomise(model)
    ids = torch.randint(50, (1, 20), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = model(ids).logits[0].numpy()
    assert expected.std() > 0.5
    assert_close(whole_model(model, ids[0].tolist()), expected, 1e-5)
