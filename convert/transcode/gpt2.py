"""GPT-2 and OPT, to GPT-BigCode: learned positions, norms before each branch, and one K/V head or all."""

from typing import Any

from headpool.convert.transcode.expressions import (
    Beyond,
    ByDepth,
    ByHead,
    Expression,
    Held,
    Part,
    Row,
    Shape,
    Transposed,
)
from headpool.convert.transcode.gptj import width
from headpool.convert.transcode.table import Transcoding


def _layer(name: str, shape: Shape, value: Expression) -> Row:
    return Row(f"transformer.h.{{}}.{name}", shape, value)


def _gpt2_rows() -> tuple[Row, ...]:
    """Its linear maps are stored as [in, out]."""

    def held(name: str, *shape: str) -> Held:
        return Held(f"transformer.h.{{}}.{name}", shape)

    def fused(of: Expression) -> Expression:
        q, k, v = (Part(of, part, "thirds") for part in ("q", "k", "v"))
        return ByHead(ByDepth(q, "scale_attn_by_inverse_layer_idx"), k, v)

    kept = [
        _layer(f"{norm}.{one}", ("D",), held(f"{norm}.{one}", "D"))
        for norm in ("ln_1", "ln_2")
        for one in ("weight", "bias")
    ]
    return (
        Row("transformer.wte.weight", ("V", "D"), Held("transformer.wte.weight", ("V", "D"))),
        Row("transformer.wpe.weight", ("P", "D"), Held("transformer.wpe.weight", ("P", "D"))),
        *kept,
        _layer("attn.c_attn.weight", ("3D", "D"), fused(Transposed(held("attn.c_attn.weight", "D", "3D")))),
        _layer("attn.c_attn.bias", ("3D",), fused(held("attn.c_attn.bias", "3D"))),
        _layer("attn.c_proj.weight", ("D", "D"), Transposed(held("attn.c_proj.weight", "D", "D"))),
        _layer("attn.c_proj.bias", ("D",), held("attn.c_proj.bias", "D")),
        _layer("mlp.c_fc.weight", ("F", "D"), Transposed(held("mlp.c_fc.weight", "D", "F"))),
        _layer("mlp.c_fc.bias", ("F",), held("mlp.c_fc.bias", "F")),
        _layer("mlp.c_proj.weight", ("D", "F"), Transposed(held("mlp.c_proj.weight", "F", "D"))),
        _layer("mlp.c_proj.bias", ("D",), held("mlp.c_proj.bias", "D")),
        Row("transformer.ln_f.weight", ("D",), Held("transformer.ln_f.weight", ("D",))),
        Row("transformer.ln_f.bias", ("D",), Held("transformer.ln_f.bias", ("D",))),
        Row("lm_head.weight", ("V", "D"), Held("lm_head.weight", ("V", "D")), unless="tie_word_embeddings"),
    )


def _opt_rows() -> tuple[Row, ...]:
    def held(name: str, *shape: str) -> Held:
        """Biases and norms may be switched off."""
        if "norm" in name:
            gain = 1.0 if name.endswith("weight") else 0.0
            return Held(f"model.decoder.layers.{{}}.{name}", shape, "layer_norm_elementwise_affine", gain)
        return Held(f"model.decoder.layers.{{}}.{name}", shape, "enable_bias" if name.endswith("bias") else None)

    def final(name: str, otherwise: float) -> Held:
        return Held(f"model.decoder.final_layer_norm.{name}", ("D",), "layer_norm_elementwise_affine", otherwise)

    norms = {"ln_1": "self_attn_layer_norm", "ln_2": "final_layer_norm"}
    kept = [
        _layer(f"{norm}.{one}", ("D",), held(f"{own}.{one}", "D"))
        for norm, own in norms.items()
        for one in ("weight", "bias")
    ]
    weights = (held(f"self_attn.{part}_proj.weight", "D", "D") for part in ("q", "k", "v"))
    biases = (held(f"self_attn.{part}_proj.bias", "D") for part in ("q", "k", "v"))
    positions = Held("model.decoder.embed_positions.weight", ("P+2", "D"))
    return (
        Row("transformer.wte.weight", ("V", "D"), Held("model.decoder.embed_tokens.weight", ("V", "D"))),
        Row("transformer.wpe.weight", ("P", "D"), Beyond(positions, 2)),
        *kept,
        _layer("attn.c_attn.weight", ("3D", "D"), ByHead(*weights)),
        _layer("attn.c_attn.bias", ("3D",), ByHead(*biases)),
        _layer("attn.c_proj.weight", ("D", "D"), held("self_attn.out_proj.weight", "D", "D")),
        _layer("attn.c_proj.bias", ("D",), held("self_attn.out_proj.bias", "D")),
        _layer("mlp.c_fc.weight", ("F", "D"), held("fc1.weight", "F", "D")),
        _layer("mlp.c_fc.bias", ("F",), held("fc1.bias", "F")),
        _layer("mlp.c_proj.weight", ("D", "F"), held("fc2.weight", "D", "F")),
        _layer("mlp.c_proj.bias", ("D",), held("fc2.bias", "D")),
        Row("transformer.ln_f.weight", ("D",), final("weight", 1.0)),
        Row("transformer.ln_f.bias", ("D",), final("bias", 0.0)),
        Row("lm_head.weight", ("V", "D"), Held("lm_head.weight", ("V", "D")), unless="tie_word_embeddings"),
    )


_TOKENS = {name: name for name in ("bos_token_id", "eos_token_id", "pad_token_id")}

_HOST: dict[str, Any] = {"host": "gpt_bigcode", "host_class": "GPTBigCodeForCausalLM"}

TRANSCODINGS = (
    Transcoding(
        source="gpt2",
        defaults={
            "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None,
            "activation_function": "gelu_new", "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
            "layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "scale_attn_weights": True, "use_cache": True,
            "bos_token_id": 50256, "eos_token_id": 50256, "pad_token_id": None,
            "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False, "tie_word_embeddings": True,
        },
        names={
            "hidden_size": "n_embd", "num_attention_heads": "n_head", "vocab_size": "vocab_size",
            "num_hidden_layers": "n_layer", "positions": "n_positions", "width": width,
        },
        config={
            **{
                name: name
                for name in (
                    "vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "activation_function", "resid_pdrop",
                    "embd_pdrop", "attn_pdrop", "layer_norm_epsilon", "initializer_range", "scale_attn_weights",
                    "use_cache", "tie_word_embeddings",
                )
            },
            "n_inner": width,
            "multi_query": lambda get: False,
            **_TOKENS,
        },
        conditions=(
            (lambda get: not get("add_cross_attention"), "it attends to an encoder (add_cross_attention)"),
        ),
        rows=_gpt2_rows(),
        prefix="transformer.",
        buffers=r".*\.attn\.(masked_)?bias",
        **_HOST,
    ),
    Transcoding(
        source="opt",
        defaults={
            "vocab_size": 50272, "hidden_size": 768, "num_hidden_layers": 12, "ffn_dim": 3072,
            "max_position_embeddings": 2048, "do_layer_norm_before": True, "_remove_final_layer_norm": False,
            "word_embed_proj_dim": None, "dropout": 0.1, "attention_dropout": 0.0, "num_attention_heads": 12,
            "activation_function": "relu", "init_std": 0.02, "use_cache": True, "pad_token_id": 1, "bos_token_id": 2,
            "eos_token_id": 2, "enable_bias": True, "layer_norm_elementwise_affine": True, "tie_word_embeddings": True,
        },
        names={
            "hidden_size": "hidden_size", "num_attention_heads": "num_attention_heads", "vocab_size": "vocab_size",
            "num_hidden_layers": "num_hidden_layers", "positions": "max_position_embeddings", "width": "ffn_dim",
        },
        config={
            "vocab_size": "vocab_size", "n_positions": "max_position_embeddings", "n_embd": "hidden_size",
            "n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_inner": "ffn_dim",
            "activation_function": "activation_function", "resid_pdrop": "dropout", "embd_pdrop": lambda get: 0.0,
            "attn_pdrop": "attention_dropout", "layer_norm_epsilon": lambda get: 1e-5, "initializer_range": "init_std",
            "scale_attn_weights": lambda get: True, "use_cache": "use_cache",
            "tie_word_embeddings": "tie_word_embeddings", "multi_query": lambda get: False, **_TOKENS,
        },
        conditions=(
            (lambda get: bool(get("do_layer_norm_before")), "its norms come after each branch (do_layer_norm_before)"),
            (
                lambda get: get("word_embed_proj_dim") in (None, get("hidden_size")),
                "its embedding is projected to the hidden size (word_embed_proj_dim)",
            ),
            (lambda get: not get("_remove_final_layer_norm"), "it has no norm at the end (_remove_final_layer_norm)"),
        ),
        rows=_opt_rows(),
        prefix="model.",
        buffers=r"(?!)",
        **_HOST,
    ),
)  # fmt: skip
