"""Long work seen from outside: bars on a terminal, plain lines elsewhere, always on standard error."""

import sys
import time
from types import TracebackType
from typing import Any, Self

LINE_EVERY_SECONDS = 10.0


class Progress:
    """Shows tasks as they are reported by calling it with a task's name, how much is done, how much there is, and
    perhaps a note.

    Amounts in the unit "bytes" are shown in powers of ten, in every other unit as plain counts. Use it as a context
    manager; calls may come from any thread, one at a time.
    """

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._bars = _bars(unit) if sys.stderr.isatty() else None
        self._begun: dict[str, Any] = {}
        self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._bars:
            self._bars.stop()

    def __call__(self, task: str, done: int, total: int, note: str = "") -> None:
        if self._bars:
            if task not in self._begun:
                self._begun[task] = self._bars.add_task(task, total=total, note="")
            self._bars.start()
            self._bars.update(self._begun[task], completed=done, note=note)
            if self._bars.finished:  # make room for what another one shows next
                self._bars.stop()
        else:
            self._line(task, done, total, note)

    def _line(self, task: str, done: int, total: int, note: str) -> None:
        now = time.monotonic()
        begun, before = self._begun.setdefault(task, (now, done))
        if now - self._last_line >= LINE_EVERY_SECONDS and now > begun:
            self._last_line = now
            line = describe(task, done, total, now - begun, self._unit, before)
            print(f"{line}, {note}" if note else line, file=sys.stderr, flush=True)  # noqa: T201


def describe(task: str, done: int, total: int, seconds: float, unit: str, before: int = 0) -> str:
    """One line about work under way: how much of it, how fast, how long still; `before` was done when the seconds
    began.
    """
    rate = (done - before) / seconds
    scale, name = (1e6, "MB") if unit == "bytes" else (1, unit)
    left = (total - done) / rate if rate else float("inf")
    return (
        f"{task}: {done / scale:,.0f} of {total / scale:,.0f} {name}, {rate / scale:,.0f} {name}/s, {left:,.0f} s left"
    )


def _bars(unit: str) -> Any:
    from rich import progress
    from rich.console import Console

    amount: tuple[progress.ProgressColumn, ...] = (progress.MofNCompleteColumn(), progress.TextColumn(unit))
    if unit == "bytes":
        amount = (progress.DownloadColumn(), progress.TransferSpeedColumn())
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        *amount,
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[note]}"),
    )
    return progress.Progress(*columns, console=Console(stderr=True), transient=True)
