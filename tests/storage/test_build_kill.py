"""Builds that are killed, interrupted, starved of space or started twice; each goes on to the same dataset."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_gpuopt.storage.errors import StorageError
from lightning_gpuopt.storage.writing import lock
from lightning_gpuopt.storage.writing.build import build_lmdb
from tests.helpers import wait_for
from tests.storage.building import BROKEN, NUM_SAMPLES, Build, Numbers
from tests.storage.source_files import beside, kept, stored

pytestmark = pytest.mark.filterwarnings("ignore:.*samples are skipped")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = tmp_path_factory.mktemp("whole") / "out"
    with pytest.warns(UserWarning, match=f"{len(BROKEN)} of {NUM_SAMPLES} samples are skipped"):
        build_lmdb(Numbers(), path, progress=False)
    assert len(stored(path)) == NUM_SAMPLES - len(BROKEN)
    return kept(path)


# Three shards: perhaps a list of the skipped, table, labels and summary each; before that the plan; then the manifest.
@pytest.mark.parametrize(
    "where",
    [
        pytest.param("read 0", marks=pytest.mark.matrix),
        pytest.param("read 833", marks=pytest.mark.matrix),
        "read 834",
        pytest.param("read 2499", marks=pytest.mark.matrix),
        pytest.param("write 0", marks=pytest.mark.matrix),
        "write 1",
        pytest.param("write 2", marks=pytest.mark.matrix),
        pytest.param("write 3", marks=pytest.mark.matrix),
        pytest.param("write 6", marks=pytest.mark.matrix),
        "write 9",
        pytest.param("write 10", marks=pytest.mark.matrix),
        "replace 1",
        "replace 3",
        "rename 0",
    ],
)
def test_a_killed_build_goes_on_to_the_same_dataset(
    tmp_path: Path, where: str, uninterrupted: dict[str, bytes]
) -> None:
    path = tmp_path / "out"
    with Build(path, stop=where) as running:
        assert running.stopped()
        running.kill()
    assert not path.exists()
    build_lmdb(Numbers(), path, resume=True, progress=False)
    assert kept(path) == uninterrupted
    assert beside(path) == ["out"]


def test_finished_shards_are_not_built_again(tmp_path: Path, uninterrupted: dict[str, bytes]) -> None:
    path = tmp_path / "out"
    with Build(path, stop="read 2000") as running:
        assert running.stopped()
        running.kill()

    class Late(Numbers):
        def __getitem__(self, index: int) -> object:
            assert index >= 834, "of a shard that was finished"
            return super().__getitem__(index)

    Late.__qualname__ = "Numbers"
    build_lmdb(Late(), path, resume=True, progress=False)
    assert kept(path) == uninterrupted


def test_workers_end_when_the_main_process_is_killed(tmp_path: Path, uninterrupted: dict[str, bytes]) -> None:
    path = tmp_path / "out"
    with Build(path, stop="read 100", num_proc=3) as running:
        worker = running.stopped()
        assert worker != running.pid
        siblings = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        assert str(worker) in siblings
        running.kill()
        build_lmdb(Numbers(), path, resume=True, progress=False)  # at once; they hold its lock until they have gone
    wait_for(lambda: not any(_alive(int(pid)) for pid in siblings))
    assert kept(path) == uninterrupted


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    "index", [pytest.param(0, marks=pytest.mark.matrix), 900, pytest.param(2499, marks=pytest.mark.matrix)]
)
def test_a_killed_worker_is_an_error_that_names_the_shard(
    tmp_path: Path, index: int, uninterrupted: dict[str, bytes]
) -> None:
    path = tmp_path / "out"
    with Build(path, stop=f"read {index}", num_proc=2) as running:
        os.kill(running.stopped(), signal.SIGKILL)
        code, errors = running.end()
    assert code == 1
    assert errors.splitlines()[-1] == (
        f"lightning_gpuopt.storage.errors.StorageError: {path}: the process that built shard-0000{index // 834} was "
        "killed by SIGKILL, perhaps because memory ran out; the finished shards are kept: run the build again "
        "with resume=True"
    )
    build_lmdb(Numbers(), path, resume=True, progress=False, num_proc=2)
    assert kept(path) == uninterrupted


@pytest.mark.parametrize("num_proc", [1, 2])
def test_ctrl_c_ends_all_and_says_how_to_go_on(tmp_path: Path, num_proc: int, uninterrupted: dict[str, bytes]) -> None:
    path = tmp_path / "out"
    with Build(path, stop="read 900", num_proc=num_proc) as running:
        stopped = running.stopped()
        assert num_proc == 1 or _ignores_ctrl_c(stopped)
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does: to all of them
        code, errors = running.end()
    assert code == 130
    assert errors.splitlines()[-1] == (
        f"KeyboardInterrupt: {path}: interrupted; run the build again with resume=True to continue"
    )
    assert errors.count("Traceback") == 1  # none from the workers
    assert not _alive(stopped)
    build_lmdb(Numbers(), path, resume=True, progress=False)
    assert kept(path) == uninterrupted


def _ignores_ctrl_c(pid: int) -> bool:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    blocked, ignored = (int(status[name], 16) >> (signal.SIGINT - 1) & 1 for name in ("SigBlk", "SigIgn"))
    return bool(ignored) and not blocked


def test_two_builds_at_once_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_PATIENCE_S", 0.0)
    path = tmp_path / "out"
    with Build(path, stop="read 900") as running:
        assert running.stopped()
        for options in ({}, {"resume": True}, {"overwrite": True}, {"part": (0, 2), "resume": True}):
            with pytest.raises(StorageError, match=f"{path}: another process builds"):
                build_lmdb(Numbers(), path, progress=False, **options)


def test_parts_of_several_processes_are_joined(tmp_path: Path, uninterrupted: dict[str, bytes]) -> None:
    path = tmp_path / "out"
    with Build(path, part=(0, 2)) as first, Build(path, part=(1, 2), num_proc=2) as second:
        assert [first.end()[0], second.end()[0]] == [0, 0]
    assert not path.exists()
    info = build_lmdb(Numbers(), path, resume=True, progress=False)
    assert (info.num_samples, info.num_shards, info.num_skipped) == (NUM_SAMPLES - len(BROKEN), 3, len(BROKEN))
    assert kept(path) == uninterrupted


def test_a_part_that_was_killed_is_made_good_by_the_join(tmp_path: Path, uninterrupted: dict[str, bytes]) -> None:
    path = tmp_path / "out"
    with Build(path, stop="read 100", part=(0, 2)) as first, Build(path, part=(1, 2)) as second:
        assert first.stopped()
        assert second.end()[0] == 0
        first.kill()
    build_lmdb(Numbers(), path, resume=True, progress=False)
    assert kept(path) == uninterrupted


def test_a_killed_overwrite_leaves_the_old_dataset(tmp_path: Path, uninterrupted: dict[str, bytes]) -> None:
    path = tmp_path / "out"
    build_lmdb(Numbers(20), path, progress=False)
    before = kept(path)
    with Build(path, stop="rename 0", overwrite=True) as running:
        assert running.stopped()
        running.kill()
    assert kept(path) == before
    build_lmdb(Numbers(), path, overwrite=True, resume=True, progress=False)
    assert kept(path) == uninterrupted
    assert beside(path) == ["out"]


def test_a_crash_between_the_two_renames_of_an_overwrite_loses_nothing(
    tmp_path: Path, uninterrupted: dict[str, bytes]
) -> None:
    path = tmp_path / "out"
    build_lmdb(Numbers(20), path, progress=False)
    with Build(path, stop="rename 1", overwrite=True) as running:
        assert running.stopped()
        running.kill()
    build_lmdb(Numbers(), path, overwrite=True, resume=True, progress=False)
    assert kept(path) == uninterrupted
    assert beside(path) == ["out"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.parametrize("num_proc", [1, 2])
def test_a_full_disk_is_an_error_that_says_so(small_disk: Path, num_proc: int, uninterrupted: dict[str, bytes]) -> None:
    path = small_disk / "out"
    with pytest.raises(OSError, match=r"No space left on device.*resume=True") as caught:
        build_lmdb(Numbers(), path, progress=False, num_proc=num_proc)
    assert caught.value.errno == errno.ENOSPC
    assert not path.exists()
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    build_lmdb(Numbers(), path, progress=False, resume=True)
    assert kept(path) == uninterrupted


def test_a_limit_on_the_size_of_files_is_an_error(tmp_path: Path, uninterrupted: dict[str, bytes]) -> None:
    path = tmp_path / "out"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(
            OSError, match=r"limit on the size of files.*resume=True.*/\.out\.building/shard-0000\d\.mdb"
        ):
            build_lmdb(Numbers(), path, progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    build_lmdb(Numbers(), path, progress=False, resume=True)
    assert kept(path) == uninterrupted
