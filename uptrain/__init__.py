"""Recover quality after a conversion with a little more training."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headpool.uptrain.run import Uptraining, uptrain

__all__ = ["Uptraining", "uptrain"]


def __getattr__(name: str) -> Any:
    """The names above, imported when they are asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from headpool.uptrain import run

    return getattr(run, name)
