"""``resume=True`` on a dataset that is finished already: nothing to do, or a refusal that names the difference."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_gpuopt.storage.errors import StorageError
from lightning_gpuopt.storage.format import LMDBInfo, Manifest
from lightning_gpuopt.storage.reader import LMDBDataset
from lightning_gpuopt.storage.writer import LMDBWriter
from lightning_gpuopt.storage.writing import fill
from lightning_gpuopt.storage.writing.build import build_lmdb
from tests.storage.building import Build, Numbers
from tests.storage.parts import write_numbered
from tests.storage.source_files import beside, stored, write_folder


def build(source: Any, path: Path, **options: Any) -> LMDBInfo:
    return build_lmdb(source, path, progress=False, **options)


def state(path: Path) -> dict[str, tuple[int, int]]:
    """Which files are there, and when they were written."""
    return {entry.name: (entry.inode(), entry.stat().st_mtime_ns) for entry in os.scandir(path)}


@pytest.fixture
def images(tmp_path: Path) -> Path:
    write_folder(tmp_path / "images", {"a": 4, "b": 2})
    return tmp_path / "images"


@pytest.mark.parametrize("options", [{}, {"part": (0, 2)}, {"part": (1, 2)}, {"strict": True}])
def test_a_finished_dataset_is_left_untouched(tmp_path: Path, images: Path, options: dict[str, Any]) -> None:
    path = tmp_path / "out"
    info = build(images, path)
    before = state(path)
    assert build(images, path, resume=True, **options) == info
    assert state(path) == before
    assert beside(path) == ["images", "out"]


def test_the_same_source_elsewhere_is_the_same(tmp_path: Path, images: Path) -> None:
    info = build(images, tmp_path / "out")
    images.rename(tmp_path / "moved")
    assert build(tmp_path / "moved", tmp_path / "out", resume=True) == info


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"image_size": 8}, "image_size was null, now 8; image_quality was null, now 90"),
        ({"shuffle_seed": 1}, "shuffle_seed was null, now 1"),
        ({"check": "decode"}, 'check was null, now "decode"'),
    ],
)
def test_other_arguments_are_refused_and_named(
    tmp_path: Path, images: Path, options: dict[str, Any], difference: str
) -> None:
    path = tmp_path / "out"
    build(images, path)
    before = state(path)
    with pytest.raises(FileExistsError) as caught:
        build(images, path, resume=True, **options)
    assert str(caught.value) == (
        f"{path}: the dataset there was built from something else ({difference}); give overwrite=True to replace it, "
        "or another path"
    )
    assert state(path) == before
    build(images, path, resume=True, overwrite=True, **options)
    assert Manifest.load(path).source["plan"] != Manifest.load(path).source
    assert state(path) != before


def as_of_an_earlier_release(path: Path) -> None:
    """Take the plan out of a manifest."""
    manifest = Manifest.load(path)
    source = {name: value for name, value in manifest.source.items() if name != "plan"}
    (path / "manifest.json").write_text(dataclasses.replace(manifest, source=source).to_json())


def test_a_dataset_of_an_earlier_release_is_compared_by_what_it_tells(tmp_path: Path, images: Path) -> None:
    path = tmp_path / "out"
    info = build(images, path, image_size=8)
    as_of_an_earlier_release(path)
    assert build(images, path, resume=True, image_size=8) == info
    with pytest.raises(FileExistsError, match=r"something else \(image_size was 8, now 9\)"):
        build(images, path, resume=True, image_size=9)
    write_folder(tmp_path / "more", {"a": 4, "b": 3})
    with pytest.raises(FileExistsError, match=r"\(source num_samples was 6, now 7\)"):
        build(tmp_path / "more", path, resume=True, image_size=8)
    with pytest.raises(FileExistsError, match=r'\(source kind was "image folder", now "dataset"\)'):
        build(list(range(6)), path, resume=True, image_size=8)


def test_a_dataset_of_the_writer_is_not_a_build_s(tmp_path: Path) -> None:
    path = write_numbered(tmp_path / "out", 5)
    with pytest.raises(FileExistsError, match=r'source kind was null, now "dataset"'):
        build([1, 2, 3, 4, 5], path, resume=True)


def test_strict_does_not_take_a_dataset_without_some_images(tmp_path: Path, images: Path) -> None:
    path = tmp_path / "out"
    good = (images / "a/00001.jpg").read_bytes()
    (images / "a/00001.jpg").write_bytes(good[:100])
    with pytest.warns(UserWarning, match="1 of 6 samples are skipped"):
        info = build(images, path)
    assert build(images, path, resume=True) == info
    with pytest.raises(FileExistsError, match="skipped 1 samples, which strict=True does not allow"):
        build(images, path, resume=True, strict=True)
    (images / "a/00001.jpg").write_bytes(good)
    assert build(images, path, resume=True, strict=True, overwrite=True).num_samples == 6


@pytest.mark.filterwarnings("ignore:.*samples are skipped")
def test_an_unfinished_build_of_the_same_plan_goes_on_where_it_is_to_replace(tmp_path: Path) -> None:
    path = tmp_path / "out"
    build(Numbers(), path)
    before = state(path)
    with Build(path, stop="read 900", overwrite=True) as running:
        assert running.stopped()
        running.kill()
    build(Numbers(), path, resume=True, overwrite=True)
    assert state(path) != before
    assert beside(path) == ["out"]


def test_a_damaged_dataset_is_not_taken_for_finished(tmp_path: Path) -> None:
    path = tmp_path / "out"
    build([1, 2], path)
    (path / "manifest.json").write_text("{")
    with pytest.raises(FileExistsError, match="it exists already"):
        build([1, 2], path, resume=True)
    build([1, 2], path, resume=True, overwrite=True)
    assert stored(path) == [1, 2]


@pytest.mark.filterwarnings("ignore:.*samples are skipped")
def test_a_strict_rebuild_of_a_shard_that_is_killed_does_not_count_as_finished(tmp_path: Path) -> None:
    """Strict looks again at shards with skipped samples: the first build's half of one must not stay."""
    path = tmp_path / "out"
    for part in ((0, 2), (1, 2)):
        build(Numbers(), path, part=part)
    with Build(path, stop="read 5", resume=True, strict=True) as running:
        assert running.stopped()
        running.kill()
    staging = tmp_path / ".out.building"
    assert not (staging / "shard-00000.json").exists()
    assert not (staging / "shard-00000.tab").exists()
    with pytest.raises(StorageError, match=r"Numbers\[7\]: cannot be decoded"):
        build(Numbers(), path, resume=True, strict=True)
    info = build(Numbers(), path, resume=True)
    assert (info.num_samples, info.num_skipped) == (2495, 5)


@pytest.mark.filterwarnings("ignore:.*samples are skipped")
def test_a_rebuild_that_does_not_begin_keeps_the_list_of_what_was_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shard still counts as finished, so its list must still be there."""
    path = tmp_path / "out"
    build(Numbers(), path, part=(0, 1))
    with monkeypatch.context() as patch:
        patch.setattr(fill, "ShardWriter", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            build(Numbers(), path, resume=True, strict=True)
    assert build(Numbers(), path, resume=True).num_skipped == 5


def test_an_interrupted_replacement_is_not_taken_for_finished(tmp_path: Path) -> None:
    class Numbers:
        def __init__(self, first: int, stop: bool = False) -> None:
            self.first, self.stop = first, stop

        def __len__(self) -> int:
            return 3000

        def __getitem__(self, index: int) -> int:
            if self.stop and index == 2000:
                raise KeyboardInterrupt
            return self.first + index

    path = tmp_path / "out"
    build(Numbers(0), path)
    with pytest.raises(KeyboardInterrupt, match="run the build again with overwrite=True and resume=True"):
        build(Numbers(7, stop=True), path, overwrite=True)
    with pytest.raises(FileExistsError, match="an unfinished build that is to replace it is next to it"):
        build(Numbers(7), path, resume=True)
    assert LMDBDataset(path)[0] == 0
    build(Numbers(7), path, resume=True, overwrite=True)
    assert [LMDBDataset(path)[index] for index in (0, 2999)] == [7, 3006]


def test_a_writers_interrupted_replacement_is_not_taken_for_finished(tmp_path: Path) -> None:
    path = write_numbered(tmp_path / "out", 5)
    with contextlib.suppress(RuntimeError), LMDBWriter(path, overwrite=True) as writer:
        writer.write(1)
        raise RuntimeError
    with pytest.raises(FileExistsError, match="give overwrite=True and resume=True to continue that"):
        LMDBWriter(path, resume=True)


def test_a_damaged_dataset_is_not_finished(tmp_path: Path, images: Path) -> None:
    path = tmp_path / "out"
    build(images, path)
    with (path / "shard-00000.mdb").open("r+b") as stream:
        stream.truncate(100)
    with pytest.raises(StorageError, match=r"shard-00000\.mdb.*give overwrite=True to build the dataset again"):
        build(images, path, resume=True)


def test_overwrite_takes_what_the_source_holds_now(tmp_path: Path) -> None:
    for value in (1, 2):
        np.save(tmp_path / "data.npy", np.full(5, value))
        build(tmp_path / "data.npy", tmp_path / "out", overwrite=True, resume=True)
    assert LMDBDataset(tmp_path / "out")[0] == 2
