"""Tars are read as webdataset reads them; their indexes are made once, by whichever process comes first."""

from __future__ import annotations

import inspect
import io
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import subprocess
import tarfile
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lightning_gpuopt.storage.errors import DamagedError, StorageError
from lightning_gpuopt.storage.format import staging_directory
from lightning_gpuopt.storage.sources import open_source, tar_index
from lightning_gpuopt.storage.sources.tar_index import Indexing
from lightning_gpuopt.storage.sources.tars import TarSource
from lightning_gpuopt.storage.writing.build import build_lmdb
from lightning_gpuopt.storage.writing.indexing import in_turn
from tests.storage.building import Build
from tests.storage.executors import Elsewhere, Immediately
from tests.storage.source_files import beside, kept, samples, stored, write_tar

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork")

Raw = list[dict[str, Any]]

BY_COMMAND = ["v7", "oldgnu", "gnu", "ustar", "posix"]
BY_TARFILE = {
    "tarfile-ustar": tarfile.USTAR_FORMAT,
    "tarfile-gnu": tarfile.GNU_FORMAT,
    "tarfile-pax": tarfile.PAX_FORMAT,
}
SPARSE = {"gnu": [], "posix-0.0": ["--sparse-version=0.0"], "posix-0.1": ["--sparse-version=0.1"], "posix-1.0": []}


def by_webdataset(path: Path) -> Raw:
    """The samples of a tar as webdataset reads them, without decoding."""
    import webdataset

    known = inspect.signature(webdataset.WebDataset).parameters
    options = {"empty_check": False} if "empty_check" in known else {}
    return [
        {name: value for name, value in sample.items() if name not in ("__url__", "__local_path__")}
        for sample in webdataset.WebDataset([str(path)], shardshuffle=False, **options)
    ]


def by_us(path: Path) -> Raw:
    source = open_source(path)
    try:
        return samples(source)
    finally:
        source.close()


def by_command(path: Path, folder: Path, names: list[str], *options: str) -> None:
    command = ["tar", "-C", str(folder), *options, "-cf", str(path), "--", *names]
    if shutil.which("tar") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs GNU tar")


def write_as(kind: str, path: Path, contents: dict[str, bytes | str]) -> None:
    """A tar of files and, where the content is a text, symbolic links to it, made in the way that `kind` names."""
    if kind in BY_TARFILE:
        with tarfile.open(path, "w", format=BY_TARFILE[kind]) as tar:
            for name, content in contents.items():
                info = tarfile.TarInfo(name)
                info.mtime = 1_700_000_000.25
                if isinstance(content, str):
                    info.type, info.linkname = tarfile.SYMTYPE, content
                else:
                    info.size = len(content)
                tar.addfile(info, None if isinstance(content, str) else io.BytesIO(content))
        return
    folder = path.with_suffix("")
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            (folder / name).symlink_to(content)
        else:
            (folder / name).write_bytes(content)
    by_command(path, folder, list(contents), f"--format={kind}")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", [*BY_COMMAND, *BY_TARFILE])
def test_tars_of_every_format_are_read_as_webdataset_reads_them(tmp_path: Path, kind: str) -> None:
    room = {"v7": 60, "ustar": 150, "tarfile-ustar": 150}.get(kind, 280)  # for a name
    longest_link = 90 if "ustar" in kind or kind == "v7" else 200
    plain = [f"{'d' * n}/{i:03d}" for i, n in enumerate((1, 7, 3))]
    unusual = [f"{'long-' * 8}/{'é' * 20}/{i}" + "/x" * ((room - 90) // 2) for i in range(3)]
    unusual.append("BZh91AY/0")  # not what a compressed file begins with
    draw = random.Random(0)
    for number, where in enumerate(["first", "middle", "last", "all", "none"]):
        keys = {
            "first": unusual + plain,
            "middle": plain[:2] + unusual + plain[2:],
            "last": plain + unusual,
            "all": unusual,
            "none": plain,
        }[where]
        contents: dict[str, bytes | str] = {}
        for key in keys:
            contents[f"{key}.link"] = "t" * longest_link
            contents[f"{key}.bin"] = draw.randbytes(draw.choice([0, 1, 511, 512, 513, 3000]))
            contents[f"{key}.seg.dat"] = draw.randbytes(20)
        path = tmp_path / f"{number}.tar"
        write_as(kind, path, contents)
        expected = [
            {"__key__": key, "bin": contents[f"{key}.bin"], "seg.dat": contents[f"{key}.seg.dat"]} for key in keys
        ]
        assert by_us(path) == by_webdataset(path) == expected, where


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", SPARSE)
def test_sparse_files_have_their_holes(tmp_path: Path, kind: str) -> None:
    names = ["0.bin", "1.bin", "2.bin"]
    for name, hole in zip(names, (70_000, 0, 5_000_000), strict=True):
        with (tmp_path / name).open("wb") as stream:
            stream.write(b"begin" * (hole > 70_000))
            stream.seek(hole, io.SEEK_CUR)
            stream.write(name.encode())
            stream.truncate(hole + 20_000)
    path = tmp_path / "x.tar"
    by_command(path, tmp_path, names, f"--format={kind[:5].rstrip('-')}", "--sparse", *SPARSE[kind])
    expected = [{"__key__": name[0], "bin": (tmp_path / name).read_bytes()} for name in names]
    assert by_us(path) == by_webdataset(path) == expected
    assert path.stat().st_size < 1_000_000


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("comment", ["x", "y" * 5000])
def test_a_global_header_holds_for_all_members(tmp_path: Path, comment: str) -> None:
    path, folder = tmp_path / "x.tar", tmp_path / "folder"
    with tarfile.open(
        path, "w", format=tarfile.PAX_FORMAT, pax_headers={"comment": comment, "uname": "somebody"}
    ) as tar:
        for number in range(3):
            info = tarfile.TarInfo(f"{number}.bin")
            info.uid = number << 22
            info.pax_headers = {"atime": "1.5"} if number == 2 else {}
            info.size = number
            tar.addfile(info, io.BytesIO(bytes(number)))
    expected = [{"__key__": str(number), "bin": bytes(number)} for number in range(3)]
    assert by_us(path) == by_webdataset(path) == expected
    folder.mkdir()
    for each in expected:
        (folder / f"{each['__key__']}.bin").write_bytes(each["bin"])
    options = ["--format=posix", f"--pax-option=comment={comment},globexthdr.name=/any/name"]
    by_command(path, folder, [f"{number}.bin" for number in range(3)], *options)
    assert by_us(path) == by_webdataset(path) == expected


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_members_are_left_out_and_grouped_as_webdataset_does(tmp_path: Path) -> None:
    names = [
        "__a__",
        "__a__/0.bin",
        "__b__.bin",
        "d/__a__.bin",
        "no-extension",
        "d/0.bin",
        "d/x",
        "d/0.B",
        "d.e/0.bin",
        "d/0.bin",
    ]
    write_tar(tmp_path / "x.tar", {})
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for kind in (tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.LNKTYPE, tarfile.CONTTYPE, tarfile.FIFOTYPE, b"Z"):
            for name in names:
                info = tarfile.TarInfo(f"{name}{kind.decode()}")
                info.type, info.linkname = kind, "elsewhere"
                tar.addfile(info, io.BytesIO())
    assert by_us(tmp_path / "x.tar") == by_webdataset(tmp_path / "x.tar")


def test_a_damaged_tar_gives_its_samples_or_is_named(tmp_path: Path) -> None:
    draw, path = random.Random(0), tmp_path / "any.tar"
    errors: list[str] = []
    for kind in BY_TARFILE:
        contents: dict[str, bytes | str] = {
            f"{'é/' * (30 * (i % 3))}{i}.bin": draw.randbytes(i * 300) for i in range(5)
        }
        write_as(kind, path, contents)
        whole = path.read_bytes()
        last = max(at for at in range(0, len(whole), 512) if any(whole[at : at + 512]))
        for _ in range(150):
            damaged = bytearray(whole)
            block = draw.randrange(last // 512 + 1) * 512
            at = draw.choice([0, 0, 100, 124, 130, 136, 148, 154, 156, 257, 329, 345, 400, draw.randrange(500)])
            change = draw.choice([b"\0", b" ", b"0", b"00", b"7", b"x", b"9", b"\xff", b"\x80"])
            damaged[block + at : block + at + len(change)] = change
            if draw.random() < 0.5:  # the checksum is right, as if it were a header
                head = damaged[block : block + 512]
                damaged[block + 148 : block + 156] = b"%06o\0 " % (sum(head) - sum(head[148:156]) + 8 * ord(" "))
            path.write_bytes(damaged)
            try:
                by_us(path)
            except (DamagedError, ValueError) as error:
                errors.append(str(error))
        for cut in draw.sample(range(last + 512), 40):
            path.write_bytes(whole[:cut])
            with pytest.raises(DamagedError, match=r"any\.tar: not a whole tar \("):
                open_source(path)
    assert all(error.startswith(str(path)) for error in errors)
    assert 50 < len(errors) < 400


@pytest.mark.parametrize("how", ["gz", "bz2", "xz"])
def test_a_compressed_tar_is_refused_whatever_its_name(tmp_path: Path, how: str) -> None:
    with tarfile.open(tmp_path / "x.tar", f"w:{how}") as tar:
        tar.addfile(tarfile.TarInfo("0.bin"), io.BytesIO())
    with pytest.raises(ValueError, match=rf"x\.tar: a tar compressed with {how[:2]}.*; decompress it first"):
        open_source(tmp_path / "x.tar")


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
    taken = in_turn([(name, "") for name in "abcdefg"], part)
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
    with pytest.raises(DamagedError, match=r"only\.tar: not a whole tar \(empty file\)"):
        build_lmdb(tars / "only.tar", tmp_path / "none", progress=False)
    assert beside(tmp_path / "none") == ["out", "tars"]


def test_an_index_that_is_not_what_was_written_is_not_used(tmp_path: Path) -> None:
    tars = write_tars(tmp_path / "tars", 1)
    build_lmdb(tars, tmp_path / "out", part=(1, 2), progress=False)
    (index,) = staging_directory(tmp_path / "out").glob("*.index")
    data = bytearray(index.read_bytes())
    data[100] ^= 1
    index.write_bytes(data)
    with pytest.raises(DamagedError, match=rf"{index}: not the index that was written; remove it, then continue with"):
        build_lmdb(tars, tmp_path / "out", resume=True, progress=False)
    index.unlink()
    assert build_lmdb(tars, tmp_path / "out", resume=True, progress=False).num_samples == 400


@pytest.mark.matrix
def test_processes_and_executors_index_and_build_the_same(tmp_path: Path, indexed: list[str]) -> None:
    tars = write_tars(tmp_path / "tars")
    build_lmdb(tars, tmp_path / "one", progress=False)
    indexed.clear()
    build_lmdb(tars, tmp_path / "two", num_proc=2, progress=False)
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        build_lmdb(tars, tmp_path / "pool", executor=pool, progress=False)
    assert indexed == []  # not by this process
    assert kept(tmp_path / "one") == kept(tmp_path / "two") == kept(tmp_path / "pool")


@pytest.mark.matrix
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
        NotADirectoryError, match="cannot write the indexes of tars here: Not a directory; pass a writable p"
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
