import errno
import os
import stat
from pathlib import Path
from typing import Any

import lmdb
import pytest

from lightning_gpuopt.storage import codec, durable
from lightning_gpuopt.storage.errors import DamagedError, StorageError
from lightning_gpuopt.storage.format import key
from lightning_gpuopt.storage.lmdb_pages import values
from lightning_gpuopt.storage.shard_writer import ShardWriter
from lightning_gpuopt.storage.writing.plan import PLAN, Notes, read_plan, write_plan


def foreign(path: Path, last: int) -> None:
    """A shard file whose second key somebody else has chosen."""
    with lmdb.open(str(path), subdir=False, lock=False, lib_version=0) as env, env.begin(write=True) as txn:
        txn.put(key(0), codec.encode(0).value(0, 0))
        txn.put(key(last), codec.encode(1).value(0, 1))


def test_keys_out_of_order_are_an_error_and_not_lost_samples(tmp_path: Path) -> None:
    foreign(tmp_path / "shard-00000.mdb", last=5)
    writer = ShardWriter(tmp_path, 0, resume=True)
    writer.add(codec.encode(2))
    with pytest.raises(StorageError, match=r"shard-00000\.mdb: LMDB took 0 of 1 samples in key order"):
        writer.commit()
    writer.close()


def test_a_gap_in_the_keys_is_found_when_the_shard_is_read_back(tmp_path: Path) -> None:
    foreign(tmp_path / "shard-00000.mdb", last=2)
    writer = ShardWriter(tmp_path, 0, resume=True)
    with pytest.raises(DamagedError, match=r"shard-00000\.mdb: sample 1"):
        writer.finish()
    writer.close()
    assert not (tmp_path / "shard-00000.json").exists()


def test_a_shard_begun_anew_is_not_finished(tmp_path: Path) -> None:
    """Whatever of an earlier shard of this number stayed could count as the new one's."""
    writer = ShardWriter(tmp_path, 0)
    writer.add(codec.encode(1))
    writer.finish()
    assert len(os.listdir(tmp_path)) == 3
    writer = ShardWriter(tmp_path, 0)
    assert os.listdir(tmp_path) == ["shard-00000.mdb"]
    writer.close()
    writer = ShardWriter(tmp_path, 0, resume=True)
    assert writer.committed == 0
    writer.close()


def test_the_summary_of_an_earlier_shard_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = ShardWriter(tmp_path, 0)
    writer.add(codec.encode(1))
    writer.finish()
    removed: list[str] = []
    monkeypatch.setattr(Path, "unlink", lambda self, missing_ok=False: removed.append(self.suffix))
    ShardWriter(tmp_path, 0).close()
    assert removed == [".json", ".lab", ".tab", ".mdb"]


@pytest.mark.parametrize(
    "sizes",
    [[], [1], [*range(3000)], [3, 100, 1900, 2100, 5000, 70_000] * 300, [8] * 20_000],
    ids=["none", "one", "growing", "on pages of their own", "small"],
)
def test_the_pages_say_where_each_value_is(tmp_path: Path, sizes: list[int]) -> None:
    path = tmp_path / "data.mdb"
    stored = [bytes([index % 256]) * size for index, size in enumerate(sizes)]
    with lmdb.open(str(path), subdir=False, lock=False, lib_version=0, map_size=1 << 30) as env:
        for begin in range(0, len(sizes), 700):
            with env.begin(write=True) as txn:
                for index in range(begin, min(begin + 700, len(sizes))):
                    txn.put(index.to_bytes(8, "big"), stored[index], append=True)
    data = path.read_bytes()
    found = list(values(data))
    assert [int.from_bytes(key, "big") for key, _, _ in found] == [*range(len(sizes))]
    assert [data[start : start + size] for _, start, size in found] == stored


@pytest.mark.parametrize("data", [b"", bytes(100), bytes(8192), b"\xde\xc0\xef\xbe" * 4000])
def test_what_is_no_lmdb_file_has_no_values(data: bytes) -> None:
    with pytest.raises(ValueError, match="LMDB file"):
        list(values(data))


def test_a_file_system_that_cannot_sync_folders_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync, number = os.fsync, errno.EINVAL

    def refuses(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(number, os.strerror(number))
        sync(handle)

    monkeypatch.setattr(os, "fsync", refuses)
    durable.write(tmp_path / "file", b"text")
    assert (tmp_path / "file").read_bytes() == b"text"
    number = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        durable.write(tmp_path / "file", b"text")


def test_the_plan_of_the_first_part_stays_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuses)
    for number in range(2):
        write_plan(tmp_path, {"part": number}, Notes(), shared=True)
    assert read_plan(tmp_path)[0] == {"part": 0}
    assert os.listdir(tmp_path) == [PLAN]


@pytest.mark.parametrize("damage", ["meta", "root", "circle"])
def test_pages_that_a_disk_gives_back_wrong_are_named(
    tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = ShardWriter(tmp_path, 0)
    for index in range(2000):
        writer.add(codec.encode(index))
    close = writer.close

    def closed_and_damaged() -> None:
        close()
        data = bytearray(writer._path.read_bytes())
        page = int.from_bytes(data[40:44], "little")
        newest = max((0, page), key=lambda at: data[at + 144 : at + 152][::-1])
        root = int.from_bytes(data[newest + 128 : newest + 136], "little")
        if damage == "meta":
            data[: 2 * page] = bytes(2 * page)
        elif damage == "root":
            data[root * page + 12 : (root + 1) * page] = b"\xff" * (page - 12)
        else:  # the root's first entry is the root
            node = root * page + int.from_bytes(data[root * page + 16 : root * page + 18], "little")
            data[node : node + 4] = root.to_bytes(4, "little")
        writer._path.write_bytes(data)

    monkeypatch.setattr(writer, "close", closed_and_damaged)
    with pytest.raises(DamagedError, match=r"shard-00000\.mdb: sample 0 read back wrong"):
        writer.finish()
