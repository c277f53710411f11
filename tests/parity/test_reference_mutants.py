"""Mutants of the NumPy specification, which the checks against stock classes must catch."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import pytest
from stock_layers import (
    check_in_pieces,
    check_layer,
    check_mean_pooled,
    check_pooling,
)

from headpool import reference


@dataclass(frozen=True)
class Mutant:
    """What is replaced in the specification's text, and the check that must then fail."""

    name: str
    edits: tuple[tuple[str, str], ...]
    check: Callable[[ModuleType], None] = lambda spec: check_layer(spec, "llama", 4, "causal")


SCORES = 'scores_GRTS = np.einsum("grtd,gsd->grts", q_GRTD, k_GSD) / np.sqrt(head_dim)'
MASKED = "softmax(np.where(seen_TS, scores_GRTS, -np.inf))"
MERGED = 'np.einsum("htv,hev->te", z_HTV, weights.o)'
UNGROUPED = "z_GRTV.reshape(heads, tokens, v_GSV.shape[2])"

MUTANTS = [
    Mutant("masking after the softmax", ((MASKED, "np.where(seen_TS, softmax(scores_GRTS), 0.0)"),)),
    Mutant("masking with zero", ((MASKED, "softmax(np.where(seen_TS, scores_GRTS, 0.0))"),)),
    Mutant(
        "interleaving heads when merging",
        ((MERGED, "z_HTV.transpose(1, 2, 0).reshape(len(x), -1) @ np.hstack([*weights.o]).T"),),
    ),
    Mutant(
        "merging without bringing heads beside tokens",
        ((MERGED, "z_HTV.reshape(len(x), -1) @ np.hstack([*weights.o]).T"),),
    ),
    Mutant(
        "interleaving groups when merging",
        ((UNGROUPED, "z_GRTV.swapaxes(0, 1).reshape(heads, tokens, v_GSV.shape[2])"),),
    ),
    Mutant(
        "strided groups",
        (
            (
                "q_HTD.reshape(kv_heads, heads // kv_heads, tokens, head_dim)",
                "q_HTD.reshape(heads // kv_heads, kv_heads, tokens, head_dim).swapaxes(0, 1)",
            ),
            (UNGROUPED, "z_GRTV.swapaxes(0, 1).reshape(heads, tokens, v_GSV.shape[2])"),
        ),
    ),
    Mutant(
        "summing scores over a group",
        ((SCORES, SCORES + "\n    scores_GRTS[:] = scores_GRTS.sum(axis=1, keepdims=True)"),),
    ),
    Mutant(
        "averaging scores over a group",
        ((SCORES, SCORES + "\n    scores_GRTS[:] = scores_GRTS.mean(axis=1, keepdims=True)"),),
    ),
    Mutant("no scale", ((" / np.sqrt(head_dim)", ""),)),
    Mutant("scale of the group", (("np.sqrt(head_dim)", "np.sqrt(head_dim * heads // kv_heads)"),)),
    Mutant(
        "softmax over queries",
        ((MASKED, "softmax(np.where(seen_TS, scores_GRTS, -1e9).swapaxes(2, 3)).swapaxes(2, 3)"),),
    ),
    Mutant("a query that sees the next key", (("seen_TS = position_S <=", "seen_TS = position_S - 1 <="),)),
    Mutant(
        "a query that does not see itself",
        (("position_S <= position_T1", "position_S <= np.maximum(position_T1 - 1, 0)"),),
    ),
    Mutant(
        "a window one too long",
        (("position_S > position_T1 - window", "position_S >= position_T1 - window"),),
        lambda spec: check_layer(spec, "mistral", 4, "sliding"),
    ),
    Mutant(
        "a window one too short",
        (("position_S > position_T1 - window", "position_S > position_T1 - window + 1"),),
        lambda spec: check_layer(spec, "mistral", 4, "sliding"),
    ),
    Mutant(
        "a bidirectional mask that is causal",
        (
            (
                "return np.ones((queries, keys), dtype=np.bool_)",
                "return np.tri(queries, keys, dtype=np.bool_)",
            ),
        ),
        lambda spec: check_layer(spec, "llama", 4, "bidirectional"),
    ),
    Mutant("rotary pairs of the other kind", (("    if interleaved:", "    if not interleaved:"),)),
    Mutant(
        "interleaved rotary pairs of the other kind",
        (("    if interleaved:", "    if not interleaved:"),),
        lambda spec: check_layer(spec, "glm", 4, "causal"),
    ),
    Mutant(
        "rotation of the queries only",
        (("rotate(q_HTD, rotary), rotate(k_GTD, rotary)", "rotate(q_HTD, rotary), k_GTD"),),
    ),
    Mutant(
        "rotation of the last dimensions",
        (
            (
                "turned, rest = x_HTD[..., :dims], x_HTD[..., dims:]",
                "turned, rest = x_HTD[..., -dims:], x_HTD[..., :-dims]",
            ),
        ),
        lambda spec: check_layer(spec, "phi", 4, "causal"),
    ),
    Mutant(
        "no bias",
        (("return y_NTD if bias_ND is None else y_NTD + bias_ND[:, None, :]", "return y_NTD"),),
        lambda spec: check_layer(spec, "qwen2", 4, "causal"),
    ),
    Mutant(
        "no output bias",
        (("return y_TE if weights.bias_o is None else y_TE + weights.bias_o, cache", "return y_TE, cache"),),
        lambda spec: check_layer(spec, "phi", 4, "causal"),
    ),
    Mutant(
        "cached queries at the first positions",
        (("np.arange(keys - queries, keys)", "np.arange(queries)"),),
        lambda spec: check_in_pieces(spec, 4, "causal"),
    ),
    Mutant(
        "new tokens before the cached ones",
        (("np.concatenate((self.k, k_GTD), axis=1)", "np.concatenate((k_GTD, self.k), axis=1)"),),
        lambda spec: check_in_pieces(spec, 4, "causal"),
    ),
    Mutant(
        "a window that forgets the cache's length",
        (
            (
                "seen_TS &= position_S > position_T1 - window",
                "seen_TS &= position_S > np.arange(queries)[:, None] - window",
            ),
        ),
        lambda spec: check_in_pieces(spec, 4, "sliding"),
    ),
    Mutant(
        "the mean of strided groups",
        (
            (
                "heads.reshape(kv_heads, group_size, *heads.shape[1:])",
                "heads.reshape(group_size, kv_heads, *heads.shape[1:]).swapaxes(0, 1)",
            ),
        ),
        check_mean_pooled,
    ),
    Mutant(
        "the sum of groups instead of their mean",
        (("groups.sum(axis=1) / group_size", "groups.sum(axis=1)"),),
        check_mean_pooled,
    ),
    Mutant(
        "the first of each group instead of the mean",
        (("groups.sum(axis=1) / group_size", "groups[:, 0]"),),
        check_mean_pooled,
    ),
    Mutant(
        "a mean in the precision of its input",
        (("heads = np.asarray(w, dtype=np.float64)", "heads = np.asarray(w)"),),
        check_pooling,
    ),
    Mutant(
        "repeating the list of heads instead of each head",
        (("np.repeat(w, heads // w.shape[0], axis=0)", "np.tile(w, (heads // w.shape[0], 1, 1))"),),
        check_pooling,
    ),
]


def specification(edits: tuple[tuple[str, str], ...]) -> ModuleType:
    """The specification with its text changed; what is to be replaced must be there exactly once."""
    text = inspect.getsource(reference)
    for old, new in edits:
        assert text.count(old) == 1, f"found {text.count(old)} times: {old}"
        text = text.replace(old, new)
    module = ModuleType("mutant")
    exec(compile(text, "mutant", "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant) -> None:
    mutant.check(specification(()))
    mutated = specification(mutant.edits)
    with pytest.raises(AssertionError, match=r"Not equal to tolerance|Arrays are not equal"):
        mutant.check(mutated)
