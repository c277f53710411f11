"""A conversion killed with SIGKILL, at every step it takes and at random moments, leaves no destination that loads."""

import json
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny

from headpool import card, destination
from headpool.convert.run import convert_checkpoint

CRASH = Path(tiny.__file__).parent / "crash.py"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.usefixtures("quick_check")
def test_killed_at_every_step(tmp_path: Path) -> None:
    source = tiny.checkpoint(tmp_path / "source", "llama", tokenizer=True, max_shard_size="100KB")
    convert_checkpoint(str(source), tmp_path / "expected" / "out", kv_heads=4)
    expected = contents(tmp_path / "expected" / "out")
    out = tmp_path / "killed" / "out"
    out.parent.mkdir()
    first, deaths = 1, 0
    while True:
        done = subprocess.run(
            [sys.executable, str(CRASH), str(source), str(out), str(first)],
            capture_output=True,
            text=True,
            check=True,
        )
        *died, last = [json.loads(line) for line in done.stdout.splitlines()]
        for attempt in died:
            entries = attempt["entries"]
            assert "out" not in entries
            # config.json lies beside the weights only when everything is written and checked: in the last instant.
            if ".out.partial/config.json" in entries:
                assert {name.removeprefix(".out.partial/") for name in entries} >= set(expected)
        deaths += len(died)
        if last["finished"]:
            break
        # Killed right after the rename: then the destination is whole.
        assert contents(out) == expected
        deaths += 1
        for path in out.iterdir():
            path.unlink()
        out.rmdir()
        first = last["die_at"] + 1
    assert contents(out) == expected, "the run after all those deaths succeeds"
    assert [path.name for path in out.parent.iterdir()] == ["out"], "and clears what they left"
    assert deaths > 40


@pytest.mark.usefixtures("quick_check")
def test_killed_at_every_step_of_a_replacement(tmp_path: Path) -> None:
    source = tiny.checkpoint(tmp_path / "source", "llama", num_hidden_layers=1)
    out = tmp_path / "place" / "out"
    out.parent.mkdir()
    command = [sys.executable, str(CRASH), str(source), str(out), "1", "replace"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    *died, last = [set(json.loads(line)["entries"]) for line in done.stdout.splitlines()]
    names = ("config.json", "model.safetensors", "headpool.json", "generation_config.json", "README.md")
    new = {f"out/{name}" for name in names}
    for entries in died:
        whole_old = "out/old" in entries or ("out" not in entries and ".out.replaced/old" in entries)
        assert whole_old != (new <= entries), entries
    assert sum(".out.replaced/old" in entries and "out" not in entries for entries in died) >= 1
    assert last == {"out"} | new
    # The moment between the two renames: the next run begins by putting the old one back.
    shutil.rmtree(out)
    (out.parent / ".out.replaced").mkdir()
    (out.parent / ".out.replaced" / "old").write_text("old")
    convert_checkpoint(str(source), out, kv_heads=4, overwrite=True)
    assert {path.name for path in out.parent.iterdir()} == {"out"}


def test_killed_at_random_moments(tmp_path: Path) -> None:
    """The real command with its real check, killed from outside while it starts, writes and checks."""
    source = tiny.checkpoint(tmp_path / "source", "llama", tokenizer=True)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "headpool", "convert", str(source), str(out), "--kv-heads", "4"]
    begin = time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    seconds = time.monotonic() - begin
    expected = contents(out)
    chosen = random.Random(0)
    for _ in range(4):
        for path in out.iterdir() if out.exists() else ():
            path.unlink()
        if out.exists():
            out.rmdir()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(seconds * chosen.uniform(0.3, 0.95))
        process.kill()
        process.wait()
        assert not out.exists() or contents(out) == expected
    if not out.exists():
        subprocess.run(command, check=True, capture_output=True)
    assert contents(out) == expected


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_by_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    source = tiny.checkpoint(tmp_path / "source", "llama", tokenizer=True)
    out = tmp_path / "place" / "out"
    command = [sys.executable, "-m", "headpool", "convert", str(source), str(out), "--kv-heads", "4"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not out.parent.exists():
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate()
    assert process.returncode == 128 + number
    assert f"stopped by {number.name}" in err
    assert not out.parent.exists(), "what was made for the destination is gone again"


class Stopped(BaseException):
    """As a signal's handler raises it."""


def _stop(number: int, frame: Any) -> None:
    raise Stopped


@pytest.mark.usefixtures("quick_check")
def test_stopped_by_a_signal_while_the_card_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that draws goes on until it is done; whenever that is, nothing of it stays."""
    source = tiny.checkpoint(tmp_path / "source", "llama", tokenizer=True)
    main, removing, remove = threading.main_thread().ident, threading.Event(), shutil.rmtree
    assert main is not None
    drawers: list[threading.Thread] = []

    def drawing(done: Mapping[str, Any]) -> dict[str, bytes]:
        drawers.append(threading.current_thread())
        while "join" not in {frame.name for frame in traceback.extract_stack(sys._current_frames()[main])}:
            time.sleep(0.01)  # until the tensors are written and the drawing alone is waited for
        signal.pthread_kill(main, signal.SIGTERM)
        assert removing.wait(60)
        return {}

    def emptying(folder: Path) -> None:
        """As rmtree, whose list of what is there may be old by the time that it removes that."""
        listed = list(folder.iterdir())
        removing.set()
        drawers[0].join()
        for path in listed:
            remove(path) if path.is_dir() else path.unlink()
        folder.rmdir()

    monkeypatch.setattr(card, "cache_plot", drawing)
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        with monkeypatch.context() as patched, pytest.raises(Stopped):
            patched.setattr(destination.shutil, "rmtree", emptying)
            convert_checkpoint(str(source), tmp_path / "place" / "out", kv_heads=4)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(drawers) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
