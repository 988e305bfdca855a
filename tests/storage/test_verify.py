from __future__ import annotations

import errno
import io
import mmap
import os
import random
import shutil
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from PIL import Image

from lightning_gpuopt.storage import verify as verify_module
from lightning_gpuopt.storage.codec import EncodedImage
from lightning_gpuopt.storage.errors import StorageError
from lightning_gpuopt.storage.format import Manifest
from lightning_gpuopt.storage.verify import MAX_LISTED, VerifyReport, verify
from lightning_gpuopt.storage.writer import LMDBWriter
from lightning_gpuopt.storage.writing.staging import Staging
from tests.storage.parts import flip, write_numbered


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A dataset of 25 numbered samples in three shards, one flipped bit away from being damaged."""
    return write_numbered(tmp_path / "dataset", 25, samples_per_shard=10)


def broken_sample(path: Path, number: int) -> None:
    """Flip a bit in the content of a numbered sample."""
    file = path / f"shard-{number // 10:05d}.mdb"
    flip(file, 8 * file.read_bytes().find(bytes([number]) * 200) + 801)


@pytest.mark.parametrize("num_proc", [1, 2])
def test_a_good_dataset_has_no_problems(path: Path, num_proc: int) -> None:
    counts: list[int] = []
    report = verify(path, num_proc=num_proc, progress=counts.append)
    assert report == VerifyReport(25, 0, ())
    assert report.ok
    assert sorted(counts) == [5, 10, 10]


@pytest.mark.parametrize("num_proc", [1, 2])
def test_damaged_samples_are_named(path: Path, num_proc: int) -> None:
    broken_sample(path, 23)
    broken_sample(path, 3)
    report = verify(path, num_proc=num_proc)
    assert (report.num_samples, report.num_problems, report.ok) == (25, 4, False)
    assert sorted(text.split(": ")[0] for index, text in report.problems if index is None) == [
        f"{path}/shard-00000.mdb",
        f"{path}/shard-00002.mdb",
    ]
    assert [problem for problem in report.problems if problem[0] is not None] == [
        (3, f"{path}/shard-00000.mdb: its checksum does not match its content"),
        (23, f"{path}/shard-00002.mdb: its checksum does not match its content"),
    ]


def test_any_flipped_bit_of_any_file_is_found(path: Path) -> None:
    generator = random.Random(0)
    files = sorted(path.iterdir())
    assert len(files) == 10
    for file in files:
        bits = file.stat().st_size * 8
        for bit in [0, bits - 1, *(generator.randrange(bits) for _ in range(40))]:
            flip(file, bit)
            # A manifest may be of another format or version now.
            with nullcontext() if file.suffix != ".json" else suppress(StorageError):
                assert not verify(path).ok, (file.name, bit)
            flip(file, bit)
    assert verify(path).ok


def test_skipped_csv_is_covered_too(tmp_path: Path) -> None:
    with Staging(tmp_path / "d", overwrite=False, resume=False, plan={}) as staging:
        (staging.directory / "skipped.csv").write_text("index,name,reason\n3,x.jpg,truncated\n")
        with LMDBWriter(tmp_path / "other") as writer:
            writer.write(1)
        for file in (tmp_path / "other").glob("shard*"):
            shutil.copy(file, staging.directory)
        staging.publish(Manifest(Manifest.load(tmp_path / "other").shards, num_skipped=1))
    skipped = tmp_path / "d" / "skipped.csv"
    assert verify(tmp_path / "d").ok
    flip(skipped, 100)
    assert verify(tmp_path / "d").problems == ((None, f"{skipped}: it is not what was written"),)
    skipped.unlink()
    assert verify(tmp_path / "d").problems == ((None, f"{skipped}: No such file or directory"),)


def test_a_shard_that_is_missing_or_cut_off_leaves_the_others_checked(path: Path) -> None:
    (path / "shard-00000.mdb").unlink()
    with (path / "shard-00001.mdb").open("r+b") as stream:
        stream.truncate(8192)
    report = verify(path)
    assert report.num_samples == 5
    assert [index for index, _ in report.problems] == [None, None]
    assert report.problems[0][1].startswith(f"{path}/shard-00000.mdb: this shard is missing")
    assert report.problems[1][1].startswith(f"{path}/shard-00001.mdb: 8192 bytes long, but ")


def test_a_damaged_manifest_is_a_problem_and_no_dataset_an_error(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"num_skipped": 0', '"num_skipped": 1'))
    report = verify(path)
    assert (report.num_samples, report.num_problems) == (0, 1)
    assert (
        "manifest.json: not a readable manifest (ValueError: its digest does not match its text)"
        in report.problems[0][1]
    )
    with pytest.raises(FileNotFoundError, match="there is no such directory"):
        verify(path / "nowhere")
    with pytest.raises(ValueError, match="num_proc: expected a number of processes, at least 1, got 0"):
        verify(path, num_proc=0)


def test_decode_finds_images_that_were_broken_when_they_came(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).save(file, "PNG")
    with LMDBWriter(tmp_path / "d") as writer:
        for data in (file.getvalue(), file.getvalue()[:-30], b"no image"):
            writer.write((EncodedImage(data), 1))
    assert verify(tmp_path / "d").ok
    report = verify(tmp_path / "d", decode=True)
    assert [index for index, _ in report.problems] == [1, 2]
    assert all("cannot be decoded" in text for _, text in report.problems)


def test_a_thousand_problems_are_counted_and_a_hundred_listed(tmp_path: Path) -> None:
    with LMDBWriter(tmp_path / "d") as writer:
        for _ in range(1000):
            writer.write(EncodedImage(b"no image"))
    report = verify(tmp_path / "d", decode=True)
    assert (report.num_samples, report.num_problems, len(report.problems)) == (1000, 1000, MAX_LISTED)
    assert [index for index, _ in report.problems] == list(range(MAX_LISTED))


@pytest.mark.parametrize("name", ["shard-00001.mdb", "shard-00001.tab"])
def test_a_disk_that_fails_is_a_problem_in_the_report(path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is mapped: a page that the disk does not give would end the process by SIGBUS."""
    monkeypatch.setattr(mmap, "mmap", None)
    (path / name).rename(path / "elsewhere")
    (path / name).symlink_to(path / "elsewhere")
    whole = open

    def opened(file: Any, *args: Any, **kwargs: Any) -> Any:
        stream = whole(file, *args, **kwargs)
        failing = isinstance(file, int) and os.path.samestat(os.fstat(file), os.stat(path / name))
        return Failing(stream) if failing else stream

    monkeypatch.setattr(verify_module, "open", opened, raising=False)
    report = verify(path)
    assert not report.ok
    texts = [text for _, text in report.problems]
    assert all(text.startswith(f"{path}/shard-00001.") and "Input/output error" in text for text in texts)
    indices = [index for index, _ in report.problems]
    assert indices == (list(range(10, 20)) if name.endswith("mdb") else [None])


class Failing:
    """A file that can be opened, and not be read."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def __enter__(self) -> Failing:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stream.close()

    def fileno(self) -> int:
        return self._stream.fileno()

    def seek(self, at: int) -> None:
        pass

    def read(self, size: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.matrix
def test_a_table_of_very_many_samples_is_not_mapped_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LMDBWriter(tmp_path / "d") as writer:
        for index in range(90_000):
            writer.write(index)
    monkeypatch.setattr(mmap, "mmap", None)
    assert verify(tmp_path / "d") == VerifyReport(90_000, 0, ())
