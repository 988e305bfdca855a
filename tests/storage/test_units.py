"""`build_lmdb(executor=)`: the same dataset by whichever workers, also where they are lost."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_gpuopt.storage.errors import StorageError
from lightning_gpuopt.storage.format import staging_directory
from lightning_gpuopt.storage.writing import units
from lightning_gpuopt.storage.writing.build import build_lmdb
from lightning_gpuopt.storage.writing.staging import finished_directory
from tests.lanes import few
from tests.storage.building import BROKEN, NUM_SAMPLES, Build, Numbers
from tests.storage.executors import Elsewhere, Immediately
from tests.storage.source_files import beside, write_folder, write_pickled, write_tar

pytestmark = pytest.mark.filterwarnings("ignore:.*samples are skipped", "ignore:.*use of fork")


def files(path: Path) -> dict[str, bytes]:
    """Every byte of a dataset."""
    return {name: (path / name).read_bytes() for name in sorted(os.listdir(path))}


class Drawn:
    """Samples that are drawn at random, in three shards, from each of the global generators."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, torch.rand(()).item()


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = tmp_path_factory.mktemp("whole") / "out"
    build_lmdb(Numbers(), path, progress=False)
    return files(path)


@pytest.fixture(params=few("fork threads", {name: name for name in ("fork", "spawn", "threads")}))
def pool(request: pytest.FixtureRequest) -> Iterator[Executor]:
    if request.param == "threads":
        made: Executor = ThreadPoolExecutor(3)
    else:
        made = ProcessPoolExecutor(2, multiprocessing.get_context(request.param))
    with made:
        yield made


@pytest.mark.matrix
def test_any_executor_builds_the_same_bytes_and_is_not_shut_down(tmp_path: Path, pool: Executor) -> None:
    write_folder(tmp_path / "images", {"a": 1100, "b": 1})
    (tmp_path / "images/a/00700.jpg").write_bytes(b"bad")
    write_tar(tmp_path / "x.tar", {f"{i:04d}.cls": str(i).encode() for i in range(1100)})
    for name, source in {
        "folder": tmp_path / "images",
        "tar": f"{tmp_path}/x.t[a]r",
        "numbers": Numbers(),
        "drawn": Drawn(),
    }.items():
        info = build_lmdb(source, tmp_path / f"{name}-1", progress=False)
        torch.manual_seed(torch.initial_seed())
        before = torch.get_rng_state()
        assert build_lmdb(source, tmp_path / name, executor=pool, progress=False) == info
        assert files(tmp_path / name) == files(tmp_path / f"{name}-1")
        assert torch.equal(torch.get_rng_state(), before)
    assert not [name for name in beside(tmp_path / "out") if name.startswith(".")]
    assert pool.submit(os.getppid).result() > 0


def test_a_unit_that_is_run_twice_one_after_the_other_counts_once(tmp_path: Path, numbers: dict[str, bytes]) -> None:
    info = build_lmdb(Numbers(), tmp_path / "out", executor=Immediately(times=2), progress=False)
    assert (info.num_samples, info.num_skipped) == (NUM_SAMPLES - len(BROKEN), len(BROKEN))
    assert files(tmp_path / "out") == numbers
    assert beside(tmp_path / "out") == ["out"]


class Met(Numbers):
    """At two samples of the second shard each attempt waits for the other one."""

    def __init__(self, barrier: Any) -> None:
        super().__init__()
        self.barrier = barrier

    def __getitem__(self, index: int) -> Any:
        if index in (900, 1600):
            self.barrier.wait()
        return super().__getitem__(index)


Met.__qualname__ = "Numbers"


class AtOnce(Executor):
    """Does each unit in two processes at once; the slower one's result counts."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        fork = multiprocessing.get_context("fork")
        future: Future[Any] = Future()
        results = fork.SimpleQueue()
        both = [fork.Process(target=lambda: results.put(pickle.dumps(fn(*args)))) for _ in range(2)]
        for each in both:
            each.start()
        for each in both:
            each.join()
        first, second = (pickle.loads(results.get()) for _ in range(2))
        assert first[0], first
        future.set_result(second)
        return future


def test_a_unit_that_is_run_twice_at_once_counts_once(tmp_path: Path, numbers: dict[str, bytes]) -> None:
    source = Met(multiprocessing.get_context("fork").Barrier(2))
    info = build_lmdb(source, tmp_path / "out", executor=AtOnce(), progress=False)
    assert (info.num_samples, info.num_skipped) == (NUM_SAMPLES - len(BROKEN), len(BROKEN))
    assert files(tmp_path / "out") == numbers
    assert beside(tmp_path / "out") == ["out"]


class Fatal(Numbers):
    """Kills the process that reads it at one sample, so many times."""

    def __init__(self, folder: Path, times: int) -> None:
        super().__init__()
        self.folder, self.times = folder, times

    def __reduce__(self) -> Any:  # its class has another's name
        return fatal, (self.folder, self.times)

    def __getitem__(self, index: int) -> Any:
        if index == 1000 and len(os.listdir(self.folder)) < self.times:
            (self.folder / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


Fatal.__qualname__ = "Numbers"


def fatal(folder: Path, times: int) -> Fatal:
    return Fatal(folder, times)


class OwnProcess(Executor):
    """An engine that survives: a process for each unit, and an error of its own where that dies."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as one:
            try:
                future.set_result(one.submit(fn, *args).result())
            except Exception:
                future.set_exception(ConnectionError("the worker has gone"))
        return future


def test_an_engine_that_survives_is_given_a_lost_unit_again(tmp_path: Path, numbers: dict[str, bytes]) -> None:
    (tmp_path / "deaths").mkdir()
    build_lmdb(Fatal(tmp_path / "deaths", 2), tmp_path / "out", executor=OwnProcess(), progress=False)
    assert len(os.listdir(tmp_path / "deaths")) == 2
    assert files(tmp_path / "out") == numbers
    assert beside(tmp_path / "out") == ["deaths", "out"]


def test_a_unit_that_is_lost_three_times_ends_the_build(tmp_path: Path, numbers: dict[str, bytes]) -> None:
    (tmp_path / "deaths").mkdir()
    source = Fatal(tmp_path / "deaths", 6)
    for finished in ("2 of 3", "0 of 1"):
        with pytest.raises(StorageError) as lost:
            build_lmdb(source, tmp_path / "out", executor=OwnProcess(), resume=True, progress=False)
        assert str(lost.value) == (
            f"{tmp_path}/out: shard-00001 was lost 3 times (ConnectionError: the worker has gone); {finished} are "
            "finished and kept: run the build again with resume=True"
        )
        left = staging_directory(tmp_path / "out")
        assert sum(".attempt." in name for name in os.listdir(left)) == 3  # those of the run before are removed
    build_lmdb(source, tmp_path / "out", resume=True, progress=False)  # num_proc= clears up, too
    assert files(tmp_path / "out") == numbers
    assert beside(tmp_path / "out") == ["deaths", "out"]


def test_a_pool_that_is_broken_ends_the_build_which_goes_on_with_another(
    tmp_path: Path, numbers: dict[str, bytes]
) -> None:
    (tmp_path / "deaths").mkdir()
    source = Fatal(tmp_path / "deaths", 1)
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, fork) as one, pytest.raises(StorageError) as broken:
        build_lmdb(source, tmp_path / "out", executor=one, progress=False)
    assert str(broken.value).startswith(
        f"{tmp_path}/out: the executor accepts no more work (BrokenProcessPool: A process in the process pool was "
    )
    assert str(broken.value).endswith("; 1 of 3 are finished and kept: run the build again with resume=True")
    with ProcessPoolExecutor(1, fork) as another:
        build_lmdb(source, tmp_path / "out", executor=another, resume=True, progress=False)
    assert files(tmp_path / "out") == numbers


class Unread(Numbers):
    def __getitem__(self, index: int) -> Any:
        raise AssertionError("all shards are finished")


Unread.__qualname__ = "Numbers"


def test_what_a_killed_build_had_finished_is_taken_over(tmp_path: Path, numbers: dict[str, bytes]) -> None:
    """Killed where a shard's directory was renamed, or in the midst of moving its files; at each of the moves."""
    # After those of the plan, the marker, and each shard's list, labels and table; from 14 on the first shard's files.
    for moves in (5, 6, *range(14, 20)):
        path = tmp_path / str(moves) / "out"
        with Build(path, stop=f"replace {moves}", executor=Immediately()) as running:
            assert running.stopped()
            running.kill()
        assert finished_directory(staging_directory(path), 0).exists() == (6 <= moves <= 18)
        build_lmdb(Numbers() if moves <= 13 else Unread(), path, resume=True, progress=False)
        assert files(path) == numbers
        assert beside(path) == ["out"]


def test_the_processes_of_a_pool_do_not_hold_the_lock_of_a_killed_build(
    tmp_path: Path, numbers: dict[str, bytes]
) -> None:
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("fork"))
    with Build(tmp_path / "out", stop="read 900", executor=pool) as running:
        try:
            assert running.stopped() not in (0, running.pid)
            running.kill()
            build_lmdb(Numbers(), tmp_path / "out", resume=True, progress=False)
        finally:
            os.killpg(running.pid, signal.SIGKILL)  # the pool's process, which nobody ends
    assert files(tmp_path / "out") == numbers


def test_ctrl_c_ends_the_build_and_says_how_to_go_on(
    tmp_path: Path, numbers: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "_PATIENCE_S", 0.0)
    with Build(tmp_path / "out", stop="read 900", executor=ThreadPoolExecutor(1)) as running:
        assert running.stopped() == running.pid
        os.kill(running.pid, signal.SIGINT)
        code, errors = running.end()
    assert code == 130
    assert errors.splitlines()[-1] == (
        f"KeyboardInterrupt: {tmp_path}/out: interrupted; run the build again with resume=True to continue"
    )
    assert not [name for name in os.listdir(staging_directory(tmp_path / "out")) if name.startswith("executor-")]
    build_lmdb(Numbers(), tmp_path / "out", resume=True, progress=False)
    assert files(tmp_path / "out") == numbers


def test_what_is_outstanding_is_cancelled_when_the_build_fails(tmp_path: Path) -> None:
    class FirstOnly(Immediately):
        """Fails at the first unit, and never comes to the others."""

        def __init__(self) -> None:
            super().__init__()
            self.later: list[Future[Any]] = []

        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            if not self.units:
                return super().submit(fn, *args)
            self.later.append(Future())
            return self.later[-1]

    executor = FirstOnly()
    with pytest.raises(TypeError, match=r"list: list\[1\]: sample is a builtins\.set"):
        build_lmdb([0, {1}, *range(2000)], tmp_path / "out", executor=executor, progress=False)
    assert [future.cancelled() for future in executor.later] == [True]


def test_a_unit_that_runs_notices_that_its_build_has_ended(tmp_path: Path) -> None:
    left = staging_directory(tmp_path / "out")

    class Ending(Numbers):
        def __getitem__(self, index: int) -> Any:
            if index == 900:
                next(left.glob("executor-*")).unlink()
            return super().__getitem__(index)

    with pytest.raises(StorageError, match=rf"{left}: the build has ended"):
        build_lmdb(Ending(), tmp_path / "out", executor=Immediately(), progress=False)
    assert not list(left.glob("*.attempt.*"))


def test_errors_of_the_source_are_raised_as_without_and_are_not_tried_again(tmp_path: Path, pool: Executor) -> None:
    write_folder(tmp_path / "images", {"a": 2})
    (tmp_path / "images/a/00001.jpg").write_bytes(b"bad")
    one = Immediately()
    for executor in (pool, one):
        with pytest.raises(StorageError, match=r"a/00001\.jpg: cannot be decoded .*resume=True"):
            build_lmdb(
                tmp_path / "images", tmp_path / "out", executor=executor, strict=True, resume=True, progress=False
            )
    assert len(one.units) == 1
    with pytest.raises(RuntimeError, match=r"Refusing\[0\] raised ZeroDivisionError: division by zero") as raised:
        build_lmdb(Refusing(), tmp_path / "none", executor=pool, progress=False)
    assert "return 1 / 0" in str(raised.value.__cause__)


def test_a_list_of_bytes_is_a_dataset_and_no_list_of_paths(tmp_path: Path) -> None:
    build_lmdb([b"a", b"b"], tmp_path / "out", executor=Immediately(), progress=False)
    build_lmdb([b"a", b"b"], tmp_path / "one", progress=False)
    assert files(tmp_path / "out") == files(tmp_path / "one")


class Refusing:
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> float:
        return 1 / 0


def test_a_strict_build_looks_again_at_what_was_left_out(tmp_path: Path) -> None:
    write_folder(tmp_path / "images", {"a": 3})
    good = (tmp_path / "images/a/00001.jpg").read_bytes()
    (tmp_path / "images/a/00001.jpg").write_bytes(good[:100])
    assert build_lmdb(tmp_path / "images", tmp_path / "out", part=(0, 1), progress=False).num_skipped == 1
    (tmp_path / "images/a/00001.jpg").write_bytes(good)
    info = build_lmdb(
        tmp_path / "images", tmp_path / "out", executor=Immediately(), resume=True, strict=True, progress=False
    )
    assert (info.num_samples, info.num_skipped) == (3, 0)


def test_a_build_that_leaves_out_too_many_stops(tmp_path: Path) -> None:
    one = Immediately()
    with pytest.raises(StorageError, match="834 of 2500 samples cannot be decoded so far"):
        build_lmdb(Bad(), tmp_path / "out", executor=one, progress=False)
    info = build_lmdb(Bad(), tmp_path / "out", executor=one, resume=True, max_skipped=1, progress=False)
    assert (info.num_skipped, [args[-2] for args in one.units]) == (1000, [0, 1, 2])  # nothing is built again


class Bad(Numbers):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(7) if index < 834 or 1000 <= index < 1166 else index


@pytest.mark.matrix
def test_a_unit_is_small_however_many_samples_there_are(tmp_path: Path) -> None:
    sizes = {}
    for count in (1100, 11000):
        write_tar(tmp_path / f"{count:05d}.tar", {f"{i:06d}.cls": b"1" for i in range(count)})
        one = Immediately()
        build_lmdb(tmp_path / f"{count:05d}.tar", tmp_path / f"{count:05d}", executor=one, progress=False)
        sizes[count] = {len(pickle.dumps((units.build_unit, unit))) for unit in one.units}
    assert sizes[1100] == sizes[11000]
    assert max(sizes[1100]) < 600 + 2 * len(str(tmp_path))


def test_only_so_many_units_are_outstanding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_gpuopt.storage.writing.plan._SHARE_SAMPLES", 1)
    monkeypatch.setattr(units, "_OUTSTANDING", 3)

    class Later(Immediately):
        """Does what it has when somebody waits for it."""

        def __init__(self) -> None:
            super().__init__()
            self.outstanding: list[tuple[Future[Any], Any, tuple[Any, ...]]] = []
            self.counts: list[int] = []

        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            self.units.append(args)
            self.outstanding.append((Future(), fn, args))
            return self.outstanding[-1][0]

        def wait(self, *args: Any, **kwargs: Any) -> Any:
            self.counts.append(len(self.outstanding))
            for future, fn, its in self.outstanding:
                future.set_result(fn(*its))
            self.outstanding.clear()
            return wait(*args, **kwargs)

    executor = Later()
    monkeypatch.setattr(units, "wait", executor.wait)
    assert build_lmdb(list(range(16)), tmp_path / "out", executor=executor, progress=False).num_shards == 16
    assert [args[-2] for args in executor.units] == list(range(16))
    assert executor.counts == [3, 3, 3, 3, 3, 1, 0]


def test_workers_that_do_not_see_the_folder_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "shared/out"
    path.parent.mkdir()
    with pytest.raises(StorageError, match=rf"{tmp_path}/shared/\.out\.building: a worker on \S+ does not see this"):
        build_lmdb([1, 2], path, executor=Elsewhere(path.parent, tmp_path / "away"), progress=False)
    assert beside(path) == []


def test_workers_that_see_another_source_are_an_error(tmp_path: Path) -> None:
    write_folder(tmp_path / "images", {"a": 2})

    class Changing(Immediately):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            (tmp_path / "images/a/00002.jpg").touch()
            return super().submit(fn, *args)

    with pytest.raises(
        StorageError, match=r"finds another source there .*\(source num_samples was 2, now 3; source na"
    ):
        build_lmdb(tmp_path / "images", tmp_path / "out", executor=Changing(), progress=False)


def test_what_may_kill_its_reader_is_not_read_in_threads(tmp_path: Path) -> None:
    write_pickled(tmp_path / "foreign", {b"0": b"\xff\xd8"})
    with pytest.raises(StorageError, match="it is not read in threads; use an executor of processes, or num_proc="):
        build_lmdb(tmp_path / "foreign", tmp_path / "out", executor=Immediately(), progress=False)
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as one:
        build_lmdb(tmp_path / "foreign", tmp_path / "out", executor=one, max_skipped=1, progress=False)
    build_lmdb(tmp_path / "foreign", tmp_path / "out-1", progress=False)
    assert files(tmp_path / "out") == files(tmp_path / "out-1")


class FutureOfItsOwn(Immediately):
    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        return "future"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"executor": 3}, r"executor: expected a concurrent\.futures\.Executor, or None, got 3"),
        ({"executor": Immediately(), "num_proc": 2}, "num_proc: expected 1 with executor=.*, got 2"),
        ({"executor": Immediately(), "part": (0, 2)}, r"part: expected None with executor=.*, got \(0, 2\)"),
        ({"executor": FutureOfItsOwn()}, r"executor: expected .* \(of Dask: client\.get_executor\(\)\), got "),
    ],
)
def test_wrong_arguments_are_told(tmp_path: Path, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as refused:
        build_lmdb([1], tmp_path / "out", progress=False, **options)
    assert isinstance(refused.value, TypeError) == (options.keys() == {"executor"})
    assert beside(tmp_path / "out") == []


def test_workers_that_are_forked_while_a_thread_reads_do_not_wait_for_it(
    tmp_path: Path, numbers: dict[str, bytes]
) -> None:
    with units._filling, ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        build_lmdb(Numbers(), tmp_path / "out", executor=pool, progress=False)
    assert files(tmp_path / "out") == numbers


class Unseen(Immediately):
    """What its workers have finished is not seen here, as over NFS for a while."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        future = super().submit(fn, *args, **kwargs)
        for done in self.folder.glob("*.done"):
            shutil.rmtree(done)
        return future


def test_a_shard_that_is_finished_and_not_seen_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        StorageError,
        match=r"shard-00000\.done: a worker has finished this, but it is not visible "
        "here",
    ):
        build_lmdb(Numbers(), tmp_path / "out", executor=Unseen(staging_directory(tmp_path / "out")), progress=False)
