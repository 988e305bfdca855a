"""`build_lmdb`: what is stored, what is left out, how it is cut, and what stays when it fails."""

from __future__ import annotations

import csv
import io
import multiprocessing
import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from lightning_gpuopt.images.checks import BadImage, check_image
from lightning_gpuopt.storage import shard_writer
from lightning_gpuopt.storage.codec import EncodedImage
from lightning_gpuopt.storage.errors import StorageError
from lightning_gpuopt.storage.format import LMDBInfo, Manifest
from lightning_gpuopt.storage.reader import LMDBDataset
from lightning_gpuopt.storage.shard_writer import ShardWriter
from lightning_gpuopt.storage.sources.datasets import DatasetSource
from lightning_gpuopt.storage.writing.build import build_lmdb
from lightning_gpuopt.storage.writing.plan import SHARD_BYTES, plan_shards
from lightning_gpuopt.utils.console_progress import ConsoleProgress
from tests.helpers import Clock
from tests.storage.building import Numbers
from tests.storage.source_files import beside, image_file, kept, stored, write_folder


def build(source: Any, path: Path, **options: Any) -> LMDBInfo:
    return build_lmdb(source, path, progress=False, **options)


def test_a_folder_becomes_a_dataset(tmp_path: Path) -> None:
    files = write_folder(tmp_path / "images", {"a": 3, "b": 2})
    info = build(tmp_path / "images", tmp_path / "out")
    assert stored(tmp_path / "out") == [(data, "ab".index(path[0])) for path, data in files.items()]
    assert (info.num_samples, info.num_shards, info.num_skipped, info.classes) == (5, 1, 0, ("a", "b"))
    assert info == LMDBDataset(tmp_path / "out").info
    assert sorted(os.listdir(tmp_path / "out")) == [
        "manifest.json",
        *(f"shard-00000.{kind}" for kind in ("lab", "mdb", "tab")),
    ]
    assert Manifest.load(tmp_path / "out").source == {
        "kind": "image folder",
        "path": str(tmp_path / "images"),
        "num_samples": 5,
        "image_size": None,
        "image_quality": None,
        "built_with": Manifest.load(tmp_path / "out").source["built_with"],
        "plan": Manifest.load(tmp_path / "out").source["plan"],
    }


def test_processes_parts_and_shards_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match="samples are skipped"):
        build(Numbers(), tmp_path / "one")
    with pytest.warns(UserWarning, match="samples are skipped"):
        build(Numbers(), tmp_path / "three", num_proc=3)
    for part in ((1, 2), (0, 2)):
        part_info = build(Numbers(), tmp_path / "parts", part=part)
        assert part_info.num_shards == (1 if part[0] else 2)
    with pytest.warns(UserWarning, match="samples are skipped"):
        build(Numbers(), tmp_path / "parts", resume=True)
    assert kept(tmp_path / "one") == kept(tmp_path / "three") == kept(tmp_path / "parts")
    assert [shard.num_samples for shard in Manifest.load(tmp_path / "one").shards] == [832, 833, 830]
    monkeypatch.setattr("lightning_gpuopt.storage.writing.plan._SHARE_SAMPLES", 100)
    with pytest.warns(UserWarning, match="samples are skipped"):
        assert build(Numbers(), tmp_path / "more").num_shards == 16
    assert repr(stored(tmp_path / "more")) == repr(stored(tmp_path / "one"))


@pytest.mark.parametrize(
    ("num_samples", "num_bytes", "per_shard"),
    [
        (1, 1, 1),
        (1024, 1 << 20, 1024),
        (1025, 1 << 20, 513),  # two shards
        (100_000, 1 << 20, 6250),  # sixteen are enough to share
        (100_000, 100 * SHARD_BYTES, 1000),
        (1_000_000, 10_000 * SHARD_BYTES, 3907),  # 256 at most, of up to 16 GiB
        (1_000_000, 256 * 64 * SHARD_BYTES, 3907),
        (1_000_000, 512 * 64 * SHARD_BYTES, 1954),
        (1_000_000_000, 100 * 10**12, 171_792),
        (10, 10_000 * SHARD_BYTES, 1),
        (50_000, None, 3125),
        (6_553_600, None, 65_536),
    ],
)
def test_the_source_alone_decides_how_it_is_cut(num_samples: int, num_bytes: int | None, per_shard: int) -> None:
    assert plan_shards(num_samples, num_bytes) == per_shard


BROKEN = {
    "empty.jpg": (b"", "it is empty"),
    "garbage.jpg": (bytes(range(100)), "not an image file"),
    "text.png": (b"no image at all", "not an image file (it begins with b'no image at ')"),
    "cut.jpg": (image_file(0, size=(200, 200))[:-2000], "image file is truncated"),
    "head.jpg": (image_file(0)[:50], ""),
    "cut.png": (image_file(0, "PNG")[:-20], "Truncated File Read"),
    "flipped.png": (image_file(0, "PNG")[:100] + b"\0\0\0" + image_file(0, "PNG")[103:], "broken PNG file"),
    "cut.webp": (image_file(0, "WEBP")[:-40], ""),
    "cut.bmp": (image_file(0, "BMP")[:-40], "image file is truncated"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_image_is_known(name: str) -> None:
    data, reason = BROKEN[name]
    with pytest.raises(BadImage) as caught:
        check_image(data)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        image_file(0),
        image_file(0, progressive=True),
        image_file(0) + b"\0\0 trailing",
        image_file(0, "PNG"),
        image_file(0, "WEBP"),
        image_file(0, "TIFF"),
        image_file(0, "GIF"),
    ],
    ids=["jpeg", "progressive", "trailing", "png", "webp", "tiff", "gif"],
)
def test_a_good_image_is_good(data: bytes) -> None:
    check_image(data)


def test_a_cmyk_jpeg_is_good() -> None:
    out = io.BytesIO()
    Image.new("CMYK", (8, 8)).save(out, "JPEG")
    check_image(out.getvalue())


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_an_image_that_pil_will_not_decode_for_its_size_is_bad(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 24 * 16 // 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_image(image_file(0, kind))  # PIL warns of it; that is for its reader to see
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 24 * 16 // 2 - 1)
        with pytest.raises(BadImage, match="exceeds limit of 382 pixels"):
            check_image(image_file(0, kind))


@pytest.mark.parametrize("num_proc", [1, 2])
def test_broken_images_are_left_out_counted_and_listed(tmp_path: Path, num_proc: int) -> None:
    files = write_folder(tmp_path / "images", {"a": 1500, "b": 1})
    (tmp_path / "images/a/00700.jpg").write_bytes(b'"bad", he said')
    (tmp_path / "images/a/01400.jpg").write_bytes(b"")
    with pytest.warns(UserWarning, match="skipped") as caught:
        info = build(tmp_path / "images", tmp_path / "out", num_proc=num_proc)
    said = [warning for warning in caught if warning.category is UserWarning]  # Python 3.12 has one of forks as well
    assert [str(warning.message) for warning in said] == [
        f"{tmp_path}/out: 2 of 1501 samples are skipped, since their images cannot be decoded (the first: a/00700.jpg: "
        f"not an image file (it begins with b'\"bad\", he sa')); {tmp_path}/out/skipped.csv lists them"
    ]
    assert said[0].filename == __file__
    assert (info.num_samples, info.num_skipped) == (1499, 2)
    with (tmp_path / "out/skipped.csv").open(newline="") as stream:
        assert list(csv.reader(stream)) == [
            ["index", "name", "reason"],
            ["700", "a/00700.jpg", "not an image file (it begins with b'\"bad\", he sa')"],
            ["1400", "a/01400.jpg", "it is empty"],
        ]
    good = [data for path, data in files.items() if path not in ("a/00700.jpg", "a/01400.jpg")]
    assert [image for image, _ in stored(tmp_path / "out")] == good


def test_strict_stops_at_the_first_and_can_go_on(tmp_path: Path) -> None:
    files = write_folder(tmp_path / "images", {"a": 1500})
    (tmp_path / "images/a/01400.jpg").write_bytes(b"bad")
    for num_proc in (1, 2):
        with pytest.raises(StorageError, match=f"{tmp_path}/images: a/01400.jpg: cannot be decoded .*resume=True"):
            build(tmp_path / "images", tmp_path / "out", strict=True, resume=num_proc > 1, num_proc=num_proc)
    assert beside(tmp_path / "out") == [".out.building", "images"]
    (tmp_path / "images/a/01400.jpg").write_bytes(files["a/01400.jpg"])
    info = build(tmp_path / "images", tmp_path / "out", strict=True, resume=True)
    assert (info.num_samples, info.num_skipped) == (1500, 0)
    assert beside(tmp_path / "out") == ["images", "out"]


def test_an_image_that_was_mended_is_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = write_folder(tmp_path / "images", {"a": 2})
    (tmp_path / "images/a/00001.jpg").write_bytes(b"bad")
    with monkeypatch.context() as patch:  # the shard's list of the skipped is written, and it is not finished
        patch.setattr(ShardWriter, "finish", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            build(tmp_path / "images", tmp_path / "out")
    assert (tmp_path / ".out.building/shard-00000.skipped").exists()
    (tmp_path / "images/a/00001.jpg").write_bytes(files["a/00001.jpg"])
    assert build(tmp_path / "images", tmp_path / "out", resume=True).num_skipped == 0
    assert not (tmp_path / "out/skipped.csv").exists()


def test_nothing_but_broken_images_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        StorageError, match=r"list: none of its 2 samples can be stored; the first, list\[0\]: it is empty"
    ):
        build([EncodedImage(b""), EncodedImage(b"x")], tmp_path / "out")
    assert beside(tmp_path / "out") == []


def test_a_whole_shard_of_broken_images_is_an_empty_shard(tmp_path: Path) -> None:
    images = [EncodedImage(b"")] * 1000 + [EncodedImage(image_file(i)) for i in range(1000)]
    with pytest.warns(UserWarning, match="1000 of 2000"):
        assert build(images, tmp_path / "out", max_skipped=0.5).num_shards == 2
    assert stored(tmp_path / "out") == images[1000:]


def some_broken(broken: int, of: int) -> list[EncodedImage]:
    return [EncodedImage(b"" if index < broken else image_file(index)) for index in range(of)]


@pytest.mark.parametrize("num_proc", [1, 2])
def test_a_build_stops_once_ten_images_and_a_share_of_all_are_bad(tmp_path: Path, num_proc: int) -> None:
    source, out = some_broken(10, 999), tmp_path / "out"
    with pytest.raises(StorageError) as stopped:
        build(source, out, num_proc=num_proc)
    first, *named = str(stopped.value).splitlines()
    assert first == (
        "list: 10 of 999 samples cannot be decoded so far, more than max_skipped=0.01 allows; fix them, or raise "
        "max_skipped, then continue with resume=True. The first:"
    )
    assert named == [f"  list[{index}]: it is empty" for index in range(10)]
    assert not out.exists()
    with pytest.warns(UserWarning, match="10 of 999"):
        assert build(source, out, num_proc=num_proc, resume=True, max_skipped=0.02).num_skipped == 10


@pytest.mark.parametrize(("broken", "of", "share"), [(9, 10, 0.01), (10, 1000, 0.01), (12, 24, 0.5), (23, 24, 1)])
def test_fewer_are_left_out(tmp_path: Path, broken: int, of: int, share: float) -> None:
    with pytest.warns(UserWarning, match=f"{broken} of {of}"):
        assert build(some_broken(broken, of), tmp_path / "out", max_skipped=share).num_skipped == broken


def test_what_other_parts_have_left_out_counts(tmp_path: Path) -> None:
    source = some_broken(999, 2000)  # two shards
    build(source, tmp_path / "out", part=(0, 2), max_skipped=1)
    with pytest.raises(StorageError, match="999 of 2000"):
        build(source, tmp_path / "out", part=(1, 2))


@pytest.mark.parametrize("wrong", [{"max_skipped": -0.1}, {"max_skipped": 1.5}, {"max_skipped": 0.5, "strict": True}])
def test_a_share_that_is_none_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="max_skipped"):
        build([1], tmp_path / "out", **wrong)


@pytest.mark.parametrize("num_proc", [1, 2])
def test_a_sample_that_cannot_be_stored_is_named(tmp_path: Path, num_proc: int) -> None:
    with pytest.raises(TypeError, match=r"list: list\[1\]: sample\['x'\]\[0\] is a builtins\.set"):
        build([1, {"x": [{2}]}, 3], tmp_path / "out", num_proc=num_proc)
    assert not (tmp_path / "out").exists()


class Odd(Exception):
    """Can be pickled, and then not be unpickled."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"odd {one + two}")


def test_an_error_in_a_worker_tells_where_it_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: DatasetSource, index: int) -> int:
        raise Odd(1, 2)

    monkeypatch.setattr(DatasetSource, "read", read)
    with pytest.raises(RuntimeError, match="Odd: odd 3") as caught:
        build([1, 2], tmp_path / "out", num_proc=2)
    assert "raise Odd(1, 2)" in str(caught.value.__cause__)


def test_reading_a_shard_back_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_gpuopt.storage.shard_writer._READ_BACK_BYTES", 1 << 20)
    monkeypatch.setattr("lightning_gpuopt.storage.shard_writer.COMMIT_BYTES", 1 << 20)
    samples = [bytes([index]) * (1 << 18) for index in range(200)]  # 50 MiB
    seen: list[int] = []
    check = shard_writer.check

    def watched(*args: Any) -> bytes:
        seen.append(_file_mib())
        return check(*args)

    monkeypatch.setattr(shard_writer, "check", watched)
    before = _file_mib()
    build(samples, tmp_path / "out")
    assert len(seen) == 200
    assert max(seen) - before < 40
    monkeypatch.undo()
    assert stored(tmp_path / "out") == samples


def _file_mib() -> int:
    """MiB of mapped files in this process's memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("RssFile"))) // 1024


# --- what is there already ---------------------------------------------------------------------------------------


def test_a_dataset_that_is_there_stays_unless_it_may_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "out"
    build([1, 2, 3], path)
    before = kept(path)
    with pytest.raises(FileExistsError, match="it exists already; give overwrite=True"):
        build([4], path)
    for broken, error in (([{1}], TypeError), ([EncodedImage(b"")], StorageError)):
        with pytest.raises(error):
            build(broken, path, overwrite=True)
        assert kept(path) == before
    build([4], path, overwrite=True)
    assert stored(path) == [4]
    assert beside(path) == ["out"]


def test_a_dataset_can_be_rebuilt_from_itself(tmp_path: Path) -> None:
    build([EncodedImage(image_file(0, size=(64, 64))), EncodedImage(image_file(1, size=(64, 64)))], tmp_path / "out")
    build(tmp_path / "out", tmp_path / "out", overwrite=True, image_size=32)
    assert [image.size for image in LMDBDataset(tmp_path / "out")] == [(32, 32)] * 2


def test_parts_and_other_arguments_want_the_source_and_the_plan_as_they_were(tmp_path: Path) -> None:
    images, path = tmp_path / "images", tmp_path / "out"
    write_folder(images, {"a": 20})
    build(images, path, part=(0, 2))
    with pytest.raises(StorageError) as refused:
        build(images, path, resume=True, image_size=8)
    assert re.search(
        rf"out\.building: the unfinished build there was begun differently \(image_size was null, now 8; .*\); give "
        rf"overwrite=True without resume=True to delete it \(20 samples in 1 finished shards, [0-9.]+ MiB in all, "
        rf"written until \d+-\d\d-\d\d \d\d:\d\d, begun by build_lmdb of the image folder {images}, lightning-gpuopt "
        r"\S+\), or resume=True and the original arguments to continue it$",
        str(refused.value),
    )
    (images / "a/00021.jpg").write_bytes(image_file(21))
    with pytest.raises(StorageError, match=r"begun differently \(source num_samples was 20, now 21.*; start all parts"):
        build(images, path, part=(1, 2))
    (images / "a/00021.jpg").unlink()
    assert build(images, path, resume=True).num_samples == 20


def test_a_dataset_is_not_built_into_its_source(tmp_path: Path) -> None:
    write_folder(tmp_path / "images", {"a": 1})
    with pytest.raises(ValueError, match="images/out: it is inside the source"):
        build(tmp_path / "images", tmp_path / "images/out")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"num_proc": 0}, "num_proc: expected a number of processes, at least 1, got 0"),
        ({"num_proc": True}, "num_proc: expected a number of processes, at least 1, got True"),
        ({"part": (2, 2)}, r"part: expected \(i, n\) with 0 <= i < n, or None, got \(2, 2\)"),
        ({"part": "0/2"}, r"part: expected \(i, n\)"),
        ({"image_size": 0}, "image_size: expected a number of pixels, at least 1, or None, got 0"),
        ({"image_quality": 96}, "image_quality: expected a JPEG quality from 1 to 95, got 96"),
    ],
)
def test_wrong_arguments_are_told(tmp_path: Path, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        build([1], tmp_path / "out", **options)
    assert beside(tmp_path / "out") == []


# --- progress ----------------------------------------------------------------------------------------------------


def test_without_a_terminal_there_is_a_line_every_ten_seconds() -> None:
    clock, out = Clock(), io.StringIO()
    with ConsoleProgress(1000, 200, console=Console(file=out, width=40), clock=clock) as progress:
        for _ in range(8):
            clock.now_s += 3
            progress.add(50, 2_000_000)
    assert out.getvalue().splitlines() == [
        "build: 400 of 1,000 samples (40%), 17 samples/s, 1 MB/s, 0:00:36 left",
        "build: 600 of 1,000 samples (60%), 17 samples/s, 1 MB/s, 0:00:24 left",
    ]


def test_in_a_terminal_there_is_a_bar() -> None:
    clock, out = Clock(), io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    with ConsoleProgress(1000, console=console, clock=clock) as progress:
        clock.now_s += 2
        progress.add(1000, 4_000_000)
    last = out.getvalue()
    assert "1,000 of 1,000" in last
    assert "500 samples/s, 2 MB/s" in last


def test_no_progress_is_silence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    clock, out = Clock(), io.StringIO()
    with ConsoleProgress(10, enabled=False, console=Console(file=out, force_terminal=True), clock=clock) as progress:
        clock.now_s += 60
        progress.add(10, 10)
    assert out.getvalue() == ""
    build_lmdb([1, 2, 3], tmp_path / "out")  # done in no time: nothing to say
    assert capfd.readouterr() == ("", "")


def test_a_strict_resume_looks_again_at_what_was_left_out(tmp_path: Path) -> None:
    write_folder(tmp_path / "images", {"a": 3})
    good = (tmp_path / "images/a/00001.jpg").read_bytes()
    (tmp_path / "images/a/00001.jpg").write_bytes(good[:100])
    assert build_lmdb(tmp_path / "images", tmp_path / "data", part=(0, 1), progress=False).num_skipped == 1
    with pytest.raises(StorageError, match=r"00001\.jpg: cannot be decoded"):
        build_lmdb(tmp_path / "images", tmp_path / "data", resume=True, strict=True, progress=False)
    (tmp_path / "images/a/00001.jpg").write_bytes(good)
    info = build_lmdb(tmp_path / "images", tmp_path / "data", resume=True, strict=True, progress=False)
    assert (info.num_samples, info.num_skipped) == (3, 0)


def test_a_daemon_is_told_that_it_may_not_start_processes(tmp_path: Path) -> None:
    said = tmp_path / "said"
    daemon = multiprocessing.get_context("fork").Process(target=_build_and_tell, args=(tmp_path, said), daemon=True)
    daemon.start()
    daemon.join()
    assert "use num_proc=1" in said.read_text()


def _build_and_tell(folder: Path, said: Path) -> None:
    try:
        build_lmdb([1, 2], folder / "data", num_proc=2, progress=False)
    except StorageError as error:
        said.write_text(str(error))
