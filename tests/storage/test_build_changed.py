"""Builds that go on after files of their source have changed, gone or come."""

from __future__ import annotations

import errno
import json
import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lightning_gpuopt.storage.errors import StorageError
from lightning_gpuopt.storage.format import LMDBInfo, staging_directory
from lightning_gpuopt.storage.sources.folder import FolderSource
from lightning_gpuopt.storage.writer import LMDBWriter
from lightning_gpuopt.storage.writing import staging
from lightning_gpuopt.storage.writing.build import build_lmdb
from lightning_gpuopt.storage.writing.changed import Hashes, place_shards, shard_starts
from lightning_gpuopt.storage.writing.publish import remove
from tests.storage.executors import Immediately
from tests.storage.source_files import beside, image_file, stored, write_folder, write_tar

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork")


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_gpuopt.storage.writing.plan._SHARE_SAMPLES", 10)


def build(source: Any, path: Path, **options: Any) -> LMDBInfo:
    return build_lmdb(source, path, progress=False, **options)


@pytest.fixture
def failed(tmp_path: Path) -> Path:
    """A folder of 100 images, of which the strict build has failed at number 42, in the fifth of ten shards."""
    images = tmp_path / "images"
    write_folder(images, {"a": 50, "b": 50})
    (images / "a/00042.jpg").write_bytes(b"bad")
    with pytest.raises(
        StorageError, match=r"a/00042\.jpg: cannot be decoded .*; repair or remove it, then continue with r"
    ):
        build(images, tmp_path / "out", strict=True)
    return images


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that this process has read."""
    names: list[str] = []
    whole = FolderSource.read

    def noted(self: FolderSource, index: int) -> Any:
        names.append(self.name(index))
        return whole(self, index)

    monkeypatch.setattr(FolderSource, "read", noted)
    return names


def removed(images: Path) -> None:
    (images / "a/00042.jpg").unlink()


def renamed(images: Path) -> None:
    (images / "a/00042.jpg").unlink()
    (images / "a/00042-again.jpg").write_bytes(image_file(42))


def many_gone(images: Path) -> None:
    for number in range(40, 50):
        (images / f"a/{number:05d}.jpg").unlink()


def many_come(images: Path) -> None:
    removed(images)
    for number in range(150, 190):
        (images / f"a/{number:05d}.jpg").write_bytes(image_file(number))
    (images / "b/z.jpg").write_bytes(image_file(99))


@pytest.mark.parametrize("change", [removed, renamed, many_gone, many_come])
def test_after_a_strict_failure_a_build_goes_on_where_it_was(
    tmp_path: Path, failed: Path, read: list[str], change: Callable[[Path], None]
) -> None:
    change(failed)
    with pytest.raises(
        FileExistsError, match=r"40 samples in 4 finished shards, .*; give resume=True to continue it, or"
    ):
        build(failed, tmp_path / "out", strict=True)
    info = build(failed, tmp_path / "out", strict=True, resume=True)
    assert min(read) == "a/00040.jpg" if change is not many_gone else "b/00000.jpg"
    build(failed, tmp_path / "fresh", strict=True)
    assert stored(tmp_path / "out") == stored(tmp_path / "fresh")
    assert (info.num_samples, info.num_shards) == (len(stored(tmp_path / "fresh")), 10)
    assert beside(tmp_path / "out") == ["fresh", "images", "out"]
    read.clear()
    assert build(failed, tmp_path / "out", strict=True, resume=True) == info
    assert read == []


def test_shards_that_were_finished_behind_it_stay_too(tmp_path: Path, read: list[str]) -> None:
    images, out = tmp_path / "images", tmp_path / "out"
    write_folder(images, {"a": 60})
    (images / "a/00021.jpg").write_bytes(b"bad")
    for part in ((0, 3), (1, 3)):
        build(images, out, strict=True, part=part)
    with pytest.raises(StorageError, match=r"a/00021\.jpg: cannot be decoded"):
        build(images, out, strict=True, part=(2, 3))
    (images / "a/00021.jpg").unlink()
    read.clear()
    build(images, out, strict=True, resume=True)
    numbers = [*range(20, 30), *range(50, 60)]
    assert read == [f"a/{number:05d}.jpg" for number in numbers if number != 21]
    build(images, tmp_path / "fresh")
    assert stored(out) == stored(tmp_path / "fresh")


@pytest.mark.parametrize("how", ["processes", "executor"])
def test_processes_and_executors_go_on_as_well(tmp_path: Path, failed: Path, how: str) -> None:
    removed(failed)
    options: dict[str, Any] = {"num_proc": 2} if how == "processes" else {"executor": Immediately()}
    build(failed, tmp_path / "out", strict=True, resume=True, **options)
    build(failed, tmp_path / "fresh")
    assert stored(tmp_path / "out") == stored(tmp_path / "fresh")


def test_a_source_may_change_again_and_other_samples_may_be_left_out(tmp_path: Path, failed: Path) -> None:
    removed(failed)
    for number in (41, 45):
        (failed / f"b/{number:05d}.jpg").write_bytes(b"bad")
        with pytest.raises(StorageError, match=rf"b/{number:05d}\.jpg: cannot be decoded"):
            build(failed, tmp_path / "out", strict=True, resume=True)
        if number == 41:
            (failed / "b/00041.jpg").unlink()
    with pytest.warns(UserWarning, match="1 of 98 samples are skipped"):
        build(failed, tmp_path / "out", resume=True)
    names = [f"{folder}/{number:05d}.jpg" for folder in "ab" for number in range(50)]
    left = [name for name in names if name not in ("a/00042.jpg", "b/00041.jpg")]
    rows = (tmp_path / "out/skipped.csv").read_text().splitlines()
    assert [row.split(",")[:2] for row in rows[1:]] == [[str(left.index("b/00045.jpg")), "b/00045.jpg"]]


def test_a_shard_that_files_have_come_into_is_built_again(
    tmp_path: Path, failed: Path, read: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    removed(failed)
    (failed / "a/00015-new.jpg").write_bytes(image_file(200))
    build(failed, tmp_path / "out", strict=True, resume=True)
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        f"{tmp_path}/out: the source has changed since the build was begun (source names are others): 3 finished "
        "shards stay, 1 are built again"
    ]
    into = [*(f"a/{number:05d}.jpg" for number in range(10, 20)), "a/00015-new.jpg"]
    assert read[:12] == [*sorted(into), "a/00040.jpg"]
    build(failed, tmp_path / "fresh")
    assert stored(tmp_path / "out") == stored(tmp_path / "fresh")


def test_a_shard_of_which_a_stored_file_has_gone_is_built_again(
    tmp_path: Path, failed: Path, read: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    removed(failed)
    (failed / "a/00001.jpg").unlink()
    build(failed, tmp_path / "out", strict=True, resume=True)
    assert "3 finished shards stay, 1 are built again" in caplog.text
    assert [name for name in read if name < "a/00040"] == [f"a/{n:05d}.jpg" for n in range(10) if n != 1]
    build(failed, tmp_path / "fresh")
    assert stored(tmp_path / "out") == stored(tmp_path / "fresh")


@pytest.mark.parametrize("files", [1, 3, 5, 9])
def test_what_is_to_be_thrown_away_does_not_count_after_a_kill(
    files: int, tmp_path: Path, failed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed(failed)
    (failed / "a/00001.jpg").write_bytes((failed / "b/00003.jpg").read_bytes())
    with monkeypatch.context() as patched:
        left = iter(range(files))

        def remove_or_end(path: Path) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt
            remove(path)

        patched.setattr(staging, "remove", remove_or_end)
        with pytest.raises(KeyboardInterrupt):
            build(failed, tmp_path / "out", overwrite=True)
    if files < 5:  # finished shards are still there
        with pytest.raises(StorageError, match="give overwrite=True without resume=True"):
            build(failed, tmp_path / "out", overwrite=True, resume=True)
    build(failed, tmp_path / "out", overwrite=True, resume=files >= 5)
    build(failed, tmp_path / "fresh")
    assert stored(tmp_path / "out") == stored(tmp_path / "fresh")


def test_an_image_that_was_left_out_and_cannot_be_read_now_stays_left_out(
    tmp_path: Path, skipping: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = FolderSource.read

    def read_or_fail(self: FolderSource, index: int) -> Any:
        if self.name(index) == "a/00000.jpg":
            raise OSError(errno.EIO, "the disk says no", self.name(index))
        return whole(self, index)

    monkeypatch.setattr(FolderSource, "read", read_or_fail)
    with pytest.warns(UserWarning, match="10 of 100 samples are skipped"):
        assert build(skipping, tmp_path / "out", resume=True, max_skipped=0.5).num_samples == 90


def test_where_most_of_what_is_stored_has_gone_nothing_is_deleted(tmp_path: Path, failed: Path) -> None:
    removed(failed)
    files = {failed / f"a/000{number}1.jpg": b"" for number in range(3)}
    for file in files:
        files[file] = file.read_bytes()
        file.unlink()
    before = sorted(staging_directory(tmp_path / "out").iterdir())
    for options in ({"resume": True}, {}):
        with pytest.raises(
            StorageError, match=r"now 96; .*: 3 samples of 3 of the 4 finished shards are gone, or have another label\)"
        ):
            build(failed, tmp_path / "out", strict=True, **options)
    assert sorted(staging_directory(tmp_path / "out").iterdir()) == before
    for file, data in files.items():
        file.write_bytes(data)
    assert build(failed, tmp_path / "out", strict=True, resume=True).num_samples == 99


def test_a_class_that_comes_before_others_changes_their_labels(tmp_path: Path, failed: Path) -> None:
    removed(failed)
    write_folder(failed / "new", {"0": 1})
    (failed / "new/0").rename(failed / "0")
    (failed / "new").rmdir()
    with pytest.raises(StorageError, match="40 samples of 4 of the 4 finished shards are gone, or have another label"):
        build(failed, tmp_path / "out", strict=True, resume=True)


@pytest.fixture
def skipping(tmp_path: Path) -> Path:
    """A folder of 100 images, whose build has stopped after two of ten shards, since five in each are bad."""
    images = tmp_path / "images"
    write_folder(images, {"a": 100})
    for number in range(0, 20, 2):
        (images / f"a/{number:05d}.jpg").write_bytes(b"bad")
    with pytest.raises(StorageError, match="10 of 100 samples cannot be decoded so far"):
        build(images, tmp_path / "out")
    return images


@pytest.mark.parametrize("how", ["deleted", "some deleted", "repaired", "some repaired"])
def test_after_bad_images_were_deleted_or_repaired_the_build_goes_on(tmp_path: Path, skipping: Path, how: str) -> None:
    for number in range(0, 20 if "some" not in how else 6, 2):
        file = skipping / f"a/{number:05d}.jpg"
        if "deleted" in how:
            file.unlink()
        else:
            then = file.stat().st_mtime_ns
            file.write_bytes(image_file(number))
            os.utime(file, ns=(then, then))  # as of a copy
    options: dict[str, Any] = {"max_skipped": 0.5}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        info = build(skipping, tmp_path / "out", resume=True, **options)
        fresh = build(skipping, tmp_path / "fresh", **options)
    assert stored(tmp_path / "out") == stored(tmp_path / "fresh")
    assert info.num_skipped == fresh.num_skipped
    skipped = [path / "skipped.csv" for path in (tmp_path / "out", tmp_path / "fresh")]
    assert len({file.read_bytes() if file.exists() else b"" for file in skipped}) == 1


def test_shards_whose_skipped_images_are_as_bad_as_before_stay(tmp_path: Path, skipping: Path, read: list[str]) -> None:
    finished = {int(file.name[6:11]) for file in staging_directory(tmp_path / "out").glob("shard-*.tab")}
    assert finished
    with pytest.warns(UserWarning, match="10 of 100 samples are skipped"):
        build(skipping, tmp_path / "out", resume=True, max_skipped=0.5)
    good = {f"a/{10 * number + 1:05d}.jpg" for number in finished}
    assert good.isdisjoint(read)


@pytest.mark.parametrize("kind", ["tar", "parquet", "images"])
def test_files_of_one_name_in_two_folders_are_told_apart(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"

    def write(folder: str, first: int, count: int) -> str:
        file = tmp_path / folder / f"0.{kind}"
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        if kind == "tar":
            write_tar(file, {f"{i:02d}.cls": b"%04d" % (first + i) for i in range(count)})
        elif kind == "parquet":
            parquet = pytest.importorskip("pyarrow.parquet")
            table = pytest.importorskip("pyarrow").table({"x": np.arange(first, first + count)})
            parquet.write_table(table, file, compression="none", use_dictionary=False, write_statistics=False)
        else:
            for number in range(count):
                (tmp_path / folder / f"{number:05d}.jpg").write_bytes(image_file(first + number))
        return str(file)

    def source(count: int) -> Any:
        files = [write("r/1/a", 1000, 10), write("r/2/a", 2000, 10), write("r/3/a", 3000, count)]
        if kind != "images":
            return files
        return Images([str(file) for folder in "123" for file in sorted((tmp_path / f"r/{folder}/a").iterdir())])

    build(source(10), out, part=(1, 3))
    build(source(12), out, resume=True)
    build(source(12), tmp_path / "fresh")
    assert stored(out) == stored(tmp_path / "fresh")


class Images:
    """As torchvision's ImageFolder, with one label."""

    transform = target_transform = None

    def __init__(self, files: list[str]) -> None:
        self.samples = [(file, 0) for file in files]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        with Image.open(self.samples[index][0]) as image:
            return image.convert("RGB"), 0


def test_a_build_of_a_file_that_is_given_twice_does_not_go_on(tmp_path: Path) -> None:
    tars = [tmp_path / f"{name}.tar" for name in "ab"]
    for tar in tars:
        write_tar(tar, {f"{i:02d}.cls": b"%d" % i for i in range(10)})
    build([*map(str, tars), str(tars[0])], tmp_path / "out", part=(0, 3))
    write_tar(tars[1], {f"{i:02d}.cls": b"%d" % i for i in range(12)})
    with pytest.raises(
        StorageError, match=r"samples of shard 0, which is finished, cannot be told apart: they come twi"
    ):
        build([*map(str, tars), str(tars[0])], tmp_path / "out", resume=True)


def test_a_shuffled_build_wants_its_source_as_it_was(tmp_path: Path) -> None:
    images = tmp_path / "images"
    write_folder(images, {"a": 30})
    (images / "a/00007.jpg").write_bytes(b"bad")
    with pytest.raises(StorageError, match="cannot be decoded"):
        build(images, tmp_path / "out", strict=True, shuffle_seed=1)
    (images / "a/00007.jpg").unlink()
    with pytest.raises(
        StorageError, match=r"in a shuffled build all samples would get other positions\); give overwrite=True"
    ):
        build(images, tmp_path / "out", strict=True, shuffle_seed=1, resume=True)


def test_of_tars_those_that_were_not_read_may_change(tmp_path: Path) -> None:
    tars = tmp_path / "tars"
    tars.mkdir()
    members = [{f"{tar}{i}.jpg": image_file(10 * tar + i) for i in range(10)} for tar in range(4)]
    for tar, each in enumerate(members):
        write_tar(tars / f"{tar}.tar", {**each, "25.jpg": b"bad"} if tar == 2 else each)
    with pytest.raises(StorageError, match=r"2\.tar: 25: cannot be decoded"):
        build(tars, tmp_path / "out", strict=True)
    write_tar(tars / "2.tar", {name: data for name, data in members[2].items() if name != "25.jpg"})
    write_tar(tars / "4.tar", {"40.jpg": image_file(40)})
    assert build(tars, tmp_path / "out", strict=True, resume=True).num_samples == 40
    build(tars, tmp_path / "fresh")
    assert stored(tmp_path / "out") == stored(tmp_path / "fresh")


def test_what_has_been_built_is_thrown_away_in_words_only(
    tmp_path: Path, failed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = staging_directory(tmp_path / "out") / "plan.json"
    whole = json.loads(plan.read_text())
    plan.write_text("{")
    with pytest.raises(
        StorageError, match=r"does not say how it was begun, .*; give overwrite=True without resume=True"
    ):
        build(failed, tmp_path / "out", resume=True)
    plan.write_text(json.dumps(whole))
    removed(failed)
    build(failed, tmp_path / "out", overwrite=True)
    assert "the unfinished build there is deleted: 40 samples in 4 finished shards, " in caplog.text


def test_a_writer_says_what_is_there(tmp_path: Path) -> None:
    writer = LMDBWriter(tmp_path / "out", samples_per_shard=2)
    for index in range(5):
        writer.write(index)
    writer.flush()
    del writer
    with pytest.raises(
        StorageError, match=r"\(4 samples in 2 finished shards, .* begun by LMDBWriter, lightning-gpuopt \S+\)"
    ):
        LMDBWriter(tmp_path / "out", samples_per_shard=3, resume=True)


@settings(max_examples=300)
@given(data=st.data())
def test_finished_shards_stay_where_their_samples_are(data: st.DataObject) -> None:
    count, per_shard = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 7))
    starts = shard_starts(count, per_shard)
    shards = range(len(starts) - 1)
    finished = data.draw(st.sets(st.sampled_from(shards)))
    then = np.arange(1, count + 1, dtype=np.uint64) * 1000
    stored: dict[int, Hashes] = {number: then[starts[number] : starts[number + 1]] for number in finished}
    gone = data.draw(st.sets(st.integers(0, count - 1)))
    come = data.draw(st.sets(st.integers(0, 1000 * count + 2000).filter(lambda number: number % 1000), max_size=5))
    now = np.array(sorted({*np.delete(then, sorted(gone)).tolist(), *come}), np.uint64)
    again = data.draw(st.dictionaries(st.integers(0, count - 1), st.integers(0, count - 1), max_size=2))
    twins = {int(then[index]): int(then[other]) for index, other in again.items() if index != other}
    if data.draw(st.booleans()):
        for hashes in (now, *stored.values()):
            hashes[:] = [twins.get(int(value), int(value)) for value in hashes]
    skipped = {number: sorted(data.draw(st.sets(st.integers(0, len(stored[number]) - 1)))) for number in finished}
    lost = [
        number
        for number in finished
        if not {each for place, each in enumerate(stored[number].tolist()) if place not in skipped[number]}
        <= set(now.tolist())
    ]
    values, counts = np.unique(now, return_counts=True)
    if any(np.isin(hashes, values[counts > 1]).any() or len(set(hashes)) < len(hashes) for hashes in stored.values()):
        with pytest.raises(ValueError, match=r"which is finished, (cannot be told apart|are in another order)"):
            place_shards(stored, starts, now, per_shard, skipped)
        return
    refused = ""
    try:
        places, kept = place_shards(stored, starts, now, per_shard, skipped)
    except ValueError as error:
        refused = str(error)
    if refused:
        assert 2 * len(lost) > len(finished) if "are gone" in refused else twins
        return
    assert 2 * len(lost) <= len(finished)
    assert places == sorted(places)
    assert (places[0], places[-1]) == (0, len(now))
    assert len(places) >= len(starts)
    assert kept <= finished
    for number in kept:
        assert now[places[number] : places[number + 1]].tolist() == stored[number].tolist()
    if not come and not twins:
        assert kept == {number for number in finished if set(stored[number].tolist()) <= set(now.tolist())}
