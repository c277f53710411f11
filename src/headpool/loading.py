"""A checkpoint as transformers opens it: config, tokenizer, the model in its stock class; and where to put it."""

from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from headpool.checkpoint import Source
from headpool.composite import composites
from headpool.errors import RequestError, first_line
from headpool.family_data import data

_POSITIONS = ("max_position_embeddings", "max_seq_len")
"""Config attributes that limit positions; a class with neither has no limit (BLOOM)."""

_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "*.spm")


def usable_device(name: str | None) -> str:
    """A device by name, a GPU where there is one by default. RequestError where it cannot be computed on."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.ones(1, device=name).item()  # a device without data ("meta") cannot give it back
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise RequestError(f"device {name!r} cannot be used: {first_line(error)}") from error
    return name


def read_config(source: Source) -> Any:
    """The config in its stock class. RequestError where it cannot be read."""
    try:
        return AutoConfig.from_pretrained(source.directory, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise RequestError(f"{source.model}: its config cannot be read: {first_line(error)}") from error


def position_limit(text_config: Any) -> int | None:
    """How many positions a language model's config allows; None where nothing limits them."""
    return next((getattr(text_config, name) for name in _POSITIONS if hasattr(text_config, name)), None)


def load_tokenizer(source: Source) -> Any:
    """The tokenizer that lies beside the weights. RequestError where there is none that can be read."""
    # Without its files some tokenizer classes come up with an empty vocabulary instead of failing.
    if not any(any(source.directory.glob(pattern)) for pattern in _TOKENIZER_FILES):
        raise RequestError(f"{source.model}: no tokenizer there (looked for {', '.join(_TOKENIZER_FILES)})")
    try:
        return AutoTokenizer.from_pretrained(source.directory, trust_remote_code=False)
    except Exception as error:  # tokenizers fail in classes of their own, some of them bare Exception
        raise RequestError(f"{source.model}: its tokenizer cannot be read: {first_line(error)}") from error


def stock_class(config: Any) -> Any:
    """The class that opens checkpoints of a config as a language model, that of a composite one with all its parts."""
    composite = composites().get(config.model_type)
    held = getattr(transformers, composite.class_name, None) if composite else None
    return held or AutoModelForCausalLM


def load_model(source: Source, dtype: torch.dtype | str, device: str | None, attention: str | None = None) -> Any:
    """The model in its stock class, with the attention implementation that is named, or the one that it chooses.

    Raises RequestError where it cannot be loaded, where its class is known to fail on text, and for a tensor that is
    missing or of another shape: it would be filled at random.
    """
    transformers.utils.logging.disable_progress_bar()
    config = read_config(source)
    composite = composites().get(config.model_type)
    if composite is not None and composite.silent and transformers.__version__ == data()["transformers"]:
        raise RequestError(
            f"{source.model}: {composite.class_name} fails on text in transformers {transformers.__version__}, so it "
            "can be converted, but neither measured nor trained"
        )
    model_class = stock_class(config)
    try:
        model, info = model_class.from_pretrained(
            source.directory,
            dtype=dtype,
            attn_implementation=attention,
            device_map=device,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, ImportError) as error:
        raise RequestError(f"{source.model} cannot be loaded: {first_line(error)}") from error
    wrong = sorted(info["missing_keys"]) + sorted(str(key[0]) for key in info["mismatched_keys"])
    if wrong:
        raise RequestError(
            f"{source.model}: {len(wrong)} tensors are missing or of another shape than its config says ({wrong[0]})"
        )
    return model
