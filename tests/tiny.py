"""Small random checkpoints of stock classes, as transformers itself writes them."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = ROOT / "recipes" / "quickstart" / "model"
NOVEL = ROOT / "recipes" / "quickstart" / "test.txt"

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma")
BASE = {
    "num_hidden_layers": 2, "num_attention_heads": 12, "num_key_value_heads": 12, "hidden_size": 96, "head_dim": 8,
    "intermediate_size": 64, "vocab_size": 300, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": None,
}  # fmt: skip
"""12 heads, so that head count, group size and K/V count can all differ (4 K/V heads: 3 query heads each)."""

OWN: dict[str, dict[str, Any]] = {
    "qwen2": {"max_window_layers": 1},
    "qwen3": {"head_dim": 16, "attention_bias": True},
    "gemma": {"head_dim": 16},
    "mistral": {"sliding_window": 16},
}
"""What makes a family itself: explicit head_dim other than hidden / heads, windows, biases."""


def model(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random causal LM of a family; every parameter is random, biases and norms too."""
    fields = {**BASE, **OWN.get(family, {}), **changes}
    without = [name for name, value in changes.items() if value is None and name in BASE]
    config = transformers.AutoConfig.for_model(family, **{k: v for k, v in fields.items() if k not in without})
    torch.manual_seed(seed)
    built = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return built.to(dtype).eval()


def checkpoint(
    directory: Path,
    family: str = "llama",
    *,
    max_shard_size: str = "5GB",
    tokenizer: bool = False,
    **changes: Any,
) -> Path:
    """Save a random model of a family into `directory`, sharded by `max_shard_size`."""
    model(family, **changes).save_pretrained(directory, max_shard_size=max_shard_size)
    if tokenizer:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(QUICKSTART / name, directory / name)
    return directory


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, read by the safetensors library."""
    return {
        name: tensor
        for file in sorted(directory.glob("model*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def rewrite(directory: Path, changes: Mapping[str, torch.Tensor | None]) -> None:
    """Replace (or with None remove) tensors of a single-file checkpoint."""
    held = {**tensors(directory), **changes}
    kept = {name: tensor for name, tensor in held.items() if tensor is not None}
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})


def load(directory: Path, dtype: torch.dtype = torch.float64) -> Any:
    """The checkpoint in its stock class under sdpa."""
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="sdpa").eval()


def stock_model(directory: Path) -> Any:
    """The checkpoint in its stock class, in float32 under the attention that transformers chooses for it."""
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@torch.no_grad()
def logits(built: Any, tokens: int = 24, seed: int = 1) -> torch.Tensor:
    """Logits over a random sequence: the same for every model of one vocabulary."""
    ids = torch.randint(0, built.config.vocab_size, (2, tokens), generator=torch.Generator().manual_seed(seed))
    result: torch.Tensor = built(ids).logits
    return result
