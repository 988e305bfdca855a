"""Checking a dataset on disk, byte by byte."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import xxhash

from lightning_gpuopt.images.decode import decode_pil
from lightning_gpuopt.storage import codec
from lightning_gpuopt.storage.errors import DamagedError, StorageError
from lightning_gpuopt.storage.format import SKIPPED, TABLE_HEAD, Manifest, Shard, file_digest
from lightning_gpuopt.storage.labels import open_labels, read_labels
from lightning_gpuopt.storage.shard import check_file, check_table, open_file
from lightning_gpuopt.storage.value import check, sample_number
from lightning_gpuopt.utils.arguments import whole_number

MAX_LISTED: Final = 100
_SAMPLES_A_TASK: Final = 1024

Problem = tuple[int | None, str]


@dataclass(frozen=True)
class VerifyReport:
    num_samples: int  # that were compared with their checksums
    num_problems: int
    problems: tuple[Problem, ...]  # the first hundred, by index; None: of no single sample

    @property
    def ok(self) -> bool:
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

    Files are read, not mapped: a damaged file or a failing disk becomes a problem in the report. With `decode`, images
    are decoded too, since some may have been stored broken. `progress` gets the number of samples done since its last
    call. FileNotFoundError, StorageError (not a lightning-gpuopt dataset, or of a newer version).
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
            if file_digest(stream) != manifest.skipped_digest:
                yield None, f"{path}: it is not what was written"
    except OSError as err:
        yield None, f"{path}: {err.strerror}"


def wrong_files(directory: Path, manifest: Manifest) -> list[str]:
    """A line for each file that is missing or not as long as it was: what can be seen without reading samples."""
    found = []
    for shard in manifest.shards:
        try:
            with _ShardFiles(directory, shard):
                if shard.labels:
                    os.close(open_labels(directory, shard))
        except (StorageError, OSError) as err:
            found.append(str(err))
    if manifest.skipped_digest is not None and not (directory / SKIPPED).exists():
        found.append(f"{directory / SKIPPED}: this file is missing")
    return found


class _ShardFiles(ExitStack):
    """A shard's two files, opened and not mapped: a page that the disk fails to give would end the process."""

    def __init__(self, directory: Path, shard: Shard) -> None:
        super().__init__()
        self.path = directory / f"{shard.name}.mdb"
        self.table = directory / f"{shard.name}.tab"
        self._num_samples = shard.num_samples
        try:
            self._data = self._open(self.path)
            check_file(self.path, self._data.fileno(), shard)
            self._places = self._open(self.table)
            check_table(self.table, self._places.fileno(), shard)
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path) -> BinaryIO:
        return self.enter_context(open(open_file(path), "rb"))

    def places(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Offset and length of these samples' values."""
        self._places.seek(TABLE_HEAD.size + 8 * start)
        offsets = self._places.read(8 * (stop - start))
        self._places.seek(TABLE_HEAD.size + 8 * self._num_samples + 4 * start)
        lengths = self._places.read(4 * (stop - start))
        places = zip(np.frombuffer(offsets, "<u8").tolist(), np.frombuffer(lengths, "<u4").tolist(), strict=True)
        return list(places)

    def value(self, offset: int, length: int) -> bytes:
        self._data.seek(offset)
        return self._data.read(length)


def _check(task: _Task) -> tuple[int, list[Problem]]:
    """The number of checked samples, and the problems."""
    try:
        files = _ShardFiles(task.directory, task.shard)
    except (StorageError, OSError) as err:
        # Reported once, and not again for each stretch of samples.
        return 0, [] if task.stop is not None else [(None, str(err))]
    with files:
        if task.stop is None:
            return 0, list(_check_files(files, task.shard))
        try:
            places = files.places(task.start, task.stop)
        except (OSError, ValueError) as err:
            first, last = task.first + task.start, task.first + task.stop - 1
            return 0, [(None, f"{files.table}: the positions of samples {first} to {last} cannot be read: {err}")]
        problems: list[Problem] = []
        for index, (offset, length) in enumerate(places, task.start):
            wrong = _check_sample(files, task, index, offset, length)
            if wrong is not None:
                problems.append((task.first + index, f"{files.path}: {wrong}"))
        return task.stop - task.start, problems


def _check_sample(files: _ShardFiles, task: _Task, index: int, offset: int, length: int) -> str | None:
    if offset + length > task.shard.file_bytes:
        return "the record table says that it ends behind the file's end"
    try:
        value = files.value(offset, length)
    except OSError as err:
        return f"it cannot be read: {err}"
    number = sample_number(task.shard.number, index)
    try:
        check(value, number)
        if task.decode:
            codec.read(value, 0, len(value), number, decode_pil)
    except DamagedError as err:
        return str(err)
    except Exception as err:
        return f"it cannot be decoded ({type(err).__name__}: {err})"
    return None


def _check_files(files: _ShardFiles, shard: Shard) -> Iterator[Problem]:
    try:
        with files.path.open("rb") as stream:
            if file_digest(stream) != shard.file_digest:
                yield (
                    None,
                    f"{files.path}: it is not the file that was written (if all its samples are fine, the damage is in "
                    "LMDB's own pages: LMDBDataset does not need them, other readers do)",
                )
    except OSError as err:
        yield None, f"{files.path}: it cannot be read: {err}"
    try:
        data = files.table.read_bytes()
        if xxhash.xxh3_64_digest(data[:-8]) != data[-8:]:
            yield None, f"{files.table}: its checksum does not match its content"
    except OSError as err:
        yield None, f"{files.table}: it cannot be read: {err}"
    try:
        read_labels(files.path.parent, shard)
    except DamagedError as err:
        yield None, str(err)
    except OSError as err:
        yield None, f"{files.path.with_suffix('.lab')}: it cannot be read: {err}"
