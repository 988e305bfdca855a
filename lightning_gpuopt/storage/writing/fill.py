"""One shard of a build: read its samples from the source, leave out the broken images, and write it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from lightning_gpuopt.images.checks import BadImage
from lightning_gpuopt.loading.order import mix, permute
from lightning_gpuopt.loading.samples import seed_all
from lightning_gpuopt.storage import codec, durable
from lightning_gpuopt.storage.errors import StorageError
from lightning_gpuopt.storage.shard_writer import ShardWriter
from lightning_gpuopt.storage.sources import Source
from lightning_gpuopt.storage.sources.prepare import ImageOptions, prepare
from lightning_gpuopt.storage.writing.changed import Hashes, hashes_file, hashes_of, skip_file, skipped_rows

REPORT_INTERVAL_S: Final = 0.2

# hears of samples and bytes that were stored since the last call, and of samples that were left out
Report = Callable[[int, int, "list[SkippedSample]"], None]


@dataclass(frozen=True)
class Job:
    """What is the same for all shards of a build."""

    source: Source
    directory: Path
    starts: list[int]  # where the shards begin in the source, then the number of its samples
    strict: bool  # a broken image is an error
    images: ImageOptions
    shuffle_seed: int | None  # None: in the source's order
    seed: int  # of the random numbers that a Dataset draws; each shard's own is derived from it

    @property
    def num_shards(self) -> int:
        return len(self.starts) - 1

    def num_samples(self, shard: int) -> int:
        return len(self._positions(shard))

    def samples(self, shard: int) -> list[int] | range:
        """The indices in the source of a shard's samples."""
        positions = self._positions(shard)
        if self.shuffle_seed is None:
            return positions
        chosen = np.arange(positions.start, positions.stop, dtype=np.int64)
        indices: list[int] = permute(chosen, len(self.source), mix(self.shuffle_seed)).tolist()
        return indices

    def _positions(self, shard: int) -> range:
        return range(self.starts[shard], self.starts[shard + 1])


@dataclass(frozen=True)
class SkippedSample:
    index: int  # in the source
    name: str
    reason: str


@dataclass(frozen=True)
class Filled:
    """A shard whose samples are all in it, but which is not finished."""

    writer: ShardWriter
    skipped: list[tuple[int, SkippedSample]]  # by their places in the shard
    hashes: Hashes | None  # of all its samples, the skipped ones too; see `hashes_of`


def build_shard(job: Job, number: int, report: Report) -> None:
    """Build a shard; it is finished when this returns, and else not there. Raises what its two steps raise."""
    finish_shard(job, fill_shard(job, number, report))


def fill_shard(job: Job, number: int, report: Report) -> Filled:
    """Write the samples of a shard, with the process's random numbers seeded for it; report a few times a second.

    ValueError if the samples have no such part as `kinds` names, StorageError for a broken image where `strict` is
    set, TypeError for a sample that cannot be stored.
    """
    skipped: list[tuple[int, SkippedSample]] = []
    new: list[SkippedSample] = []
    reported_at, samples, reported_bytes = time.perf_counter(), 0, 0
    check_kinds(job.source)
    writer = ShardWriter(job.directory, number)
    # After the writer has removed an earlier shard of this number: finished shards keep their list.
    skip_file(job.directory, number).unlink(missing_ok=True)
    try:
        seed_all(mix(job.seed, number))
        for place, index in enumerate(job.samples(number)):
            try:
                writer.add(_encode(job, index))
            except BadImage as error:
                new.append(_skip(job, index, error))
                skipped.append((place, new[-1]))
            samples += 1
            if (now := time.perf_counter()) - reported_at >= REPORT_INTERVAL_S:
                report(samples, writer.num_bytes - reported_bytes, new)
                reported_at, samples, reported_bytes, new = now, 0, writer.num_bytes, []
        report(samples, writer.num_bytes - reported_bytes, new)
        hashes = hashes_of(job.source, job.samples(number))
    except BaseException:
        writer.close()
        raise
    return Filled(writer, skipped, hashes)


def check_kinds(source: Source) -> None:
    """Raise ValueError, with the parts that there are, where the samples lack a part that `kinds` names."""
    if not source.kinds:
        return
    there = source.parts()
    if missing := [name for name in source.kinds if name not in there]:
        parts, wrong = ", ".join(map(repr, there)) or "none has a name", ", ".join(map(repr, missing))
        raise ValueError(f"kinds: expected names of parts of {source.path} ({parts}), got {wrong}")


def finish_shard(job: Job, filled: Filled) -> None:
    """Read a shard back and make it durable; DamagedError if the disk gives back something else."""
    try:
        if filled.skipped:  # first: a shard that is finished is not built again
            rows = [[place, row.name, row.reason] for place, row in filled.skipped]
            durable.write(skip_file(job.directory, filled.writer.number), json.dumps(rows).encode())
        if filled.hashes is not None:
            durable.write(hashes_file(job.directory, filled.writer.number), filled.hashes.tobytes())
        filled.writer.finish()
    finally:
        filled.writer.close()


def _encode(job: Job, index: int) -> codec.Encoded:
    sample = job.source.read(index)
    try:
        sample = prepare(sample, job.images)
    except (BadImage, MemoryError):
        raise
    except Exception as error:  # of the file that an image was opened from
        raise RuntimeError(
            f"{job.source.path}: {job.source.name(index)}: its image cannot be read ({type(error).__name__}: {error}); "
            "fix that, then continue with resume=True"
        ) from error
    try:
        return codec.encode(sample)
    except TypeError as error:
        raise TypeError(f"{job.source.path}: {job.source.name(index)}: {error}") from None


def _skip(job: Job, index: int, error: BadImage) -> SkippedSample:
    name = job.source.name(index)
    if job.strict:
        raise StorageError(
            f"{job.source.path}: {name}: cannot be decoded ({error}); repair or remove it, then continue with "
            "resume=True, or without strict=True to skip such images"
        ) from None
    return SkippedSample(index, name, str(error))


def is_repaired(job: Job, number: int) -> bool:
    """Whether a sample that a finished shard leaves out could be stored by now, where single samples are read fast."""
    return job.source.single_reads and any(_is_good(job, row.index) for row in skipped_samples(job, [number]))


def _is_good(job: Job, index: int) -> bool:
    try:
        _encode(job, index)
    except (BadImage, OSError):  # which leaves it out, as before
        return False
    return True


def skipped_samples(job: Job, numbers: Iterable[int]) -> Iterable[SkippedSample]:
    """The samples left out of these shards, in order."""
    for number in numbers:
        if rows := skipped_rows(job.directory, number):
            samples = job.samples(number)
            yield from (SkippedSample(samples[place], name, reason) for place, name, reason in rows)
