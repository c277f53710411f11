"""A checkpoint directory as a source: its config, its tensors by header, the files that go along."""

import fnmatch
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from headpool import families, headers, hub
from headpool.errors import RequestError
from headpool.headers import TensorRecord

PROVENANCE = "headpool.json"
"""The file in a converted checkpoint that says what was done."""

SIDECARS = (
    "tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "*.spm", "special_tokens_map.json",
    "added_tokens.json", "chat_template*", "generation_config.json", "preprocessor_config.json",
    "video_preprocessor_config.json", "processor_config.json", "licen[cs]e*", "notice*", "use_policy*", "copying*",
    "copyright*",
)  # fmt: skip
"""Files that travel with a checkpoint, copied byte for byte, by lower-case patterns. Weights of other formats and code
do not.
"""

CARD, SOURCE_CARD = "README.md", "SOURCE_README.md"

_OUTPUT_EMBEDDING = re.compile(r"(.*\.)?(lm_head|embed_out|output_projection)\.weight")
"""The tensor that models with tied embeddings share with their input embedding, and do not store."""

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
    """A checkpoint to read. `model` is what the user typed, `directory` where its files lie on this machine, `revision`
    the commit of one that came from the hub.

    `shards` maps each weight file's name to its tensors in the order of their bytes; it is empty where there are no
    weights and none were demanded. `origin` is the checkpoint that this one is written from as another class, None
    where it is none.
    """

    model: str
    revision: str | None
    directory: Path
    config_text: str
    config: Mapping[str, Any]
    shards: Mapping[str, tuple[TensorRecord, ...]]
    origin: "Source | None" = None

    @cached_property
    def tensors(self) -> dict[str, TensorRecord]:
        return {record.name: record for records in self.shards.values() for record in records}

    @cached_property
    def name(self) -> str:
        """The hub id, or the directory's own name: nothing that only this machine knows."""
        local = Path(self.model)
        return local.resolve().name if local.is_dir() else self.model

    @cached_property
    def provenance(self) -> dict[str, Any] | None:
        """What headpool.json says, None where headpool did not make the checkpoint."""
        return read_provenance(self.directory)

    def as_origin(self) -> dict[str, Any]:
        """What headpool.json of something made from this says of it: a `revision` is there for what came from the hub;
        of what headpool made on this machine, `source` says what that was made from.
        """
        held = {"model": self.name, "revision": self.revision, "headers_sha256": self.headers_sha256()}
        made_here = self.revision is None and self.provenance is not None and "source" in self.provenance
        return held | ({"source": self.provenance["source"]} if made_here and self.provenance else {})

    def headers_sha256(self) -> str:
        """Identifies names, dtypes, shapes and places of all tensors, and the config, without reading weights."""
        layout = [
            [file, [[record.name, record.dtype, record.shape, record.offset] for record in records]]
            for file, records in sorted(self.shards.items())
        ]
        return hashlib.sha256(json.dumps([self.config_text, layout]).encode()).hexdigest()

    def checkpoint_sha256(self) -> str:
        """Tells one result of headpool from another, also from one made anew in its place: that of headpool.json,
        config and headers, without reading weights.
        """
        digest = hashlib.sha256(self.headers_sha256().encode())
        if (path := self.directory / PROVENANCE).is_file():
            digest.update(path.read_bytes())
        return digest.hexdigest()

    def sidecars(self) -> dict[Path, Path]:
        """The files to copy, relative to the directory, and where they go: the source's card under another name."""
        names = [path.relative_to(self.directory) for path in sorted(self.directory.glob("*chat_templates/*"))]
        for path in sorted(self.directory.iterdir()):
            if path.is_file() and any(fnmatch.fnmatchcase(path.name.lower(), pattern) for pattern in SIDECARS):
                names.append(Path(path.name))
        copies = {name: name for name in names}
        # The card of what headpool made here is drawn anew for what is made of it; a stranger's has to be kept.
        ours = self.revision is None and self.provenance is not None
        cards = (SOURCE_CARD,) if ours else (CARD, SOURCE_CARD)
        card = next((Path(name) for name in cards if (self.directory / name).is_file()), None)
        return copies if card is None else copies | {card: Path(SOURCE_CARD)}


def open_source(model: str, revision: str | None = None, *, weights: bool = True) -> Source:
    """Open a local directory or a hub id: config and headers only, no weights in memory.

    With `weights` a source without readable weights is refused, and a hub id's weight files are downloaded; otherwise
    shards are read where they lie already. Raises RequestError naming the file at fault.
    """
    directory = locate(model, revision, weights=weights)
    config_text, config = read_config(directory)
    shards = _without_aliases(_read_shards(directory), config)
    if weights and not shards:
        raise RequestError(_no_weights(directory, model))
    on_hub = directory != Path(model)
    return Source(model, directory.name if on_hub else None, directory, config_text, config, shards)


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


def read_provenance(directory: Path) -> dict[str, Any] | None:
    """headpool.json of a directory, None where there is none. Raises RequestError where it is not JSON."""
    path = directory / PROVENANCE
    return headers.read_json_object(path.read_bytes(), PROVENANCE) if path.is_file() else None


def _read_shards(directory: Path) -> dict[str, tuple[TensorRecord, ...]]:
    for (single, index), read in zip(headers.WEIGHT_FILES, _READERS, strict=True):
        if (directory / single).is_file():
            return {single: read(directory / single)}
        if (directory / index).is_file():
            return _read_sharded(directory, index, read)
    return {}


_READERS = (headers.read_safetensors_header, headers.read_pickle_header)


def _read_sharded(
    directory: Path, index: str, read: Callable[[Path], tuple[TensorRecord, ...]]
) -> dict[str, tuple[TensorRecord, ...]]:
    weight_map = headers.read_index(directory / index)
    shards: dict[str, tuple[TensorRecord, ...]] = {}
    for file in sorted(set(weight_map.values())):
        if not (directory / file).is_file():
            raise RequestError(f"{index} names {file}, which is not there (an unfinished download?)")
        shards[file] = read(directory / file)
    held = {record.name: file for file, records in shards.items() for record in records}
    for name, file in weight_map.items():
        if held.get(name) != file:
            raise RequestError(f"{index} places tensor {name!r} in {file}, which does not hold it")
    stray = next((name for name in held if name not in weight_map), None)
    if stray is not None:
        raise RequestError(f"{held[stray]} holds tensor {stray!r}, which {index} does not name")
    if sum(map(len, shards.values())) != len(held):
        raise RequestError(f"{index}: a tensor stands in two of its files")
    return shards


def _without_aliases(
    shards: dict[str, tuple[TensorRecord, ...]], config: Mapping[str, Any]
) -> dict[str, tuple[TensorRecord, ...]]:
    """Without the output embedding where it is the input embedding's bytes by another name and the config ties them.

    Only pickles hold such aliases. Where nothing is tied, the same bytes are two tensors.
    """
    family = families.families().get(str(config.get("model_type")))
    tied = families.get(config, family, "tie_word_embeddings") if family else config.get("tie_word_embeddings", True)
    places = Counter((record.path, record.offset) for records in shards.values() for record in records)

    def is_alias(record: TensorRecord) -> bool:
        return places[record.path, record.offset] > 1 and _OUTPUT_EMBEDDING.fullmatch(record.name) is not None

    if not tied:
        return shards
    return {file: tuple(record for record in records if not is_alias(record)) for file, records in shards.items()}


def _no_weights(directory: Path, model: str) -> str:
    for pattern, what in _FOREIGN.items():
        if any(directory.glob(pattern)):
            return f"{model} holds {what}"
    return f"{model}: no weights there (looked for {', '.join(name for pair in headers.WEIGHT_FILES for name in pair)})"


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
    patterns = (
        "config.json",
        CARD,
        SOURCE_CARD,
        PROVENANCE,
        "adapter_config.json",
        *_any_case(SIDECARS),
        "*chat_templates/*",
    )
    return hub.download(model, revision, patterns, weights=weights)


def _any_case(patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Lower-case patterns, and the same in capitals and with a capital: the hub's own matching minds the case."""
    return tuple(form for one in patterns for form in dict.fromkeys((one, one.upper(), one.capitalize())))
