"""Convert a checkpoint to fewer key/value heads: plan, pool, write, check."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headpool.convert.aligned.options import Alignment
    from headpool.convert.result import Conversion
    from headpool.convert.run import convert_checkpoint

__all__ = ["Alignment", "Conversion", "convert_checkpoint"]


def __getattr__(name: str) -> Any:
    """The names above, imported when they are asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from headpool.convert import run
    from headpool.convert.aligned import options

    return getattr(options if name == "Alignment" else run, name)
