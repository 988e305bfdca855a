"""How fast the samples of a dataset are read at random, cold and warm, as they are and from an LMDB of them."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import psutil

from lightning_gpuopt.doctor.facts import DataFacts, ReadRates
from lightning_gpuopt.images.cost import measure_images
from lightning_gpuopt.images.files import class_names, image_extensions, read_file
from lightning_gpuopt.storage.errors import StorageError
from lightning_gpuopt.storage.format import Manifest
from lightning_gpuopt.storage.reader import LMDBDataset
from lightning_gpuopt.storage.shard import blocks_read
from lightning_gpuopt.storage.writer import LMDBWriter

_MIB: Final = 1024 * 1024

_MAX_LISTED: Final = 200_000
_LIST_S: Final = 3.0  # a larger folder, or a slow file system, is known by the files listed until then
_MAX_SAMPLES: Final = 2048
_MAX_BYTES: Final = 192 * _MIB
_MAX_SAMPLE_BYTES: Final = 16 * _MIB  # a larger file is no sample of a batch
_COLLECT_S: Final = 5.0
_READ_S: Final = 2.0  # no further batch is read after so long
_BATCH: Final = 32

_PART_READ: Final = 4
"""One in so many of the records of the LMDB is read, and the same files: in a small LMDB of nothing but what is read,
what the kernel reads ahead of one record would be the next one, which is not so in a large one."""

_BLOCK: Final = 128 * 1024
_MIN_SAMPLES: Final = 8

_UPPER_KIB: Final = (4, 16, 64, 128, 512, 2048)

_Read = Callable[[Sequence[int]], int]  # reads the samples of a batch; gives their bytes


def data_facts(path: str, clock: Callable[[], float] = time.perf_counter) -> DataFacts:
    """Look at a dataset (a folder of files, an LMDB of ours, a file), and measure how fast its samples are read.

    A folder of files is compared with an LMDB of a part of them, in a temporary folder on the same file system, which
    is removed before this returns, also by an exception. FileNotFoundError.
    """
    kind = "folder" if stat.S_ISDIR(os.stat(path).st_mode) else "file"
    if kind == "folder":
        with contextlib.suppress(StorageError, OSError):
            Manifest.load(Path(path))
            kind = "lmdb"
    facts = DataFacts(path, kind, file_system_of(path))
    look = {"folder": _folder, "lmdb": _lmdb, "file": _file}[kind]
    try:
        return look(facts, clock)
    except OSError as error:
        return replace(facts, failure=f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except (StorageError, ValueError) as error:
        return replace(facts, failure=f"{type(error).__name__}: {error}")


def file_system_of(path: str) -> str:
    """The type of the file system that a path lies on; empty if it is not known."""
    real = Path(os.path.realpath(path))
    try:
        mounts = [each for each in psutil.disk_partitions(all=True) if real.is_relative_to(each.mountpoint)]
    except OSError:
        return ""
    # of two at one place the later one is on top
    innermost = max(reversed(mounts), key=lambda each: len(each.mountpoint), default=None)
    return innermost.fstype if innermost is not None else ""


def _list(folder: str, clock: Callable[[], float]) -> tuple[dict[str, int], bool]:
    """Bytes of the files below a folder and below links in it, each of them once; and whether these are all.

    OSError if the folder cannot be read.
    """
    os.scandir(folder).close()
    sizes: dict[str, int] = {}
    linked = {os.path.realpath(folder)}
    until_s = clock() + _LIST_S
    waiting = [folder]
    random_order = random.Random(0)
    while waiting:
        # at random: where the time is over, what was listed is from all over the folder
        chosen = random_order.randrange(len(waiting))
        waiting[chosen], waiting[-1] = waiting[-1], waiting[chosen]
        for entry in _entries(waiting.pop()):
            if len(sizes) >= _MAX_LISTED or clock() > until_s:
                return sizes, False
            with contextlib.suppress(OSError):
                if entry.is_dir():
                    if not entry.is_symlink() or _leads_on(entry.path, linked):
                        waiting.append(entry.path)
                elif entry.is_file():
                    sizes[entry.path] = entry.stat().st_size
    return sizes, True


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    """What is in a folder and not hidden; nothing if it cannot be read."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        yield from (entry for entry in entries if not entry.name.startswith("."))


def _leads_on(link: str, linked: set[str]) -> bool:
    """Whether a link leads to a folder that no other link has led to, and that does not contain the link."""
    here, there = os.path.realpath(os.path.dirname(link)), os.path.realpath(link)
    if there in linked or f"{here}/".startswith(f"{there}/"):
        return False
    linked.add(there)
    return True


def histogram(sizes: Iterable[int]) -> dict[str, int]:
    """How many sizes in bytes there are, by the upper end of a range: ``"4_kib"``, ``"16_kib"``, ..., ``"more"``."""
    counts = dict.fromkeys([*(f"{upper}_kib" for upper in _UPPER_KIB), "more"], 0)
    for size in sizes:
        counts[next((f"{upper}_kib" for upper in _UPPER_KIB if size <= upper * 1024), "more")] += 1
    return counts


def _folder(facts: DataFacts, clock: Callable[[], float]) -> DataFacts:
    found, complete = _list(facts.path, clock)
    sizes = found.values()
    facts = replace(facts, files=len(found), complete=complete, total_mib=sum(sizes) / _MIB, sizes=histogram(sizes))
    candidates = [path for path, size in found.items() if 0 < size <= _MAX_SAMPLE_BYTES]
    if len(candidates) < _MIN_SAMPLES:
        failure = f"{len(candidates)} files of a sample's size; {_MIN_SAMPLES} are needed"
        large = any(size > _MAX_SAMPLE_BYTES for size in sizes)
        return replace(facts, failure=failure + ("; for large files, name one" if large else ""))
    random.Random(0).shuffle(candidates)
    with _beside(facts.path) as (folder, same_disk):
        with _without_advice():
            paths, database, failure = _build(candidates, folder, clock)
        if len(paths) < _MIN_SAMPLES:
            return replace(facts, failure=failure or f"{len(paths)} files can be read; {_MIN_SAMPLES} are needed")
        apart = _PART_READ if len(paths) >= _MIN_SAMPLES * _PART_READ else 1
        order = list(range(0, len(paths), apart))
        random.Random(1).shuffle(order)
        files = _measure(lambda batch: sum(_read_bytes(paths[i]) for i in batch), order, paths, clock)
        as_lmdb = None
        if database is not None:
            shards = [str(each) for each in database.iterdir() if each.is_file()]
            dataset = LMDBDataset(database, decode="raw")
            as_lmdb = _measure(lambda batch: sum(map(len, dataset.__getitems__(batch))), order, shards, clock)
            if not same_disk:  # another disk's figures say nothing of this one
                as_lmdb = replace(as_lmdb, cold_per_s=None, cold_mib_s=None)
                failure = "only warm reads are compared: no folder on the same file system is writable"
    decode_s = _decode_s(paths)
    return replace(
        facts,
        read=files,
        as_lmdb=as_lmdb,
        decode_s=decode_s,
        image_folder=decode_s is not None and bool(class_names(facts.path)[0]),
        failure=failure,
    )


def _read_bytes(path: str) -> int:
    """Reads a file; gives its bytes, none if it is gone meanwhile."""
    try:
        return len(read_file(path))
    except OSError:
        return 0


def _build(candidates: Sequence[str], folder: Path, clock: Callable[[], float]) -> tuple[list[str], Path | None, str]:
    """Write as many files as time and disk allow into an LMDB: the files, the database or None, and why none."""
    until_s, room = clock() + _COLLECT_S, shutil.disk_usage(folder).free // 4
    taken: list[str] = []
    total = 0
    writer = LMDBWriter(folder / "sample.lmdb")
    try:
        for path in candidates:
            if len(taken) >= _MAX_SAMPLES or total >= _MAX_BYTES:
                break
            if clock() > until_s and len(taken) >= _MIN_SAMPLES:
                break
            try:
                data = read_file(path)
            except OSError:  # removed meanwhile, or not ours to read
                continue
            if not data:
                continue
            total += len(data)
            if total > room:
                raise OSError("there is not enough room on the disk for a temporary LMDB")
            writer.write(data)
            taken.append(path)
        if not taken:
            return taken, None, "no file can be read"
        writer.close()
    except OSError as error:
        return taken, None, str(error)
    finally:
        writer.abort()  # nothing, if it is closed
    return taken, folder / "sample.lmdb", ""


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Silence the writer's advice on how to resume: what was interrupted here is thrown away."""
    writers = logging.getLogger(LMDBWriter.__module__)
    before, writers.disabled = writers.disabled, True
    try:
        yield
    finally:
        writers.disabled = before


@contextlib.contextmanager
def _beside(path: str) -> Iterator[tuple[Path, bool]]:
    """A temporary folder, on the file system of the path where that can be; and whether it is."""
    device = os.stat(path).st_dev
    made, same = None, False
    for place in (tempfile.gettempdir(), os.path.dirname(os.path.realpath(path))):
        with contextlib.suppress(OSError):
            if os.stat(place).st_dev == device:
                made, same = tempfile.mkdtemp(prefix=".gpuopt-doctor-", dir=place), True
                break
    if made is None:
        made = tempfile.mkdtemp(prefix=".gpuopt-doctor-")
    try:
        yield Path(made), same
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _decode_s(paths: Sequence[str]) -> float | None:
    """Seconds of decoding an image with PIL, where the files are images."""
    extensions = image_extensions()
    images = [path for path in paths if os.path.splitext(path)[1].lower() in extensions]
    if 2 * len(images) < len(paths):
        return None
    costs = measure_images(lambda index: read_file(images[index]), range(len(images)), None)
    return costs.pil_decode_s if costs is not None else None


def _lmdb(facts: DataFacts, clock: Callable[[], float]) -> DataFacts:
    dataset = LMDBDataset(facts.path, decode="raw")
    files = [each.path for each in _entries(facts.path) if each.is_file()]
    facts = replace(facts, files=len(files), total_mib=sum(map(os.path.getsize, files)) / _MIB)
    order = random.Random(1).sample(range(len(dataset)), min(len(dataset), _MAX_SAMPLES))

    def read(batch: Sequence[int]) -> int:
        dataset.read_ahead(batch)
        return sum(len(dataset.value(index)) for index in batch)

    return replace(facts, read=_measure(read, order, files, clock))


def _file(facts: DataFacts, clock: Callable[[], float]) -> DataFacts:
    size = os.path.getsize(facts.path)
    facts = replace(facts, files=1, total_mib=size / _MIB)
    blocks = size // _BLOCK
    if blocks < _MIN_SAMPLES:
        return replace(facts, failure="less than 1 MiB is too little to measure")
    order = random.Random(1).sample(range(blocks), min(blocks, _MAX_SAMPLES))
    with open(facts.path, "rb", buffering=0) as file:

        def read(batch: Sequence[int]) -> int:
            return sum(len(os.pread(file.fileno(), _BLOCK, index * _BLOCK)) for index in batch)

        return replace(facts, read=_measure(read, order, [facts.path], clock))


def _measure(read: _Read, order: Sequence[int], files: Sequence[str], clock: Callable[[], float]) -> ReadRates:
    """Read batch by batch, as a loader's worker does, first with the page cache emptied of ``files``, then again."""
    _forget(files)
    before = blocks_read()
    done, cold_bytes, cold_s = _run(read, order, clock)
    from_disk = blocks_read() > before
    again, _, warm_s = _run(read, order[:done], clock)
    cold = from_disk and cold_s > 0
    return ReadRates(
        done, done / cold_s if cold else None, again / max(warm_s, 1e-9), cold_bytes / _MIB / cold_s if cold else None
    )


def _run(read: _Read, order: Sequence[int], clock: Callable[[], float]) -> tuple[int, int, float]:
    """Samples read, their bytes, and the seconds it took."""
    began_s = clock()
    done = total = 0
    for start in range(0, len(order), _BATCH):
        batch = order[start : start + _BATCH]
        total += read(batch)
        done += len(batch)
        if clock() - began_s > _READ_S:
            break
    return done, total, clock() - began_s


def _forget(files: Sequence[str]) -> None:
    """Have the kernel drop files from its page cache; what others have mapped stays."""
    advise: Any = getattr(os, "posix_fadvise", None)
    if advise is None:
        return
    for path in files:
        with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
            advise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
