"""A checkpoint as GGUF, by the package gguf: tensor names by its own table, llama's queries and keys in its order.

Only what tiny llama and qwen2 checkpoints need. There is no tokenizer in the file: prompts are token ids.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import tiny
import torch

ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}


def write(checkpoint: Path, file: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    names = gguf.get_tensor_name_map(ARCHITECTURES[config["model_type"]], config["num_hidden_layers"])
    writer = gguf.GGUFWriter(file, config["model_type"])
    _describe(writer, config)
    for name, tensor in tiny.tensors(checkpoint).items():
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        writer.add_tensor(target, _ordered(name, tensor, config).float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or {"rope_theta": config["rope_theta"]}
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("none")


def _ordered(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """llama.cpp rotates neighbouring dimensions in llama's heads, transformers those half a head apart."""
    counts = {"q_proj.weight": "num_attention_heads", "k_proj.weight": "num_key_value_heads"}
    field = next((field for end, field in counts.items() if name.endswith(end)), None)
    if config["model_type"] != "llama" or field is None:
        return tensor
    return tensor.unflatten(0, (config[field], 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()
