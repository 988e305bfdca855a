"""Real folders, real LMDBs; the clock is the test's, so that no rate depends on the machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightning_gpuopt.doctor import data
from lightning_gpuopt.doctor.data import data_facts, file_system_of, histogram
from lightning_gpuopt.storage.reader import LMDBDataset
from lightning_gpuopt.storage.writer import LMDBWriter
from lightning_gpuopt.storage.writing.staging import Staging
from tests.images.pictures import encoded, photo


class Ticks:
    """A clock that gains a millisecond each time it is read."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1e-3
        return self.now_s


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made, to be empty after each test."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(data.tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def files(tmp_path: Path) -> Callable[..., Path]:
    def make(count: int, size: int = 1000, content: bytes | None = None, suffix: str = ".bin") -> Path:
        for number in range(count):
            folder = tmp_path / "data" / f"class{number % 3}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number}{suffix}").write_bytes(content or os.urandom(size))
        os.sync()
        return tmp_path / "data"

    return make


def test_a_folder_is_read_as_files_and_as_an_lmdb_of_them(files, place):
    folder = files(96)
    (folder / ".hidden").write_bytes(b"not seen")
    facts = data_facts(str(folder), Ticks())
    assert (facts.kind, facts.files, facts.complete, facts.failure) == ("folder", 96, True, "")
    assert facts.total_mib == 96 * 1000 / 2**20
    assert facts.sizes["4_kib"] == 96
    assert facts.read is not None
    assert facts.as_lmdb is not None
    assert facts.read.samples == facts.as_lmdb.samples == 24  # one in four
    assert (facts.decode_s, facts.image_folder) == (None, False)


def test_both_are_read_in_the_same_order(files, place, monkeypatch):
    read: dict[str, list[bytes]] = {"files": [], "lmdb": []}
    folder = files(64)
    plain_read, plain_items = data.read_file, LMDBDataset.__getitems__

    def read_file(path: str) -> bytes:
        read["files"].append(plain_read(path))
        return read["files"][-1]

    def items(self: LMDBDataset, indices: Any) -> list[Any]:
        found = plain_items(self, indices)
        read["lmdb"] += found
        return found

    monkeypatch.setattr(data, "read_file", read_file)
    monkeypatch.setattr(LMDBDataset, "__getitems__", items)
    data_facts(str(folder), Ticks())
    as_built, as_read = read["files"][:64], read["files"][64:]
    assert len(set(as_built)) == 64
    assert as_read == read["lmdb"]
    assert len(as_read) == 2 * 16  # cold and warm


def test_nothing_is_left_behind(files, place):
    folder = files(40)
    before = sorted(folder.parent.rglob("*"))
    data_facts(str(folder), Ticks())
    assert sorted(folder.parent.rglob("*")) == before


@pytest.mark.parametrize("where", [(LMDBWriter, "write"), (LMDBWriter, "close"), (Staging, "publish")])
def test_nothing_is_left_behind_by_ctrl_c(files, place, monkeypatch, caplog, where):
    def interrupted(self: object, *arguments: object) -> None:
        raise KeyboardInterrupt

    folder = files(40)
    monkeypatch.setattr(*where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        data_facts(str(folder), Ticks())
    assert list(place.iterdir()) == []
    assert caplog.records == []


def test_images_are_decoded_too(files, place):
    folder = files(40, content=encoded(photo(64, 48)), suffix=".jpg")
    facts = data_facts(str(folder), Ticks())
    assert facts.decode_s is not None
    assert facts.image_folder
    assert not data_facts(str(folder / "class0"), Ticks()).image_folder  # no class subfolders


def test_a_disk_that_is_full_is_told(files, place, monkeypatch):
    folder = files(40)
    usage = data.shutil.disk_usage(folder)
    monkeypatch.setattr(data.shutil, "disk_usage", lambda path: usage._replace(free=20_000))
    facts = data_facts(str(folder), Ticks())
    assert facts.failure == "there is not enough room on the disk for a temporary LMDB"
    assert facts.as_lmdb is None
    assert list(place.iterdir()) == []


def test_an_lmdb_on_another_disk_says_nothing_of_cold_reads(files, place, monkeypatch):
    plain_make = data.tempfile.mkdtemp

    def make(prefix: str, dir: str | None = None) -> str:
        if dir is not None:
            raise PermissionError(13, "Permission denied", dir)
        return plain_make(prefix=prefix)

    folder = files(40)
    monkeypatch.setattr(data.tempfile, "mkdtemp", make)
    facts = data_facts(str(folder), Ticks())
    assert facts.failure == "only warm reads are compared: no folder on the same file system is writable"
    assert facts.as_lmdb is not None
    assert (facts.as_lmdb.cold_per_s, facts.as_lmdb.samples) == (None, 10)
    assert list(place.iterdir()) == []


def test_few_files_are_not_measured(files, place):
    facts = data_facts(str(files(7)), Ticks())
    assert (facts.read, facts.failure) == (None, "7 files of a sample's size; 8 are needed")


def test_an_empty_folder(tmp_path, place):
    empty = tmp_path / "empty"
    empty.mkdir()
    facts = data_facts(str(empty), Ticks())
    assert (facts.files, facts.read, facts.failure) == (0, None, "0 files of a sample's size; 8 are needed")


def test_a_folder_that_cannot_be_read(tmp_path, monkeypatch):
    def refused(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(data.os, "scandir", refused)
    assert data_facts(str(tmp_path), Ticks()).failure == f"{tmp_path}: Permission denied"


def test_links_to_folders_are_followed_once_and_loops_are_not(files, tmp_path, place):
    folder = files(40)
    (folder / "class0/up").symlink_to("..")
    linked = tmp_path / "linked"
    linked.mkdir()
    for name in ("a", "b"):
        (linked / name).symlink_to(folder)
    facts = data_facts(str(linked), Ticks())
    assert (facts.files, facts.failure) == (40, "")


def test_large_files_are_no_samples(tmp_path, place, monkeypatch):
    monkeypatch.setattr(data, "_MAX_SAMPLE_BYTES", 100)
    (tmp_path / "shard.tar").write_bytes(bytes(101))
    facts = data_facts(str(tmp_path), Ticks())
    assert facts.failure == "0 files of a sample's size; 8 are needed; for large files, name one"


def test_a_file_that_goes_away_meanwhile_is_nothing_lost(files, place, monkeypatch):
    folder = files(40)
    plain_measure = data._measure

    def measure(read: Any, order: Any, paths: Any, clock: Any) -> Any:
        if place not in Path(paths[0]).parents:
            Path(paths[order[0]]).unlink()
        return plain_measure(read, order, paths, clock)

    monkeypatch.setattr(data, "_measure", measure)
    facts = data_facts(str(folder), Ticks())
    assert (facts.files, facts.failure) == (40, "")
    assert facts.read is not None


def test_a_small_file_is_not_measured(tmp_path, place):
    (tmp_path / "notes.txt").write_text("small")
    facts = data_facts(str(tmp_path / "notes.txt"), Ticks())
    assert (facts.read, facts.failure) == (None, "less than 1 MiB is too little to measure")


def test_a_file_that_cannot_be_read_is_left_out(files, place, monkeypatch):
    folder = files(33)
    plain_read = data.read_file

    def read_file(path: str) -> bytes:
        if path.endswith(f"{os.sep}7.bin"):
            raise PermissionError(13, "Permission denied", path)
        return plain_read(path)

    monkeypatch.setattr(data, "read_file", read_file)
    facts = data_facts(str(folder), Ticks())
    assert (facts.files, facts.failure) == (33, "")
    assert facts.read is not None
    assert facts.read.samples == 8


def test_a_listing_that_takes_too_long_ends(files, place, monkeypatch):
    monkeypatch.setattr(data, "_MAX_LISTED", 20)
    facts = data_facts(str(files(40)), Ticks())
    assert (facts.files, facts.complete) == (20, False)


def test_an_lmdb_dataset_is_read_as_it_is(tmp_path, place):
    with LMDBWriter(tmp_path / "train.lmdb") as writer:
        for number in range(50):
            writer.write((os.urandom(500), number))
    facts = data_facts(str(tmp_path / "train.lmdb"), Ticks())
    assert (facts.kind, facts.as_lmdb, facts.failure) == ("lmdb", None, "")
    assert facts.read is not None
    assert facts.read.samples == 50


def test_a_file_is_read_in_blocks(tmp_path, place):
    (tmp_path / "train.h5").write_bytes(os.urandom(10 * 128 * 1024 + 5))
    facts = data_facts(str(tmp_path / "train.h5"), Ticks())
    assert (facts.kind, facts.files) == ("file", 1)
    assert facts.read is not None
    assert facts.read.samples == 10


def test_a_path_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        data_facts(str(tmp_path / "nowhere"))


def test_the_file_system_is_that_of_the_innermost_mount(tmp_path, monkeypatch):
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "mounts").write_text(
        "/dev/vda / ext3 rw 0 0\n"
        "/dev/vda / ext4 rw,relatime 0 0\n"
        "server:/export /data nfs4 rw 0 0\n"
        "tmpfs /data\\040set tmpfs rw 0 0\n"
    )
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    kinds = [file_system_of(path) for path in ("/data/train", "/data", "/database", "/data set/x", "/")]
    assert kinds == ["nfs4", "nfs4", "ext4", "tmpfs", "ext4"]
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path / "nowhere"))
    assert file_system_of("/") == ""


def test_sizes_by_their_upper_end():
    assert histogram([1, 4096, 4097, 131072, 131073, 3 << 20]) == {
        "4_kib": 2,
        "16_kib": 1,
        "64_kib": 0,
        "128_kib": 1,
        "512_kib": 1,
        "2048_kib": 0,
        "more": 1,
    }
