"""What reaches a training process from outside: signals, and what its launcher meant."""

import signal
from types import FrameType
from typing import Any, Self

PROCESSES = "HEADPOOL_PROCESSES"
"""The environment variable by which a launcher tells how many processes there are to be."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopRequest:
    """While this context is open, the first of SIGNALS to arrive is noted in `number` (0: none came), for the loop to
    obey between two steps. A hang-up that is ignored, as under nohup, stays so.
    """

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for one in SIGNALS:
            if one != signal.SIGHUP or signal.getsignal(one) is not signal.SIG_IGN:
                self._before[one] = signal.signal(one, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for one, handler in self._before.items():
            signal.signal(one, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.number = self.number or number
