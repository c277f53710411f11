"""A destination appears whole or not at all, and only one process writes it."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headpool.destination import check_destination, check_space, staged
from headpool.errors import HeadpoolError, RequestError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_appears_at_the_end_only(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with staged(out, overwrite=False) as staging:
        (staging / "a").write_text("a")
        assert not out.exists()
    assert names(out) == ["a"]
    assert names(out.parent) == ["out"]


@pytest.mark.parametrize("failure", [ValueError("x"), KeyboardInterrupt(), SystemExit(3)])
def test_a_failure_leaves_nothing(tmp_path: Path, failure: BaseException) -> None:
    with pytest.raises(type(failure)), staged(tmp_path / "deep" / "out", overwrite=False) as staging:
        (staging / "a").write_text("a")
        raise failure
    assert names(tmp_path) == [], "parents that were made for it are gone too"


def test_replaces_only_at_the_end(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("old")
    with pytest.raises(ValueError, match="x"), staged(out, overwrite=True):
        raise ValueError("x")
    assert names(out) == ["old"]
    with staged(out, overwrite=True) as staging:
        (staging / "new").write_text("new")
        assert names(out) == ["old"]
    assert names(out) == ["new"]
    assert names(tmp_path) == ["out"]


def test_one_that_appeared_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(RequestError, match="appeared"), staged(out, overwrite=False):
        out.mkdir()
        (out / "theirs").write_text("theirs")
    assert names(out) == ["theirs"]


def test_a_second_writer_is_refused_and_a_dead_ones_rest_is_cleared(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with staged(out, overwrite=False):
        with pytest.raises(RequestError, match="another process"), staged(out, overwrite=False):
            pass
        assert names(tmp_path) == [".out.partial"], "the refused writer must not remove the first one's work"
    out.rmdir()
    dying = f"""
import os
from pathlib import Path
from headpool.destination import staged
with staged(Path({str(out)!r}), overwrite=False) as staging:
    (staging / "deep").mkdir()
    (staging / "deep" / "rest").write_text("rest")
    os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", dying], check=False).returncode == 9
    assert names(tmp_path) == [".out.partial"]
    with staged(out, overwrite=False) as staging:
        assert names(staging) == []
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize(
    ("error", "kind"), [("ENOSPC", HeadpoolError), ("EACCES", RequestError), ("EIO", HeadpoolError)]
)
def test_the_systems_refusals_become_one_line(tmp_path: Path, error: str, kind: type[HeadpoolError]) -> None:
    with pytest.raises(kind) as caught, staged(tmp_path / "out", overwrite=False):
        raise OSError(getattr(errno, error), os.strerror(getattr(errno, error)), "file")
    assert type(caught.value) is kind
    assert "out" in str(caught.value)
    assert names(tmp_path) == []


def test_refuses_before_anything_is_written(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(source)
    for out, overwrite, says in [
        (source, True, "inside one another"),
        (source / "deep" / "out", False, "inside one another"),
        (tmp_path, True, "inside one another"),
        (tmp_path / "link", True, "inside one another"),
        (tmp_path / "file", True, "no directory"),
        (tmp_path / "file" / "out", False, "no directory"),
    ]:
        with pytest.raises(RequestError, match=says):
            check_destination(out, overwrite=overwrite, source=source)
    with pytest.raises(RequestError, match="--overwrite"):
        check_destination(source, overwrite=False)
    with pytest.raises(RequestError, match=r"needs .* GiB, the disk has"):
        check_space(tmp_path / "out", 1 << 60)
    with (
        pytest.raises(RequestError, match="cannot be written"),
        staged(tmp_path / "file" / "out", overwrite=False),
    ):
        pass
    assert names(tmp_path) == ["file", "link", "source"]
    assert names(source) == []


def test_a_replacement_that_fails_puts_the_old_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("old")
    rename = Path.rename

    def full(self: Path, target: Path) -> Path:
        if self.name == ".out.partial":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(HeadpoolError, match="the disk filled up"), staged(out, overwrite=True) as staging:
        (staging / "new").write_text("new")
    assert names(tmp_path) == ["out"]
    assert names(out) == ["old"]


def test_one_killed_between_its_two_renames_is_mended(tmp_path: Path) -> None:
    (tmp_path / ".out.replaced").mkdir()
    (tmp_path / ".out.replaced" / "old").write_text("old")
    (tmp_path / ".out.partial").mkdir()
    with pytest.raises(ValueError, match="x"), staged(tmp_path / "out", overwrite=True):
        raise ValueError("x")
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["old"]


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").write_text("x")
    (tmp_path / ".out.partial").symlink_to(victim)
    with pytest.raises(RequestError, match="cannot be written"), staged(tmp_path / "out", overwrite=False):
        pass
    assert names(victim) == ["precious"]
