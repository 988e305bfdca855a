"""Every kind of source, from real files: what its samples are, in which order, and what is refused."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightning_gpuopt.images.files import read_file
from lightning_gpuopt.storage.codec import EncodedImage
from lightning_gpuopt.storage.errors import DamagedError
from lightning_gpuopt.storage.sources import open_source
from lightning_gpuopt.storage.sources.base import Source, expand
from lightning_gpuopt.storage.writing.build import build_lmdb
from tests.lanes import combinations
from tests.storage.parts import mapped_shards, open_descriptors
from tests.storage.source_files import image_file, npy, same, samples, write_folder, write_pickled, write_tar

# --- image folders -----------------------------------------------------------------------------------------------


def test_a_folder_of_images_is_in_torchvision_s_order(tmp_path: Path) -> None:
    paths = ["b/z.jpg", "b/a.JPG", "b/a-nested/x.png", "b/a/deep/y.jpeg", "a/1.webp", "B/0.bmp"]
    for number, path in enumerate(paths):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(bytes([number]))
    source = open_source(tmp_path)
    # torchvision sorts what os.walk gives by the folder's path, and the files in each by name.
    expected = ["B/0.bmp", "a/1.webp", "b/a.JPG", "b/z.jpg", "b/a-nested/x.png", "b/a/deep/y.jpeg"]
    assert source.classes == ("B", "a", "b")
    assert [source.name(index) for index in range(len(source))] == expected
    assert [sample for _, sample in samples(source)] == [0, 1, 2, 2, 2, 2]
    assert [bytes(image) for image, _ in samples(source)] == [bytes([paths.index(path)]) for path in expected]
    assert {type(image) for image, _ in samples(source)} == {EncodedImage}
    assert source.num_bytes == 6


def test_hidden_files_and_other_files_are_no_images(tmp_path: Path) -> None:
    files = write_folder(tmp_path, {"a": 1, "b": 1})
    for path in (".hidden/x.jpg", "a/.y.jpg", "a/._00000.jpg", "a/notes.txt", "readme.md"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(b"x")
    source = open_source(str(tmp_path))
    assert [source.name(index) for index in range(len(source))] == list(files)


def test_a_class_without_images_keeps_its_label_and_is_told(tmp_path: Path) -> None:
    write_folder(tmp_path, {"a": 0, "b": 1})
    with pytest.warns(UserWarning, match=r"no image in 1 of 2 class subfolders \(a\); they keep their labels"):
        source = open_source(tmp_path)
    assert source.classes == ("a", "b")
    assert [label for _, label in samples(source)] == [1]


def test_images_beside_the_classes_are_told(tmp_path: Path) -> None:
    write_folder(tmp_path, {"a": 1})
    (tmp_path / "loose.jpg").write_bytes(b"x")
    with pytest.warns(UserWarning, match=r"1 images next to the class subfolders \(loose.jpg\) have no class"):
        assert len(open_source(tmp_path)) == 1


def test_links_to_folders_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    write_folder(tmp_path / "elsewhere", {"x": 2})
    write_folder(tmp_path / "images", {"a": 1})
    (tmp_path / "images/b").symlink_to(tmp_path / "elsewhere/x")
    assert [label for _, label in samples(open_source(tmp_path / "images"))] == [0, 1, 1]
    (tmp_path / "images/a/up").symlink_to(tmp_path / "images")
    with pytest.warns(UserWarning, match=r"are folders already included: a/up \(1\)"):
        assert [label for _, label in samples(open_source(tmp_path / "images"))] == [0, 1, 1]


@pytest.mark.filterwarnings("ignore:.*already included")
def test_a_folder_is_entered_once(tmp_path: Path) -> None:
    """By its own path where it has one here, else by the first link."""
    write_folder(tmp_path / "images", {"a": 1, "b/deep": 1, "c": 1})
    write_folder(tmp_path / "elsewhere", {"x": 1})
    links = {"a/to b": "images/b", "b/to a": "images/a", "a/to deep": "images/b/deep", "c/to all": "."}
    links |= {"c/to x": "elsewhere/x", "a/to x": "elsewhere", "d": "images/b/deep", "a/self": "images/a"}
    for link, target in links.items():
        (tmp_path / "images" / link).symlink_to(tmp_path / target)
    with pytest.warns(UserWarning, match=r"no image in 1 of 4 class subfolders \(d\)"):
        source = open_source(tmp_path / "images")
    found = {source.name(index): source.read(index)[1] for index in range(len(source))}
    assert found == {"a/00000.jpg": 0, "a/to x/x/00000.jpg": 0, "b/deep/00000.jpg": 1, "c/00000.jpg": 2}


def test_what_is_no_regular_file_is_left_out_and_named(tmp_path: Path) -> None:
    files = write_folder(tmp_path, {"a": 2})
    os.mkfifo(tmp_path / "a/pipe.jpg")
    (tmp_path / "a/zero.png").symlink_to("/dev/zero")
    (tmp_path / "a/same.jpg").symlink_to(tmp_path / "a/00001.jpg")
    with pytest.warns(UserWarning, match=r"not regular files, .*: a/pipe.jpg, a/zero.png \(2\)") as told:
        source = open_source(tmp_path)
    assert [source.name(index) for index in range(len(source))] == [*files, "a/same.jpg"]
    assert len(told) == 1


@pytest.mark.parametrize("path", ["pipe.jpg", "/dev/zero"])
def test_a_file_that_has_become_a_pipe_or_device_is_an_error(tmp_path: Path, path: str) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    with pytest.raises(OSError, match="expected a regular file, got a pipe or device"):
        read_file(str(tmp_path / path))


def test_all_that_pil_opens_is_taken_and_the_rest_counted(tmp_path: Path) -> None:
    taken = ["x.gif", "x.JFIF", "x.jp2", "x.tga", "x.mpo", "x.dib", "x.jpe", "x.apng"]
    for name in [*taken, "x.heic", "y.HEIC", "x.svg", "x.h5", "notes"]:
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a" / name).write_bytes(b"x")
    with pytest.warns(UserWarning, match="skipped: 2 .heic, 1 without extension, 1 .h5, 1 .svg$") as told:
        source = open_source(tmp_path)
    assert [source.name(index) for index in range(len(source))] == sorted(f"a/{name}" for name in taken)
    assert len(told) == 1


def test_a_link_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path, {"a": 1})
    (tmp_path / "a/gone.jpg").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"resume=True: '.*/a/gone\.jpg'"):
        open_source(tmp_path).read(1)


def test_folders_that_are_no_source_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected class subfolders"):
        open_source(tmp_path)
    (tmp_path / "a").mkdir()
    with pytest.raises(ValueError, match="there is no image in it"):
        open_source(tmp_path)
    (tmp_path / "a").rmdir()
    (tmp_path / "x.jpg").write_bytes(b"x")
    with pytest.raises(ValueError, match="1 images, but no class subfolders; expected PATH/<class>/<image>"):
        open_source(tmp_path)


def test_a_name_that_is_no_utf_8_survives(tmp_path: Path) -> None:
    write_folder(tmp_path, {"a": 0})
    (tmp_path / "a" / "caf\udce9.jpg").write_bytes(b"x")
    source = open_source(tmp_path)
    assert source.read(0) == (b"x", 0)
    assert source.name(0) == "a/caf\udce9.jpg"


# --- tars --------------------------------------------------------------------------------------------------------


def test_a_webdataset_is_a_dict_a_sample(tmp_path: Path) -> None:
    jpeg, png = image_file(1), image_file(2, "PNG")
    mask = np.arange(6, dtype=np.int16).reshape(2, 3)
    write_tar(
        tmp_path / "data.tar",
        {
            "__meta__": b"left out",
            "__about.json__": b"left out",
            "sub.dir/0001.JPG": jpeg,
            "sub.dir/0001.cls": b"7\n",
            "sub.dir/0001.seg.png": png,
            "0002.txt": "grün".encode(),
            "0002.json": b'{"a": [1, null]}',
            "0002.mask.npy": npy(mask),
            "0002.bin": b"\x00\x01",
            "no-extension": b"left out",
        },
    )
    source = open_source(tmp_path / "data.tar")
    first, second = samples(source)
    assert first == {"__key__": "sub.dir/0001", "jpg": jpeg, "cls": 7, "seg.png": png}
    assert [type(first[key]) for key in ("jpg", "cls", "seg.png")] == [EncodedImage, int, EncodedImage]
    expected = {"__key__": "0002", "txt": "grün", "json": {"a": [1, None]}, "mask.npy": mask, "bin": b"\x00\x01"}
    assert same(second, expected)
    assert source.name(0) == f"{tmp_path}/data.tar: sub.dir/0001"


@pytest.mark.parametrize("given", ["folder", "braces", "glob", "list"])
def test_several_tars_are_one_source(tmp_path: Path, given: str) -> None:
    for number in range(12):
        write_tar(
            tmp_path / f"d-{number:02d}.tar", {f"{number}{i}.cls": str(number * 2 + i).encode() for i in range(2)}
        )
    ways: dict[str, Any] = {
        "folder": tmp_path,
        "braces": f"{tmp_path}/d-{{00..11}}.tar",
        "glob": f"{tmp_path}/d-*.tar",
        "list": sorted(tmp_path.glob("*.tar")),
    }
    assert [sample["cls"] for sample in samples(open_source(ways[given]))] == list(range(24))


def test_braces_are_those_of_a_shell() -> None:
    assert expand("x{8..10}-{a,b}") == ["x8-a", "x8-b", "x9-a", "x9-b", "x10-a", "x10-b"]
    assert expand("x{010..008}{y}") == ["x010{y}", "x009{y}", "x008{y}"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tars_of_webdatasets_own_writer_read_as_it_reads_them(tmp_path: Path) -> None:
    import webdataset

    with webdataset.ShardWriter(str(tmp_path / "%04d.tar"), maxcount=2) as writer:
        for index in range(5):
            sample = {"__key__": f"a/{index}", "cls": index, "txt": f"é{index}", "json": [index]}
            writer.write({**sample, "x.npy": np.arange(index)})
    tars = sorted(map(str, tmp_path.glob("*.tar")))
    theirs = [
        {name: value for name, value in sample.items() if name not in ("__url__", "__local_path__")}
        for sample in webdataset.WebDataset(tars, shardshuffle=False).decode()
    ]
    assert len(theirs) == 5
    assert all(same(ours, other) for ours, other in zip(samples(open_source(tmp_path)), theirs, strict=True))


@pytest.mark.parametrize("cut", [1, 511, 600, 1500, 2047, 2048])
def test_a_truncated_tar_is_named(tmp_path: Path, cut: int) -> None:
    tar = tmp_path / "data.tar"
    write_tar(tar, {"0.bin": bytes(600), "1.bin": bytes(100)})  # header, two blocks, header, one block: 2,560 bytes
    tar.write_bytes(tar.read_bytes()[:cut])
    with pytest.raises(DamagedError, match=r"data\.tar: not a whole tar \("):
        open_source(tar)


def test_a_tar_without_its_end_or_with_garbage_is_not_whole(tmp_path: Path) -> None:
    tar = tmp_path / "data.tar"
    write_tar(tar, {"0.bin": bytes(600)})
    whole = tar.read_bytes()
    tar.write_bytes(whole[:1536])
    with pytest.raises(DamagedError, match="the end-of-archive marker is missing"):
        open_source(tar)
    tar.write_bytes(whole[:1536] + b"x" * 1024)
    with pytest.raises(DamagedError, match="no member begins at byte 1536"):
        open_source(tar)
    tar.write_bytes(b"")
    with pytest.raises(DamagedError, match="empty file"):
        open_source(tar)


def test_a_sparse_member_of_a_size_below_none_is_refused(tmp_path: Path) -> None:
    tar = tmp_path / "data.tar"
    for size in (-512, -1024):
        head = bytearray(tarfile.TarInfo("a.bin").tobuf(tarfile.GNU_FORMAT))
        head[156:157] = tarfile.GNUTYPE_SPARSE
        head[124:136] = size.to_bytes(12, "big", signed=True)
        head[482:495] = b"\0" + b"00000000005\0"
        head[148:156] = b" " * 8
        head[148:156] = b"%06o\0 " % sum(head)
        tar.write_bytes(tarfile.TarInfo("z.txt").tobuf(tarfile.GNU_FORMAT) + head + bytes(1024))
        with pytest.raises(
            DamagedError, match=r"data\.tar: not a whole tar \(a\.bin ends where it begins, or before\)"
        ):
            open_source(tar)


def test_what_comes_after_the_end_of_a_tar_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tar = tmp_path / "data.tar"
    write_tar(tar, {"0.bin": bytes(600)})
    assert len(open_source(tar)) == 1
    assert caplog.text == ""
    tar.write_bytes(2 * tar.read_bytes())
    assert len(open_source(tar)) == 1
    [message] = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"{tar}: data after its end-of-archive marker, at byte 1536, is ignored; ")


@pytest.mark.parametrize("name", ["data.tar.gz", "data.tgz", "data.tar"])
def test_a_compressed_tar_is_refused(tmp_path: Path, name: str) -> None:
    write_tar(tmp_path / "plain.tar", {"0.bin": b"x"})
    (tmp_path / name).write_bytes(gzip.compress((tmp_path / "plain.tar").read_bytes()))
    with pytest.raises(ValueError, match=f"{name}: a .*compressed.*decompress it first"):
        open_source(tmp_path / name)


def test_a_member_that_is_not_what_its_name_says_is_named(tmp_path: Path) -> None:
    write_tar(tmp_path / "data.tar", {"a.cls": b"seven"})
    with pytest.raises(ValueError, match=r"data\.tar: a\.cls: cannot be read as its name says"):
        open_source(tmp_path / "data.tar").read(0)


def test_a_member_twice_in_a_sample_and_tars_of_nothing_are_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "twice.tar", "w") as tar:
        for _ in range(2):
            tar.addfile(tarfile.TarInfo("a.cls"))
    with pytest.raises(ValueError, match=r"twice\.tar: the member a\.cls is there twice"):
        open_source(tmp_path / "twice.tar")
    write_tar(tmp_path / "nothing.tar", {})
    with pytest.raises(ValueError, match=r"nothing\.tar: there is no sample in it"):
        open_source(tmp_path / "nothing.tar")


def test_folders_and_tars_together_are_a_question(tmp_path: Path) -> None:
    write_folder(tmp_path, {"a": 1})
    write_tar(tmp_path / "data.tar", {"0.bin": b"x"})
    with pytest.raises(ValueError, match=r"it holds both folders and \*\.tar files"):
        open_source(tmp_path)


# --- all of them -------------------------------------------------------------------------------------------------


def test_wrong_paths_are_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere: there is no such file or folder"):
        open_source(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"\*\.tar: no file is matched by this pattern"):
        open_source(f"{tmp_path}/*.tar")
    write_tar(tmp_path / "x-0.tar", {"0.bin": b""})
    with pytest.raises(FileNotFoundError, match=r"x-1\.tar: there is no such file"):
        open_source(f"{tmp_path}/x-{{0..1}}.tar")
    (tmp_path / "x.csv").write_bytes(b"a,b\n")
    with pytest.raises(ValueError, match=r"x\.csv: not a known source"):
        open_source(tmp_path / "x.csv")
    with pytest.raises(ValueError, match=r"files of several kinds \(\.csv, \.tar\)"):
        open_source([tmp_path / "x.csv", tmp_path / "x-0.tar"])


def _all_kinds(root: Path) -> dict[str, Any]:
    write_folder(root / "folder", {"a": 3})
    write_tar(root / "x.tar", {f"{i}.cls": str(i).encode() for i in range(3)})
    np.save(root / "x.npy", np.arange(3))
    np.savez_compressed(root / "x.npz", np.arange(3))
    with h5py.File(root / "x.h5", "w") as file:
        file["x"] = np.arange(3)
    pq.write_table(pa.table({"x": [0, 1, 2]}), root / "x.parquet")
    write_pickled(root / "pickled", {b"%d" % i: i for i in range(3)})
    build_lmdb(root / "x.npy", root / "own", progress=False)
    names = ("folder", "x.tar", "x.npy", "x.npz", "x.h5", "x.parquet", "pickled", "own")
    return {name: root / name for name in names} | {"dataset": [(0, "x"), (1, "x"), (4, "x")]}


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.matrix)])
def test_every_source_can_be_read_in_other_processes(tmp_path: Path, method: str) -> None:
    sources = {name: open_source(given, allow_pickle=True) for name, given in _all_kinds(tmp_path).items()}
    # Opened here first, but for LMDB: that a process reads which is not to have it open.
    expected = {name: source.read(1) for name, source in sources.items() if not source.isolated}
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.apply(_read_ones, (sources,)) == {**expected, "pickled": 1}


def _read_ones(sources: dict[str, Source]) -> dict[str, Any]:
    return {name: source.read(1) for name, source in sources.items()}


def test_a_fingerprint_is_the_source_s_and_not_the_place_s(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    _all_kinds(tmp_path / "here")
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    for name in ("folder", "x.tar", "x.npy", "x.npz", "x.h5", "x.parquet", "pickled", "own"):
        here, there = (open_source(tmp_path / p / name, allow_pickle=True).fingerprint() for p in ("here", "there"))
        assert here == json.loads(json.dumps(there)), name
    before = open_source(tmp_path / "there/folder").fingerprint()
    (tmp_path / "there/folder/a/00001.jpg").rename(tmp_path / "there/folder/a/00001.jpeg")
    assert open_source(tmp_path / "there/folder").fingerprint() != before


@combinations("x.tar x.h5 own", name=["folder", "x.tar", "x.npy", "x.npz", "x.h5", "x.parquet", "own", "dataset"])
def test_no_file_stays_open_after_a_build(tmp_path: Path, name: str) -> None:
    given = _all_kinds(tmp_path)[name]
    build_lmdb(given, tmp_path / "warm", progress=False)
    before, maps = open_descriptors(), mapped_shards()
    build_lmdb(given, tmp_path / "out", progress=False)
    assert (open_descriptors(), mapped_shards()) == (before, maps)


def test_tars_are_closed_after_a_build_that_failed_and_few_are_open_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tar in range(40):
        write_tar(tmp_path / f"{tar:02d}.tar", {f"{tar}{i}.cls": str(tar).encode() for i in range(2)})
    source = open_source(tmp_path)
    before = open_descriptors()
    for index in (0, 1, *range(2, 30, 2)):  # of 15 tars
        source.read(index)
    used_again = source.read(0)
    source.read(40)
    source.read(50)  # the second tar is given up for it, not the first
    assert open_descriptors() == before + 16
    opened: list[str] = []
    whole = os.open
    monkeypatch.setattr(os, "open", lambda path, *flags: opened.append(path) or whole(path, *flags))
    assert source.read(0) == used_again
    assert opened == []
    monkeypatch.undo()
    source.close()
    assert open_descriptors() == before
    write_tar(tmp_path / "99.tar", {"x.cls": b"no number"})
    with pytest.raises(ValueError, match="cannot be read as its name says"):
        build_lmdb(tmp_path, tmp_path / "out", progress=False)
    assert open_descriptors() == before
