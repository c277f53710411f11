"""Models that hold a language model beside others: where its config and its layers lie."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from headpool.errors import RequestError
from headpool.family_data import data


@dataclass(frozen=True)
class Composite:
    """A model_type whose class holds a language model beside others: image-text models, and of other media.

    `path` are the keys that lead from its config to the language model's, `text` is that one's model_type where the
    config names none, and `flat` says that old configs hold its fields at the top instead. `stems` are the beginnings
    of its layers' tensors up to the number, in files and in the class: other parts have attention of the same names.
    `reason` says why none of its checkpoints is converted; else it is its language model's family that decides.
    `silent` says that its class failed on text when it was tested, so that only the language model in it was run.
    """

    model_type: str
    class_name: str
    path: tuple[str, ...]
    text: str
    stems: tuple[str, ...]
    flat: bool
    reason: str | None
    silent: bool = False


@cache
def composites() -> dict[str, Composite]:
    """Every class that holds a language model with a K/V-head field beside other models, by model_type."""
    return {
        name: Composite(
            model_type=name,
            class_name=entry["class"],
            path=tuple(entry["path"]),
            text=entry["text"],
            stems=tuple(entry.get("stems", ())),
            flat=entry.get("flat", False),
            reason=entry.get("reason"),
            silent=entry.get("silent", False),
        )
        for name, entry in data()["composites"].items()
    }


def text_path(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys that lead to the language model's part of a config: none where all of it is the language model's."""
    composite = composites().get(str(config.get("model_type")))
    if composite is None:
        return ()
    held: Any = config
    for key in composite.path:
        held = held.get(key) if isinstance(held, Mapping) else None
    if isinstance(held, Mapping):
        return composite.path
    if composite.flat:
        return ()
    place = ".".join(composite.path)
    raise RequestError(f"model_type {composite.model_type!r}: no {place}, where its language model's fields stand")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config, its model_type included; all of it where there is nothing else.

    Raises RequestError for a composite model's config without one.
    """
    composite = composites().get(str(config.get("model_type")))
    if composite is None:
        return config
    path = text_path(config)
    held: Any = config
    for key in path:
        held = held[key]
    return {"model_type": composite.text, **held} if path else {**held, "model_type": composite.text}


def inside(config: Mapping[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Changes of the language model's part of a config as changes of all of it."""
    for key in reversed(text_path(config)):
        changes = {key: changes}
    return changes
