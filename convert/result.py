"""What a conversion did, for a program and for a person."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from headpool.convert.aligned.options import Prediction

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Conversion:
    """What a conversion did: sizes in bytes, times in seconds.

    `layers`: what method aligned found of each; `predictions` and `estimate`: what a dry run of it tells.
    `peak_rss_bytes` is the operating system's figure for the larger of this process and its check. `copied` says that
    the source had `kv_heads` K/V heads already, `transcoded` the model types that it went "from" and "to", if any.
    """

    output: str
    method: str
    source_kv_heads: int
    kv_heads: int
    pooled_tensors: int
    copied: bool
    transcoded: dict[str, str] | None
    dry_run: bool
    output_bytes: int
    seconds: float
    peak_rss_bytes: int
    warnings: tuple[str, ...] = ()
    layers: tuple[dict[str, Any], ...] = ()
    predictions: tuple[Prediction, ...] = ()
    estimate: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def describe(self) -> "RenderableType":
        """For a person: what was done in words, and what is predicted as a table."""
        from rich.console import Group

        if self.estimate is None:
            return self._words()
        needed = (f"{self.estimate[f'{what}_bytes'] / 2**30:.2f} GiB of {what}" for what in ("memory", "disk"))
        return Group(self._words(), _table(self.predictions), f"aligning needs at most {' and '.join(needed)}")

    def _words(self) -> str:
        verb = "would write" if self.dry_run else "wrote"
        what = f"method {self.method}"
        if self.copied:
            what = "nothing to pool" + ("" if self.transcoded else ": a copy")
        if self.transcoded:
            what = f"{self.transcoded['from']} as {self.transcoded['to']}, {what}"
        result = (
            f"{verb} {self.output}: {self.source_kv_heads} -> {self.kv_heads} K/V heads ({what}), "
            f"{self.pooled_tensors} tensors pooled, {self.output_bytes / 1e9:,.3f} GB in {self.seconds:.1f} s"
        )
        lines = [result, *(f"warning: {warning}" for warning in self.warnings)]
        if not self.copied:
            lines.append("It is not uptrained yet: expect it to be worse than its source until it is.")
        return "\n".join(lines)


def _table(predictions: tuple[Prediction, ...]) -> "RenderableType":
    from rich.table import Table

    table = Table(caption="lost energy, mean over the layers, before refit and healing", caption_justify="left")
    for column in ("K/V heads", "cache bytes/token", "keys lost", "values lost"):
        table.add_column(column, justify="right")
    for one in predictions:
        table.add_row(str(one.kv_heads), f"{one.cache_bytes_per_token:,}", f"{one.keys:.2%}", f"{one.values:.2%}")
    return table
