"""Bad image files: found once, kept, and looked at again."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from lightning_gpuopt.images.errors import CorruptSampleError
from lightning_gpuopt.images.file_checks import bad_images
from tests.images.pictures import encoded, photo

GOOD = encoded(photo(16, 16))


class Files:
    """Files in memory that count which of them are read."""

    def __init__(self, *contents: bytes) -> None:
        self.contents = list(contents)
        self.read: list[int] = []

    def __call__(self, number: int) -> bytes:
        self.read.append(number)
        if self.contents[number] == b"gone":
            raise CorruptSampleError("it is gone")
        return self.contents[number]

    def bad(self, key: str = "files", trust: bool = False) -> dict[int, str]:
        self.read = []
        return bad_images(self, len(self.contents), key, trust=trust)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "cache/lightning-gpuopt/bad-images"


def test_reasons_by_number() -> None:
    found = Files(GOOD, b"", GOOD, b"text", GOOD[:-9], b"gone").bad()
    assert list(found) == [1, 3, 4, 5]
    assert found[1] == "it is empty"
    assert found[3] == "not an image file (it begins with b'text')"
    assert found[5] == "it is gone"


def test_only_bad_files_are_read_again(cache: Path) -> None:
    files = Files(GOOD, b"bad", GOOD, b"bad")
    assert list(files.bad()) == [1, 3]
    assert sorted(files.read) == [0, 1, 2, 3]
    files.contents[1] = GOOD
    assert list(files.bad()) == [3]
    assert sorted(files.read) == [1, 3]
    assert list(files.bad()) == [3]
    assert files.read == [3]
    assert list(files.bad("others")) == [3]
    assert sorted(files.read) == [0, 1, 2, 3]
    assert len(list(cache.iterdir())) == 2


def test_another_process_has_just_looked() -> None:
    files = Files(GOOD, b"bad")
    files.bad()
    files.contents[1] = GOOD
    assert list(files.bad(trust=True)) == [1]
    assert files.read == []


def test_what_was_kept_may_be_broken_or_impossible(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Files(GOOD, b"bad")
    files.bad()
    (kept,) = cache.iterdir()
    kept.write_text("{")
    assert list(files.bad()) == [1]
    assert sorted(files.read) == [0, 1]
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert list(files.bad()) == [1]
    assert sorted(files.read) == [0, 1]


def test_other_ranks_read_no_file_where_the_home_cannot_be_written(
    tmp_path: Path,
) -> None:
    (tmp_path / "cache").write_text("a file where the folder would be")
    files = Files(GOOD, b"bad", GOOD)
    assert list(files.bad()) == [1]
    for _ in range(2):
        assert list(files.bad(trust=True)) == [1]
        assert files.read == []
