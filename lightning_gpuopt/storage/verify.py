"""Checking a dataset on disk, byte by byte."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Final

import xxhash

from lightning_gpuopt._arguments import whole_number
from lightning_gpuopt.images.decode import decode_pil
from lightning_gpuopt.storage import codec
from lightning_gpuopt.storage.errors import DamagedError, StorageError
from lightning_gpuopt.storage.format import SKIPPED, Manifest, Shard
from lightning_gpuopt.storage.shard import digest_of, open_shard

MAX_LISTED: Final = 100
_SAMPLES_A_TASK: Final = 1024

Problem = tuple[int | None, str]


@dataclass(frozen=True)
class VerifyReport:
    """What `verify` found.

    Attributes:
        num_samples: Samples that were compared with their checksums.
        num_problems: Problems in all.
        problems: The first hundred: the sample's index, or None where it is no single sample's, and what it is.
    """

    num_samples: int
    num_problems: int
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Whether every byte is as it was written."""
        return not self.num_problems


@dataclass(frozen=True)
class _Task:
    """Samples of a shard, or with ``stop=None`` its files as wholes."""

    directory: Path
    shard: Shard
    first: int
    start: int
    stop: int | None
    decode: bool


def verify(
    path: str | os.PathLike[str],
    *,
    decode: bool = False,
    num_proc: int = 1,
    progress: Callable[[int], None] | None = None,
) -> VerifyReport:
    """Compare every byte of a dataset with the checksums that were taken when it was written.

    Nothing is mapped or walked: files are read, so a damaged one or a sick disk gives a problem in the report.

    Args:
        path: The dataset's directory.
        decode: Decode every image, too. (Images are stored as they came; some may have been broken then.)
        num_proc: Processes that work on it.
        progress: Called with the number of samples done since its last call.

    Raises:
        FileNotFoundError: There is nothing at `path`.
        StorageError: It is no dataset of ours, or of a newer version.
    """
    num_proc = whole_number("num_proc", num_proc, "a number of processes", least=1)
    directory = Path(os.path.abspath(path))
    try:
        manifest = Manifest.load(directory)
    except DamagedError as err:
        return VerifyReport(0, 1, ((None, str(err)),))
    problems: list[Problem] = [*_skipped(directory, manifest)]
    done = 0
    tasks = _tasks(directory, manifest, decode)
    for count, found in _results(tasks, num_proc):
        done += count
        problems += found
        if progress is not None and count:
            progress(count)
    problems.sort(key=lambda problem: -1 if problem[0] is None else problem[0])
    return VerifyReport(done, len(problems), tuple(problems[:MAX_LISTED]))


def _tasks(directory: Path, manifest: Manifest, decode: bool) -> list[_Task]:
    tasks = []
    firsts = accumulate((shard.num_samples for shard in manifest.shards), initial=0)
    for shard, first in zip(manifest.shards, firsts, strict=False):
        tasks.append(_Task(directory, shard, first, 0, None, decode))
        for start in range(0, shard.num_samples, _SAMPLES_A_TASK):
            stop = min(start + _SAMPLES_A_TASK, shard.num_samples)
            tasks.append(_Task(directory, shard, first, start, stop, decode))
    return tasks


def _results(tasks: list[_Task], num_proc: int) -> Iterator[tuple[int, list[Problem]]]:
    if num_proc == 1:
        yield from map(_check, tasks)
        return
    with ProcessPoolExecutor(num_proc) as pool:
        futures = [pool.submit(_check, task) for task in tasks]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool:
            raise StorageError(
                f"{tasks[0].directory}: a process of the check was killed (out of memory?); try a smaller num_proc"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _skipped(directory: Path, manifest: Manifest) -> Iterator[Problem]:
    path = directory / SKIPPED
    if manifest.skipped_digest is None:
        return
    try:
        with path.open("rb") as stream:
            if digest_of(stream) != manifest.skipped_digest:
                yield None, f"{path}: it is not what was written"
    except OSError as err:
        yield None, f"{path}: {err.strerror}"


def _check(task: _Task) -> tuple[int, list[Problem]]:
    """Samples that were checked, and what is wrong."""
    path = task.directory / f"{task.shard.name}.mdb"
    try:
        shard = open_shard(task.directory, task.shard)
    except (StorageError, OSError) as err:
        # Said once, and not again for each stretch of samples.
        return 0, [] if task.stop is not None else [(None, str(err))]
    if task.stop is None:
        return 0, list(_check_files(path, task.shard))
    problems: list[Problem] = []
    with path.open("rb", buffering=0) as stream:
        for index in range(task.start, task.stop):
            try:
                start, length = int(shard.offsets[index]), int(shard.lengths[index])
                if start + length > task.shard.file_bytes:
                    raise DamagedError("the record table says that it ends behind the file's end")
                value = os.pread(stream.fileno(), length, start)
                codec.check(value, codec.sample_id(task.shard.number, index))
                if task.decode:
                    number = codec.sample_number(task.shard.number, index)
                    codec.read(value, 0, len(value), number, decode_pil)
            except DamagedError as err:
                problems.append((task.first + index, f"{path}: {err}"))
            except OSError as err:
                what = "cannot be decoded" if err.errno is None else "cannot be read"
                problems.append((task.first + index, f"{path}: it {what}: {err}"))
            except Exception as err:
                problems.append((task.first + index, f"{path}: it cannot be decoded ({type(err).__name__}: {err})"))
    return task.stop - task.start, problems


def _check_files(path: Path, shard: Shard) -> Iterator[Problem]:
    """What is wrong with a shard's files as wholes."""
    try:
        with path.open("rb") as stream:
            if digest_of(stream) != shard.file_digest:
                yield (
                    None,
                    f"{path}: it is not the file that was written (where all its samples are fine, the damage is in "
                    "LMDB's own pages: LMDBDataset does without these, other readers do not)",
                )
        table = path.with_suffix(".tab")
        data = table.read_bytes()
        if xxhash.xxh3_64_digest(data[:-8]) != data[-8:]:
            yield None, f"{table}: its checksum does not match its content"
    except OSError as err:
        yield None, f"{path}: {err}"
