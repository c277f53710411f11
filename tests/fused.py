"""Models with one projection for queries, keys and values: small ones of stock classes, and whose row is whose, written
out row by row.
"""

import json
from pathlib import Path
from typing import Any

import tiny
import torch

HEADS, KV, HEAD_DIM, HIDDEN = 12, 4, 8, 96
PLAIN = {"num_hidden_layers": 2, "num_attention_heads": HEADS, "hidden_size": HIDDEN, "head_dim": None}
NO_COUNT = {"num_key_value_heads": None}
DBRX = {
    "n_layers": 2, "n_heads": HEADS, "d_model": HIDDEN, "max_seq_len": 128, "hidden_size": None, "head_dim": None,
    "num_hidden_layers": None, "num_attention_heads": None, "max_position_embeddings": None,
    "ffn_config": {"ffn_hidden_size": 64, "hidden_size": HIDDEN}, **NO_COUNT,
}  # fmt: skip
FALCON = {"bias": True, "ffn_hidden_size": 64, "head_dim": None, **NO_COUNT}
PHI4 = {
    "head_dim": None,
    "vision_config": {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 448,
        "crop_size": 448, "patch_size": 14,
    },
    "audio_config": {
        "hidden_size": 32, "intermediate_size": 32, "num_blocks": 1, "num_attention_heads": 2, "nemo_conv_channels": 32,
        "ext_pw_out_channel": 32,
    },
}  # fmt: skip
"""A Phi-4 whose eyes and ears are small."""
SARVAM = {"attention_bias": True, "first_k_dense_replace": 2}
"""Without experts: they are chosen in float32."""
NEW = {"new_decoder_architecture": True}
"""Falcon's, in which K/V heads may be any number."""


def attn(kv_heads: int) -> dict[str, Any]:
    return {"attn_config": {"kv_n_heads": kv_heads, "clip_qkv": 0.5, "rope_theta": 10000.0}}


KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "phi3": ("phi3", {"head_dim": None}, {"num_key_value_heads": HEADS}, {"num_key_value_heads": KV}),
    "phi3 partial rotary": (
        "phi3", {"head_dim": None, "partial_rotary_factor": 0.5, "sliding_window": 8},
        {"num_key_value_heads": HEADS}, {"num_key_value_heads": KV},
    ),
    "phi4_multimodal": ("phi4_multimodal", PHI4, {"num_key_value_heads": HEADS}, {"num_key_value_heads": KV}),
    "dbrx": ("dbrx", DBRX, attn(HEADS), attn(KV)),
    "falcon two norms": ("falcon", FALCON, {"num_kv_heads": HEADS, **NEW}, {"num_kv_heads": KV, **NEW}),
    "falcon one norm": (
        "falcon", FALCON | {"num_ln_in_parallel_attn": 1, "multi_query": False},
        {"num_kv_heads": HEADS}, {"num_kv_heads": KV, **NEW},
    ),
    "falcon one norm, alibi": (
        "falcon", FALCON | {"num_ln_in_parallel_attn": 1, "multi_query": False, "alibi": True},
        {"num_kv_heads": HEADS}, {"num_kv_heads": KV, **NEW},
    ),
    "falcon to one": ("falcon", FALCON, {"multi_query": False, "num_kv_heads": HEADS}, {"multi_query": True}),
    "falcon alibi": (
        "falcon", FALCON | {"alibi": True, "parallel_attn": False},
        {"multi_query": False, "num_kv_heads": HEADS}, {"multi_query": True},
    ),
    "gpt_bigcode": ("gpt_bigcode", {"head_dim": None, **NO_COUNT}, {"multi_query": False}, {"multi_query": True}),
    "sarvam_moe": ("sarvam_moe", SARVAM, {"num_key_value_heads": HEADS}, {"num_key_value_heads": KV}),
}  # fmt: skip
"""Name → model_type, what makes it, what gives it 12 K/V heads, what fewer: 4, or 1 where its class knows no others."""

FUSED = {
    "phi3": "qkv_proj",
    "phi4_multimodal": "qkv_proj",
    "dbrx": "Wqkv",
    "falcon": "query_key_value",
    "gpt_bigcode": "c_attn",
    "sarvam_moe": "query_key_value",
}


def fewer(name: str) -> int:
    """The K/V heads of a kind that are fewer than all."""
    return 1 if "multi_query" in KINDS[name][3] else KV


def checkpoint(directory: Path, name: str, *, grouped: bool = False, **changes: Any) -> Path:
    """A random model of a kind with 12 K/V heads, or with fewer."""
    family, own, full, less = KINDS[name]
    return tiny.checkpoint(directory, family, **{**own, **(less if grouped else full), **changes})


def owners(model_type: str, kv_heads: int) -> list[tuple[str, int]]:
    """Whose the blocks of head_dim rows of a fused projection are, in order: ("q", 0), …"""
    shared = HEADS // kv_heads
    if model_type in ("phi3", "phi4_multimodal", "dbrx", "sarvam_moe"):
        return [
            *(("q", head) for head in range(HEADS)),
            *(("k", head) for head in range(kv_heads)),
            *(("v", head) for head in range(kv_heads)),
        ]
    rows = []
    for group in range(kv_heads):
        rows += [("q", head) for head in range(group * shared, (group + 1) * shared)]
        rows += [("k", group), ("v", group)]
    return rows


def split(fused: torch.Tensor, model_type: str, kv_heads: int) -> dict[tuple[str, int], torch.Tensor]:
    """The rows of each head."""
    blocks = fused.split(HEAD_DIM)
    return dict(zip(owners(model_type, kv_heads), blocks, strict=True))


def join(heads: dict[tuple[str, int], torch.Tensor], model_type: str, kv_heads: int) -> torch.Tensor:
    return torch.cat([heads[owner] for owner in owners(model_type, kv_heads)])


def regrouped(fused: torch.Tensor, model_type: str, before: int, after: int) -> torch.Tensor:
    """With the K/V heads repeated, or each group's mean in their place, computed in float64."""
    heads = split(fused, model_type, before)
    for part in ("k", "v"):
        held = [heads[part, head] for head in range(before)]
        for head in range(after):
            if after >= before:
                heads[part, head] = held[head * before // after]
            else:
                size = before // after
                total = torch.stack(held[head * size : (head + 1) * size]).double().sum(0)
                heads[part, head] = (total / size).to(fused.dtype)
    return join(heads, model_type, after)


def is_fused(name: str) -> bool:
    return any(f".{projection}." in name for projection in FUSED.values())


def rewrite(directory: Path, model_type: str, before: int, after: int) -> None:
    """Give all fused tensors of a checkpoint another number of K/V heads."""
    held = tiny.tensors(directory)
    tiny.rewrite(
        directory,
        {name: regrouped(one, model_type, before, after) for name, one in held.items() if is_fused(name)},
    )


def config(directory: Path, **changes: Any) -> dict[str, Any]:
    """A checkpoint's config.json, changed by these fields."""
    path = directory / "config.json"
    held: dict[str, Any] = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(held))
    return held
