from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import lmdb
import msgpack
import numpy as np
import pytest

from lightning_gpuopt.storage import shard_writer
from lightning_gpuopt.storage import writer as writer_module
from lightning_gpuopt.storage.errors import StorageError
from lightning_gpuopt.storage.format import LMDBInfo, Manifest, staging_directory
from lightning_gpuopt.storage.reader import LMDBDataset
from lightning_gpuopt.storage.verify import verify
from lightning_gpuopt.storage.writer import LMDBWriter
from lightning_gpuopt.storage.writing.build import build_lmdb
from tests.fork_server import run_code
from tests.storage.parts import (
    REPOSITORY,
    Interrupted,
    assert_numbered,
    numbered,
    write_and_fail,
    write_numbered,
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    with LMDBWriter(tmp_path / "dataset", samples_per_shard=4) as writer:
        for index in range(10):
            writer.write(numbered(index))
        writer.classes = ["cat", "dog"]
        assert not (tmp_path / "dataset").exists()
    info = LMDBInfo(10, LMDBDataset(tmp_path / "dataset").info.num_bytes, 3, 0, ("cat", "dog"))
    assert writer.close() == LMDBDataset(tmp_path / "dataset").info == info
    assert_numbered(tmp_path / "dataset", 10)
    assert os.listdir(tmp_path) == ["dataset"]


def test_anybody_can_read_the_lmdb_files(tmp_path: Path) -> None:
    write_numbered(tmp_path / "dataset", 5)
    env = lmdb.open(str(tmp_path / "dataset" / "shard-00000.mdb"), subdir=False, readonly=True, lock=False)
    with env, env.begin() as txn:
        items = list(txn.cursor())
    assert [key for key, _ in items] == [index.to_bytes(8, "big") for index in range(5)]
    assert [msgpack.unpackb(value)[3] for _, value in items] == [index.to_bytes(8, "little") for index in range(5)]


def test_a_sample_that_cannot_be_stored_is_named_and_the_writer_goes_on(tmp_path: Path) -> None:
    with LMDBWriter(tmp_path / "dataset") as writer:
        writer.write(1)
        with pytest.raises(TypeError, match=r"dataset: sample 1 cannot be stored: sample\[0\] is a builtins.object"):
            writer.write((object(),))
        writer.write(2)
    assert list(LMDBDataset(tmp_path / "dataset")) == [1, 2]


def test_an_exception_leaves_what_was_written_for_a_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "dataset"
    with caplog.at_level(logging.WARNING), pytest.raises(Interrupted):
        write_and_fail(path, 6, samples_per_shard=4)
    assert caplog.messages == [
        f"{path} is not finished (Interrupted): 6 samples are safely written next to it; "
        "LMDBWriter(..., resume=True) continues after them"
    ]
    assert not path.exists()
    with pytest.raises(FileNotFoundError, match="run the build again with resume=True"):
        LMDBDataset(path)
    with pytest.raises(FileExistsError, match="give resume=True to continue"):
        LMDBWriter(path, samples_per_shard=4)
    with pytest.raises(StorageError, match="samples_per_shard was 4, now 5"):
        LMDBWriter(path, samples_per_shard=5, resume=True)
    write_numbered(path, 10, samples_per_shard=4, resume=True)
    assert_numbered(path, 10)
    assert [shard.num_samples for shard in Manifest.load(path).shards] == [4, 4, 2]


def test_len_counts_what_is_safe(tmp_path: Path) -> None:
    with LMDBWriter(tmp_path / "dataset") as writer:
        writer.write(1)
        writer.write(2)
        assert (len(writer), writer.num_samples, bool(writer)) == (0, 2, True)
        writer.flush()
        assert len(writer) == 2
        writer.write(b"x" * shard_writer.COMMIT_BYTES)
        assert len(writer) == 3


def test_shards_are_cut_by_size_also_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "SHARD_BYTES", 1000)
    path = tmp_path / "dataset"
    write_numbered(path, 20)
    counts = [shard.num_samples for shard in Manifest.load(path).shards]
    assert counts == [4, 4, 4, 4, 4]
    for stop in range(1, 20, 3):
        with pytest.raises(Interrupted):
            write_and_fail(path, stop, overwrite=True, resume=stop > 1)
    with LMDBWriter(path, overwrite=True, resume=True) as writer:
        assert len(writer) == 19
        writer.write(numbered(19))
    assert [shard.num_samples for shard in Manifest.load(path).shards] == counts
    assert_numbered(path, 20)


def test_a_tiny_map_grows(tmp_path: Path) -> None:
    with LMDBWriter(tmp_path / "dataset", map_size_step=1 << 16) as writer:
        for index in range(300):
            writer.write(np.full(10_000, index % 250, np.uint8))
            if index % 50 == 0:
                writer.flush()
    assert [int(sample[0]) for sample in LMDBDataset(tmp_path / "dataset")] == [index % 250 for index in range(300)]


def test_nothing_written_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dataset: no samples were written"):
        LMDBWriter(tmp_path / "dataset").close()
    assert os.listdir(tmp_path) == []


def test_after_closing_there_is_no_writing(tmp_path: Path) -> None:
    writer = LMDBWriter(tmp_path / "dataset")
    writer.write(1)
    assert writer.close() == writer.close()
    for call in (lambda: writer.write(2), writer.flush):
        with pytest.raises(ValueError, match="dataset: this LMDBWriter is closed; open another"):
            call()
    writer.abort()
    assert list(LMDBDataset(tmp_path / "dataset")) == [1]


def test_abort_throws_away_and_leaves_the_old_dataset(tmp_path: Path) -> None:
    path = write_numbered(tmp_path / "dataset", 3)
    with LMDBWriter(path, overwrite=True) as writer:
        writer.write(9)
        writer.abort()
    assert_numbered(path, 3)
    assert os.listdir(tmp_path) == ["dataset"]


def test_a_failed_overwrite_does_not_harm_the_old_dataset(tmp_path: Path) -> None:
    path = write_numbered(tmp_path / "dataset", 3)
    with pytest.raises(Interrupted):
        write_and_fail(path, 9, overwrite=True)
    assert_numbered(path, 3)


def test_two_writers_at_once_are_refused(tmp_path: Path) -> None:
    code = "import sys; from lightning_gpuopt.storage.writer import LMDBWriter; LMDBWriter(sys.argv[1], resume=True)"
    with LMDBWriter(tmp_path / "dataset") as writer:
        writer.write(1)
        writer.flush()
        result = run_code(code, tmp_path / "dataset")
        assert result.returncode == 1
        assert f"another process builds this dataset (process {os.getpid()} on " in result.stderr
        writer.write(2)
    assert list(LMDBDataset(tmp_path / "dataset")) == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"samples_per_shard": 0}, "samples_per_shard: expected a number of samples, at least 1, or None, got 0"),
        ({"samples_per_shard": 1.5}, "samples_per_shard: expected a number of samples"),
        ({"map_size_step": 100}, "map_size_step: expected a number of bytes, at least 65536, got 100"),
        ({"resume": 1}, "resume: expected True or False, got 1"),
    ],
)
def test_wrong_arguments_are_named(tmp_path: Path, arguments: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        LMDBWriter(tmp_path / "dataset", **arguments)  # type: ignore[arg-type]


def test_a_name_is_no_list_of_classes(tmp_path: Path) -> None:
    with LMDBWriter(tmp_path / "dataset") as writer:
        writer.write(1)
        with pytest.raises(TypeError, match="classes: expected a list of names, or None, got 'cat'"):
            writer.classes = "cat"  # type: ignore[assignment]


WRITE = """
import sys
from pathlib import Path
from lightning_gpuopt.storage import shard_writer
from lightning_gpuopt.storage.writer import LMDBWriter
from tests.storage.parts import numbered
shard_writer.COMMIT_SAMPLES = 5
path, count, points = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def tell(name, call):
    def told(*args, **kwargs):
        print("before", name, flush=True)
        sys.stdin.readline()
        result = call(*args, **kwargs)
        print("after", name, flush=True)
        sys.stdin.readline()
        return result
    return told

if points == "yes":
    import os
    shard_writer.ShardWriter.commit = tell("commit", shard_writer.ShardWriter.commit)
    shard_writer.ShardWriter._write_table = tell("table", shard_writer.ShardWriter._write_table)
    shard_writer.ShardWriter.finish = tell("finish", shard_writer.ShardWriter.finish)
    os.rename = tell("rename", os.rename)
    os.replace = tell("replace", os.replace)
    os.fsync = tell("fsync", os.fsync)
with LMDBWriter(path, samples_per_shard=12, resume=True) as writer:
    print("safe", len(writer), flush=True)
    for index in range(len(writer), count):
        writer.write(numbered(index))
"""


@pytest.mark.matrix
def test_a_kill_at_any_point_costs_nothing_that_was_safe(tmp_path: Path) -> None:
    """One writer after the other is killed at one more point of its way, until one gets to the end."""
    path, count, safe, kills = tmp_path / "dataset", 30, 0, 0
    while not path.exists():
        process = subprocess.Popen(
            [sys.executable, "-c", WRITE, path, str(count), "yes"],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        steps = 0
        for line in process.stdout:
            if line.startswith("safe"):
                assert int(line.split()[1]) >= safe
                safe = int(line.split()[1])
                continue
            if steps == 6 + 11 * (kills % 3):  # a stride that shares no factor with the steps of a shard
                break
            steps += 1
            process.stdin.write("\n")
            process.stdin.flush()
        process.kill()
        process.communicate()
        assert process.returncode in (-signal.SIGKILL, 0)
        kills += 1
        assert kills < 30
    assert kills > 4
    assert_numbered(path, count)
    assert [shard.num_samples for shard in Manifest.load(path).shards] == [12, 12, 6]
    assert verify(path).ok
    assert not staging_directory(path).exists()


def test_a_full_disk_is_an_error_and_nothing_is_lost(tmp_path: Path) -> None:
    """A file-size limit stands for the full disk: LMDB gets the same kind of error from the same call."""
    code = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from lightning_gpuopt.storage.writer import LMDBWriter
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
with LMDBWriter(sys.argv[1], samples_per_shard=1000) as writer:
    for index in range(300):
        writer.write(bytes([index % 256]) * 10_000)
        if index % 10 == 9:
            writer.flush()
"""
    path = tmp_path / "dataset"
    result = run_code(code, path)
    assert result.returncode == 1, result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert re.match(
        r"OSError: \[Errno \d+\] (File too large|Input/output error, or a quota or limit).*; what was", last
    )
    assert "resume=True" in last
    assert str(staging_directory(path)) in last
    assert not path.exists()
    with LMDBWriter(path, samples_per_shard=1000, resume=True) as writer:
        assert 80 <= len(writer) <= 110
        for index in range(len(writer), 300):
            writer.write(bytes([index % 256]) * 10_000)
    dataset = LMDBDataset(path, verify_checksum=True)
    assert [dataset[index] for index in range(300)] == [bytes([index % 256]) * 10_000 for index in range(300)]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_really_full_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("this root may not mount")
    try:
        with pytest.raises(OSError, match="No space left on device; what was committed is safe") as caught:
            write_numbered(disk / "dataset", 20_000)
        assert caught.value.errno == errno.ENOSPC
        assert not (disk / "dataset").exists()
        subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
        write_numbered(disk / "dataset", 6_000, resume=True)
        assert verify(disk / "dataset").ok
        assert LMDBDataset(disk / "dataset")[5_999][1] == 5_999
    finally:
        subprocess.run(["umount", disk], check=True)


def test_an_unfinished_file_that_is_no_lmdb_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "dataset"
    with pytest.raises(Interrupted):
        write_and_fail(path, 1)
    (staging_directory(path) / "shard-00000.mdb").write_bytes(b"garbage" * 10_000)
    with pytest.raises(StorageError, match=r"LMDB failed .*build it again with overwrite=True without resume=True"):
        LMDBWriter(path, resume=True)
    write_numbered(path, 2, overwrite=True)
    assert_numbered(path, 2)


def test_a_forked_child_cannot_publish_its_parents_dataset(tmp_path: Path) -> None:
    writer = LMDBWriter(tmp_path / "data")
    writer.write(1)
    child = multiprocessing.get_context("fork").Process(target=_close_and_tell, args=(writer, tmp_path / "said"))
    child.start()
    child.join()
    assert "belongs to process" in (tmp_path / "said").read_text()
    assert not (tmp_path / "data").exists()
    writer.write(2)
    assert writer.close().num_samples == 2


def _close_and_tell(writer: LMDBWriter, path: Path) -> None:
    try:
        writer.close()
    except RuntimeError as error:
        path.write_text(str(error))


def test_a_finished_dataset_has_nothing_left_to_write(tmp_path: Path) -> None:
    path = write_numbered(tmp_path / "dataset", 5, samples_per_shard=2)
    before = (path / "manifest.json").stat()
    with LMDBWriter(path, samples_per_shard=2, resume=True) as writer:
        assert (len(writer), writer.num_samples) == (5, 5)
        writer.flush()
        with pytest.raises(ValueError, match="dataset: it is finished, with 5 samples; give overwrite=True without"):
            writer.write(1)
        with pytest.raises(ValueError, match="it is finished, with the classes None"):
            writer.classes = ["cat"]
        writer.classes = None
    assert writer.close() == LMDBDataset(path).info
    writer.abort()
    assert (path / "manifest.json").stat() == before
    assert os.listdir(tmp_path) == ["dataset"]
    assert_numbered(path, 5)
    write_numbered(path, 5, samples_per_shard=2, resume=True)


def test_a_finished_dataset_of_other_making_is_not_gone_on_with(tmp_path: Path) -> None:
    path = write_numbered(tmp_path / "dataset", 5, samples_per_shard=2)
    with pytest.raises(FileExistsError, match=r"was written differently \(samples_per_shard was 2, now 3\)"):
        LMDBWriter(path, samples_per_shard=3, resume=True)
    build_lmdb([1, 2], tmp_path / "built", progress=False)
    with pytest.raises(FileExistsError, match=r'was written differently \(kind was "dataset", now null'):
        LMDBWriter(tmp_path / "built", resume=True)
    write_numbered(path, 3, resume=True, overwrite=True)
    assert_numbered(path, 3)
