from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from lightning_gpuopt.storage import codec
from lightning_gpuopt.storage.errors import StorageError
from lightning_gpuopt.storage.format import Manifest, Shard, replaced_directory, staging_directory
from lightning_gpuopt.storage.reader import LMDBDataset
from lightning_gpuopt.storage.shard_writer import ShardWriter
from lightning_gpuopt.storage.writing import lock
from lightning_gpuopt.storage.writing.staging import Staging
from tests.fork_server import run_code
from tests.storage.parts import run_until


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_PATIENCE_S", 0.0)


def begin(path: Path, value: int = 0, **kwargs: Any) -> Staging:
    return Staging(path, **{"plan": {"value": value}, "overwrite": False, "resume": False, **kwargs})


def add_shard(staging: Staging, number: int = 0, value: int = 0) -> Shard:
    writer = ShardWriter(staging.directory, number)
    writer.add(codec.encode(value))
    return writer.finish()


def build(path: Path, value: int = 0, **kwargs: Any) -> None:
    with begin(path, value, **kwargs) as staging:
        staging.publish(Manifest((add_shard(staging, value=value),)))


def test_a_published_dataset_has_its_own_files_only(tmp_path: Path) -> None:
    path = tmp_path / "not" / "yet" / "there"
    build(path, 5)
    assert sorted(os.listdir(path)) == ["manifest.json", "shard-00000.mdb", "shard-00000.tab"]
    assert os.listdir(path.parent) == ["there"]
    assert LMDBDataset(path)[0] == 5


def test_what_is_there_already_is_not_replaced_by_chance(tmp_path: Path) -> None:
    path = tmp_path / "dataset"
    build(path, 1)
    with pytest.raises(FileExistsError, match=re.escape(f"{path}: it exists already; give overwrite=True")):
        begin(path)
    build(path, 2, overwrite=True)
    assert LMDBDataset(path)[0] == 2
    assert os.listdir(tmp_path) == ["dataset"]


def test_what_is_no_dataset_is_never_deleted(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match=r"it holds 'thesis.tex'"):
        begin(mine, overwrite=True)
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(FileExistsError, match="there is a file of that name"):
        begin(file, overwrite=True)
    assert (mine / "thesis.tex").read_text() == "years of work"
    assert sorted(os.listdir(tmp_path)) == ["file", "mine"]


def test_a_file_that_came_while_it_was_built_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "dataset"
    with begin(path) as staging:
        shard = add_shard(staging)
        path.mkdir()
        with pytest.raises(FileExistsError):
            staging.publish(Manifest((shard,)))
    with begin(path, overwrite=True, resume=True) as staging:
        assert staging.finished() == {0: shard}


def test_a_symlink_is_followed_so_that_the_build_is_on_the_same_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    build(disk / "dataset", 1)
    link = tmp_path / "link"
    link.symlink_to(disk / "dataset")
    build(link, 2, overwrite=True)
    assert link.is_symlink()
    assert LMDBDataset(disk / "dataset")[0] == LMDBDataset(link)[0] == 2


def test_an_unfinished_build_is_resumed_or_thrown_away_as_one_says(tmp_path: Path) -> None:
    path = tmp_path / "dataset"
    with begin(path) as staging:
        shard = add_shard(staging)
    with pytest.raises(FileExistsError, match=r"unfinished build is next to it .*give resume=True"):
        begin(path)
    with begin(path, resume=True) as staging:
        assert staging.finished() == {0: shard}
    with begin(path, overwrite=True) as staging:
        assert staging.finished() == {}
    assert os.listdir(tmp_path) == []  # nothing was built, so nothing is left


def test_another_plan_is_refused_and_the_difference_named(tmp_path: Path) -> None:
    path = tmp_path / "dataset"
    with begin(path, 1) as staging:
        add_shard(staging)
    for overwrite in (False, True):
        with pytest.raises(
            StorageError, match=r"begun differently \(value was 1, now 2\); give overwrite=True without"
        ):
            begin(path, 2, resume=True, overwrite=overwrite)
    build(path, 2, overwrite=True)
    assert LMDBDataset(path)[0] == 2


def test_a_shard_without_a_good_sidecar_is_not_finished(tmp_path: Path) -> None:
    with begin(tmp_path / "dataset") as staging:
        shards = [add_shard(staging, number) for number in range(5)]
        (staging.directory / "shard-00000.json").write_text("{")
        (staging.directory / "shard-00001.json").write_text("[1]")
        (staging.directory / "shard-00002.tab").unlink()
        with (staging.directory / "shard-00003.mdb").open("ab") as stream:
            stream.write(b"x")
        assert staging.finished() == {4: shards[4]}


def test_a_second_build_is_refused_until_the_first_lets_go(tmp_path: Path) -> None:
    path = tmp_path / "dataset"
    first = begin(path)
    for kwargs in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(StorageError, match=f"another process builds this dataset .process {os.getpid()} on "):
            begin(path, **kwargs)
    first.close()
    first.close()
    begin(path).close()


def test_a_forgotten_build_lets_go(tmp_path: Path) -> None:
    staging = begin(tmp_path / "dataset")
    add_shard(staging)
    del staging
    begin(tmp_path / "dataset", resume=True).close()


def test_a_forked_child_neither_keeps_nor_breaks_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "dataset"
    staging = begin(path)
    add_shard(staging)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        staging.close()
        os.write(write, b"closed")
        os.read(read, 0)
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(StorageError, match="another process builds"):
        begin(path, resume=True)
    keeper_read, keeper_write = os.pipe()
    keeper = os.fork()
    if keeper == 0:  # holds the inherited lock file until the parent says so
        os.close(keeper_write)
        os.read(keeper_read, 1)
        os._exit(0)
    staging.close()
    begin(path, resume=True).close()
    os.close(keeper_write)
    os.waitpid(keeper, 0)
    for descriptor in (read, write, keeper_read):
        os.close(descriptor)


def test_parts_build_side_by_side_and_are_joined(tmp_path: Path) -> None:
    path = tmp_path / "dataset"
    parts = [begin(path, part=(i, 3)) for i in range(3)]
    shards = [add_shard(part, i, value=i) for i, part in enumerate(parts)]
    with pytest.raises(StorageError, match="another process builds this dataset"):
        begin(path, resume=True)
    with pytest.raises(StorageError, match="another process builds part 1 of 3"):
        begin(path, part=(1, 3), resume=True)
    with pytest.raises(StorageError, match="in another number of parts"):
        begin(path, part=(1, 2), resume=True)
    with pytest.raises(StorageError, match="value was 0, now 9"):
        begin(path, 9, part=(3, 3), resume=True)
    for part in parts:
        part.close()
    with pytest.raises(FileExistsError, match="unfinished build"):
        begin(path, part=(1, 3))
    begin(path, part=(1, 3), overwrite=True).close()  # only its own
    with begin(path, resume=True) as staging:
        assert staging.finished() == {0: shards[0], 2: shards[2]}
        staging.publish(Manifest((shards[0], add_shard(staging, 1, value=1), shards[2])))
    assert list(LMDBDataset(path)) == [0, 1, 2]


def test_a_part_never_throws_a_build_with_another_plan_away(tmp_path: Path) -> None:
    path = tmp_path / "dataset"
    part = begin(path, 1, part=(0, 2))
    shard = add_shard(part)
    part.close()
    for options in ({"overwrite": True}, {"resume": True}, {}):
        with pytest.raises(StorageError, match=r"begun differently \(value was 1, now 2\); start all parts"):
            begin(path, 2, part=(1, 2), **options)
    with begin(path, 1, resume=True) as staging:
        assert staging.finished() == {0: shard}


def test_a_recovered_dataset_is_refused_as_any_other(tmp_path: Path) -> None:
    """The crash left the old dataset under its other name only."""
    path = tmp_path / "dataset"
    build(path, 1)
    os.rename(path, replaced_directory(path))
    with pytest.raises(FileExistsError, match="it exists already"):
        begin(path, 2)
    assert LMDBDataset(path)[0] == 1


def test_discard_leaves_nothing(tmp_path: Path) -> None:
    staging = begin(tmp_path / "dataset")
    add_shard(staging)
    staging.discard()
    assert os.listdir(tmp_path) == []


PUBLISH = """
import os, signal, sys
from pathlib import Path
from tests.storage.test_staging import build
left, rename = int(sys.argv[2]), os.rename
def counted(*args):
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    rename(*args)
os.rename = counted
import shutil
shutil.rmtree = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
build(Path(sys.argv[1]), 2, overwrite=True)
"""


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_kill_while_a_dataset_is_replaced_loses_nothing(tmp_path: Path, renames: int) -> None:
    """Killed before the first rename, between the two, and before the old one is removed."""
    path = tmp_path / "dataset"
    build(path, 1)
    result = run_code(PUBLISH, path, renames)
    assert result.returncode == -signal.SIGKILL, result.stderr
    if renames == 1:
        with pytest.raises(
            FileNotFoundError, match=r"replacing it was interrupted.*\.dataset\.replaced.*rename it back"
        ):
            LMDBDataset(path)
    else:
        assert LMDBDataset(path)[0] == (1 if renames == 0 else 2)
    if renames < 2:
        with begin(path, 2, overwrite=True, resume=True) as staging:
            assert LMDBDataset(path)[0] == 1  # recovered before anything else
            staging.publish(Manifest(tuple(staging.finished().values())))
    else:
        with pytest.raises(FileExistsError):
            begin(path)
        build(path, 2, overwrite=True)
    assert LMDBDataset(path)[0] == 2
    assert not replaced_directory(path).exists()
    assert not staging_directory(path).exists()


def test_where_one_may_not_write_the_error_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError, match=r"cannot build a dataset here: .*pass a writable path"):
        begin(tmp_path / "file" / "dataset")
    with pytest.raises(OSError, match=r"cannot build a dataset here: .*pass a writable path"):
        begin(Path("/sys/dataset"))


@pytest.mark.matrix
def test_a_killed_build_lets_go_of_its_lock(tmp_path: Path) -> None:
    path = tmp_path / "dataset"
    code = """
import sys
from tests.storage.test_staging import add_shard, begin
staging = begin(sys.argv[1])
add_shard(staging)
print("built")
sys.stdin.read()
"""
    run_until(code, "built", path)
    with begin(path, resume=True) as staging:
        assert sorted(staging.finished()) == [0]
