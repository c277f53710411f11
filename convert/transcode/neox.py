"""GPT-NeoX: to Phi with parallel residual, else to Starcoder2 or Nemotron.

Phi has one norm before both branches and GPT-NeoX one before each: Phi's becomes the identity but for its centring and
scaling, and each branch's own is folded into the linear maps that follow it.
"""

from typing import Any

from headpool.convert.transcode.expressions import (
    Expression,
    Filled,
    Folded,
    FoldedBias,
    Held,
    LessOne,
    Part,
    Row,
    Shape,
)
from headpool.convert.transcode.table import Get, Transcoding

_LAYER = "gpt_neox.layers.{}."

DEFAULTS: dict[str, Any] = {
    "vocab_size": 50432, "hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64,
    "intermediate_size": 24576, "hidden_act": "gelu", "attention_dropout": 0.0, "hidden_dropout": 0.0,
    "max_position_embeddings": 2048, "initializer_range": 0.02, "layer_norm_eps": 1e-5, "use_cache": True,
    "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": None, "tie_word_embeddings": False,
    "use_parallel_residual": True, "attention_bias": True,
}  # fmt: skip


def held(name: str, *shape: str, switch: str | None = None) -> Held:
    return Held(_LAYER + name, shape, switch)


QKV = held("attention.query_key_value.weight", "3D", "D")
QKV_BIAS = held("attention.query_key_value.bias", "3D", switch="attention_bias")
OUT = held("attention.dense.weight", "D", "D")
OUT_BIAS = held("attention.dense.bias", "D", switch="attention_bias")
UP, UP_BIAS = held("mlp.dense_h_to_4h.weight", "F", "D"), held("mlp.dense_h_to_4h.bias", "F")
DOWN, DOWN_BIAS = held("mlp.dense_4h_to_h.weight", "D", "F"), held("mlp.dense_4h_to_h.bias", "D")
NORMS = {
    name: (held(f"{name}.weight", "D"), held(f"{name}.bias", "D"))
    for name in ("input_layernorm", "post_attention_layernorm")
}
FINAL = tuple(Held(f"gpt_neox.final_layer_norm.{one}", ("D",)) for one in ("weight", "bias"))
EMBEDDING = Held("gpt_neox.embed_in.weight", ("V", "D"))
HEAD = Held("lm_head.weight", ("V", "D"))


def layer(name: str, shape: Shape, value: Expression) -> Row:
    return Row(f"model.layers.{{}}.{name}", shape, value)


def _phi_rows() -> tuple[Row, ...]:
    (gain, shift), (mlp_gain, mlp_shift) = NORMS.values()
    rows = [layer("input_layernorm.weight", ("D",), Filled(1, ("D",)))]
    rows += [layer("input_layernorm.bias", ("D",), Filled(0, ("D",)))]
    for part in ("q", "k", "v"):
        weight, bias = (Part(one, part, "heads") for one in (QKV, QKV_BIAS))
        rows += [
            layer(f"self_attn.{part}_proj.weight", ("D", "D"), Folded(weight, gain)),
            layer(f"self_attn.{part}_proj.bias", ("D",), FoldedBias(bias, weight, shift)),
        ]
    rows += [
        layer("self_attn.dense.weight", ("D", "D"), OUT),
        layer("self_attn.dense.bias", ("D",), OUT_BIAS),
        layer("mlp.fc1.weight", ("F", "D"), Folded(UP, mlp_gain)),
        layer("mlp.fc1.bias", ("F",), FoldedBias(UP_BIAS, UP, mlp_shift)),
        layer("mlp.fc2.weight", ("D", "F"), DOWN),
        layer("mlp.fc2.bias", ("D",), DOWN_BIAS),
    ]
    return (
        Row("model.embed_tokens.weight", ("V", "D"), EMBEDDING),
        *rows,
        Row("model.final_layernorm.weight", ("D",), FINAL[0]),
        Row("model.final_layernorm.bias", ("D",), FINAL[1]),
        Row("lm_head.weight", ("V", "D"), HEAD, unless="tie_word_embeddings"),
        Row("lm_head.bias", ("V",), Filled(0, ("V",))),
    )


def _sequential_rows(up: str, down: str, *, less_one: bool) -> tuple[Row, ...]:
    """Of classes with norms before each branch; some store their gains less one."""

    def gain(value: Held) -> Expression:
        return LessOne(value) if less_one else value

    rows = []
    for name, (weight, bias) in NORMS.items():
        rows += [layer(f"{name}.weight", ("D",), gain(weight)), layer(f"{name}.bias", ("D",), bias)]
    for part in ("q", "k", "v"):
        rows += [
            layer(f"self_attn.{part}_proj.weight", ("D", "D"), Part(QKV, part, "heads")),
            layer(f"self_attn.{part}_proj.bias", ("D",), Part(QKV_BIAS, part, "heads")),
        ]
    rows += [
        layer("self_attn.o_proj.weight", ("D", "D"), OUT),
        layer("self_attn.o_proj.bias", ("D",), OUT_BIAS),
        layer(f"mlp.{up}.weight", ("F", "D"), UP),
        layer(f"mlp.{up}.bias", ("F",), UP_BIAS),
        layer(f"mlp.{down}.weight", ("D", "F"), DOWN),
        layer(f"mlp.{down}.bias", ("D",), DOWN_BIAS),
    ]
    return (
        Row("model.embed_tokens.weight", ("V", "D"), EMBEDDING),
        *rows,
        Row("model.norm.weight", ("D",), gain(FINAL[0])),
        Row("model.norm.bias", ("D",), FINAL[1]),
        Row("lm_head.weight", ("V", "D"), HEAD, unless="tie_word_embeddings"),
    )


def _rope(get: Get) -> dict[str, Any]:
    """Everything of the rotary embedding that either generation of configs says."""
    held = get("rope_scaling") or get("rope_parameters") or {}
    base, factor = get("rotary_emb_base"), get("rotary_pct")
    legacy = {
        "rope_theta": 10000 if base is None else base,
        "partial_rotary_factor": 0.25 if factor is None else factor,
    }
    return legacy | dict(held)


def rotary_dims(get: Get) -> int:
    return int(get("hidden_size") // get("num_attention_heads") * _rope(get)["partial_rotary_factor"])


def _scaling(get: Get) -> dict[str, Any] | None:
    """What changes the frequencies beyond their base."""
    rest = {key: one for key, one in _rope(get).items() if key not in ("rope_theta", "partial_rotary_factor")}
    return rest if rest.get("rope_type", rest.get("type", "default")) != "default" else None


_CONFIG = {
    **{
        name: name
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act",
            "max_position_embeddings", "initializer_range", "use_cache", "tie_word_embeddings", "attention_dropout",
            "bos_token_id", "eos_token_id", "pad_token_id",
        )
    },
    "num_key_value_heads": "num_attention_heads",
    "rope_theta": lambda get: _rope(get)["rope_theta"],
    "partial_rotary_factor": lambda get: _rope(get)["partial_rotary_factor"],
    "rope_scaling": _scaling,
}  # fmt: skip


def _full(get: Get) -> bool:
    return bool(rotary_dims(get) == get("hidden_size") // get("num_attention_heads"))


_COMMON: dict[str, Any] = {
    "source": "gpt_neox",
    "defaults": DEFAULTS,
    "names": {
        "hidden_size": "hidden_size", "num_attention_heads": "num_attention_heads", "vocab_size": "vocab_size",
        "num_hidden_layers": "num_hidden_layers", "width": "intermediate_size",
    },
    "prefix": "gpt_neox.",
    "renamed": {"lm_head.weight": "embed_out.weight"},
    "buffers": r".*\.attention\.((masked_)?bias|rotary_emb\.inv_freq)|.*\.rotary_emb\.inv_freq",
    "rotary": rotary_dims,
}  # fmt: skip

TRANSCODINGS = (
    Transcoding(
        host="phi",
        host_class="PhiForCausalLM",
        applies=lambda get: bool(get("use_parallel_residual")),
        config={
            **_CONFIG,
            "layer_norm_eps": "layer_norm_eps",
            "resid_pdrop": "hidden_dropout",
            "embd_pdrop": "hidden_dropout",
            "qk_layernorm": lambda get: False,
        },
        rows=_phi_rows(),
        **_COMMON,
    ),
    Transcoding(
        host="starcoder2",
        host_class="Starcoder2ForCausalLM",
        applies=lambda get: not get("use_parallel_residual") and _full(get),
        config={
            **{name: value for name, value in _CONFIG.items() if name != "partial_rotary_factor"},
            "norm_epsilon": "layer_norm_eps",
            "residual_dropout": "hidden_dropout",
            "embedding_dropout": "hidden_dropout",
            "use_bias": lambda get: True,
            "sliding_window": lambda get: None,
        },
        rows=_sequential_rows("c_fc", "c_proj", less_one=False),
        **_COMMON,
    ),
    Transcoding(
        host="nemotron",
        host_class="NemotronForCausalLM",
        applies=lambda get: not get("use_parallel_residual") and not _full(get),
        config={
            **_CONFIG,
            "norm_eps": "layer_norm_eps",
            "attention_bias": lambda get: True,
            "mlp_bias": lambda get: True,
        },
        rows=_sequential_rows("up_proj", "down_proj", less_one=True),
        **_COMMON,
    ),
)
