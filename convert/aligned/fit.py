"""Steps 4 and 5 for one layer: the output projection refitted, and the attention or the whole layer healed."""

from dataclasses import dataclass

from torch import Tensor, nn

from headpool.convert.aligned.heal import Schedule, heal
from headpool.convert.aligned.options import Alignment
from headpool.convert.aligned.refit import refit_output
from headpool.convert.aligned.replay import Examples, normal_equations, relative_error
from headpool.convert.aligned.sharing import Figures, changed, compute_dtype, searches, share_on_text
from headpool.convert.aligned.stock import Stock
from headpool.convert.aligned.walk import Layer
from headpool.convert.layouts import AttentionWeights
from headpool.convert.plan import Plan
from headpool.tensors import read_tensor

RIDGE = 1e-4
"""Lambda of the refit relative to the mean square of the head outputs."""

HELD_OUT = 16
"""One calibration window in so many is kept out of refit and healing, to tell what they are worth."""


@dataclass(frozen=True)
class Fit:
    """One layer while the walk is at it. `keep`: hold on to its inputs and outputs in memory."""

    plan: Plan
    alignment: Alignment
    layer: Layer
    converted: Stock
    kv_heads: int
    seed: int
    keep: bool

    def run(self) -> tuple[dict[str, Tensor], Figures]:
        """The tensors that the plan declares to change, and the layer's figures.

        What the refit gives goes on only where it is better on held-out windows.
        """
        search = searches(self.plan, self.alignment)
        shared, figures = share_on_text(self.plan, self.layer, self.kv_heads, search=search)
        if self.alignment.refit:
            shared = self._refitted(shared, figures)
        else:
            figures.block_error["closed"] = self._block_error(self._attention(shared))
        if self.alignment.heal:
            return self._healed(shared, figures), figures
        return changed(self.plan, self.layer.index, shared), figures

    def _refitted(self, shared: AttentionWeights, figures: Figures) -> AttentionWeights:
        attention = self._attention(shared)
        normal = normal_equations(attention, self.plan.layout.projections["o"], self._examples(self._train))
        refitted = refit_output(shared, normal, RIDGE)
        error = figures.block_error
        error["closed"], error["refit"] = (self._block_error(one) for one in (attention, self._attention(refitted)))
        return refitted if error["refit"] < error["closed"] else shared

    def _healed(self, shared: AttentionWeights, figures: Figures) -> dict[str, Tensor]:
        """The layer's changed tensors after healing; what the plan declares and healing leaves alone is as it was."""
        index, whole = self.layer.index, self.alignment.heal_scope == "layer"
        start = changed(self.plan, index, shared)
        module = self.converted.layer(index, start) if whole else self.converted.attention_with(index, start)
        declared = self.plan.changed_in(index)
        prefix = f"{self.plan.layout.stem}{index}." if whole else self.plan.layout.tensor(index, "")
        trained = {prefix + name: one for name, one in module.named_parameters() if prefix + name in declared}
        train, held_out = (self._examples(windows, whole=whole) for windows in (self._train, self._held_out))
        schedule = Schedule(self.alignment.heal, self.alignment.learning_rate)
        healed = heal(module, train, held_out, schedule, parameters=list(trained.values()), seed=self.seed)
        if whole:
            figures.layer_error = {"before": healed.errors[0], "heal": healed.best}
        attention = self.converted.attention(module) if whole else module
        figures.block_error["heal"] = self._block_error(attention)
        made = start | {name: one.detach() for name, one in trained.items()}
        return {name: made[name] if name in made else self._source(name) for name in declared}

    def _source(self, name: str) -> Tensor:
        return read_tensor(self.plan.source.tensors[name]).to(compute_dtype(self.plan))

    def _attention(self, weights: AttentionWeights) -> nn.Module:
        return self.converted.attention_with(self.layer.index, changed(self.plan, self.layer.index, weights))

    def _block_error(self, attention: nn.Module) -> float:
        return relative_error(attention, self._examples(self._held_out))

    def _examples(self, windows: slice, *, whole: bool = False) -> Examples:
        return Examples(self.layer, windows, whole=whole, keep=self.keep)

    @property
    def _train(self) -> slice:
        return slice(0, self._held_out.start)

    @property
    def _held_out(self) -> slice:
        count = len(self.layer.walk.tokens_NT)
        return slice(count - max(1, count // HELD_OUT), count)
