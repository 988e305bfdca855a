"""The indexes of tars: what `tarfile` reads, made once, by whichever process comes first."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lightning_gpuopt.storage.build.build import build_lmdb
from lightning_gpuopt.storage.errors import DamagedError, StorageError
from lightning_gpuopt.storage.format import staging_directory
from lightning_gpuopt.storage.sources import open_source, tar_index
from lightning_gpuopt.storage.sources.tar_index import Indexing
from lightning_gpuopt.storage.sources.tars import TarSource
from tests.lanes import few
from tests.storage.building import Build
from tests.storage.executors import Elsewhere, Immediately
from tests.storage.source_files import beside, kept, samples, stored, write_tar

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork")

Member = tuple[str, int, int, bool]


def by_tarfile(path: Path) -> Iterator[Member]:
    """The regular files of a tar as `tarfile` alone reads them, and its end."""
    with path.open("rb") as stream:
        with tarfile.open(fileobj=stream, mode="r:") as tar:
            for member in tar:
                if member.isreg():
                    yield member.name, member.offset_data, member.size, member.sparse is not None
            end = tar.offset
        stream.seek(end)
        block = stream.read(512)
    if len(block) < 512:
        raise tar_index.not_whole(str(path), "the end-of-archive marker is missing")
    if any(block):
        raise tar_index.not_whole(str(path), f"no member begins at byte {end}")


def by_us(path: Path) -> Iterator[Member]:
    with path.open("rb") as stream:
        yield from tar_index.regular_members(stream, str(path))


def outcome(read: Callable[[Path], Iterator[Member]], path: Path) -> list[Any]:
    """The members that are read, and the error after them."""
    found: list[Any] = []
    try:
        for member in read(path):
            found.append(member)
    except Exception as error:  # of every type, where a number in a header is out of all bounds
        found.append(f"{type(error).__name__}: {error}")
    return found


KINDS = (*[tarfile.REGTYPE] * 20, tarfile.AREGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE)
KINDS = (*KINDS, tarfile.CONTTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, b"Z")


def any_name(draw: random.Random, most: int) -> str:
    letters = draw.choice(["abc.", "abc.", "aé.", "a/b."])
    length = draw.choice([5, 20, 99, 100, 101, 160, most])
    name = "".join(draw.choices(letters, k=length)).replace("//", "/").strip("/") or "x"
    return name + "/" * (draw.random() < 0.03)


def write_any(path: Path, draw: random.Random) -> None:
    """A tar of whatever there may be in one."""
    kind = draw.choice([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
    everywhere = {"path": "of-all.x"} if kind == tarfile.PAX_FORMAT and draw.random() < 0.1 else None
    with tarfile.open(path, "w", format=kind, pax_headers=everywhere) as tar:
        for _ in range(draw.randrange(12)):
            info = tarfile.TarInfo(any_name(draw, 300))
            info.type = draw.choice(KINDS)
            info.linkname = "elsewhere" * (info.type in (tarfile.SYMTYPE, tarfile.LNKTYPE))
            info.mtime = draw.choice([0, 1_700_000_000, 1_700_000_000.25])
            info.uid = draw.choice([0, 1000, 1000, 1000, 1 << 22])
            info.devmajor = draw.choice([0, 0, 7])
            if kind == tarfile.PAX_FORMAT:
                info.pax_headers = draw.choice([{}, {}, {"atime": "1.5"}, {"comment": "x"}, {"path": "other.x"}])
            data = bytes(draw.choice([0, 1, 511, 512, 513, 2000])) if info.type in tarfile.REGULAR_TYPES else b""
            info.size = len(data)
            try:
                tar.addfile(info, io.BytesIO(data))
            except ValueError:  # a name or number for which this format has no room
                continue


def mend(tar: bytearray, block: int) -> None:
    """Make a block's checksum right, as if it were a header."""
    head = tar[block : block + 512]
    tar[block + 148 : block + 156] = b"%06o\0 " % (sum(head) - sum(head[148:156]) + 8 * ord(" "))


@pytest.mark.parametrize("at_once", few("2048", {"2": 2, "2048": 2048}))
def test_any_tar_is_read_as_tarfile_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(tar_index, "_HEADERS_AT_ONCE", at_once)
    draw, path, members = random.Random(at_once), tmp_path / "any.tar", 0
    for _ in range(300):
        write_any(path, draw)
        whole = path.read_bytes()
        expected = outcome(by_tarfile, path)
        assert outcome(by_us, path) == expected
        members += len(expected)
        for _ in range(3):  # damaged: a byte of a header changed, or the end gone
            damaged = bytearray(whole)
            block = draw.randrange(len(whole) // 512) * 512
            at = draw.choice([0, 0, 100, 124, 130, 136, 148, 154, 156, 257, 329, 345, 400, draw.randrange(500)])
            change = draw.choice([b"\0", b" ", b"0", b"00", b"7", b"x", b"9", b"\xff"])
            damaged[block + at : block + at + len(change)] = change
            if draw.random() < 0.5:
                mend(damaged, block)
            path.write_bytes(damaged[: draw.choice([None, None, None, block, block + 100])])
            assert outcome(by_us, path) == outcome(by_tarfile, path)
    assert members > 500


@pytest.mark.parametrize("kind", few("ustar", {"ustar": tarfile.USTAR_FORMAT, "pax": tarfile.PAX_FORMAT}))
def test_any_byte_of_a_header_is_taken_as_tarfile_takes_it(tmp_path: Path, kind: int) -> None:
    path = tmp_path / "any.tar"
    with tarfile.open(path, "w", format=kind) as tar:
        for index in range(3):
            info = tarfile.TarInfo(f"{index}.x")
            info.mtime = 1_700_000_000.5
            tar.addfile(info)
    whole = path.read_bytes()
    second = whole.index(b"1.x")  # in PAX the header of its times is before it
    blocks = [second] if kind == tarfile.USTAR_FORMAT else [second - 512, second - 1024, second]
    for block in blocks:
        for at in range(32 if whole[block : block + 1].isdigit() and block != second else 512):
            for change in (b"\0", b"9", b"x", b"00"):
                damaged = bytearray(whole)
                damaged[block + at : block + at + len(change)] = change
                if block != second - 512:
                    mend(damaged, block)
                path.write_bytes(damaged)
                assert outcome(by_us, path) == outcome(by_tarfile, path), (block, at, change)


@pytest.mark.parametrize("kind", ["v7", "oldgnu", "gnu", "ustar", "posix"])
def test_tars_of_gnu_tar_are_read_as_tarfile_reads_them(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "/".join(["long-" * 12] * (1 if kind == "v7" else 2))
    folder.mkdir(parents=True)
    for index in range(30):
        (folder / f"{index:03d}.bin").write_bytes(bytes(index * 40))
        (tmp_path / f"{index:03d}.bin").write_bytes(bytes(index * 40))
    command = ["tar", f"--format={kind}", "-cf", "made.tar", "--exclude=made.tar", "."]
    if shutil.which("tar") is None or subprocess.run(command, cwd=tmp_path, capture_output=True).returncode:
        pytest.skip("needs GNU tar")
    found = outcome(by_us, tmp_path / "made.tar")
    assert found == outcome(by_tarfile, tmp_path / "made.tar")
    assert len(found) == 60


@pytest.fixture
def slowly_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often `tarfile` is asked for a member."""
    asked: list[int] = []
    following = tarfile.TarFile.next

    def counted(self: tarfile.TarFile) -> tarfile.TarInfo | None:
        asked.append(1)
        return following(self)

    monkeypatch.setattr(tarfile.TarFile, "next", counted)
    return asked


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_plain_members_are_not_left_to_tarfile(tmp_path: Path, slowly_read: list[int], kind: int) -> None:
    with tarfile.open(tmp_path / "x.tar", "w", format=kind) as tar:
        for index in range(100):
            info = tarfile.TarInfo(f"{'sub/' * 30 * (kind == tarfile.USTAR_FORMAT)}{index:03d}.cls")
            info.mtime = 1_700_000_000.5  # in PAX a header of its own
            info.size = 1
            tar.addfile(info, io.BytesIO(b"1"))
    assert len(open_source(tmp_path / "x.tar")) == 100
    assert len(slowly_read) == 2  # the first member, where tarfile opens it, and the end


def write_tars(folder: Path, count: int = 4) -> Path:
    """Tars of 400 samples, each of two members."""
    folder.mkdir()
    for tar in range(count):
        members = {f"{i:05d}.{e}": f"{tar} {i} {e}".encode() for i in range(400) for e in ("bin", "txt")}
        write_tar(folder / f"{tar}.tar", members)
    return folder


def test_the_fingerprint_is_that_of_the_releases_before(tmp_path: Path) -> None:
    for n in range(3):
        extensions = ("bin", "txt") if n else ("cls", "bin")
        write_tar(
            tmp_path / f"{n}.tar",
            {f"{n}/{'k' * n}{i:03d}.{e}": bytes(i * n) for i in range(20) for e in extensions},
        )
    tars = sorted(map(str, tmp_path.glob("*.tar")))
    for source in (TarSource(tars), TarSource(tars, Indexing(tmp_path / "indexes"))):
        assert source.fingerprint() == {
            "kind": "webdataset",
            "num_samples": 60,
            "num_tars": 3,
            "names": "5160d43bfcf553a64c18df3821bff544",
            "members": "b226de32fb72d547",
        }
        assert source.parts() == ["cls", "bin", "txt"]
        source.close()


def test_a_process_holds_no_more_of_more_samples(tmp_path: Path) -> None:
    sizes = []
    for count in (10, 1000):
        write_tar(tmp_path / f"{count:04d}.tar", {f"{i:05d}.cls": b"1" for i in range(count)})
        source = TarSource([str(tmp_path / f"{count:04d}.tar")], Indexing(tmp_path / "indexes"))
        assert [each["cls"] for each in samples(source)] == [1] * count
        sizes.append(len(pickle.dumps(source)))
        source.close()
    assert abs(sizes[1] - sizes[0]) < 10  # the digits of the numbers


@pytest.fixture
def indexed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tars that this process has looked through."""
    names: list[str] = []
    whole = tar_index.index_tar

    def noted(path: str) -> bytes:
        names.append(os.path.basename(path))
        return whole(path)

    monkeypatch.setattr(tar_index, "index_tar", noted)
    return names


def test_parts_share_the_indexes_which_go_with_the_build(tmp_path: Path, indexed: list[str]) -> None:
    tars = write_tars(tmp_path / "tars")
    build_lmdb(tars, tmp_path / "one", progress=False)
    assert indexed == ["0.tar", "1.tar", "2.tar", "3.tar"]
    indexed.clear()
    build_lmdb(tars, tmp_path / "out", part=(1, 2), progress=False)
    assert indexed == ["2.tar", "3.tar", "1.tar", "0.tar"]
    assert len([name for name in os.listdir(staging_directory(tmp_path / "out")) if name.endswith(".index")]) == 4
    build_lmdb(tars, tmp_path / "out", part=(0, 2), progress=False)
    build_lmdb(tars, tmp_path / "out", resume=True, progress=False)
    assert len(indexed) == 4
    assert kept(tmp_path / "out") == kept(tmp_path / "one")
    assert sorted(os.listdir(tmp_path / "out")) == sorted(os.listdir(tmp_path / "one"))
    assert beside(tmp_path / "out") == ["one", "out", "tars"]


@pytest.mark.parametrize(
    ("part", "order"), [((0, 1), "abcdefg"), ((0, 3), "abgfedc"), ((1, 3), "cdbagfe"), ((2, 3), "efgdcba")]
)
def test_each_part_begins_with_its_share_and_meets_the_others(part: tuple[int, int], order: str) -> None:
    taken = Indexing(part=part).in_turn([(name, "") for name in "abcdefg"])
    assert "".join(name for name, _ in taken) == order


def test_an_index_that_is_there_is_not_made_again(tmp_path: Path, indexed: list[str]) -> None:
    tars = write_tars(tmp_path / "tars", 1)
    for _ in range(2):
        tar_index.write_index((str(tars / "0.tar"), str(tmp_path / "index")))
    assert indexed == ["0.tar"]
    assert sorted(os.listdir(tmp_path)) == ["index", "tars"]


def test_a_tar_that_has_changed_is_indexed_anew(tmp_path: Path, indexed: list[str]) -> None:
    tars = write_tars(tmp_path / "tars", 2)
    build_lmdb(tars, tmp_path / "out", part=(0, 2), progress=False)
    indexed.clear()
    about = (tars / "1.tar").stat()
    write_tar(tars / "1.tar", {f"{i:05d}.{e}": f"7 {i} {e}".encode() for i in range(400) for e in ("bin", "txt")})
    os.utime(tars / "1.tar", ns=(about.st_atime_ns, about.st_mtime_ns + 1))
    assert (tars / "1.tar").stat().st_size == about.st_size
    build_lmdb(tars, tmp_path / "out", overwrite=True, progress=False)
    assert indexed == ["1.tar"]
    assert stored(tmp_path / "out")[400]["bin"] == b"7 0 bin"


def test_a_tar_that_is_not_whole_leaves_the_indexes_of_the_others(tmp_path: Path, indexed: list[str]) -> None:
    tars = write_tars(tmp_path / "tars", 3)
    whole = (tars / "2.tar").read_bytes()
    (tars / "2.tar").write_bytes(whole[:-10240])
    for num_proc in (1, 2):
        with pytest.raises(DamagedError, match=r"2\.tar: not a whole tar \("):
            build_lmdb(tars, tmp_path / "out", num_proc=num_proc, progress=False)
    (tars / "2.tar").write_bytes(whole)
    indexed.clear()
    build_lmdb(tars, tmp_path / "out", progress=False)
    assert indexed == ["2.tar"]
    (tars / "only.tar").write_bytes(b"")
    with pytest.raises(DamagedError, match="it is empty"):
        build_lmdb(tars / "only.tar", tmp_path / "none", progress=False)
    assert beside(tmp_path / "none") == ["out", "tars"]


def test_an_index_that_is_not_what_was_written_is_not_used(tmp_path: Path) -> None:
    tars = write_tars(tmp_path / "tars", 1)
    build_lmdb(tars, tmp_path / "out", part=(1, 2), progress=False)
    (index,) = staging_directory(tmp_path / "out").glob("*.index")
    data = bytearray(index.read_bytes())
    data[100] ^= 1
    index.write_bytes(data)
    with pytest.raises(DamagedError, match=rf"{index}: not the index that was written; remove it, then go on with"):
        build_lmdb(tars, tmp_path / "out", resume=True, progress=False)
    index.unlink()
    assert build_lmdb(tars, tmp_path / "out", resume=True, progress=False).num_samples == 400


def test_processes_and_executors_index_and_build_the_same(tmp_path: Path, indexed: list[str]) -> None:
    tars = write_tars(tmp_path / "tars")
    build_lmdb(tars, tmp_path / "one", progress=False)
    indexed.clear()
    build_lmdb(tars, tmp_path / "two", num_proc=2, progress=False)
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        build_lmdb(tars, tmp_path / "pool", executor=pool, progress=False)
    assert indexed == []  # not by this process
    assert kept(tmp_path / "one") == kept(tmp_path / "two") == kept(tmp_path / "pool")


def test_parts_that_begin_at_one_moment_do_not_harm_one_another(tmp_path: Path) -> None:
    tars = write_tars(tmp_path / "tars")
    build_lmdb(tars, tmp_path / "one", progress=False)
    with (
        Build(tmp_path / "out", source=tars, part=(0, 2)) as first,
        Build(tmp_path / "out", source=tars, part=(1, 2)) as second,
    ):
        assert [first.end(), second.end()] == [(0, ""), (0, "")]
    build_lmdb(tars, tmp_path / "out", resume=True, progress=False)
    assert kept(tmp_path / "out") == kept(tmp_path / "one")


def test_a_process_that_dies_while_it_indexes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tars, whole, here = write_tars(tmp_path / "tars"), tar_index.index_tar, os.getpid()

    def deadly(path: str) -> bytes:
        if path.endswith("2.tar") and os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(path)

    monkeypatch.setattr(tar_index, "index_tar", deadly)
    with pytest.raises(StorageError, match=r"out: the process that built the index of 2\.tar was killed by SIGKILL"):
        build_lmdb(tars, tmp_path / "out", num_proc=2, progress=False)
    build_lmdb(tars, tmp_path / "out", progress=False)


def test_a_place_where_nothing_can_be_kept_is_told(tmp_path: Path) -> None:
    tars = write_tars(tmp_path / "tars", 1)
    (tmp_path / "file").touch()
    with pytest.raises(
        NotADirectoryError, match="cannot keep the indexes of tars here: Not a directory; give a path w"
    ):
        build_lmdb(tars, tmp_path / "file/out", progress=False)


def test_tars_that_change_while_workers_build_are_an_error(tmp_path: Path) -> None:
    tars = write_tars(tmp_path / "tars", 1)

    class Changing(Immediately):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            if self.units:  # after the index
                os.utime(tars / "0.tar", ns=(0, 0))
            return super().submit(fn, *args)

    with pytest.raises(StorageError, match="1 tars have changed since they were indexed, or a worker on"):
        build_lmdb(tars, tmp_path / "out", executor=Changing(), progress=False)


def test_workers_that_do_not_see_where_indexes_are_kept_are_an_error(tmp_path: Path) -> None:
    tars = write_tars(tmp_path / "tars", 1)
    path = tmp_path / "shared/out"
    path.parent.mkdir()
    with pytest.raises(StorageError, match=rf"{tmp_path}/shared/\.out\.building: a worker on \S+ does not see this f"):
        build_lmdb(tars, path, executor=Elsewhere(path.parent, tmp_path / "away"), progress=False)
    assert beside(path) == []


def test_an_index_is_made_where_there_is_a_dataset_and_left_nowhere(tmp_path: Path) -> None:
    tars = write_tars(tmp_path / "tars", 1)
    build_lmdb(tars, tmp_path / "out", progress=False)
    with pytest.raises(FileExistsError):
        build_lmdb(tars, tmp_path / "out", progress=False)
    assert build_lmdb(tars, tmp_path / "out", resume=True, progress=False).num_samples == 400
    assert beside(tmp_path / "out") == ["out", "tars"]
