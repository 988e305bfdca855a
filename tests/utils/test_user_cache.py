"""One file in the user's cache directory: replaced whole or not at all, and never a reason to fail."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import IO

import pytest

from lightning_gpuopt.utils.user_cache import UserCache


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "lightning-gpuopt/kind"


def cache(key: str = "a") -> UserCache:
    return UserCache("kind", [1, key], ".txt")


def test_what_was_kept_is_loaded_by_the_same_key_only(folder: Path) -> None:
    assert cache().load(bytes.decode) is None
    cache().keep(lambda stream: stream.write(b"one"))
    cache().keep(lambda stream: stream.write(b"two"))
    assert cache().load(bytes.decode) == "two"
    assert cache("b").load(bytes.decode) is None
    assert [each.suffix for each in folder.iterdir()] == [".txt"]


@pytest.mark.parametrize("error", [OSError("disk full"), ValueError("ZIP does not support timestamps before 1980")])
def test_a_write_that_fails_leaves_the_earlier_file_and_nothing_else(folder: Path, error: Exception) -> None:
    def half(stream: IO[bytes]) -> None:
        stream.write(b"ha")
        raise error

    cache().keep(lambda stream: stream.write(b"whole"))
    cache().keep(half)
    assert cache().load(bytes.decode) == "whole"
    assert len(list(folder.iterdir())) == 1


def test_what_cannot_be_read_is_as_if_it_were_not_there(folder: Path) -> None:
    cache().keep(lambda stream: stream.write(b"\xff"))
    assert cache().load(bytes.decode) is None


def test_where_the_home_cannot_be_written_the_temporary_folder_serves(folder: Path) -> None:
    folder.parent.write_text("a file where the directory would be")
    cache().keep(lambda stream: stream.write(b"one"))
    assert cache().load(bytes.decode) == "one"
    (own,) = Path(tempfile.gettempdir()).iterdir()
    assert (own.stat().st_mode & 0o777, own.name) == (0o700, f"lightning-gpuopt-{os.getuid()}")


def test_not_where_others_may_write_there(folder: Path) -> None:
    folder.parent.write_text("a file where the directory would be")
    cache().keep(lambda stream: stream.write(b"one"))
    (own,) = Path(tempfile.gettempdir()).iterdir()
    own.chmod(0o777)
    assert cache().load(bytes.decode) is None
    cache().keep(lambda stream: stream.write(b"two"))
    own.chmod(0o700)
    assert cache().load(bytes.decode) == "one"


def test_without_a_directory_to_write_to_nothing_is_kept(folder: Path) -> None:
    for place in (folder.parent, Path(tempfile.gettempdir(), f"lightning-gpuopt-{os.getuid()}")):
        place.write_text("a file where the directory would be")
    cache().keep(lambda stream: stream.write(b"one"))
    assert cache().load(bytes.decode) is None
