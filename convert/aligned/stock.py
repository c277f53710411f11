"""A model of a stock class in pieces: its frame without decoder layers, and its layers one at a time.

Every piece is loaded by transformers itself (`from_pretrained` with a state dict), into the stock class less what is
not wanted: whatever it renames, fuses or initialises on loading is right here, too. No piece needs more memory than its
own tensors, in the file's dtype and in the one computed in.
"""

import contextlib
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from headpool import families
from headpool.checkpoint import Source
from headpool.convert.layouts import PARTS, AttentionWeights, Layout, Part
from headpool.errors import RequestError, first_line
from headpool.headers import TensorRecord
from headpool.tensors import read_tensor


class Stock:
    """The stock class of a checkpoint, which gives pieces of the model with their weights.

    `config_text` is another config.json for the same class (that of the converted model); None means the source's own.
    `dtype` is what the pieces compute in, `device` where they are; `eager`: their attention holds all its scores.
    """

    def __init__(
        self, source: Source, layout: Layout, *, device: str, dtype: torch.dtype, config_text: str | None = None
    ) -> None:
        self.source = source
        self.layout = layout
        self.device = device
        self.dtype = dtype
        self.config = _read_config(source.config_text if config_text is None else config_text, source.model)
        try:
            with torch.device("meta"):
                bare = AutoModel.from_config(self.config)
        except ValueError as error:
            raise RequestError(f"{source.model}: no class of transformers is this model without its head") from error
        self._class: Any = type(bare)
        self.eager: bool = bare.config._attn_implementation == "eager"
        self._list = layout.stem.rstrip(".").rpartition(".")[2]
        self._stems = families.find_family(source.config).stems

    def layers(self, model: nn.Module) -> nn.ModuleList:
        """The decoder layers of a model of this class."""
        count = len(self.layout.layers)
        for name, module in model.named_modules():
            if isinstance(module, nn.ModuleList) and len(module) == count and self._holds_layers(name):
                return module
        raise RequestError(f"{type(model).__name__} keeps its {count} layers elsewhere than in {self._list!r}")

    def _holds_layers(self, name: str) -> bool:
        """Whether a module of this name is the list of decoder layers; other parts of a composite have lists, too."""
        stems = self._stems or (f"{self._list}.",)
        return any(f".{stem}".endswith(f".{name}.") or f".{name}.".endswith(f".{stem}") for stem in stems)

    def attention(self, layer: nn.Module) -> nn.Module:
        """A decoder layer's attention."""
        return layer.get_submodule(self.layout.attention)

    def frame(self, *, embedding: bool = True) -> nn.Module:
        """The model around the decoder layers, which are there but empty: they keep their attributes, and can do
        nothing. Without `embedding` the input embedding is empty as well.
        """

        def prune(model: Any) -> None:
            for layer in self.layers(model):
                _empty(layer)
            if not embedding:
                _empty(model.get_input_embeddings())

        stem, prefix = self.layout.stem, f"{self._class.base_model_prefix}."
        # What is not below it belongs to the head; composites have other parts there, too.
        base = prefix if stem.startswith(prefix) and not self._stems else ""
        tensors = {
            name: record
            for name, record in self.source.tensors.items()
            if name.startswith(base) and not name.startswith(stem)
        }
        return self._load(prune, tensors, "outside the layers")

    def layer(self, index: int, changed: Mapping[str, Tensor] | None = None) -> nn.Module:
        """Decoder layer `index`; with some of its tensors changed, named as in the checkpoint."""

        def prune(model: nn.Module) -> None:
            _keep(model, self.layers(model)[index])

        stem = f"{self.layout.stem}{index}."
        tensors: dict[str, TensorRecord | Tensor] = {
            name: record for name, record in self.source.tensors.items() if name.startswith(stem)
        }
        return self.layers(self._load(prune, tensors | dict(changed or {}), f"in layer {index}"))[index]

    def attention_with(self, index: int, changed: Mapping[str, Tensor]) -> nn.Module:
        """The attention of decoder layer `index` with some of its tensors changed, named as in the checkpoint."""

        def prune(model: nn.Module) -> None:
            _keep(model, self.attention(self.layers(model)[index]))

        tensors: dict[str, TensorRecord | Tensor] = {**self._attention_tensors(index), **changed}
        model = self._load(prune, tensors, f"in the attention of layer {index}")
        return self.attention(self.layers(model)[index])

    def weights(self, index: int, parts: Collection[Part] = PARTS) -> AttentionWeights:
        """The attention weights of decoder layer `index`, or some of them, as the source has them, on the device.

        RequestError naming a tensor that holds NaN or infinity.
        """
        tensors = {name: read_tensor(record).to(self.device) for name, record in self._attention_tensors(index).items()}
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                raise RequestError(f"tensor {name!r} holds NaN or infinity")
        return self.layout.read(tensors, index, parts)

    def _attention_tensors(self, index: int) -> dict[str, TensorRecord]:
        inside = self.layout.tensor(index, "")
        return {name: record for name, record in self.source.tensors.items() if name.startswith(inside)}

    def _load(
        self, prune: Callable[[Any], None], tensors: Mapping[str, TensorRecord | Tensor], where: str
    ) -> nn.Module:
        """The stock class after `prune`, filled with `tensors`.

        Raises RequestError where one is missing or of another shape: it would be filled at random.
        """
        held = {name: one if isinstance(one, Tensor) else read_tensor(one) for name, one in tensors.items()}
        with _quiet():
            model, info = _pruned(self._class, prune).from_pretrained(
                None,
                config=self.config,
                state_dict=held,
                dtype=self.dtype,
                device_map={"": self.device},
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
        wrong = sorted(info["missing_keys"]) + sorted(str(key[0]) for key in info["mismatched_keys"])
        if wrong:
            raise RequestError(f"{self.source.model}: {wrong[0]!r} {where} is missing, or of another shape")
        model.requires_grad_(False)
        result: nn.Module = model.eval()
        return result


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars and reports of what was loaded: it is checked here."""
    verbosity = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.utils.logging.set_verbosity(verbosity)


def _read_config(text: str, model: str) -> Any:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(text, encoding="utf-8", newline="")
        try:
            return AutoConfig.from_pretrained(directory, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise RequestError(f"{model}: its config cannot be read: {first_line(error)}") from error


def _pruned(stock: Any, prune: Callable[[Any], None]) -> Any:
    """The stock class, which calls `prune` on itself once it is built (on the meta device, where nothing costs)."""

    class Pruned(stock):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            prune(self)

    Pruned.__name__, Pruned.__qualname__, Pruned.__module__ = stock.__name__, stock.__qualname__, stock.__module__
    return Pruned


def _empty(module: nn.Module) -> None:
    module._modules.clear()
    _bare(module)


def _bare(module: nn.Module) -> None:
    """Take a module's own tensors away, and let transformers believe that it has initialised them."""
    module._parameters.clear()
    module._buffers.clear()
    module._is_hf_initialized = True  # type: ignore[assignment]


def _keep(model: nn.Module, kept: nn.Module) -> None:
    """Empty every module of `model` that neither is nor holds nor lies in `kept`, and drop what those on the way to it
    hold themselves.
    """
    inside = set(kept.modules())
    for module in list(model.modules()):
        if module not in inside and kept not in set(module.modules()):
            _empty(module)
        elif module not in inside:
            _bare(module)
