"""The NumPy specification against stock attention classes, and mutants of it that this must catch."""

import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

import numpy as np
import pytest
import torch
from transformers import (
    CohereConfig,
    GlmConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
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


# Checks: each takes the specification as a module, so that mutants of it can be given the same


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


# Mutants


@dataclass(frozen=True)
class Mutant:
    """What is replaced in the specification's text, and the check that must then fail."""

    name: str
    edits: tuple[tuple[str, str], ...]
    check: Callable[[ModuleType], None] = lambda spec: check_layer(spec, "llama", 4, "causal")


SCORES = 'scores_GRTS = np.einsum("grtd,gsd->grts", q_GRTD, k_GSD) / np.sqrt(head_dim)'
MASKED = "softmax(np.where(seen_TS, scores_GRTS, -np.inf))"
MERGED = 'np.einsum("htv,hev->te", z_HTV, weights.o)'
UNGROUPED = "z_GRTV.reshape(heads, tokens, v_GSV.shape[2])"

MUTANTS = [
    Mutant("masking after the softmax", ((MASKED, "np.where(seen_TS, softmax(scores_GRTS), 0.0)"),)),
    Mutant("masking with zero", ((MASKED, "softmax(np.where(seen_TS, scores_GRTS, 0.0))"),)),
    Mutant(
        "interleaving heads when merging",
        ((MERGED, "z_HTV.transpose(1, 2, 0).reshape(len(x), -1) @ np.hstack([*weights.o]).T"),),
    ),
    Mutant(
        "merging without bringing heads beside tokens",
        ((MERGED, "z_HTV.reshape(len(x), -1) @ np.hstack([*weights.o]).T"),),
    ),
    Mutant(
        "interleaving groups when merging",
        ((UNGROUPED, "z_GRTV.swapaxes(0, 1).reshape(heads, tokens, v_GSV.shape[2])"),),
    ),
    Mutant(
        "strided groups",
        (
            (
                "q_HTD.reshape(kv_heads, heads // kv_heads, tokens, head_dim)",
                "q_HTD.reshape(heads // kv_heads, kv_heads, tokens, head_dim).swapaxes(0, 1)",
            ),
            (UNGROUPED, "z_GRTV.swapaxes(0, 1).reshape(heads, tokens, v_GSV.shape[2])"),
        ),
    ),
    Mutant(
        "summing scores over a group",
        ((SCORES, SCORES + "\n    scores_GRTS[:] = scores_GRTS.sum(axis=1, keepdims=True)"),),
    ),
    Mutant(
        "averaging scores over a group",
        ((SCORES, SCORES + "\n    scores_GRTS[:] = scores_GRTS.mean(axis=1, keepdims=True)"),),
    ),
    Mutant("no scale", ((" / np.sqrt(head_dim)", ""),)),
    Mutant("scale of the group", (("np.sqrt(head_dim)", "np.sqrt(head_dim * heads // kv_heads)"),)),
    Mutant(
        "softmax over queries",
        ((MASKED, "softmax(np.where(seen_TS, scores_GRTS, -1e9).swapaxes(2, 3)).swapaxes(2, 3)"),),
    ),
    Mutant("a query that sees the next key", (("seen_TS = position_S <=", "seen_TS = position_S - 1 <="),)),
    Mutant(
        "a query that does not see itself",
        (("position_S <= position_T1", "position_S <= np.maximum(position_T1 - 1, 0)"),),
    ),
    Mutant(
        "a window one too long",
        (("position_S > position_T1 - window", "position_S >= position_T1 - window"),),
        lambda spec: check_layer(spec, "mistral", 4, "sliding"),
    ),
    Mutant(
        "a window one too short",
        (("position_S > position_T1 - window", "position_S > position_T1 - window + 1"),),
        lambda spec: check_layer(spec, "mistral", 4, "sliding"),
    ),
    Mutant(
        "a bidirectional mask that is causal",
        (
            (
                "return np.ones((queries, keys), dtype=np.bool_)",
                "return np.tri(queries, keys, dtype=np.bool_)",
            ),
        ),
        lambda spec: check_layer(spec, "llama", 4, "bidirectional"),
    ),
    Mutant("rotary pairs of the other kind", (("    if interleaved:", "    if not interleaved:"),)),
    Mutant(
        "interleaved rotary pairs of the other kind",
        (("    if interleaved:", "    if not interleaved:"),),
        lambda spec: check_layer(spec, "glm", 4, "causal"),
    ),
    Mutant(
        "rotation of the queries only",
        (("rotate(q_HTD, rotary), rotate(k_GTD, rotary)", "rotate(q_HTD, rotary), k_GTD"),),
    ),
    Mutant(
        "rotation of the last dimensions",
        (
            (
                "turned, rest = x_HTD[..., :dims], x_HTD[..., dims:]",
                "turned, rest = x_HTD[..., -dims:], x_HTD[..., :-dims]",
            ),
        ),
        lambda spec: check_layer(spec, "phi", 4, "causal"),
    ),
    Mutant(
        "no bias",
        (("return y_NTD if bias_ND is None else y_NTD + bias_ND[:, None, :]", "return y_NTD"),),
        lambda spec: check_layer(spec, "qwen2", 4, "causal"),
    ),
    Mutant(
        "no output bias",
        (("return y_TE if weights.bias_o is None else y_TE + weights.bias_o, cache", "return y_TE, cache"),),
        lambda spec: check_layer(spec, "phi", 4, "causal"),
    ),
    Mutant(
        "cached queries at the first positions",
        (("np.arange(keys - queries, keys)", "np.arange(queries)"),),
        lambda spec: check_in_pieces(spec, 4, "causal"),
    ),
    Mutant(
        "new tokens before the cached ones",
        (("np.concatenate((self.k, k_GTD), axis=1)", "np.concatenate((k_GTD, self.k), axis=1)"),),
        lambda spec: check_in_pieces(spec, 4, "causal"),
    ),
    Mutant(
        "a window that forgets the cache's length",
        (
            (
                "seen_TS &= position_S > position_T1 - window",
                "seen_TS &= position_S > np.arange(queries)[:, None] - window",
            ),
        ),
        lambda spec: check_in_pieces(spec, 4, "sliding"),
    ),
    Mutant(
        "the mean of strided groups",
        (
            (
                "heads.reshape(kv_heads, group_size, *heads.shape[1:])",
                "heads.reshape(group_size, kv_heads, *heads.shape[1:]).swapaxes(0, 1)",
            ),
        ),
        check_mean_pooled,
    ),
    Mutant(
        "the sum of groups instead of their mean",
        (("groups.sum(axis=1) / group_size", "groups.sum(axis=1)"),),
        check_mean_pooled,
    ),
    Mutant(
        "the first of each group instead of the mean",
        (("groups.sum(axis=1) / group_size", "groups[:, 0]"),),
        check_mean_pooled,
    ),
    Mutant(
        "a mean in the precision of its input",
        (("heads = np.asarray(w, dtype=np.float64)", "heads = np.asarray(w)"),),
        check_pooling,
    ),
    Mutant(
        "repeating the list of heads instead of each head",
        (("np.repeat(w, heads // w.shape[0], axis=0)", "np.tile(w, (heads // w.shape[0], 1, 1))"),),
        check_pooling,
    ),
]


def specification(edits: tuple[tuple[str, str], ...]) -> ModuleType:
    """The specification with its text changed; what is to be replaced must be there exactly once."""
    text = inspect.getsource(reference)
    for old, new in edits:
        assert text.count(old) == 1, f"found {text.count(old)} times: {old}"
        text = text.replace(old, new)
    module = ModuleType("mutant")
    exec(compile(text, "mutant", "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant) -> None:
    mutant.check(specification(()))
    mutated = specification(mutant.edits)
    with pytest.raises(AssertionError, match=r"Not equal to tolerance|Arrays are not equal"):
        mutant.check(mutated)
