"""`build_lmdb`: a dataset from a folder of images, tars, files of arrays or tensors, a Dataset or another LMDB."""

from __future__ import annotations

import contextlib
import csv
import errno
import functools
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any, Final, Literal, get_args

import torch

from lightning_gpuopt._version import __version__
from lightning_gpuopt.storage import durable
from lightning_gpuopt.storage.errors import StorageError
from lightning_gpuopt.storage.format import SKIPPED, LMDBInfo, Manifest, Shard, staging_directory
from lightning_gpuopt.storage.sources import Source, open_source
from lightning_gpuopt.storage.sources.kinds import Kind
from lightning_gpuopt.storage.sources.prepare import ImageOptions
from lightning_gpuopt.storage.verify import wrong_files
from lightning_gpuopt.storage.writing.changed import place_build, shard_starts, skip_file
from lightning_gpuopt.storage.writing.fill import Job, SkippedSample, check_kinds, is_repaired, skipped_samples
from lightning_gpuopt.storage.writing.indexing import indexing
from lightning_gpuopt.storage.writing.plan import Plan, as_json, difference, plan_shards
from lightning_gpuopt.storage.writing.pool import build_shards
from lightning_gpuopt.storage.writing.staging import Staging, finished_dataset
from lightning_gpuopt.storage.writing.units import build_units, source_plan
from lightning_gpuopt.utils.arguments import choice, or_none, real_number, refuse, whole_number
from lightning_gpuopt.utils.console_progress import ConsoleProgress

_log = logging.getLogger(__name__)

MAX_SKIPPED: Final = 0.01
_MIN_SKIPPED: Final = 10  # so few bad images end no build, whatever share they are
_SHOWN: Final = 10
_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def build_lmdb(
    source: Any,
    path: str | os.PathLike[str],
    *,
    num_proc: int = 1,
    executor: Executor | None = None,
    part: tuple[int, int] | None = None,
    progress: bool = True,
    resume: bool = False,
    overwrite: bool = False,
    strict: bool = False,
    allow_pickle: bool = False,
    image_size: int | None = None,
    image_quality: int = 90,
    check: Literal["header", "decode"] = "header",
    shuffle_seed: int | None = None,
    kinds: Mapping[str, Kind] | None = None,
    max_skipped: float = MAX_SKIPPED,
) -> LMDBInfo:
    """Build a dataset at `path` from any source; it appears there only once it is complete.

    The order is the source's, unless `shuffle_seed` is given. The result is the same whatever `num_proc`, `executor`
    and `part` are, and whether or not it was interrupted. Images are stored unchanged, unless `image_size` makes them
    smaller.

    Image files are photographs, which are read as upright RGB. Exceptions keep mode and values: a part of a sample
    named mask, seg, label or depth (a word of its extension, column or key), and in samples of several images those of
    mode P, 1, I, I;16 or F. PIL images that a Dataset returns keep their pixels.

    If a Dataset draws random numbers from Python, numpy or torch, these are seeded for each shard from
    ``torch.initial_seed()``: no two processes draw the same numbers, and the result does not depend on `num_proc`. For
    that reason, threads of an executor read one shard at a time.

    Args:
        source: A folder with a subfolder of images for each class; one or several WebDataset ``*.tar`` (a path, a
            folder, a pattern such as ``"train-{0000..0146}.tar"``, a list); an HDF5, ``.npy``, ``.npz`` (which must
            fit in memory) or Parquet file; tensors in ``.pt``, ``.pth`` or ``.safetensors``; an LMDB of files, or with
            `allow_pickle` one of pickled values; a map-style Dataset; a dataset of this package. Of a Dataset like
            torchvision's ``ImageFolder``, without transforms, the image files themselves are stored.
        path: The dataset's directory.
        num_proc: Number of processes, each building a shard.
        executor: Its workers build instead of local processes, here or on machines that see the same file system: any
            ``concurrent.futures.Executor``, such as Dask's ``client.get_executor()`` or mpi4py's. A source's paths must
            be the same there; a Dataset is pickled with each shard. It is not shut down. A shard whose worker is lost
            is sent again, three times in all.
        part: ``(i, n)``: do the i-th (from 0) of n parts of the work, here or on another machine that sees the same
            file system. When all are done, the same call without `part` and with ``resume=True`` joins them.
        progress: Show how far it is on stderr: a bar in a terminal, else a line every ten seconds.
        resume: Go on with a build that was interrupted, if there is one. If it is finished already, nothing is
            done. Files of the source that are not stored yet may have changed, gone or come since (of folders, tars and
            Parquet files, without `shuffle_seed` and `part`).
        overwrite: Replace the dataset at `path`, which stays until the new one is whole.
        strict: Stop at the first image that cannot be decoded. Otherwise such images are left out, counted, and listed
            in ``skipped.csv`` with their index in the source, name and the reason: those of which PIL and its plugins,
            simplejpeg, ``torchvision.io`` or torchcodec say so.
            Every other error stops the build, and `resume` goes on.
        allow_pickle: Unpickle the values of an LMDB, which runs whatever code its author wished.
        image_size: Bring the shorter side of larger images down to as many pixels. They become JPEG, whatever they
            were, with the EXIF orientation applied. Masks and depth maps are resized with nearest neighbour and stay
            lossless.
        image_quality: The JPEG quality (1 to 95) of images that are made smaller.
        check: How images are checked: ``"header"`` checks the header and the end of a JPEG and the checksums of a PNG,
            and decodes others; ``"decode"`` decodes every image in full, which takes several times as long.
        shuffle_seed: Store the samples in the random order of this seed (0 or more), so that neighbours are of
            different classes, as a later ``shuffle_window`` needs. None: in the source's order. HDF5 and Parquet are
            slow to read at random: build them in order, then build the shuffled dataset from that one.
        kinds: What the image files of parts are, if the rule above is wrong: ``{"mask.png": "exact", "jpg":
            "photograph"}``, by a member's extension in a tar, a column's name, a key.
        max_skipped: Share of the source's samples, 0-1. Once at least ten images are bad and exceed this share, the
            build stops; `resume` continues it.

    Returns:
        The dataset's `LMDBInfo`; with `part`, this part's, unless the dataset is finished.

    Raises:
        FileNotFoundError: There is no such source.
        FileExistsError: `path` exists, or an unfinished build is next to it, or with `resume` the dataset was built
            from something else.
        ValueError: An argument is wrong, or the source is empty.
        TypeError: A sample of the source is of a type that cannot be stored.
        StorageError: The source is damaged or all its images are broken, or more than `max_skipped`; another process
            builds there, a process of the build died, an executor's workers were lost or see another file system, or an
            image is broken and `strict` is set.
        OSError: The disk is full, the path is not writable, or a file of the source cannot be read.
        RuntimeError: A Dataset raised an error; it is the cause.

    Example::

        build_lmdb("imagenet/train", "imagenet-train", num_proc=16)
    """
    _check_arguments(num_proc, part, image_size, image_quality, shuffle_seed)
    _check_executor(executor, num_proc, part)
    choice("check", check, ("header", "decode"))
    real_number("max_skipped", max_skipped, "a share of the samples", least=0, at_most=1)
    if strict and max_skipped != MAX_SKIPPED:
        refuse("max_skipped", "none with strict=True, which stops at the first bad image", max_skipped)
    for name, kind in (kinds or {}).items():
        choice(f"kinds[{name!r}]", kind, get_args(Kind))
    indexes = indexing(path, overwrite=overwrite, part=part, num_proc=num_proc, executor=executor, progress=progress)
    opened = open_source(source, allow_pickle=allow_pickle, indexing=indexes)
    with contextlib.closing(opened):
        _refuse_inside(opened, path)
        opened.kinds = dict(kinds or {})
        if not opened.isolated:
            check_kinds(opened)
        images = ImageOptions(image_size, image_quality, check == "decode")
        directory = staging_directory(path)
        per_shard = plan_shards(len(opened), opened.num_bytes)
        starts = shard_starts(len(opened), per_shard)
        job = Job(opened, directory, starts, strict, images, shuffle_seed, torch.initial_seed())
        plan = _plan(job, per_shard)
        begun_by = f"build_lmdb of the {opened.kind} {opened.path}, lightning-gpuopt {__version__}"
        place = functools.partial(place_build, opened, as_json(plan), directory)
        if resume and (manifest := _finished(Path(path), plan, overwrite)) is not None:
            if strict and manifest.num_skipped:
                raise FileExistsError(
                    f"{os.fspath(path)}: the dataset there is finished, but skipped {manifest.num_skipped} samples, "
                    "which strict=True does not allow; give overwrite=True to build it again"
                )
            _log.info("%s: finished already, nothing to do", path)
            return manifest.info
        with Staging(
            path, overwrite=overwrite, resume=resume, plan=plan, part=part, begun_by=begun_by, place=place
        ) as staging:
            job = replace(job, starts=staging.shard_starts or starts)
            go_on = "overwrite=True and resume=True" if overwrite else "resume=True"
            build = functools.partial(build_shards, job, num_proc=num_proc, path=str(staging.path))
            if executor is not None:
                build = functools.partial(
                    build_units, executor, job, source=source, allow_pickle=allow_pickle, staging=staging
                )
            with _how_to_go_on(staging.path, go_on):
                return _run(job, staging, part, build, progress, _SkipLimit(opened, max_skipped, go_on))


@contextlib.contextmanager
def _how_to_go_on(path: Path, go_on: str) -> Iterator[None]:
    """Add to an interruption, or a storage error, how to continue."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{path}: interrupted; run the build again with {go_on} to continue") from None
    except OSError as error:
        if error.errno not in _NO_SPACE or "resume=True" in str(error):
            raise
        what = f"{error.strerror}; make room, and run the build again with {go_on}"
        raise OSError(error.errno, what, str(path)) from error


def _plan(job: Job, per_shard: int) -> Plan:
    """What every run of this build must have in common."""
    plan = source_plan(job.source)
    plan |= {"samples_per_shard": per_shard, "image_size": job.images.size}
    if job.images.size is not None:
        plan["image_quality"] = job.images.quality
    if job.images.decode:
        plan["check"] = "decode"
    if job.shuffle_seed is not None:
        plan["shuffle_seed"] = job.shuffle_seed
    if job.source.kinds:
        plan["kinds"] = dict(job.source.kinds)
    return plan


def _finished(path: Path, plan: Plan, overwrite: bool) -> Manifest | None:
    """The dataset at `path`, if the plan would build the same; FileExistsError if another may not be replaced."""
    if overwrite:
        return None  # what the source holds may have changed under the same names
    if (manifest := finished_dataset(path)) is None:
        return None
    if wrong := wrong_files(path, manifest):
        raise StorageError(f"{wrong[0]}; give overwrite=True to build the dataset again")
    how = manifest.source
    then = how.get("plan")
    if then is None:  # of a release that did not keep it
        then = {"source kind": how.get("kind"), "source num_samples": how.get("num_samples")}
        then |= {name: how.get(name) for name in ("image_size", "image_quality")}
        plan = {name: plan.get(name) for name in then}
    if then == (plan := as_json(plan)):
        return manifest
    raise FileExistsError(
        f"{path}: the dataset there was built from something else ({difference(then, plan)}); give overwrite=True to "
        "replace it, or another path"
    )


def _check_arguments(num_proc: Any, part: Any, image_size: Any, image_quality: Any, shuffle_seed: Any) -> None:
    whole_number("num_proc", num_proc, "a number of processes", least=1)
    or_none(whole_number, "image_size", image_size, "a number of pixels", least=1)
    if whole_number("image_quality", image_quality, "a JPEG quality up to 95", least=1) > 95:
        refuse("image_quality", "a JPEG quality from 1 to 95", image_quality)
    or_none(whole_number, "shuffle_seed", shuffle_seed, "a seed", least=0)
    if part is None:
        return
    whole = isinstance(part, Sequence) and len(part) == 2 and all(isinstance(number, Integral) for number in part)
    if not whole or not 0 <= part[0] < part[1]:
        refuse("part", "(i, n) with 0 <= i < n, or None", part)


def _check_executor(executor: Any, num_proc: int, part: Any) -> None:
    if executor is None:
        return
    if not callable(getattr(executor, "submit", None)):
        refuse("executor", "a concurrent.futures.Executor, or None", executor, wrong_type=True)
    if num_proc != 1:
        refuse("num_proc", "1 with executor=, whose workers do the building", num_proc)
    if part is not None:
        refuse("part", "None with executor=, which has all parts built", part)


def _refuse_inside(source: Source, path: str | os.PathLike[str]) -> None:
    target, folder = os.path.realpath(path), os.path.realpath(source.path)
    if source.kind == "image folder" and target.startswith(folder + os.sep):
        raise ValueError(f"{os.fspath(path)}: it is inside the source, {source.path}; pass a path outside of it")


class _SkipLimit:
    """Counts the samples left out, and ends a build that leaves out more than the share `most` (0-1) of the source."""

    def __init__(self, source: Source, most: float, go_on: str) -> None:
        self._source, self._most, self._go_on = source, most, go_on
        self._count = 0
        self._first: list[SkippedSample] = []

    def note(self, skipped: Iterable[SkippedSample]) -> None:
        """Count samples that are left out; StorageError once there are too many."""
        for each in skipped:
            self._count += 1
            self._first += [each] if len(self._first) < _SHOWN else []
        if self._count < _MIN_SKIPPED or self._count <= self._most * len(self._source):
            return
        named = "\n".join(f"  {each.name}: {each.reason}" for each in self._first)
        raise StorageError(
            f"{self._source.path}: {self._count} of {len(self._source)} samples cannot be decoded so far, more than "
            f"max_skipped={self._most:g} allows; fix them, or raise max_skipped, then continue with {self._go_on}. The "
            f"first:\n{named}"
        )


def _run(
    job: Job,
    staging: Staging,
    part: tuple[int, int] | None,
    build: Callable[..., None],
    progress: bool,
    limit: _SkipLimit,
) -> LMDBInfo:
    i, n = part or (0, 1)
    wanted = range(i, job.num_shards, n)
    finished = staging.finished()
    # What an earlier run left out is looked at again; it may have been repaired.
    left_out = [number for number in wanted if number in finished and skip_file(staging.directory, number).exists()]
    again = {number for number in left_out if job.strict or is_repaired(job, number)}
    missing = [number for number in wanted if number not in finished or number in again]
    if missing:
        total = sum(map(job.num_samples, wanted))
        done = total - sum(map(job.num_samples, missing))
        limit.note(skipped_samples(job, sorted(finished.keys() - set(missing))))
        with ConsoleProgress(total, done, enabled=progress) as shown:

            def report(samples: int, size: int, skipped: list[SkippedSample]) -> None:
                shown.add(samples, size)
                limit.note(skipped)

            build(missing, report=report)
        finished = staging.finished()
    shards = tuple(finished[number] for number in wanted)
    if part is not None:
        return Manifest(shards, job.source.classes, sum(1 for _ in skipped_samples(job, wanted))).info
    return _publish(job, staging, shards)


def _publish(job: Job, staging: Staging, shards: tuple[Shard, ...]) -> LMDBInfo:
    source = job.source
    numbers = [shard.number for shard in shards]
    num_skipped, first = _write_skipped(job, numbers)
    if first is not None and num_skipped == len(source):
        staging.discard()
        raise StorageError(
            f"{source.path}: none of its {num_skipped} samples can be stored; the first, {first.name}: {first.reason}"
        )
    how = {
        "kind": source.kind,
        "path": source.path,
        "num_samples": len(source),
        "image_size": job.images.size,
        "image_quality": None if job.images.size is None else job.images.quality,
        "built_with": f"lightning-gpuopt {__version__}",
        "plan": staging.plan,
    }
    manifest = Manifest(shards, source.classes, num_skipped, how)
    staging.publish(manifest)
    if first is not None:
        warnings.warn(
            f"{staging.path}: {num_skipped} of {len(source)} samples are skipped, since their images cannot be decoded "
            f"(the first: {first.name}: {first.reason}); {staging.path / SKIPPED} lists them",
            stacklevel=4,  # build_lmdb's caller
        )
    return manifest.info


def _write_skipped(job: Job, numbers: list[int]) -> tuple[int, SkippedSample | None]:
    """Write skipped.csv if there is anything to write; how many there are, and the first."""
    file = job.directory / SKIPPED
    file.unlink(missing_ok=True)
    skipped = sorted(skipped_samples(job, numbers), key=lambda row: row.index)
    if not skipped:
        return 0, None
    text = io.StringIO(newline="")
    rows = csv.writer(text)
    rows.writerow(("index", "name", "reason"))
    rows.writerows((row.index, row.name, row.reason) for row in skipped)
    durable.write(file, text.getvalue().encode(errors="backslashreplace"))
    return len(skipped), skipped[0]
