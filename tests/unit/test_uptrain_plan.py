"""What tells text that training has read from text that has changed since."""

from pathlib import Path

import pytest

from headpool.uptrain import plan
from headpool.uptrain.plan import text_fingerprint


def test_text_is_known_by_its_contents_wherever_it_lies(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("here", "there[1]")]
    for folder in folders:
        folder.mkdir()
        (folder / "a.txt").write_text("some text")
        (folder / "b.txt").write_text("")
    here, there = (str(folder / "a.txt") for folder in folders)
    assert text_fingerprint(here) == text_fingerprint(there) != text_fingerprint(str(tmp_path / "here" / "b.txt"))
    both = str(tmp_path / "here" / "*.txt")
    assert text_fingerprint(both) not in (text_fingerprint(here), None)
    assert text_fingerprint("owner/set") is None
    before = text_fingerprint(both)
    (tmp_path / "here" / "a.txt").write_text("same size")
    assert text_fingerprint(both) != before


@pytest.mark.parametrize("size", [1, 4, 5, 8, 11, 12])
def test_every_byte_of_a_file_that_is_read_whole_counts(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "_BLOCK", 4)
    monkeypatch.setattr(plan, "_MOST_BLOCKS", 3)
    path = tmp_path / "a.txt"
    found = set()
    for number in range(size + 1):  # the last time nothing is changed
        path.write_bytes(bytes(1 if at == number else 0 for at in range(size)))
        found.add(text_fingerprint(str(path)))
    assert len(found) == size + 1


def test_of_a_large_file_beginning_middle_and_end_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_BLOCK", 4)
    monkeypatch.setattr(plan, "_MOST_BLOCKS", 3)
    path = tmp_path / "a.txt"
    texts = ["-" * 1000, "+" + "-" * 999, "-" * 500 + "+" + "-" * 499, "-" * 999 + "+"]
    found = [(path.write_text(text), text_fingerprint(str(path)))[1] for text in texts]
    assert len(set(found)) == 4
