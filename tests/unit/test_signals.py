"""Which signals a training process notes, and that it leaves their handlers as they were."""

import signal
from collections.abc import Iterator

import pytest

from headpool.uptrain.signals import SIGNALS, StopRequest


@pytest.fixture
def hang_up() -> Iterator[None]:
    """With a handler for hang-ups, which may be ignored where the tests run."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hang_up")
@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_noted(number: signal.Signals) -> None:
    before = {one: signal.getsignal(one) for one in SIGNALS}
    with StopRequest() as stop:
        assert stop.number == 0
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGTERM)
    assert stop.number == number
    assert {one: signal.getsignal(one) for one in SIGNALS} == before


@pytest.mark.usefixtures("hang_up")
def test_a_hang_up_that_nohup_ignores_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert stop.number == 0
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
