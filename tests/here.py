"""The check of a result without a process of its own, and its card without a plot: both take longer than the rest."""

from pathlib import Path

import pytest

from headpool import card, check, parcel
from headpool.convert import run
from headpool.uptrain import output


class CheckHere:
    """the check of a result in this process, where transformers is loaded already: the same code without seconds of
    start-up.
    """

    def __init__(self, config: Path, weights: Path) -> None:
        self._directories = (str(config), str(weights))

    def result(self) -> check.Report:
        return check.Report.of(check.load(*self._directories))

    def kill(self) -> None:
        pass


def check_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """For conversions, for uptraining and for publishing."""
    monkeypatch.setattr(run, "Check", CheckHere)
    monkeypatch.setattr(output, "Check", CheckHere)
    monkeypatch.setattr(parcel, "Check", CheckHere)
    monkeypatch.setattr(card, "cache_plot", lambda done: {})
