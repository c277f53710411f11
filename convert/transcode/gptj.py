"""GPT-J and CodeGen, to Phi: one norm before both branches in all of them, and rotary dimensions in another order."""

from math import nextafter
from typing import Any

from headpool.convert.transcode.expressions import Expression, Filled, HalfSplit, Held, Part, Row, Shape
from headpool.convert.transcode.table import Condition, Get, Transcoding

_LAYER = "transformer.h.{}."

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 50400, "n_positions": 2048, "n_embd": 4096, "n_layer": 28, "n_head": 16, "rotary_dim": 64,
    "n_inner": None, "activation_function": "gelu_new", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    "layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "use_cache": True, "bos_token_id": 50256,
    "eos_token_id": 50256, "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip


def held(name: str, *shape: str) -> Held:
    return Held(_LAYER + name, shape)


def width(get: Get) -> int:
    """Of the MLP."""
    inner: int | None = get("n_inner")
    return 4 * int(get("n_embd")) if inner is None else inner


def _factor(get: Get) -> float:
    """rotary_dim as a share of the head, such that its product with head_dim is no less."""
    head_dim = get("n_embd") // get("n_head")
    factor = get("rotary_dim") / head_dim
    return factor if int(head_dim * factor) == get("rotary_dim") else nextafter(factor, 2)


def _rows(queries: dict[str, Expression]) -> tuple[Row, ...]:
    """`queries` gives the weight of q, k and v, head by head."""

    def layer(name: str, shape: Shape, value: Expression) -> Row:
        return Row(f"model.layers.{{}}.{name}", shape, value)

    rows = [layer(f"input_layernorm.{one}", ("D",), held(f"ln_1.{one}", "D")) for one in ("weight", "bias")]
    for part, weight in queries.items():
        turned = weight if part == "v" else HalfSplit(weight)
        rows.append(layer(f"self_attn.{part}_proj.weight", ("D", "D"), turned))
        rows.append(layer(f"self_attn.{part}_proj.bias", ("D",), Filled(0, ("D",))))
    return (
        Row("model.embed_tokens.weight", ("V", "D"), Held("transformer.wte.weight", ("V", "D"))),
        *rows,
        layer("self_attn.dense.weight", ("D", "D"), held("attn.out_proj.weight", "D", "D")),
        layer("self_attn.dense.bias", ("D",), Filled(0, ("D",))),
        layer("mlp.fc1.weight", ("F", "D"), held("mlp.fc_in.weight", "F", "D")),
        layer("mlp.fc1.bias", ("F",), held("mlp.fc_in.bias", "F")),
        layer("mlp.fc2.weight", ("D", "F"), held("mlp.fc_out.weight", "D", "F")),
        layer("mlp.fc2.bias", ("D",), held("mlp.fc_out.bias", "D")),
        Row("model.final_layernorm.weight", ("D",), Held("transformer.ln_f.weight", ("D",))),
        Row("model.final_layernorm.bias", ("D",), Held("transformer.ln_f.bias", ("D",))),
        Row("lm_head.weight", ("V", "D"), Held("lm_head.weight", ("V", "D")), unless="tie_word_embeddings"),
        Row("lm_head.bias", ("V",), Held("lm_head.bias", ("V",))),
    )


_PARTIAL: Condition = (
    lambda get: type(get("rotary_dim")) is int and 0 < get("rotary_dim") <= get("n_embd") // get("n_head"),
    "its rotary_dim is no number of dimensions of a head",
)

_COMMON: dict[str, Any] = {
    "host": "phi",
    "host_class": "PhiForCausalLM",
    "defaults": _DEFAULTS,
    "names": {
        "hidden_size": "n_embd", "num_attention_heads": "n_head", "vocab_size": "vocab_size",
        "num_hidden_layers": "n_layer", "width": width,
    },
    "config": {
        "vocab_size": "vocab_size", "hidden_size": "n_embd", "intermediate_size": width,
        "num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "num_key_value_heads": "n_head",
        "hidden_act": "activation_function", "max_position_embeddings": "n_positions",
        "initializer_range": "initializer_range", "layer_norm_eps": "layer_norm_epsilon", "use_cache": "use_cache",
        "tie_word_embeddings": "tie_word_embeddings", "rope_theta": lambda get: 10000.0,
        "partial_rotary_factor": _factor, "resid_pdrop": "resid_pdrop", "embd_pdrop": "embd_pdrop",
        "attention_dropout": "attn_pdrop", "qk_layernorm": lambda get: False, "bos_token_id": "bos_token_id",
        "eos_token_id": "eos_token_id", "pad_token_id": "pad_token_id",
    },
    "prefix": "transformer.",
    "buffers": r".*\.attn\.((masked_)?bias|causal_mask|embed_positions)|.*\.rotary_emb\.embed_positions",
    "rotary": lambda get: get("rotary_dim"),
}  # fmt: skip

_FUSED = held("attn.qkv_proj.weight", "3D", "D")

TRANSCODINGS = (
    Transcoding(
        source="gptj",
        conditions=(_PARTIAL,),
        rows=_rows({part: held(f"attn.{part}_proj.weight", "D", "D") for part in ("q", "k", "v")}),
        **_COMMON,
    ),
    Transcoding(
        source="codegen",
        conditions=(
            _PARTIAL,
            (lambda get: get("n_head") % 4 == 0, "its heads do not divide into the four parts of its projection"),
        ),
        rows=_rows({part: Part(_FUSED, part, "four") for part in ("q", "k", "v")}),
        **_COMMON,
    ),
)
