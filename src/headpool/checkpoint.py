"""A checkpoint directory as a source: its config, its tensors by header, the files that go along."""

import fnmatch
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from headpool import headers
from headpool.errors import RequestError
from headpool.headers import TensorRecord

PROVENANCE = "headpool.json"
"""The file in a converted checkpoint that says what was done."""

SIDECARS = (
    "tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "*.spm", "special_tokens_map.json",
    "added_tokens.json", "chat_template*", "generation_config.json", "preprocessor_config.json",
    "processor_config.json", "LICEN[CS]E*", "NOTICE*", "USE_POLICY*", "COPYING*", "COPYRIGHT*",
)  # fmt: skip
"""Files that travel with a checkpoint, copied byte for byte. Weights of other formats and code do not."""

_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_WEIGHT_FILES = _SAFETENSORS + _PICKLES
_FOREIGN = {
    "adapter_config.json": "an adapter; merge it into its base model first (peft: merge_and_unload, save_pretrained)",
    "*.gguf": "GGUF weights; convert the checkpoint that they were made from",
    "consolidated*": "weights in the original release's format; use the Hugging Face version of the model",
    "tf_model.h5": "TensorFlow weights; load with from_tf and save as safetensors in transformers 4",
    "flax_model.msgpack": "Flax weights; load with from_flax and save as safetensors in transformers 4",
}
"""What else a directory may hold instead of weights that can be read, and what to do about it."""


@dataclass(frozen=True)
class Source:
    """A checkpoint to read. `model` is what the user typed, `directory` where its files lie on this machine.

    `shards` maps each weight file's name to its tensors in the order of their bytes; it is empty where there are no
    weights and none were demanded.
    """

    model: str
    revision: str | None
    directory: Path
    config_text: str
    config: Mapping[str, Any]
    shards: Mapping[str, tuple[TensorRecord, ...]]

    @cached_property
    def tensors(self) -> dict[str, TensorRecord]:
        return {record.name: record for records in self.shards.values() for record in records}

    @cached_property
    def name(self) -> str:
        """The hub id, or the directory's own name: nothing that only this machine knows."""
        local = Path(self.model)
        return local.resolve().name if local.is_dir() else self.model

    def headers_sha256(self) -> str:
        """Identifies names, dtypes, shapes and places of all tensors, and the config, without reading weights."""
        layout = [
            [file, [[record.name, record.dtype, record.shape, record.offset] for record in records]]
            for file, records in sorted(self.shards.items())
        ]
        return hashlib.sha256(json.dumps([self.config_text, layout]).encode()).hexdigest()

    def sidecars(self) -> list[Path]:
        """The files to copy, relative to the directory; an own card is copied under another name by who writes."""
        return [
            path.relative_to(self.directory)
            for path in sorted([*self.directory.iterdir(), *self.directory.glob("*chat_templates/*")])
            if path.is_file()
            and (path.parent != self.directory or any(fnmatch.fnmatchcase(path.name, one) for one in SIDECARS))
        ]


def open_source(model: str, revision: str | None = None, *, weights: bool = True) -> Source:
    """Open a local directory or a hub id: config and headers only, no weights in memory.

    With `weights` a source without readable weights is refused, and a hub id's weight files are downloaded; otherwise
    shards are read where they lie already. Raises RequestError naming the file at fault.
    """
    directory = locate(model, revision, weights=weights)
    config_text, config = read_config(directory)
    shards = _read_shards(directory)
    if weights and not shards:
        raise RequestError(_no_weights(directory, model))
    return Source(model, revision, directory, config_text, config, shards)


def read_config(directory: Path) -> tuple[str, dict[str, Any]]:
    """config.json of a directory, as text and as an object."""
    path = directory / "config.json"
    try:
        raw = path.read_bytes()
    except OSError as error:
        hint = next((why for one, why in _FOREIGN.items() if any(directory.glob(one))), None)
        raise RequestError(f"{directory}: no config.json" + (f"; it holds {hint}" if hint else "")) from error
    config = headers.read_json_object(raw, "config.json")
    return raw.decode("utf-8"), config


def _read_shards(directory: Path) -> dict[str, tuple[TensorRecord, ...]]:
    """The weight files by transformers' own order of preference: one file before shards, safetensors before pickles."""
    found = next((name for name in _WEIGHT_FILES if (directory / name).is_file()), None)
    if found is None:
        return {}
    read = headers.read_safetensors_header if found in _SAFETENSORS else headers.read_pickle_header
    if not found.endswith(".index.json"):
        return {found: read(directory / found)}
    return _read_sharded(directory, found, read)


def _read_sharded(directory: Path, index: str, read: Any) -> dict[str, tuple[TensorRecord, ...]]:
    weight_map = headers.read_index(directory / index)
    shards: dict[str, tuple[TensorRecord, ...]] = {}
    for file in sorted(set(weight_map.values())):
        if not (directory / file).is_file():
            raise RequestError(f"{index} names {file}, which is not there (an unfinished download?)")
        shards[file] = read(directory / file)
    held = {record.name: file for file, records in shards.items() for record in records}
    for name, file in weight_map.items():
        if held.get(name) != file and read is headers.read_safetensors_header:
            raise RequestError(f"{index} places tensor {name!r} in {file}, which does not hold it")
    stray = next((name for name in held if name not in weight_map), None)
    if stray is not None:
        raise RequestError(f"{held[stray]} holds tensor {stray!r}, which {index} does not name")
    if sum(map(len, shards.values())) != len(held):
        raise RequestError(f"{index}: a tensor stands in two of its files")
    return shards


def _no_weights(directory: Path, model: str) -> str:
    for pattern, what in _FOREIGN.items():
        if any(directory.glob(pattern)):
            return f"{model} holds {what}"
    return f"{model}: no weights there (looked for {', '.join(_WEIGHT_FILES)})"


def locate(model: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """The directory of a model on this machine, downloading from the hub what is missing.

    Raises RequestError when `model` is neither a directory nor a hub id that can be reached.
    """
    path = Path(model)
    if model and path.is_dir():
        return path
    if path.is_file():
        raise RequestError(f"{model} is a file; a checkpoint directory or a hub id is needed")
    if model.startswith((".", "/", "~")) or model.count("/") > 1 or not model:
        raise RequestError(f"no such directory: {model}")
    return _download(model, revision, weights)


def _download(model: str, revision: str | None, weights: bool) -> Path:
    from huggingface_hub import errors, snapshot_download

    def fetch(*patterns: str) -> Path:
        return Path(snapshot_download(model, revision=revision, allow_patterns=list(patterns)))

    try:
        directory = fetch("config.json", "README.md", "adapter_config.json", *SIDECARS, "*chat_templates/*")
        if weights:
            directory = fetch("model*.safetensors", "model.safetensors.index.json")
            if not any((directory / name).is_file() for name in _SAFETENSORS):
                directory = fetch("pytorch_model*.bin", "pytorch_model.bin.index.json")
    except errors.GatedRepoError as error:
        raise RequestError(f"{model} is gated: accept its licence on its page and log in (hf auth login)") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise RequestError(f"no such directory, and no such model on the hub: {model}") from error
    except errors.RevisionNotFoundError as error:
        raise RequestError(f"{model} has no revision {revision!r}") from error
    except (errors.LocalEntryNotFoundError, errors.HfHubHTTPError, OSError) as error:
        raise RequestError(f"no such directory, and the hub cannot be reached: {model}") from error
    return directory
