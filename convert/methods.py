"""The methods as data: which parts of a layer each changes, and which it needs in memory together."""

from dataclasses import dataclass

from headpool.convert.layouts import Part


@dataclass(frozen=True)
class Method:
    """How to reach fewer K/V heads.

    `units` are the parts of a layer that must be in memory together; the method's function is called once for each,
    with the other parts None. The parts named here are also all that it changes: every other tensor is copied.
    `aligned`: the whole model is gone through first, layer by layer, and what changes is computed there.
    `calibrates_gains`: the gains of norms for every key head can be chosen on calibration text.
    """

    name: str
    units: tuple[tuple[Part, ...], ...]
    aligned: bool = False
    calibrates_gains: bool = False


METHODS = {
    method.name: method
    for method in (
        Method("mean", units=(("k",), ("v",)), calibrates_gains=True),
        Method("first", units=(("k",), ("v",)), calibrates_gains=True),
        Method("random", units=(("k",), ("v",))),
        Method("aligned", units=(("q", "k", "v", "o"),), aligned=True),
    )
}
"""The published baselines (Ainslie et al. 2023, section 2.1 and figure 4), whose functions are in pool, and ours."""
