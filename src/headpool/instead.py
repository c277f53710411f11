"""What works instead of a model that is refused, told from the reason."""

import re

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

_MARK = "; instead: "


def what_works(reason: str, inside: str | None = None) -> str | None:
    """What works instead of a model refused for this reason, None where there is no telling.

    inside: the model_type of the language model in it, where that converts by itself.
    """
    if inside is not None:
        return ALONE.format(inside)
    return next((what for pattern, what in NEAREST if re.search(pattern, reason)), None)


def with_what_works(reason: str, inside: str | None = None) -> str:
    """The reason, and what works instead where anything does, for a message."""
    what = what_works(reason, inside)
    return reason if what is None or what.startswith("nothing") else f"{reason}{_MARK}{what}"


def reason_alone(message: str) -> str:
    """What `with_what_works` was given."""
    return message.partition(_MARK)[0]
