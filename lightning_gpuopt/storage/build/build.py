"""`build_lmdb`: a dataset from a folder of images, tars, HDF5, NumPy, Parquet, a Dataset or another LMDB."""

from __future__ import annotations

import csv
import errno
import math
import os
import warnings
from collections.abc import Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, Final

from lightning_gpuopt._arguments import refuse, whole_number
from lightning_gpuopt._version import __version__
from lightning_gpuopt.storage.build.pool import build_shards
from lightning_gpuopt.storage.build.progress import BuildProgress
from lightning_gpuopt.storage.build.fill import Job, Skipped, skip_file, skipped_samples
from lightning_gpuopt.storage.errors import StorageError
from lightning_gpuopt.storage.format import SKIPPED, LMDBInfo, Manifest, Shard
from lightning_gpuopt.storage.shard import sync_directory
from lightning_gpuopt.storage.sources import Source, open_source
from lightning_gpuopt.storage.build.staging import Staging

SHARD_BYTES: Final = 256 << 20
_MOST_SHARDS: Final = 256
# At least this many shards where the samples suffice, so that processes and machines have something to share.
_SHARDS_TO_SHARE: Final = 16
_SHARE_SAMPLES: Final = 1024
_UNKNOWN_SIZE_SAMPLES: Final = 1 << 16
_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def build_lmdb(
    source: Any,
    path: str | os.PathLike[str],
    *,
    num_proc: int = 1,
    part: tuple[int, int] | None = None,
    progress: bool = True,
    resume: bool = False,
    overwrite: bool = False,
    strict: bool = False,
    allow_pickle: bool = False,
    image_size: int | None = None,
    image_quality: int = 90,
) -> LMDBInfo:
    """Build a dataset at `path` from any source; it is there when it is whole, and not before.

    The order is the source's. The result is the same whatever `num_proc` and `part` are, and whether or not it was
    interrupted. Images are stored as they came, unless `image_size` asks for smaller ones.

    Args:
        source: A folder with a subfolder of images for each class; one or several WebDataset ``*.tar`` (a path, a
            folder, a pattern such as ``"train-{0000..0146}.tar"``, a list); an HDF5, ``.npy``, ``.npz`` or Parquet
            file; a map-style Dataset; a dataset of this package; with `allow_pickle` an LMDB of pickled values.
        path: Where the dataset is to be, a directory.
        num_proc: How many processes build, a shard each.
        part: ``(i, n)``: do the i-th (from 0) of n parts of the work, here or on another machine that sees the same
            file system. When all are done, the same call without `part` and with ``resume=True`` joins them.
        progress: Show how far it is on stderr: a bar in a terminal, else a line every ten seconds.
        resume: Go on with a build that was interrupted, if there is one.
        overwrite: Replace the dataset at `path`, which stays until the new one is whole.
        strict: Stop at the first image that cannot be decoded. Otherwise such images are left out, counted, and listed
            in ``skipped.csv`` with their index, name and the reason.
        allow_pickle: Unpickle the values of an LMDB, which runs whatever code its author wished.
        image_size: Bring the shorter side of larger images down to as many pixels. They become JPEG, whatever they
            were, with the EXIF orientation applied.
        image_quality: The JPEG quality (1 to 95) of images that are made smaller.

    Returns:
        What the dataset holds; with `part`, what this part of it does.

    Raises:
        FileNotFoundError: There is no such source.
        FileExistsError: There is something at `path`, or an unfinished build beside it.
        ValueError: An argument is wrong, or the source is empty.
        TypeError: A sample of the source is of a type that cannot be stored.
        StorageError: The source is damaged or all its images are broken, another process builds there, a process of the
            build died, or an image is broken and `strict` is set.
        OSError: The disk is full, or one may not write there.

    Example::

        build_lmdb("imagenet/train", "imagenet-train", num_proc=16)
    """
    _check_arguments(num_proc, part, image_size, image_quality)
    opened = open_source(source, allow_pickle=allow_pickle)
    _refuse_inside(opened, path)
    samples_per_shard = plan_shards(len(opened), opened.num_bytes)
    plan = {f"source {name}": value for name, value in opened.fingerprint().items()}
    plan |= {"samples_per_shard": samples_per_shard, "image_size": image_size}
    if image_size is not None:
        plan["image_quality"] = image_quality
    with Staging(path, overwrite=overwrite, resume=resume, plan=plan, part=part) as staging:
        job = Job(opened, staging.directory, samples_per_shard, strict, image_size, image_quality)
        try:
            return _run(job, staging, part, num_proc, progress)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"{path}: interrupted; run the build again with resume=True to go on") from None
        except OSError as error:
            if error.errno not in _NO_SPACE or "resume=True" in str(error):
                raise
            what = f"{error.strerror}; make room, and run the build again with resume=True"
            raise OSError(error.errno, what, str(path)) from error


def _check_arguments(num_proc: Any, part: Any, image_size: Any, image_quality: Any) -> None:
    whole_number("num_proc", num_proc, "a number of processes", least=1)
    if image_size is not None:
        whole_number("image_size", image_size, "a number of pixels", least=1, or_none=True)
    if whole_number("image_quality", image_quality, "a JPEG quality up to 95", least=1) > 95:
        refuse("image_quality", "a JPEG quality from 1 to 95", image_quality)
    if part is None:
        return
    whole = isinstance(part, Sequence) and len(part) == 2 and all(isinstance(number, Integral) for number in part)
    if not whole or not 0 <= part[0] < part[1]:
        refuse("part", "(i, n) with 0 <= i < n, or None", part)


def _refuse_inside(source: Source, path: str | os.PathLike[str]) -> None:
    target, folder = os.path.realpath(path), os.path.realpath(source.path)
    if source.kind == "image folder" and target.startswith(folder + os.sep):
        raise ValueError(f"{os.fspath(path)}: it lies in the source, {source.path}; give a path outside of it")


def plan_shards(num_samples: int, num_bytes: int | None) -> int:
    """How many samples of the source make up a shard. A matter of the source alone, so that every run cuts alike.

    Args:
        num_samples: Samples of the source.
        num_bytes: About how many bytes they are; None where that is not known.
    """
    to_share = min(_SHARDS_TO_SHARE, math.ceil(num_samples / _SHARE_SAMPLES))
    for_size = math.ceil(num_samples / _UNKNOWN_SIZE_SAMPLES if num_bytes is None else num_bytes / SHARD_BYTES)
    num_shards = min(max(to_share, for_size, 1), _MOST_SHARDS, num_samples)
    return math.ceil(num_samples / num_shards)


def _run(job: Job, staging: Staging, part: tuple[int, int] | None, num_proc: int, progress: bool) -> LMDBInfo:
    i, n = part or (0, 1)
    wanted = range(i, math.ceil(len(job.source) / job.samples_per_shard), n)
    finished = staging.finished()
    # strict: what an earlier run left out is looked at again; it may have been mended.
    again = {number for number in wanted if job.strict and skip_file(staging.directory, number).exists()}
    missing = [number for number in wanted if number not in finished or number in again]
    if missing:
        total = sum(len(job.samples(number)) for number in wanted)
        done = total - sum(len(job.samples(number)) for number in missing)
        with BuildProgress(total, done, enabled=progress) as shown:
            build_shards(job, missing, num_proc, str(staging.path), shown.add)
        finished = staging.finished()
    shards = tuple(finished[number] for number in wanted)
    if part is not None:
        return _info(shards, sum(1 for _ in skipped_samples(staging.directory, wanted)), job.source.classes)
    return _publish(job, staging, shards)


def _publish(job: Job, staging: Staging, shards: tuple[Shard, ...]) -> LMDBInfo:
    source = job.source
    numbers = [shard.number for shard in shards]
    num_skipped, first = _write_skipped(staging.directory, numbers)
    if first is not None and num_skipped == len(source):
        staging.discard()
        raise StorageError(
            f"{source.path}: none of its {num_skipped} samples can be stored; the first, {first.name}: {first.reason}"
        )
    how = {
        "kind": source.kind,
        "path": source.path,
        "num_samples": len(source),
        "image_size": job.image_size,
        "image_quality": None if job.image_size is None else job.image_quality,
        "built_with": f"lightning-gpuopt {__version__}",
    }
    staging.publish(Manifest(shards, source.classes, num_skipped, how))
    if first is not None:
        warnings.warn(
            f"{staging.path}: {num_skipped} of {len(source)} samples are left out, their images cannot be decoded "
            f"(the first: {first.name}: {first.reason}); {staging.path / SKIPPED} lists them",
            stacklevel=4,  # build_lmdb's caller
        )
    return _info(shards, num_skipped, source.classes)


def _write_skipped(directory: Path, numbers: list[int]) -> tuple[int, Skipped | None]:
    """Write skipped.csv if there is anything to write; how many there are, and the first."""
    file = directory / SKIPPED
    file.unlink(missing_ok=True)
    count, first = 0, None
    beside = directory / f"{SKIPPED}.part"
    with beside.open("w", encoding="utf-8", errors="backslashreplace", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(("index", "name", "reason"))
        for row in skipped_samples(directory, numbers):
            first = first or row
            count += 1
            rows.writerow((row.index, row.name, row.reason))
        stream.flush()
        os.fsync(stream.fileno())
    if count:
        os.replace(beside, file)
        sync_directory(directory)
    else:
        beside.unlink()
    return count, first


def _info(shards: tuple[Shard, ...], num_skipped: int, classes: tuple[str, ...] | None) -> LMDBInfo:
    return LMDBInfo(
        num_samples=sum(shard.num_samples for shard in shards),
        num_bytes=sum(shard.value_bytes for shard in shards),
        num_shards=len(shards),
        num_skipped=num_skipped,
        classes=classes,
    )
