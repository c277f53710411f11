"""K/V-head counts that configs hold in ways of their own: under another name, nested, or as a switch for one head.

The rules are data of a family (`kv_heads` in told_families.json): lists of which the first that applies is taken.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headpool.errors import RequestError

Rule = Mapping[str, Any]
"""`when`: fields with the values that they must have. To read a count: `field` holds it, by its path, with a `default`;
or it is `count`; or, with neither, the query heads'. To write one: `counts` are those that can be, all where it is
missing; `set` are the fields to change ("count" stands for the new one, a mapping changes within a nested object),
`repeated` those that are told of it where a config has them; `refused` says why it cannot be.
"""

Get = Callable[[str], Any]
"""What a config holds for a field, or its class's default."""


def read(rules: Sequence[Rule], config: Mapping[str, Any], get: Get) -> Any:
    """The count that a config says."""
    rule = next(rule for rule in rules if _applies(rule, get))
    held = rule.get("count")
    if "field" in rule:
        held = config
        for key in rule["field"].split("."):
            held = held.get(key) if isinstance(held, Mapping) else None
        held = rule.get("default") if held is None else held
    return get("num_attention_heads") if held is None else held


def changes(rules: Sequence[Rule], kv_heads: int, config: Mapping[str, Any], get: Get) -> dict[str, Any]:
    """The fields that give a config `kv_heads` K/V heads. RequestError where its class cannot hold so many."""
    if (reason := refusal(rules, kv_heads, get)) is not None:
        raise RequestError(f"{kv_heads} K/V heads asked for: {reason}")
    rule = _rule(rules, kv_heads, get)
    repeated = {name: kv_heads for name in rule.get("repeated", ()) if name in config}
    return repeated | {name: _filled(value, kv_heads) for name, value in rule["set"].items()}


def refusal(rules: Sequence[Rule], kv_heads: int, get: Get) -> str | None:
    """Why a config cannot be given `kv_heads` K/V heads; None where it can."""
    reason: str | None = _rule(rules, kv_heads, get).get("refused")
    return reason


def _rule(rules: Sequence[Rule], kv_heads: int, get: Get) -> Rule:
    return next(rule for rule in rules if _applies(rule, get) and kv_heads in rule.get("counts", (kv_heads,)))


def _applies(rule: Rule, get: Get) -> bool:
    return all(get(name) == value for name, value in rule.get("when", {}).items())


def _filled(value: Any, kv_heads: int) -> Any:
    if isinstance(value, Mapping):
        return {name: _filled(one, kv_heads) for name, one in value.items()}
    return kv_heads if value == "count" else value
