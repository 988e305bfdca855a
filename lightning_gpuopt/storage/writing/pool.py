"""The processes of a build: each takes the next shard that nobody has; none outlives the build."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Final, TypeVar

import torch

from lightning_gpuopt.loading.samples import given_back
from lightning_gpuopt.storage.errors import StorageError
from lightning_gpuopt.storage.format import shard_name
from lightning_gpuopt.storage.writing.fill import Job, Report, build_shard, fill_shard, finish_shard

_ORPHANED: Final = 3  # exit code
T = TypeVar("T")


def build_shards(job: Job, numbers: Sequence[int], num_proc: int, path: str, report: Report) -> None:
    """Build shards, each finished when it is done with; the first failure is raised after all else has ended.

    With one process it is this one, unless the source may kill the one that reads it. What `report` raises ends the
    build. StorageError if a process died, or none may be started here.
    """
    if num_proc == 1 and not job.source.isolated:
        with given_back():
            _build_here(job, numbers, report)
        return
    run_in_processes(functools.partial(build_shard, job), numbers, num_proc, path, shard_name, report)


def run_in_processes(
    task: Callable[[T, Report], None],
    items: Sequence[T],
    num_proc: int,
    path: str,
    name: Callable[[T], str],
    report: Report,
) -> None:
    """Call a function with each item, in processes of our own; the first failure is raised (StorageError: one died)."""
    if multiprocessing.current_process().daemon:
        raise StorageError(
            f"{path}: this process is a daemon, which cannot start others; use num_proc=1, or build outside of it"
        )
    with _workers(task, min(num_proc, len(items))) as workers:
        _feed(workers, list(items), path, name, report)


def _build_here(job: Job, numbers: Sequence[int], report: Report) -> None:
    """Build shards in this process: while one is finished, which means to wait for the disk, the next is filled."""
    finishing: Future[None] | None = None
    with ThreadPoolExecutor(1, thread_name_prefix="gpuopt-finish") as finisher:
        for number in numbers:
            filled = fill_shard(job, number, report)
            try:
                if finishing is not None:
                    finishing.result()
            except BaseException:
                filled.writer.close()
                raise
            finishing = finisher.submit(finish_shard, job, filled)
        if finishing is not None:
            finishing.result()


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    item: tuple[Any] | None = None


class WorkerTraceback(Exception):
    """Where in a worker process an error came from."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _feed(workers: list[_Worker], items: list[T], path: str, name: Callable[[T], str], report: Report) -> None:
    items.reverse()
    for worker in workers:
        _hand_out(worker, items)
    while busy := [worker for worker in workers if worker.item is not None]:
        ready = wait([worker.pipe for worker in busy] + [worker.process.sentinel for worker in busy])
        for worker in busy:
            if worker.pipe in ready or worker.process.sentinel in ready:
                _listen(worker, items, path, name, report)


def _hand_out(worker: _Worker, items: list[T]) -> None:
    worker.item = (items.pop(),) if items else None
    with contextlib.suppress(OSError):  # it has died; its sentinel tells
        worker.pipe.send(worker.item)


def _listen(worker: _Worker, items: list[T], path: str, name: Callable[[T], str], report: Report) -> None:
    try:
        if not worker.pipe.poll():
            raise EOFError
        kind, *content = worker.pipe.recv()
    except (EOFError, OSError):
        raise _death(worker, path, name) from None
    if kind == "progress":
        report(*content)
    elif kind == "done":
        _hand_out(worker, items)
    else:
        error, trace = content
        raise pickle.loads(error) from WorkerTraceback(trace)


def _death(worker: _Worker, path: str, name: Callable[[T], str]) -> StorageError:
    assert worker.item is not None
    worker.process.join()
    code = worker.process.exitcode or 0
    how = f"ended with exit code {code}, what it printed is above"
    if code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
        if -code == signal.SIGKILL:
            how += ", perhaps because memory ran out"
        elif -code in (signal.SIGSEGV, signal.SIGBUS):
            how += ", as happens when a library reads a damaged file"
    return StorageError(
        f"{path}: the process that built {name(*worker.item)} {how}; the finished shards are kept: run the build again "
        "with resume=True"
    )


@contextlib.contextmanager
def _workers(task: Callable[[T, Report], None], number: int) -> Iterator[list[_Worker]]:
    workers: list[_Worker] = []
    try:
        for _ in range(number):
            ours, theirs = multiprocessing.Pipe()
            process = multiprocessing.Process(target=_work, args=(task, theirs), daemon=True)
            with _ctrl_c_held_back():  # until the worker ignores it
                process.start()
            theirs.close()
            workers.append(_Worker(process, ours))
        yield workers
    finally:
        for worker in workers:
            if worker.process.is_alive() and worker.item is not None:
                worker.process.kill()  # what it had not finished is built again
            worker.pipe.close()
        for worker in workers:
            worker.process.join()


@contextlib.contextmanager
def _ctrl_c_held_back() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(task: Callable[[Any, Report], None], pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to us as well; the build ends us
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_parent, name="gpuopt-watch", daemon=True).start()
    torch.set_num_threads(1)  # as in a DataLoader's workers: the processes share the cores
    try:
        while (item := pipe.recv()) is not None:
            task(item[0], lambda *news: pipe.send(("progress", *news)))
            pipe.send(("done",))
    except (EOFError, BrokenPipeError):
        os._exit(_ORPHANED)
    except Exception as error:
        pipe.send(("failed", portable(error), traceback.format_exc()))


def _end_with_parent() -> None:
    """End this process when the build's main process has gone, whatever it was doing."""
    main = multiprocessing.parent_process()
    assert main is not None
    # After a fork, workers that were started later hold this open too; they end first, and then so does this one.
    wait([main.sentinel])
    os._exit(_ORPHANED)


def portable(error: Exception) -> bytes:
    """The error as a pickle, or another of the same words."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        data = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return data
