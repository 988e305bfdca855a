"""What came into the cache folders of streams."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_gpuopt.detector import downloads
from lightning_gpuopt.detector.downloads import DownloadWatch

SAID = "an epoch that downloads is not representative of later epochs."


def test_what_came_into_a_folder_is_a_note(tmp_path: Path) -> None:
    cache, warm, later = tmp_path / "cache", tmp_path / "warm", tmp_path / "later"
    for folder in (cache, warm):
        (folder / "train").mkdir(parents=True)
        (folder / "train/0.mds").touch()
    watch = DownloadWatch()
    watch.begin([str(cache), str(warm), str(later)])
    assert watch.notes() == []
    (cache / "train/1.mds").touch()
    later.mkdir()
    for number in range(2):
        (later / f"{number}.mds").touch()
    watch.begin([str(cache)])  # of a later epoch
    assert watch.notes() == [
        f"1 more file in the cache folder {cache} than before training: {SAID}",
        f"2 more files in the cache folder {later} than before training: {SAID}",
    ]


def test_of_a_large_folder_a_part_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "_MAX_FILES", 2)
    for number in range(3):
        (tmp_path / str(number)).touch()
    watch = DownloadWatch()
    watch.begin([str(tmp_path)])
    (tmp_path / "more").touch()
    assert watch.notes() == []
