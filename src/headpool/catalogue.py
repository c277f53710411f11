"""Every model type that transformers has for generating text: whether it converts, and where the result opens.

What a row says comes from the functions that convert itself asks. docs/families.md is what
`python -m headpool.catalogue` prints.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from headpool.composite import composites
from headpool.convert.transcode.find import TRANSCODINGS
from headpool.families import families, family_or_refusal
from headpool.family import Family
from headpool.family_data import data
from headpool.instead import Refusal
from headpool.opening import opens_in

if TYPE_CHECKING:
    from rich.console import RenderableType

Status = Literal["converts", "transcodes", "refused"]


@dataclass(frozen=True)
class Row:
    """One model type. `to`: the classes that it can be transcoded to; layout, key_norm and rotary are None where it is
    refused or transcoded; `reason` says why it is refused, `nearest` what works instead.
    """

    name: str
    status: Status
    to: tuple[str, ...] = ()
    layout: str | None = None
    key_norm: str | None = None
    rotary: str | None = None
    opens_in: tuple[str, ...] = ()
    reason: str | None = None
    nearest: str | None = None


USUALLY = "a model of another class that converts"
"""What works instead where there is no telling."""


def rows() -> list[Row]:
    """All model types that a checkpoint can be of, by name."""
    refused = {name for names in data()["others"].values() for name in names}
    inside = {name for name, family in families().items() if family.within is not None}
    return [_row(name) for name in sorted({*families(), *composites(), *refused} - inside)]


def _row(name: str) -> Row:
    config = _bare_config(name)
    hosts = tuple(dict.fromkeys(one.host_class for one in TRANSCODINGS if one.source == name))
    if hosts:
        return Row(name, "transcodes", hosts, opens_in=(f"transformers {data()['transformers']}",))
    family = family_or_refusal(config)
    if isinstance(family, Refusal):
        return Row(name, "refused", reason=family.reason, nearest=family.instead or USUALLY)
    return Row(
        name,
        "converts",
        layout="separate" if family.fused is None else f"fused ({family.fused.projection})",
        key_norm=_key_norm(family),
        rotary=family.rotary,
        opens_in=tuple(opens_in(config)),
    )


def _bare_config(name: str) -> Mapping[str, Any]:
    """The least that a config of a model_type can hold."""
    composite = composites().get(name)
    config: dict[str, Any] = {}
    for key in reversed(composite.path if composite else ()):
        config = {key: config}
    return {"model_type": name} | config


def _key_norm(family: Family) -> str | None:
    if family.key_gains is not None:
        return "gains for every key head"
    normed = any(re.match(r"k(ey)?_?(layer)?norm", name) for name in family.attention_tensors)
    return "per head" if normed else None


SERVERS = """`make serving` converts random models to 4 K/V heads beside 12 query heads of 32 dimensions, and asks
servers on a CPU, in float32, for transformers' greedy tokens and for its log-probabilities within 0.001. llama and
qwen2 give them in vLLM 0.32.0 (its CPU build) and in llama.cpp (llama-cpp-python 0.3.36), phi in vLLM through its
transformers backend. What was in the way: vLLM's CPU build refuses heads of fewer than 32 dimensions, and llama.cpp's
cache, float16 by default, moves log-probabilities by up to 0.005, enough to turn a close choice."""


def to_dict(found: list[Row]) -> dict[str, Any]:
    """The rows as `headpool families --json` prints them."""
    return {"families": [asdict(row) for row in found]}


def table(found: list[Row]) -> "RenderableType":
    """The rows for a terminal, those that convert first."""
    from rich.table import Table

    drawn = Table("family", "layout", "key norm", "rotary", "status", "opens in")
    for row in _in_order(found):
        drawn.add_row(*_cells(row))
    return drawn


def _in_order(found: list[Row]) -> list[Row]:
    order: list[Status] = ["converts", "transcodes", "refused"]
    return sorted(found, key=lambda row: (order.index(row.status), row.name))


def _cells(row: Row) -> tuple[str, ...]:
    what = {
        "converts": "converts",
        "transcodes": f"transcodes to {', '.join(row.to)}",
        "refused": f"refused: {row.reason}; instead: {row.nearest}",
    }[row.status]
    return row.name, row.layout or "", row.key_norm or "", row.rotary or "", what, ", ".join(row.opens_in)


def markdown(found: list[Row]) -> str:
    """docs/families.md."""
    return "\n".join(_lines(found)) + "\n"


def _lines(found: list[Row]) -> Iterator[str]:
    counts = {status: sum(row.status == status for row in found) for status in ("converts", "transcodes", "refused")}
    yield "# Families"
    yield ""
    yield "```sh"
    yield "headpool families"
    yield "```"
    yield ""
    yield f"Of the {len(found)} model types that transformers {data()['transformers']} has for generating text,"
    yield f"{counts['converts']} convert and {counts['transcodes']} are transcoded first (`--transcode`,"
    yield "[how](transcoding.md)); the others are refused, with the reason. Image-text and other composite models are"
    yield "converted in their language model. *Opens in* holds what was tried: transformers by a test of every family,"
    yield "servers by `make serving`. `python -m headpool.catalogue` prints this page."
    yield ""
    yield "| family | layout | key norm | rotary | | opens in |"
    yield "|---|---|---|---|---|---|"
    for row in _in_order(found):
        if row.status != "refused":
            yield f"| {' | '.join(_cells(row))} |"
    yield ""
    yield "## Servers"
    yield ""
    yield SERVERS
    yield ""
    yield "## Refused"
    yield ""
    yield "Of any family, headpool refuses checkpoints that are quantized (convert the unquantized one), adapters"
    yield "(merge them first), and models whose code comes with the checkpoint (take one with a stock class)."
    yield ""
    yield "| family | because | what works |"
    yield "|---|---|---|"
    for row in found:
        if row.status == "refused":
            yield f"| {row.name} | {str(row.reason).replace('|', '/')} | {row.nearest} |"


if __name__ == "__main__":
    print(markdown(rows()), end="")  # noqa: T201
