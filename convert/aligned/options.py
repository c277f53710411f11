"""What method aligned may be told, and pooling of calibration text; heavy packages are left to whoever does it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from headpool.defaults import CALIBRATION_TOKENS, HEAL_RATE, HEAL_STEPS
from headpool.errors import RequestError
from headpool.text import TextData, is_file_name

GROUPS = ("search", "contiguous")
SCOPES = ("layer", "attention")

TEXT = ("calibration", "text_column", "calibration_tokens", "calibration_window", "device")
"""What choosing gains on calibration text may be told, too."""


@dataclass(frozen=True)
class Alignment:
    """How a model is aligned (docs/method.md has the figures behind the defaults).

    calibration: documents like those that the model was trained on; without them alignment goes by the weights alone,
        and refit and healing are left out.
    tokens, window: how many tokens of it are used, and how many make a window (None: half the model's positions, at
        most 2048).
    groups: which heads share is searched for, or neighbours do. refit: whether the output projection is refitted.
    heal: for how many steps each layer is healed; 0 leaves it out. heal_scope: whether the whole decoder layer is
        trained for that, norms and MLP included (experts are not), or its attention projections alone.
    learning_rate: of healing, at its peak, relative to the size of what is trained (heal.Schedule).
    device: such as cuda:0; None takes a GPU where there is one.
    work: where the work so far is kept; None puts it beside the output.
    plot: a PNG of what a dry run predicts.
    progress: called with the tokens of calibration text that have gone through a layer so far and in all.
    """

    calibration: TextData | None = None
    text_column: str = "text"
    tokens: int = CALIBRATION_TOKENS
    window: int | None = None
    groups: str = "search"
    refit: bool = True
    heal: int = HEAL_STEPS
    heal_scope: str = "layer"
    learning_rate: float = HEAL_RATE
    device: str | None = None
    work: Path | None = None
    plot: Path | None = None
    progress: Callable[[int, int], None] = lambda done, total: None

    def __post_init__(self) -> None:
        for name, value, known in (("groups", self.groups, GROUPS), ("heal scope", self.heal_scope, SCOPES)):
            if value not in known:
                raise RequestError(f"unknown {name} {value!r}; there are {', '.join(known)}")
        if not 0 < self.learning_rate < math.inf:
            raise RequestError(f"heal_learning_rate {self.learning_rate} is no positive number")

    @property
    def whole_layers(self) -> bool:
        """Whether more than attention changes."""
        return self.calibration is not None and self.heal > 0 and self.heal_scope == "layer"

    def chosen(self) -> list[str]:
        """The names of what is not at its default, but for where things lie and who is told."""
        elsewhere = ("work", "plot", "progress")
        told = [one for one in fields(self) if one.name not in elsewhere]
        names = {"tokens": "calibration_tokens", "window": "calibration_window", "learning_rate": "heal_learning_rate"}
        return [names.get(one.name, one.name) for one in told if getattr(self, one.name) != one.default]

    def needing_text(self) -> list[str]:
        """The names of what was chosen and can only be done on calibration text."""
        off = {"refit": self.refit, "heal": self.heal}
        return [name for name in self.chosen() if name not in ("groups", "device") and off.get(name, True)]

    def text_options(self) -> dict[str, Any]:
        """What gains that are chosen on text depend on besides it, in JSON's types."""
        return {"calibration_tokens": self.tokens}

    def options(self) -> dict[str, Any]:
        """What the aligned result depends on besides the text, in JSON's types."""
        return {"groups": self.groups} | ({} if self.calibration is None else self.text_options() | self._trained())

    def text_recipe(self) -> dict[str, Any]:
        """The keys of a recipe's convert section that say which text; a data set on the hub by its id."""
        if self.calibration is None:
            return {}
        name = self.calibration.name
        chosen: dict[str, Any] = {"calibration": name if is_file_name(name) else name.split(":")[0]}
        chosen |= {} if self.text_column == "text" else {"text_column": self.text_column}
        chosen["calibration_tokens"] = self.tokens
        return chosen | ({} if self.window is None else {"calibration_window": self.window})

    def recipe(self) -> dict[str, Any]:
        """The keys of a recipe's convert section that say all this."""
        return {"groups": self.groups} | ({} if self.calibration is None else self.text_recipe() | self._trained())

    def _trained(self) -> dict[str, Any]:
        return {
            "refit": self.refit,
            "heal": self.heal,
            "heal_scope": self.heal_scope,
            "heal_learning_rate": self.learning_rate,
        }


@dataclass(frozen=True)
class Prediction:
    """Lost energy of keys and of values, means over the layers, at `kv_heads` K/V heads: 0 where nothing is lost, 1
    where everything is. What refit and healing win back is not in it.
    """

    kv_heads: int
    cache_bytes_per_token: int
    keys: float
    values: float
