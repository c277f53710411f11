"""Small models of classes that cannot hold fewer K/V heads, and what they are transcoded to."""

import json
from pathlib import Path
from typing import Any

import tiny
import torch

HEADS = 12
NEOX = {"intermediate_size": 80, "hidden_act": "gelu", "head_dim": None, "num_key_value_heads": None}
OWN_NAMES = {
    "hidden_size": None, "num_attention_heads": None, "num_hidden_layers": None, "max_position_embeddings": None,
    "intermediate_size": None, "head_dim": None, "num_key_value_heads": None,
    "n_embd": 96, "n_head": HEADS, "n_layer": 2, "n_positions": 128,
}  # fmt: skip
OPT = {"ffn_dim": 80, "intermediate_size": None, "head_dim": None, "num_key_value_heads": None, "pad_token_id": 5}

KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "pythia": ("gpt_neox", "phi", NEOX | {"rotary_pct": 0.25, "rotary_emb_base": 5000}),
    "pythia, full rotary": ("gpt_neox", "phi", NEOX | {"rotary_pct": 1.0, "hidden_act": "gelu_fast"}),
    "pythia, no biases": ("gpt_neox", "phi", NEOX | {"rotary_pct": 0.5, "attention_bias": False}),
    "pythia, tied": ("gpt_neox", "phi", NEOX | {"tie_word_embeddings": True, "layer_norm_eps": 1e-3}),
    "pythia, scaled rope": (
        "gpt_neox", "phi", NEOX | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rotary_pct": 0.5},
    ),
    "redpajama": ("gpt_neox", "starcoder2", NEOX | {"use_parallel_residual": False, "rotary_pct": 1.0}),
    "redpajama, no biases": (
        "gpt_neox", "starcoder2",
        NEOX | {"use_parallel_residual": False, "rotary_pct": 1.0, "attention_bias": False, "layer_norm_eps": 1e-3},
    ),
    "sequential, partial rotary": ("gpt_neox", "nemotron", NEOX | {"use_parallel_residual": False, "rotary_pct": 0.5}),
    "gptj": ("gptj", "phi", OWN_NAMES | {"rotary_dim": 4}),
    "gptj, all rotary": ("gptj", "phi", OWN_NAMES | {"rotary_dim": 8, "n_inner": 80, "activation_function": "relu"}),
    "codegen": ("codegen", "phi", OWN_NAMES | {"rotary_dim": 6, "layer_norm_epsilon": 1e-3}),
    "gpt2": ("gpt2", "gpt_bigcode", OWN_NAMES),
    "gpt2, by depth": (
        "gpt2", "gpt_bigcode", OWN_NAMES | {"scale_attn_by_inverse_layer_idx": True, "n_inner": 80, "n_layer": 3},
    ),
    "gpt2, no scale": (
        "gpt2", "gpt_bigcode",
        OWN_NAMES | {"scale_attn_weights": False, "reorder_and_upcast_attn": True, "tie_word_embeddings": False},
    ),
    "gpt-sw3": ("gpt-sw3", "gpt_bigcode", OWN_NAMES),
    "opt": ("opt", "gpt_bigcode", OPT),
    "opt, bare": (
        "opt", "gpt_bigcode", OPT | {"enable_bias": False, "layer_norm_elementwise_affine": False},
    ),
}  # fmt: skip
"""Name → model_type, that of the host, what makes it."""


def model(name: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A random model of a kind under sdpa, weights so large that attention is far from even. Built in float32, so that
    tables of angles are what a float32 model has.
    """
    family, _, own = KINDS[name]
    built = tiny.model(family, **{"attn_implementation": "sdpa", **own, **changes})
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.dim() == 1))
    return built.to(dtype)


def fewer(name: str) -> int:
    return 1 if KINDS[name][1] == "gpt_bigcode" else 4


def saved(directory: Path, built: Any, model_type: str | None = None) -> Path:
    """The model as a checkpoint, of another model_type that transformers reads in its class where one is given."""
    built.save_pretrained(directory)
    if model_type not in (None, built.config.model_type):
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": model_type}))
    return directory
