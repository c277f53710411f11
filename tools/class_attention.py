"""What fewer K/V heads change in a class, and whether pooling may change just that, measured on small models."""

import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from class_probe import (
    BASE,
    CACHE_KINDS,
    HEAD_DIM,
    HEADS,
    KV,
    LAYERS,
    TOKENS,
    NotMeasuredError,
    Probe,
    Shapes,
    cache_layers,
    run,
)

from headpool import geometry
from headpool.families import KV_HEADS
from headpool.family import Family

OUTPUTS = ("o_proj", "out_proj", "dense")
"""Names of an output projection."""

SAME, OTHER = 1e-4, 1e-2
"""Logits that differ by less, relative to the largest, are the same in float32; by more, they are others."""

OTHER_NAMES = "its checkpoints keep attention under other names than its class, which is not supported yet"

HEAD_FIELDS = re.compile("heads|head_dim|head_size")
OTHER_MIXERS = re.compile("(n_)?mamba|linear|conv|ssm")
"""What fields of layers without attention begin with."""

KV_PART = re.compile(r"(.+)\.([kv]_proj)\.(weight|bias)")
KEY_NORM = re.compile(r"(.+)\.k_(layer)?norm\.(weight|norms\.\d+\.weight)")
NUMBERED = re.compile(r"(.*?\.)(\d+)\.(.+)")


def measure_attention(probe: Probe, entry: dict[str, Any]) -> None:
    """Fill in what pooling has to know; NotMeasuredError where the family does not convert."""
    module = attention_module(probe)
    output, tensors = roles(probe, module)
    query_parts = check_shapes(probe, module, output)
    if not entry["geometry"]:
        raise NotMeasuredError("its cache is not of the shape that the heads and head_dim of its config give")
    check_groups(probe)
    if renamed(probe, module):
        module, (output, tensors) = names_on_disk(probe)
        entry["unaligned"] = "its checkpoints have other names for it than its class"
    if any(type(layer).__name__.startswith("LinearAttentionAnd") for layer in cache_layers(probe.config())):
        entry["unaligned"] = "a state-space model stands beside it"
    entry |= {"attention": module, "attention_tensors": tensors, "rotary": rotary(probe)}
    if output != OUTPUTS[0]:
        entry["output"] = output
    if query_parts > 1:
        entry["query_parts"] = query_parts


def changed(before: Shapes, after: Shapes) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def split(name: str) -> tuple[str, int, str]:
    """A tensor's name as what stands before its layer's number, that number, and the rest."""
    match = NUMBERED.fullmatch(name)
    return (match[1], int(match[2]), match[3]) if match else ("", -1, name)


LATENT = "multi-head latent attention (MLA): it has no key/value heads to pool"


def is_latent(probe: Probe) -> bool:
    """Whether keys and values come of one latent vector, and so no tensor of their heads' count."""
    latent = any("kv_lora_rank" in name for name in probe.parameters)
    return latent and not changed(probe.shapes(), probe.shapes(**{KV_HEADS: 2 * KV}))


def attention_module(probe: Probe) -> str:
    """The attention module's name with {} for the layer's number, where it is one module that every layer
    has.
    """
    if is_latent(probe):
        raise NotMeasuredError(LATENT)
    follow = changed(probe.shapes(), probe.shapes(**{KV_HEADS: 2 * KV}))
    states = sorted({type(layer).__name__ for layer in cache_layers(probe.config())} - set(CACHE_KINDS))
    if states:
        raise NotMeasuredError(f"its cache holds more than keys and values (transformers' {', '.join(states)})")
    if not attending(probe):
        raise NotMeasuredError("a hybrid, of which no small model with attention could be built to test")
    if not follow:
        raise NotMeasuredError(f"how many key and value heads its layers have does not follow from {KV_HEADS} alone")
    other = sorted({split(name)[2] for name in follow if not (KV_PART.fullmatch(name) or KEY_NORM.fullmatch(name))})
    if other:
        listed = ", ".join(other)
        raise NotMeasuredError(
            f"its keys and values are not of separate projections alone ({listed}), which is not supported yet"
        )
    layers = sorted({split(name)[1] for name in follow})
    if layers != attending(probe):
        raise NotMeasuredError(
            f"of {LAYERS} layers only {', '.join(map(str, layers))} hold keys and values of their own"
        )
    parts = [name for name in follow if KV_PART.fullmatch(name)]
    modules = {f"{before}{{}}.{rest.rsplit('.', 2)[0]}" for before, _, rest in map(split, parts)}
    if len(modules) > 1:
        raise NotMeasuredError(f"its attention lies in several modules ({', '.join(sorted(modules))})")
    if set(parts) & set(getattr(probe.on_meta(), "all_tied_weights_keys", ())):
        raise NotMeasuredError("its attention layers share one set of weights, which is not supported yet")
    if fields := head_fields(probe):
        raise NotMeasuredError(f"its heads may follow from fields that are not supported yet ({', '.join(fields)})")
    return modules.pop()


def attending(probe: Probe) -> list[int]:
    """The layers that keep keys and values of their own."""
    kinds = [CACHE_KINDS.get(type(layer).__name__) for layer in cache_layers(probe.config())]
    return [index for index, kind in enumerate(kinds) if kind != "none"]


def head_fields(probe: Probe) -> list[str]:
    """Fields by which a class may give some layers other heads than the common fields say."""
    known = {*BASE, "head_dim", *probe.aliases.values()}
    return sorted(
        name
        for name in probe.parameters
        if HEAD_FIELDS.search(name) and not OTHER_MIXERS.match(name) and name not in known
    )


def inside(probe: Probe, shapes: Shapes, module: str) -> dict[str, list[tuple[int, ...]]]:
    """The attention tensors by their names inside the module, numbers as *, with their shapes in all layers that
    attend.
    """
    before, after = module.split("{}.")
    layers = attending(probe)
    found: dict[str, list[tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        head, layer, rest = split(name)
        if head == before and layer in layers and rest.startswith(after + "."):
            found.setdefault(re.sub(r"\d+", "*", rest.removeprefix(after + ".")), []).append(shape)
    return found


def roles(probe: Probe, module: str, *, on_disk: bool = False) -> tuple[str, dict[str, str]]:
    """The output projection's name, and whose count each attention tensor's size follows, options included; by the
    names in the class, or those in checkpoints.
    """
    shapes_of = probe.written if on_disk else probe.shapes
    fewer: dict[str, Any] = {"num_attention_heads": HEADS // 2}
    if "head_dim" not in probe.fields:
        fewer["hidden_size"] = HEADS // 2 * HEAD_DIM
    found: dict[str, str] = {}
    output = ""
    for flags in ({}, *({flag: True} for flag in probe.flags()), dict.fromkeys(probe.flags(), True)):
        try:
            base, more_kv, fewer_heads = (
                inside(probe, shapes_of(**flags, **changes), module) for changes in ({}, {KV_HEADS: 2 * KV}, fewer)
            )
        except Exception:
            if not flags:
                raise
            continue  # an option that the class refuses by itself
        output = output or next((name for name in OUTPUTS if f"{name}.weight" in base), OUTPUTS[0])
        for name, shapes in base.items():
            follows_heads = shapes != fewer_heads.get(name) and name != f"{output}.bias"
            found.setdefault(name, "kv_heads" if shapes != more_kv.get(name) else "heads" if follows_heads else "fixed")
    return output, dict(sorted(found.items()))


def check_shapes(probe: Probe, module: str, output: str) -> int:
    """How often the query projection has [heads x head_dim, hidden]; NotMeasuredError where a projection has another
    form, the output projection its transpose.
    """
    hidden, q, kv = BASE["hidden_size"], HEADS * HEAD_DIM, KV * HEAD_DIM
    found = inside(probe, probe.shapes(), module)
    rows = (found.get("q_proj.weight") or [(q,)])[0][0]
    parts = 2 if rows == 2 * q else 1
    for name, shape in {
        "q_proj": (parts * q, hidden),
        "k_proj": (kv, hidden),
        "v_proj": (kv, hidden),
        output: (hidden, q),
    }.items():
        held = found.get(f"{name}.weight", [])
        if held != [shape] * len(attending(probe)):
            form = next((list(one) for one in held if one != shape), "absent")
            raise NotMeasuredError(f"its {name} has another form ({form}, expected {list(shape)} everywhere)")
    return parts


def spread(model: Any) -> None:
    """Weights so random that every part of attention shows in the logits."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 0.2 * noise if parameter.dim() > 1 else parameter.data + 0.1 * noise


def check_groups(probe: Probe) -> None:
    """NotMeasuredError unless K/V head j serves the j-th run of neighbouring query heads, and one may
    serve them all.
    """
    try:
        run(probe.model("cpu", **{KV_HEADS: 1}))
    except Exception as error:
        raise NotMeasuredError("its class refuses a single K/V head") from error
    grouped, full = probe.model("cpu"), probe.model("cpu", **{KV_HEADS: HEADS})
    spread(grouped)
    state = grouped.state_dict()
    shared = changed(probe.shapes(), probe.shapes(**{KV_HEADS: 2 * KV}))
    expected = run(grouped).logits
    orders = {"next": torch.arange(HEADS) // (HEADS // KV), "in turn": torch.arange(HEADS) % KV}
    differs = {}
    for order, index in orders.items():
        repeated = {
            name: tensor.unflatten(0, (KV, -1))[index].flatten(0, 1) if name in shared else tensor
            for name, tensor in state.items()
        }
        full.load_state_dict(repeated)
        differs[order] = float((run(full).logits - expected).abs().max() / expected.abs().max())
    if not (differs["next"] < SAME and differs["in turn"] > OTHER):
        raise NotMeasuredError("its query heads do not share K/V heads in neighbouring groups")


def renamed(probe: Probe, module: str) -> bool:
    """Whether checkpoints keep attention under other names than the class, but for what stands before the list of
    layers.
    """
    layers = module.split("{}.", maxsplit=1)[0].removesuffix(".").rpartition(".")[2]
    below = f"{layers}.{{}}.{module.split('{}.')[1]}"
    saved = {name[name.index(f"{layers}.") :]: shape for name, shape in probe.written().items() if f"{layers}." in name}
    return bool(set(inside(probe, probe.shapes(), module)) - set(inside(probe, saved, below)))


def names_on_disk(probe: Probe) -> tuple[str, tuple[str, dict[str, str]]]:
    """The attention module by its name in checkpoints, and `roles` of its tensors there; NotMeasuredError where keys
    and values are not separate projections there.
    """
    follow = changed(probe.written(), probe.written(**{KV_HEADS: 2 * KV}))
    if not all(KV_PART.fullmatch(name) for name in follow):
        raise NotMeasuredError(OTHER_NAMES)
    modules = {f"{before}{{}}.{rest.rsplit('.', 2)[0]}" for before, _, rest in map(split, follow)}
    if len(modules) > 1:
        raise NotMeasuredError(OTHER_NAMES)
    module = modules.pop()
    return module, roles(probe, module, on_disk=True)


def rotary(probe: Probe) -> str | None:
    """How the class's module pairs the dimensions of a head, by what its quarter turn makes of (0, 1, 2, 3)."""
    module = sys.modules[probe.model_class.__module__]
    found = next(((turn, function) for name, turn in TURNS.items() if (function := getattr(module, name, None))), None)
    if found is None:
        return None
    turn, function = found
    turned = tuple(turn(function, torch.arange(4.0)).flatten().tolist())
    return next((kind for kind, both in PAIRS.items() if turned in both), None)


PAIRS = {"half-split": ((-2, -3, 0, 1), (2, 3, 0, -1)), "interleaved": ((-1, 0, -3, 2), (1, 0, 3, -2))}
"""(0, 1, 2, 3) after a quarter turn of its pairs, one way and the other."""

TURNS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "rotate_half": lambda rotate, x: rotate(x[None]),
    "_apply_rotary_emb": lambda rotate, x: rotate(x, torch.zeros(2), torch.ones(2)),
    "apply_rotary_emb": lambda rotate, x: rotate(*(x.view(1, 1, 1, 4),) * 2, torch.full((1, 1, 2), 1j))[0],
}
"""A quarter turn by the functions that modules have for rotation: by name, called with cosines 0 and sines 1."""


def reads_head_dim(probe: Probe) -> bool:
    """Whether keys get wider with an explicit head_dim."""
    for changes in ({}, {"rope_parameters": None}):  # those may hold sections of a head
        try:
            return bool(changed(probe.shapes(), probe.shapes(head_dim=2 * HEAD_DIM, **changes)))
        except Exception:
            continue
    raise NotMeasuredError("its class cannot be built with another head_dim")


def cache_agrees(probe: Probe, family: Family) -> bool:
    """Whether the cache that a small model fills has the shapes that headpool.geometry tells from its
    config alone.
    """
    if head_fields(probe) or not probe.runs():
        return False
    for kv_heads in (KV, HEADS):
        try:
            told = geometry.layers_of(probe.fields | {KV_HEADS: kv_heads}, family)
            more = kv_heads != probe.fields[KV_HEADS]
            held = run(probe.model("cpu", **{KV_HEADS: kv_heads})).past_key_values.layers if more else probe.cached
        except Exception:
            return False
        if len(told) != len(held) or not all(map(holds, told, held)):
            return False
    return True


def holds(layer: geometry.Layer, cached: Any) -> bool:
    """Whether a cache layer, after TOKENS tokens of one sequence, is what `layer` says. (A sliding one may
    drop the token that the next step would not see.)
    """
    keys, values = getattr(cached, "keys", None), getattr(cached, "values", None)
    if keys is None or values is None:
        return layer.kind in ("none", "cross") or layer.shares is not None
    least = min(TOKENS, layer.window - 1) if layer.window else TOKENS
    shapes = {(1, layer.kv_heads, tokens, layer.head_dim) for tokens in (least, min(TOKENS, layer.window or TOKENS))}
    return layer.kind != "none" and tuple(keys.shape) in shapes and tuple(values.shape) in shapes
