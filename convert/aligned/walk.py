"""A checkpoint run layer by layer over calibration windows, with one decoder layer's weights in memory.

The model's own forward is run with its decoder layers replaced: those before the layer of interest hand on what they
get, the layer itself is given the stored hidden states of the batch, and the one after it stops the run. So every layer
gets the masks, positions and whatever else its class gives it, and no family needs code of its own.

Shape suffixes: N windows, T tokens of each, B windows of a batch, D hidden.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from headpool.convert.aligned.stock import Stock
from headpool.convert.aligned.work import Rows, Work
from headpool.errors import RequestError


class _StopError(Exception):
    """Ends a run of the model; carries what arrived where it ended."""

    def __init__(self, arrived: Any) -> None:
        self.arrived = arrived


@dataclass(frozen=True)
class Block:
    """What an attention submodule is called with for one batch: `x` [B, T, D] is its input, after the layer's norm.

    `rows` are the windows of the batch.
    """

    rows: slice
    x: Tensor
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]

    def through(self, attention: nn.Module) -> Tensor:
        """The output [B, T, D] of an attention submodule, the layer's own or another of its class."""
        return _first(attention(self.x, *self.arguments, **self.keywords))


@dataclass
class Layer:
    """A decoder layer with its weights, of the stock class, while the walk is at it.

    outputs: what its own attention gave for each window, [N, T, D], once that was recorded.
    """

    index: int
    module: nn.Module
    walk: "Walk"
    advanced: bool = field(default=False, init=False)
    outputs: Rows | None = field(default=None, init=False)

    @property
    def attention(self) -> nn.Module:
        return self.walk.stock.attention(self.module)

    def blocks(self, windows: slice | None = None) -> Iterator[Block]:
        """The inputs of the attention submodule, batch by batch, of all windows or of some."""
        for rows in self.walk.batches(windows):
            yield self.block(rows)

    @torch.no_grad()
    def block(self, rows: slice, *, whole: bool = False) -> Block:
        """The inputs of the attention submodule, or of the whole layer, for the windows `rows`."""

        def stop(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            raise _StopError((arguments, keywords))

        module = self.module if whole else self.attention
        hook = module.register_forward_pre_hook(stop, with_kwargs=True)
        try:
            arguments, keywords = self.walk.arrive(self, rows)
        finally:
            hook.remove()
        keywords = dict(keywords)
        x, *rest = (keywords.pop("hidden_states"), *arguments) if "hidden_states" in keywords else arguments
        return Block(rows, x, tuple(rest), keywords)

    @torch.no_grad()
    def advance(self, *, record: bool = False) -> None:
        """Compute the hidden states that the next layer gets; with `record` the outputs of the layer's attention are
        kept on the way. Raises RequestError where hidden states are not finite.
        """
        with self._recording() if record else contextlib.nullcontext():
            for rows in self.walk.batches():
                self.walk.store(self, rows, _first(self.walk.arrive(self, rows)))
        self.advanced = True

    @torch.no_grad()
    def output(self, block: Block) -> Tensor:
        """What the whole layer gives for windows, [B, T, D]: what the next one gets, where that is known already."""
        if self.advanced and self.index + 1 < self.walk.count:
            return self.walk.hidden(self.index + 1, block.rows)
        return block.through(self.module)

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        outputs = self.outputs = self.walk.rows("outputs")
        batches = self.walk.batches()

        def keep(_: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            outputs[next(batches)] = _first(output)

        hook = self.attention.register_forward_hook(keep)
        try:
            yield
        finally:
            hook.remove()


class Walk:
    """Windows of tokens [N, T], taken through a model layer by layer.

    Iterating gives each layer from `first` on. Before it asks for the next, the caller has kept what it wants of this
    one; then the hidden states for the next layer take the place of those for this. With `work` they are files there,
    and a walk that was killed begins at the layer where it was; without, they are in memory.

    Hidden states are float32 (float64 where the model computes in float64), whatever the model's dtype.
    """

    def __init__(self, stock: Stock, tokens_NT: Tensor, *, batch: int, work: Work | None = None) -> None:
        shared = next((i for i, layer in enumerate(stock.layout.layers) if layer.shares is not None), None)
        if shared is not None:
            raise RequestError(f"layer {shared} reads the keys and values of another, so layers cannot be run alone")
        self.stock = stock
        self.tokens_NT = tokens_NT
        self.batch = batch
        self.count = len(stock.layout.layers)
        self._work = work
        self._dtype = torch.promote_types(stock.dtype, torch.float32)
        self._parts = 0  # of the tuples that layers give; 0 where they give hidden states alone
        self._hidden: dict[int, Rows] = {}
        self._width: int = stock.config.get_text_config().hidden_size
        self.first = self._resume()
        self._frame = stock.frame(embedding=self.first == 0)
        self._layers = stock.layers(self._frame)
        for stand_in in self._layers:
            stand_in.forward = self._hand_on
        if self.first == 0 and 0 not in self._hidden:
            self._embed()
        self._drop_embedding()

    def __iter__(self) -> Iterator[Layer]:
        for index in range(self.first, self.count):
            layer = Layer(index, self.stock.layer(index), self)
            yield layer
            if index + 1 < self.count and not layer.advanced:
                layer.advance()
            if layer.outputs is not None:
                layer.outputs.close()
            self._leave(index)

    def batches(self, windows: slice | None = None) -> Iterator[slice]:
        """The windows in batches, in order."""
        start, stop, _ = (windows or slice(None)).indices(len(self.tokens_NT))
        for begin in range(start, stop, self.batch):
            yield slice(begin, min(begin + self.batch, stop))

    def hidden(self, index: int, rows: slice) -> Tensor:
        """What layer `index` gets for some windows, [B, T, D] in the model's dtype on its device."""
        return self._hidden[index][rows].to(self.stock.device, self.stock.dtype)

    def arrive(self, layer: Layer, rows: slice) -> Any:
        """Run some windows to where the run is stopped, at the latest after `layer`, and give what arrives there."""

        def enter(*arguments: Any, **keywords: Any) -> Any:
            hidden = self.hidden(layer.index, rows)
            if "hidden_states" in keywords:
                keywords["hidden_states"] = hidden
            else:
                arguments = (hidden, *arguments[1:])
            result = layer.module(*arguments, **keywords)
            self._parts = len(result) if isinstance(result, tuple) else 0
            return result

        return self._run(rows, {layer.index: enter, layer.index + 1: _stop})

    def store(self, layer: Layer, rows: slice, hidden_BTD: Tensor) -> None:
        """Keep what the layer after `layer` gets for some windows. RequestError where it is not finite."""
        _check_finite(hidden_BTD, f"layer {layer.index} of {self.stock.source.model} gives")
        if layer.index + 1 < self.count:
            self._rows(layer.index + 1)[rows] = hidden_BTD

    def _run(self, rows: slice, stand_ins: Mapping[int, Callable[..., Any]]) -> Any:
        """Run the frame with other functions for some layers: what it was stopped with, or the last one's result."""
        results: list[Any] = []
        if self.count in stand_ins:  # nothing comes after the last layer: its result is what arrives
            stand_ins = {self.count - 1: _noting(stand_ins[self.count - 1], results)}
        try:
            for index, function in stand_ins.items():
                self._layers[index].forward = function
            self._frame(input_ids=self.tokens_NT[rows].to(self.stock.device), use_cache=False)
        except _StopError as stopped:
            return stopped.arrived
        finally:
            for index in stand_ins:
                self._layers[index].forward = self._hand_on
        return results[-1]

    def _hand_on(self, *arguments: Any, **keywords: Any) -> Any:
        hidden = keywords["hidden_states"] if "hidden_states" in keywords else arguments[0]
        return (hidden, *(None,) * (self._parts - 1)) if self._parts else hidden

    @torch.no_grad()
    def _embed(self) -> None:
        for rows in self.batches():
            hidden_BTD = self._run(rows, {0: _stop})
            if hidden_BTD.shape != (*self.tokens_NT[rows].shape, self._width):
                name = type(self._frame).__name__
                raise RequestError(f"{name} gives its layers {list(hidden_BTD.shape)}, not one hidden state per token")
            _check_finite(hidden_BTD, f"the embedding of {self.stock.source.model} gives")
            self._rows(0)[rows] = hidden_BTD
        self._publish(0)

    def _drop_embedding(self) -> None:
        """From now on only the shape of what the embedding gives matters: free what may be the largest tensor."""
        embedding: Any = self._frame.get_input_embeddings()  # type: ignore[operator]
        nothing = torch.zeros(1, dtype=self.stock.dtype, device=self.stock.device)
        embedding._parameters.clear()
        embedding.weight = nn.Parameter(nothing, requires_grad=False)  # some classes ask it for its device
        embedding.forward = lambda ids: nothing.expand(*ids.shape, self._width)

    def rows(self, name: str) -> Rows:
        """Room for a hidden state of every token, new."""
        return Rows(self._shape(), self._dtype, self._work.path(name) if self._work else None)

    def _rows(self, index: int) -> Rows:
        if index not in self._hidden:
            self._hidden[index] = self.rows(f"{_name(index)}.partial")
        return self._hidden[index]

    def _shape(self) -> tuple[int, int, int]:
        windows, tokens = self.tokens_NT.shape
        return windows, tokens, self._width

    def _publish(self, index: int) -> None:
        if self._work:
            self._work.save("walk", {}, {"parts": self._parts})
            self._work.publish(_name(index))

    def _leave(self, index: int) -> None:
        """The next layer's hidden states take the place of this one's, which are no longer needed."""
        if index + 1 in self._hidden:
            self._publish(index + 1)
        self._hidden.pop(index).close()
        if self._work:
            self._work.path(_name(index)).unlink(missing_ok=True)

    def _resume(self) -> int:
        """The layer whose hidden states a killed walk left, 0 where there are none."""
        kept = self._work.facts("walk") if self._work else None
        if self._work is None or kept is None:
            return 0
        found = [index for index in range(self.count) if self._work.path(_name(index)).is_file()]
        if not found:
            return 0
        first = max(found)
        self._parts = kept["parts"]
        self._hidden[first] = Rows(self._shape(), self._dtype, self._work.path(_name(first)), new=False)
        return first


def _name(index: int) -> str:
    return f"hidden-{index:04d}"


def _stop(*arguments: Any, **keywords: Any) -> Any:
    raise _StopError(keywords["hidden_states"] if "hidden_states" in keywords else arguments[0])


def _noting(function: Callable[..., Any], results: list[Any]) -> Callable[..., Any]:
    def noting(*arguments: Any, **keywords: Any) -> Any:
        results.append(function(*arguments, **keywords))
        return results[-1]

    return noting


def _first(result: Any) -> Tensor:
    tensor: Tensor = result[0] if isinstance(result, tuple) else result
    return tensor


def _check_finite(values: Tensor, what: str) -> None:
    if not all(bound.isfinite() for bound in torch.aminmax(values)):
        raise RequestError(f"{what} values that are not finite on the calibration text: its weights are broken")
