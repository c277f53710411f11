"""Measure checkpoints: perplexity and key/value-cache bytes, before and after."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headpool.eval.measure import Report, evaluate
    from headpool.eval.models import ModelSpec
    from headpool.eval.report import write_report

__all__ = ["ModelSpec", "Report", "evaluate", "write_report"]


def __getattr__(name: str) -> Any:
    """The names above, imported when they are asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from headpool.eval import measure, models, report

    return getattr({"write_report": report, "ModelSpec": models}.get(name, measure), name)
