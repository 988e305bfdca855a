"""A build by the workers of an executor: a shard is a unit, sent again where its worker was lost.

A worker opens the source itself, and writes into a directory of its own. When the shard is finished it renames that
directory; of several attempts at one shard the first rename counts.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import pickle
import shutil
import socket
import threading
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from lightning_gpuopt.loading.samples import given_back
from lightning_gpuopt.storage import durable
from lightning_gpuopt.storage.errors import StorageError
from lightning_gpuopt.storage.format import shard_name
from lightning_gpuopt.storage.sources import Source, open_source
from lightning_gpuopt.storage.sources.prepare import ImageOptions
from lightning_gpuopt.storage.sources.tar_index import Indexing, Item, write_index
from lightning_gpuopt.storage.writing.fill import Job, Report, SkippedSample, fill_shard, finish_shard
from lightning_gpuopt.storage.writing.plan import as_json, difference, read_plan
from lightning_gpuopt.storage.writing.pool import WorkerTraceback, portable
from lightning_gpuopt.storage.writing.publish import MARKER
from lightning_gpuopt.storage.writing.staging import Staging, finished_directory
from lightning_gpuopt.utils.arguments import refuse

_OUTSTANDING: Final = 64  # units that an executor has at a time: how many workers it has, or will have, nobody knows
_ATTEMPTS: Final = 3
_PATIENCE_S: Final = 5.0  # how long a build that fails waits for units that run, and are told to stop
T = TypeVar("T")
Outcome = tuple[bool, Any]  # of a unit: True and what it gave, or False and the error, pickled, with its traceback


def build_units(
    executor: Executor,
    job: Job,
    numbers: Sequence[int],
    source: Any,
    allow_pickle: bool,
    staging: Staging,
    report: Report,
) -> None:
    """Build shards by an executor, which is neither waited for when it is idle nor shut down.

    A Dataset is sent with each unit, paths are not. What `report` raises ends the build. StorageError if a unit was
    lost with its worker three times, the executor takes no more, or its workers do not see the directory or the source.
    """
    paths = _paths(source)
    marker = staging.directory / f"{MARKER}{uuid.uuid4().hex}.json"
    how = {"paths": paths, "allow_pickle": allow_pickle, "kinds": dict(job.source.kinds), "images": asdict(job.images)}
    how |= {name: getattr(job, name) for name in ("starts", "strict", "shuffle_seed", "seed")}
    durable.write(marker, json.dumps({**how, "process": _this_process()}).encode())
    task = functools.partial(build_unit, str(marker), source if paths is None else None)

    stop = functools.partial(marker.unlink, missing_ok=True)

    def finished(number: int, outcome: Any) -> None:
        staging.adopt(number)
        report(*outcome)

    with staging.kept_from_children():
        try:
            send(executor, task, numbers, str(staging.path), shard_name, finished, stop)
        finally:
            if _filling.acquire(blocking=False):  # else a thread of this process still reads
                _forget()
                _filling.release()


def send(
    executor: Executor,
    task: Callable[[T, int], Outcome],
    items: Sequence[T],
    path: str,
    name: Callable[[T], str],
    done: Callable[[T, Any], None],
    stop: Callable[[], None],
) -> None:
    """Have an executor do a task for each item; what fails first is raised, and at the end `stop` is called.

    `task` gets an item and the number of the attempt, and returns its errors. Tasks that still run should notice
    `stop`.
    """
    waiting = deque((item, 1) for item in items)
    running: dict[Future[Outcome], tuple[T, int]] = {}
    finished, lost = 0, None

    def failure(what: str, error: Exception) -> StorageError:
        return StorageError(
            f"{path}: {what} ({type(error).__name__}: {error}); {finished} of {len(items)} are finished and kept: run "
            "the build again with resume=True"
        )

    try:
        while waiting or running:
            while waiting and len(running) < _OUTSTANDING:
                try:
                    future: Any = executor.submit(task, *waiting[0])
                except Exception as error:
                    raise failure("the executor accepts no more work", lost or error) from error
                if not isinstance(future, Future):
                    expected = "a concurrent.futures.Executor (of Dask: client.get_executor())"
                    refuse("executor", expected, executor, wrong_type=True)
                running[future] = waiting.popleft()
            wait(running, return_when=FIRST_COMPLETED)
            for future in [each for each in running if each.done()]:
                item, attempt = running.pop(future)
                try:
                    good, value = future.result()
                except Exception as error:  # the engine's own, of whichever type
                    if attempt == _ATTEMPTS:
                        what = f"{name(item)} was lost {attempt} times"
                        raise failure(what, error) from error
                    waiting.append((item, attempt + 1))
                    lost = error
                    continue
                if not good:
                    raise pickle.loads(value[0]) from WorkerTraceback(value[1])
                finished += 1
                done(item, value)
    finally:
        stop()
        wait([future for future in running if not future.cancel()], _PATIENCE_S)


def build_unit(marker: str, dataset: Any, number: int, attempt: int) -> Outcome:
    """Build a shard, in a worker; the build has ended where the file `marker` is gone.

    The marker has the paths where `dataset` is None. `attempt` tells two calls apart for executors that take equal
    calls for one.
    """
    try:
        return True, _build(Path(marker), dataset, number)
    except Exception as error:
        return False, (portable(error), traceback.format_exc())


def index_unit(item: Item, attempt: int) -> Outcome:
    try:
        if not os.path.isdir(directory := os.path.dirname(item[1])):
            raise _not_seen(directory)
        write_index(item)
        return True, None
    except Exception as error:
        return False, (portable(error), traceback.format_exc())


def _not_seen(directory: Path | str) -> StorageError:
    return StorageError(
        f"{directory}: a worker on {socket.gethostname()} does not see this folder; choose a dataset path that all "
        "workers of the executor see"
    )


# one thread of a process reads the source, and seeds the process's random numbers, at a time
_filling = threading.Lock()
_opened: dict[str, Job] = {}  # the job of this process's last unit, by its marker


def _new_lock() -> None:
    global _filling
    _filling = threading.Lock()


os.register_at_fork(after_in_child=_new_lock)  # a thread of the parent may have held it


def _build(marker: Path, dataset: Any, number: int) -> tuple[int, int, list[SkippedSample]]:
    directory = marker.parent
    samples, size, left_out = 0, 0, []

    def count(more_samples: int, more_bytes: int, skipped: list[SkippedSample]) -> None:
        nonlocal samples, size
        if not marker.exists():
            raise StorageError(f"{directory}: the build has ended")
        samples, size = samples + more_samples, size + more_bytes
        left_out.extend(skipped)

    own = directory / f"{shard_name(number)}.attempt.{uuid.uuid4().hex}"
    try:
        with _filling, given_back():
            job = replace(_job(marker, dataset), directory=own)
            own.mkdir()
            filled = fill_shard(job, number, count)
        finish_shard(job, filled)
        count(0, 0, [])
        try:
            os.rename(own, finished_directory(directory, number))
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another attempt was first
                raise
    finally:
        shutil.rmtree(own, ignore_errors=True)
    return samples, size, left_out


def _job(marker: Path, dataset: Any) -> Job:
    """The job of a marker; the source is opened once a process."""
    try:
        how = json.loads(marker.read_bytes())
    except FileNotFoundError:
        raise _not_seen(marker.parent) from None
    if str(marker) not in _opened:
        _forget()
        given = how["paths"] if dataset is None else dataset
        indexes = Indexing(marker.parent, _no_index)
        source = open_source(given, allow_pickle=how["allow_pickle"], indexing=indexes)
        source.kinds = how["kinds"]
        images = ImageOptions(**how["images"])
        options = {name: how[name] for name in ("starts", "strict", "shuffle_seed", "seed")}
        _refuse_other(source, marker.parent, how["process"])
        _opened[str(marker)] = Job(source=source, directory=marker.parent, images=images, **options)
    return _opened[str(marker)]


def _no_index(items: list[Item]) -> None:
    raise StorageError(
        f"{len(items)} tars have changed since they were indexed, or a worker on {socket.gethostname()} finds other "
        "files there; use paths that are the same for all workers of the executor, and build again"
    )


def _refuse_other(source: Source, directory: Path, coordinator: list[Any]) -> None:
    """Refuse a source that is another than the build's, or that may not be read in its process."""
    seen = source_plan(source)
    plan = read_plan(directory)[0] or {}
    if (wanted := {name: plan.get(name) for name in seen}) != seen:
        raise StorageError(
            f"{source.path}: a worker on {socket.gethostname()} finds another source there than the build "
            f"({difference(wanted, seen)}); use a path that is the same for all workers of the executor"
        )
    if source.isolated and coordinator == _this_process():
        raise StorageError(
            f"{source.path}: a damaged one can kill the process that reads it, so it is not read in threads; use an "
            "executor of processes, or num_proc="
        )


def source_plan(source: Source) -> dict[str, Any]:
    return as_json({f"source {name}": value for name, value in source.fingerprint().items()})


def _forget() -> None:
    for job in _opened.values():
        job.source.close()
    _opened.clear()


def _this_process() -> list[Any]:
    return [socket.gethostname(), os.getpid()]


def _paths(source: Any) -> str | list[str] | None:
    """The source's paths, for workers that are elsewhere; None if it is a Dataset."""
    if isinstance(source, (str, os.PathLike)):
        return os.path.abspath(source)
    if isinstance(source, (list, tuple)) and all(isinstance(each, (str, os.PathLike)) for each in source):
        return [os.path.abspath(path) for path in source]
    return None
