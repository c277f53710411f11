"""How a command ends and what it prints: exit codes, signals, standard output kept for the one JSON object."""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import typer

from headpool.errors import HeadpoolError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signalled(BaseException):
    """One of SIGNALS arrived: unwind, clean up, exit with 128 + number."""


def run_to_exit(app: Callable[[], Any]) -> None:
    """Run a command line; exits 0, 1 (it failed), 2 (impossible) or 128 + n (stopped by signal n)."""
    for number in SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup's
            signal.signal(number, _on_signal)
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the exit would try, and fail, once more
        where = f"{error.filename}: " if error.filename is not None else ""
        _fail(f"{where}{error.strerror or error}", 1)
    except HeadpoolError as error:
        _fail(str(error), error.exit_code)
    except Signalled as stop:
        number = stop.args[0]
        _fail(f"stopped by {signal.Signals(number).name}; nothing half-written was left", 128 + number)


def _on_signal(number: int, _: Any) -> None:
    for one in SIGNALS:
        signal.signal(one, signal.SIG_IGN)  # impatience must not interrupt the cleaning up
    raise Signalled(number)


def _fail(message: str, code: int) -> None:
    print(f"headpool: {message}", file=sys.stderr)  # noqa: T201
    sys.exit(code)


@contextlib.contextmanager
def stdout_for_json(as_json: bool) -> Iterator[None]:
    """With --json, keep standard output for the one object: whatever else prints goes to standard error."""
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield


def show(renderable: Any, values: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(values, allow_nan=False))
        return
    from rich.console import Console

    # Paths may hold brackets: nothing here is markup.
    console = Console(width=None if sys.stdout.isatty() else 140, markup=False, highlight=False)
    console.print(renderable)
