"""Stock attention layers, and checks that a specification of attention gives what they give. Each check takes the
specification as a module, so that mutants of it can be given the same.
"""

import itertools
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch
from transformers import (
    CohereConfig,
    GlmConfig,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    Qwen2Config,
)
from transformers.masking_utils import sliding_window_causal_mask_function
from transformers.models.cohere import modeling_cohere
from transformers.models.glm import modeling_glm
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.phi import modeling_phi
from transformers.models.qwen2 import modeling_qwen2

from headpool import reference

HEADS, HEAD_DIM, HIDDEN, TOKENS, WINDOW = 12, 8, 96, 11, 4
KV_HEADS = [HEADS, 4, 1]
MASKS: list[reference.Mask] = ["causal", "bidirectional", "sliding"]


@dataclass(frozen=True)
class Family:
    """A stock attention class and the order of the columns that its rotary module returns."""

    config: type
    attention: type
    rotary: type
    columns: Literal["half-split", "interleaved", "interleaved from half-split"] = "half-split"
    options: dict[str, Any] = field(default_factory=dict)
    # Cohere rotates in float32 whatever it is given; the others keep float64.
    atol: float = 1e-10


FAMILIES = {
    "llama": Family(LlamaConfig, modeling_llama.LlamaAttention, modeling_llama.LlamaRotaryEmbedding),
    "llama with biases": Family(
        LlamaConfig,
        modeling_llama.LlamaAttention,
        modeling_llama.LlamaRotaryEmbedding,
        options={"attention_bias": True},
    ),
    "llama with head_dim 10": Family(
        LlamaConfig,
        modeling_llama.LlamaAttention,
        modeling_llama.LlamaRotaryEmbedding,
        options={"head_dim": 10},
    ),
    "qwen2": Family(Qwen2Config, modeling_qwen2.Qwen2Attention, modeling_qwen2.Qwen2RotaryEmbedding),
    "mistral": Family(MistralConfig, modeling_mistral.MistralAttention, modeling_mistral.MistralRotaryEmbedding),
    "phi": Family(
        PhiConfig,
        modeling_phi.PhiAttention,
        modeling_phi.PhiRotaryEmbedding,
        options={"partial_rotary_factor": 0.5},
    ),
    "glm": Family(
        GlmConfig,
        modeling_glm.GlmAttention,
        modeling_glm.GlmRotaryEmbedding,
        "interleaved from half-split",
        {"partial_rotary_factor": 0.5, "attention_bias": True},
    ),
    "glm, every dimension rotated": Family(
        GlmConfig,
        modeling_glm.GlmAttention,
        modeling_glm.GlmRotaryEmbedding,
        "interleaved from half-split",
        {"partial_rotary_factor": 1.0},
    ),
    "cohere": Family(
        CohereConfig,
        modeling_cohere.CohereAttention,
        modeling_cohere.CohereRotaryEmbedding,
        "interleaved",
        atol=1e-5,
    ),
}


def randomise(module: torch.nn.Module) -> None:
    """Weights large enough that the softmax is far from uniform and no parameter is zero or one."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.15 * noise)


@dataclass(frozen=True)
class Layer:
    """A stock layer in float64 under sdpa, an input [1, T, E] and its cosines and sines."""

    module: torch.nn.Module
    x: torch.Tensor
    position_embeddings: tuple[torch.Tensor, torch.Tensor]

    def output(self, mask: reference.Mask) -> reference.Array:
        options: dict[str, Any] = {"attention_mask": None}
        if mask == "bidirectional":
            options["is_causal"] = False
        elif mask == "sliding":
            p = torch.arange(TOKENS)
            seen_TS = sliding_window_causal_mask_function(WINDOW)(None, None, p[:, None], p)
            options["attention_mask"] = seen_TS[None, None]
        with torch.no_grad():
            y, _ = self.module(self.x, position_embeddings=self.position_embeddings, **options)
        return y[0].numpy()


def stock_layer(family: Family, kv_heads: int) -> Layer:
    options = {"head_dim": HEAD_DIM, **family.options}
    config = family.config(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=kv_heads,
        attn_implementation="sdpa",
        **options,
    )
    module = family.attention(config, layer_idx=0).double()
    randomise(module)
    x = torch.randn(1, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return Layer(module, x, family.rotary(config)(x, torch.arange(TOKENS)[None]))


def layer_weights(spec: ModuleType, module: torch.nn.Module) -> Any:
    """The same weights by head: rows of q, k and v and columns of o run over heads, then dimensions."""
    output = module.dense if hasattr(module, "dense") else module.o_proj
    head_dim = module.head_dim
    tensors: dict[str, Any] = {
        "o": output.weight.detach().numpy().reshape(HIDDEN, HEADS, head_dim).transpose(1, 0, 2),
        "bias_o": None if output.bias is None else output.bias.detach().numpy(),
    }
    for name in "qkv":
        projection = getattr(module, f"{name}_proj")
        tensors[name] = projection.weight.detach().numpy().reshape(-1, head_dim, HIDDEN)
        bias = projection.bias
        tensors[f"bias_{name}"] = None if bias is None else bias.detach().numpy().reshape(-1, head_dim)
    return spec.LayerWeights(**tensors)


def layer_rotary(spec: ModuleType, family: Family, layer: Layer) -> Any:
    cos, sin = (table[0].numpy() for table in layer.position_embeddings)
    if family.columns == "interleaved from half-split":
        cos, sin = (np.repeat(table[:, : table.shape[1] // 2], 2, axis=1) for table in (cos, sin))
    return spec.Rotary(cos, sin, interleaved=family.columns != "half-split")


def assert_close(actual: reference.Array, expected: reference.Array, atol: float) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


def check_layer(spec: ModuleType, name: str, kv_heads: int, mask: reference.Mask) -> None:
    family = FAMILIES[name]
    layer = stock_layer(family, kv_heads)
    y, cache = spec.attention(
        layer.x[0].numpy(),
        layer_weights(spec, layer.module),
        mask=mask,
        window=WINDOW if mask == "sliding" else None,
        rotary=layer_rotary(spec, family, layer),
    )
    assert cache.k.shape[0] == cache.v.shape[0] == kv_heads
    assert_close(y, layer.output(mask), family.atol)


def check_in_pieces(spec: ModuleType, kv_heads: int, mask: reference.Mask) -> None:
    """Five tokens at once and the others one by one, against the stock layer that sees all at once."""
    family = FAMILIES["llama"]
    layer = stock_layer(family, kv_heads)
    x, weights = layer.x[0].numpy(), layer_weights(spec, layer.module)
    rotary = layer_rotary(spec, family, layer)
    pieces, cache = [], None
    for start, stop in itertools.pairwise([0, *range(5, TOKENS + 1)]):
        y, cache = spec.attention(
            x[start:stop],
            weights,
            mask=mask,
            window=WINDOW if mask == "sliding" else None,
            rotary=spec.Rotary(rotary.cos[start:stop], rotary.sin[start:stop]),
            cache=cache,
        )
        pieces.append(y)
    assert_close(np.concatenate(pieces), layer.output(mask), 1e-10)


def check_pooling(spec: ModuleType) -> None:
    """Repeating is what stock classes do to K/V heads, and the mean undoes it bit for bit."""
    w = torch.randn(4, HEAD_DIM, HIDDEN, generator=torch.Generator().manual_seed(2))
    repeated = modeling_llama.repeat_kv(w[None], 3)[0].numpy()
    np.testing.assert_array_equal(spec.repeat_heads(w.numpy(), HEADS), repeated)
    np.testing.assert_array_equal(spec.mean_heads(repeated, 4), w.numpy().astype(np.float64))


def check_mean_pooled(spec: ModuleType) -> None:
    """The specification on pooled heads, against a stock MHA layer with its heads overwritten by the mean."""
    family = FAMILIES["qwen2"]
    layer = stock_layer(family, HEADS)
    source = layer_weights(reference, layer.module)
    pooled = {name: spec.mean_heads(getattr(source, name), 4).copy() for name in ("k", "v", "bias_k", "bias_v")}
    with torch.no_grad():
        for projection in (layer.module.k_proj, layer.module.v_proj):
            for tensor in (projection.weight, projection.bias):
                groups = tensor.view(4, 3, HEAD_DIM, -1)
                groups.copy_(groups.mean(dim=1, keepdim=True).expand_as(groups))
    y, _ = spec.attention(
        layer.x[0].numpy(),
        spec.LayerWeights(q=source.q, o=source.o, bias_q=source.bias_q, **pooled),
        rotary=layer_rotary(spec, family, layer),
    )
    assert_close(y, layer.output("causal"), 1e-10)
