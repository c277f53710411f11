"""aligned on whole models of stock classes in float64 under sdpa: where nothing has to be lost, no logit moves."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fused
import heads
import pytest
import steps
import tiny
import torch
from torch import Tensor

from headpool import families, geometry
from headpool.convert.aligned.keys import share_keys
from headpool.convert.aligned.moments import data_free
from headpool.convert.aligned.refit import Normal, refit_output
from headpool.convert.aligned.values import share_values
from headpool.convert.layouts import AttentionWeights, Layout, find_layout
from headpool.headers import TensorRecord

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, 4 K/V heads": ("llama", {"num_key_value_heads": 4}),
    "llama with biases": ("llama", {"attention_bias": True}),
    "qwen2, 4 K/V heads": ("qwen2", {"num_key_value_heads": 4}),
    "starcoder2": ("starcoder2", {"use_bias": True, "sliding_window": 9}),
    "phi": ("phi", {"partial_rotary_factor": 0.5}),
    "glm": ("glm", {"attention_bias": True}),
    "glm, every dimension rotated": ("glm", {"partial_rotary_factor": 1.0}),
    "granite_swa": ("granite_swa", {"num_key_value_heads": 4, "attn_implementation": "eager"}),
    "qwen3": ("qwen3", {"num_key_value_heads": 4}),
    "phi with norms": ("phi", {"qk_layernorm": True}),
    "phi3": ("phi3", {"head_dim": None, "num_key_value_heads": 4}),
    "falcon": ("falcon", fused.FALCON | fused.NEW | {"num_kv_heads": 4}),
    "gpt_bigcode": ("gpt_bigcode", {"head_dim": None, "num_key_value_heads": None, "multi_query": False}),
    "dbrx, cut off": ("dbrx", fused.DBRX | fused.attn(4)),
    "olmo2": ("olmo2", {"num_key_value_heads": 4}),
    "afmoe": ("afmoe", {"num_key_value_heads": 4, "num_dense_layers": 2}),
    "bitnet": ("bitnet", {"num_key_value_heads": 4}),
}
"""Half-split and interleaved, whole and partial rotary, biases of q, k, v and o, sinks, norms with and without
centring, of each head or of all, fused projections, gates, a norm of the output, and all of it cut off at a size.
"""

RESTRICTED = ("dbrx, cut off", "olmo2", "afmoe", "bitnet")
"""Where less is free than complex multiples of keys and maps of values."""

SIGNED = ("dbrx, cut off", "bitnet")
"""Where only signs of values are: one head by itself stays as it is."""

OF_THEIR_OWN = ("falcon", "gpt_bigcode")
"""Their configs say in a way of their own that there are half as many K/V heads, or cannot."""


EAGER = ("granite_swa",)
"""There is no sdpa for sinks, and eager attention takes its softmax in float32."""


def exact(name: str) -> float:
    return 1e-6 if name in EAGER else 1e-10


class Norm(torch.nn.Module):
    """An RMS norm in float64: the stock ones round to float32, where a change of 1e-16 now and then becomes one of
    1e-8.
    """

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self.weight = stock.weight
        self._eps = stock.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps) * self.weight


def built(name: str, **changes: Any) -> Any:
    model_type, options = FAMILIES[name]
    model = tiny.model(model_type, dtype=torch.float64, **{"attn_implementation": "sdpa", **options, **changes})
    for module in list(model.modules()):
        for key, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                setattr(module, key, Norm(child))
    return model


def layout_of(model: Any) -> tuple[Layout, dict[str, Tensor]]:
    config = model.config.to_dict()
    state = model.state_dict()
    records = {name: TensorRecord(name, "F64", tuple(w.shape), Path(), 0) for name, w in state.items()}
    family = families.find_family(config)
    return find_layout(records, config, family, geometry.layers_of(config, family)), state


def converted(model: Any, name: str, change: Callable[[AttentionWeights, int], AttentionWeights], **config: Any) -> Any:
    """A model of the same class with `change` made of every layer's weights."""
    layout, state = layout_of(model)
    tensors = dict(state)
    for index in range(len(layout.layers)):
        tensors |= layout.write(change(layout.read(state, index), index), index)
    made = built(name, **config)
    made.load_state_dict(tensors)
    return made


STEPS = {"keys": steps.keys, "values": steps.values, "groups": steps.groups, "together": steps.together}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", FAMILIES)
def test_one_head_in_a_group_moves_no_logit(name: str, step: str) -> None:
    model = built(name)
    made = converted(model, name, STEPS[step])
    before, after = tiny.logits(model), tiny.logits(made)
    assert before.std() > 0.05
    assert (after - before).abs().max() < exact(name)
    moved = {key for key, w in model.state_dict().items() if not torch.equal(made.state_dict()[key], w)}
    assert moved or step == "keys" or (step == "values" and name in SIGNED), "the step did something"


def outputs(model: Any) -> list[tuple[Tensor, Tensor]]:
    """What enters and leaves every layer's output projection, tokens in rows."""
    layout, _ = layout_of(model)
    held: list[tuple[Tensor, Tensor]] = []
    projections = [
        module
        for name, module in model.named_modules()
        if name.endswith(f"{layout.attention}.{layout.projections['o']}")
    ]
    hooks = [
        module.register_forward_hook(lambda _, args, y: held.append((args[0].flatten(0, 1), y.flatten(0, 1))))
        for module in projections
    ]
    tiny.logits(model, tokens=120)
    for hook in hooks:
        hook.remove()
    assert len(held) == len(layout.layers)
    return held


@pytest.mark.parametrize("name", FAMILIES)
def test_the_refit_of_an_exact_layer_moves_no_logit(name: str) -> None:
    model = built(name)
    made = converted(model, name, steps.together)
    pairs = list(zip(outputs(model), outputs(made), strict=True))

    def refit(weights: AttentionWeights, index: int) -> AttentionWeights:
        (_, y), (z, y_made) = pairs[index]
        normal = Normal(z.shape[1], y.shape[1])
        normal.add(z, y - y_made)
        return refit_output(weights, normal, 1e-4)

    refitted = converted(made, name, refit)
    assert (tiny.logits(refitted) - tiny.logits(model)).abs().max() < exact(name)


@pytest.mark.parametrize(
    "name", [name for name in FAMILIES if "norms" not in name and name not in ("qwen3", *OF_THEIR_OWN, *RESTRICTED)]
)
def test_what_a_group_has_in_common_is_kept(name: str) -> None:
    """Keys that are complex multiples of one another and values that span one head's dimensions, in the stock class
    with its own number of K/V heads and in the one with half as many.
    """
    model = built(name)
    layout, _ = layout_of(model)
    count = layout.layers[0].kv_heads
    source = converted(model, name, lambda weights, _: redundant(weights))

    def halved(weights: AttentionWeights, index: int) -> AttentionWeights:
        assert weights.q is not None
        moments = data_free(weights, torch.ones(weights.q.shape[2]))
        made = share_keys(weights, count // 2, moments)
        return share_values(made, count // 2, moments.value_groups(count // 2), moments.value_means, fold_mean=False)

    made = converted(source, name, halved, num_key_value_heads=count // 2)
    assert (tiny.logits(made) - tiny.logits(source)).abs().max() < max(1e-8, exact(name))
    assert (tiny.logits(source) - tiny.logits(model)).abs().max() > 1e-3


def redundant(weights: AttentionWeights) -> AttentionWeights:
    """The second head of each two made of the first: its key pair by pair, and by any map where it does not rotate; its
    value by any map.
    """
    assert weights.k is not None and weights.v is not None and weights.rotary is not None
    held = {part: w.clone() for part in ("k", "v", "bias_k", "bias_v") if (w := getattr(weights, part)) is not None}
    pairs, flat = heads.indices(weights.rotary, weights.k.shape[1])
    for j in range(1, len(weights.k), 2):
        key = torch.zeros(weights.k.shape[1], weights.k.shape[1], dtype=torch.float64)
        for f, (a, b) in enumerate(pairs):
            c, s = heads.normal(100 * j + f, 2)
            key[a, a], key[a, b], key[b, a], key[b, b] = c, -s, s, c
        for a in flat:
            key[a, flat] = heads.normal(100 * j + 50 + a, len(flat))
        value = heads.normal(100 * j + 99, *key.shape)
        for part, map_dd in (("k", key), ("bias_k", key), ("v", value), ("bias_v", value)):
            if part in held:
                held[part][j] = map_dd @ held[part][j - 1]
    return replace(weights, **held)


def test_every_kind_of_layer_is_among_them() -> None:
    read = {name: (layout := layout_of(built(name)))[0].read(layout[1], 0) for name in FAMILIES}
    kinds = {(w.rotary.kind, w.rotary.dims < w.k.shape[1]) for w in read.values() if w.rotary and w.k is not None}
    assert kinds == {("half-split", False), ("half-split", True), ("interleaved", False), ("interleaved", True)}
    assert any(w.bias_o is not None and w.bias_q is not None for w in read.values())
    assert {name for name, w in read.items() if w.key_norm is not None} == {"qwen3", "phi with norms", "afmoe"}
    assert [name for name, w in read.items() if w.whole_norms and w.query_gains is not None] == ["olmo2"]
    assert [name for name, w in read.items() if w.clipped] == ["dbrx, cut off"]
    assert all((w.query_norm is None) == (w.key_norm is None) for w in read.values())
    assert [name for name, w in read.items() if w.centred_norms] == ["phi with norms"]
    assert "sinks" in read["granite_swa"].per_query_head
