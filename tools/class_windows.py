"""Which layers slide in configs that do not list their layers' types: rules found by trying candidates against
transformers' own cache.
"""

import itertools
from collections.abc import Iterator
from typing import Any

from class_probe import FULL_INTERVAL, Probe, Windows

from headpool import families, geometry
from headpool.family import Family


def window_rule(probe: Probe, family: Family) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The first candidate rule that agrees with transformers on every probe (None where none does), and
    the fields by which a config overrules it, with their defaults.
    """
    switch = "use_sliding_window"
    on = {switch: True} if switch in probe.parameters else {}
    fields = probe.layer_fields(probe.without_windows() | {"sliding_window": 5} | on)
    for fixed in ({}, {switch: False}) if on else ({},):
        told = [(config, held) for config in probe.window_configs(**fixed) if (held := probe.windows(config))]
        for rule in candidate_rules(probe) if told else ():
            if all(by_rule(rule, config, family) == held for config, held in told):
                read = {name for name in rule.values() if isinstance(name, str)}
                return rule, {name: held for name, held in fields.items() if name not in read} | fixed
    return None, fields


def by_rule(rule: dict[str, Any], config: dict[str, Any], family: Family) -> Windows | None:
    """Each layer's kind and window by a rule; None where the rule asks for a field that the class lacks."""

    def get(field: str) -> Any:
        return families.get(config, family, field)

    if "below" in rule and get(rule["below"]) is None:
        return None
    kinds = geometry.kinds_by_rule(rule, config["num_hidden_layers"], get)
    return [(geometry.KINDS[kind], window) for kind, window in kinds]


def candidate_rules(probe: Probe) -> Iterator[dict[str, Any]]:
    """Rules that classes have been seen to follow, the simplest first."""
    yield {}
    periods: list[dict[str, Any]] = [{}, {"below": "max_window_layers"}]
    periods += [
        {"every": every} | ({"at": at} if at != every - 1 else {}) for every in range(2, 8) for at in range(every)
    ]
    field = {"every": "sliding_window_pattern"}
    periods += (
        [field] if "sliding_window_pattern" in probe.parameters else [field | {"default": n} for n in range(2, 8)]
    )
    switches: list[dict[str, Any]] = [{}, {"enabled_by": "use_sliding_window"}]
    ends: list[dict[str, Any]] = [{}, {"last": True}, {"first": 1}, {"first": 2}, {"first": 2, "last": True}]
    if FULL_INTERVAL in (*probe.parameters, *probe.popped()):
        yield from ({"type": "linear_attention", "every": FULL_INTERVAL, "default": n} for n in range(2, 8))
    for layer_type in geometry.WINDOW_FIELDS:
        for end, switch, period in itertools.product(ends, switches, periods):
            yield {"type": layer_type} | switch | period | end
