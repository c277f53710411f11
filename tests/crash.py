"""Die by SIGKILL inside a conversion, at a chosen moment. Run as a program; used by test_kill.py.

    python crash.py SOURCE OUT FIRST [replace]

Forks a converting child again and again. Child number n is killed at its n-th audited operation on files (open, mkdir,
rename, remove, truncate, ...), counted from the moment when it begins to write, for n = FIRST, FIRST + 1, ... until one
finishes. After each death a JSON line is printed: what stands in the destination's folder. With `replace` each child
finds an older destination, a directory that holds the file `old`.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from headpool import card, check
from headpool.convert import compute, run  # noqa: F401 - loaded now: its import would be thousands of events

ModelCard.from_template(ModelCardData(), template_str="---\n{{ card_data }}\n---\n")  # loads what cards need

FILE_EVENTS = ("open", "os.", "shutil.", "fcntl.")


class NoCheck:
    """The check has a process of its own; what dies here is the one that writes."""

    def __init__(self, config: Path, weights: Path) -> None:
        pass

    def result(self) -> check.Report:
        return check.Report()

    def kill(self) -> None:
        pass


def convert(source: str, out: Path, die_at: int) -> None:
    count = 0

    def on_event(event: str, _: object) -> None:
        nonlocal count
        if event.startswith(FILE_EVENTS):
            count += 1
            if count == die_at:
                os.kill(os.getpid(), signal.SIGKILL)

    staged = run.staged

    def from_here(out: Path, *, overwrite: bool):  # type: ignore[no-untyped-def]
        sys.addaudithook(on_event)
        return staged(out, overwrite=overwrite)

    run.Check, run.staged = NoCheck, from_here  # type: ignore[misc, assignment]
    card.cache_plot = lambda done: {}  # drawing loads matplotlib
    run.convert_checkpoint(source, out, kv_heads=4, overwrite=out.exists())


def main(source: str, out: Path, first: int, *, replace: bool) -> None:
    die_at, finished = first, False
    while not finished:
        if replace:
            shutil.rmtree(out.parent)
            out.mkdir(parents=True)
            for name in ("old", "config.json"):
                (out / name).write_text("old")
        child = os.fork()
        if child == 0:
            convert(source, out, die_at)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        finished = os.WIFEXITED(status)
        if finished and os.WEXITSTATUS(status) != 0:
            raise SystemExit(f"a conversion failed by itself at {die_at}")
        entries = sorted(str(path.relative_to(out.parent)) for path in out.parent.rglob("*"))
        print(json.dumps({"die_at": die_at, "finished": finished, "entries": entries}), flush=True)
        if out.exists() and not finished and not replace:
            return
        die_at += 1


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), replace=sys.argv[4:] == ["replace"])
