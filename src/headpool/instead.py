"""A model that is refused: the reason, and what works instead, told from the reason."""

import re
from dataclasses import dataclass

NEAREST: tuple[tuple[str, str], ...] = (
    ("recurrent or state-space", "nothing: there is no K/V cache to make smaller"),
    ("drafts for another", "the model that it drafts for"),
    ("moves robots", "nothing: there is no text to keep keys and values of"),
    ("multi-head latent", "nothing: its cache holds one latent vector per token already, smaller than few K/V heads"),
    ("encoder-decoder", "a decoder-only model of its kind"),
    ("several models that generate", "its thinker alone, where that is saved as a model of its own"),
    ("language model's config has no", "a composite model around a language model that converts"),
    ("under other names", "the same weights saved as a model of a class that converts, such as Llama"),
    ("no num_key_value_heads", "a model of a class that has the field, such as Llama or, by --transcode, GPT-NeoX"),
    ("remote code", "a model with a class in transformers"),
)
"""What works instead, by a pattern of the reason."""

ALONE = "its language model alone, saved as a causal model ({}), which converts"
"""For composite models around a language model of a family that converts."""


@dataclass(frozen=True)
class Refusal:
    """Why a model is refused, and as a string the whole message.

    subject: what is refused. inside: the model_type of the language model in it, where that converts by itself.
    """

    subject: str
    reason: str
    inside: str | None = None

    @property
    def instead(self) -> str | None:
        """What works in its place, None where there is no telling."""
        if self.inside is not None:
            return ALONE.format(self.inside)
        return next((what for pattern, what in NEAREST if re.search(pattern, self.reason)), None)

    def __str__(self) -> str:
        works = self.instead is not None and not self.instead.startswith("nothing")
        return f"{self.subject}: {self.reason}" + (f"; instead: {self.instead}" if works else "")
