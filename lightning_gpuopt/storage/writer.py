"""Writing a dataset sample by sample: `LMDBWriter`."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from lightning_gpuopt._version import __version__
from lightning_gpuopt.storage import codec
from lightning_gpuopt.storage.errors import StorageError
from lightning_gpuopt.storage.format import LMDBInfo, Manifest, Shard
from lightning_gpuopt.storage.shard_writer import MAP_SIZE_STEP, ShardWriter
from lightning_gpuopt.storage.writing.plan import Plan, difference
from lightning_gpuopt.storage.writing.staging import Staging, finished_dataset
from lightning_gpuopt.utils.arguments import flag, or_none, refuse, whole_number

SHARD_BYTES: Final = 8 << 30
_MIN_STEP: Final = 1 << 16

_log = logging.getLogger(__name__)


class LMDBWriter:
    """Writes a dataset sample by sample next to its path; closing it publishes it there in one step.

    Every commit (16 MiB or 4,096 samples) reaches the disk before the next begins, so a killed process or a power cut
    loses only samples after the last one, and ``resume=True`` continues from there. An exception in the ``with`` block
    keeps the unfinished dataset for that.

    Args:
        path: Directory of the dataset.
        samples_per_shard: Samples in each LMDB file; None: a new one when 8 GiB are full.
        map_size_step: Bytes by which LMDB's memory map grows.
        overwrite: Replace a dataset at `path` when the new one is closed; delete an unfinished one.
        resume: Continue an unfinished dataset: write the samples from number ``len(writer)`` on. If it is already
            finished, there is nothing left to write, and `close` returns its `LMDBInfo`.

    Attributes:
        classes: Names of the classes, index by label; may be set until the writer is closed.

    Raises:
        FileExistsError: `path` exists, or an unfinished dataset is next to it, or with `resume` a finished dataset was
            begun with other arguments.
        StorageError: Another process writes it, or the unfinished dataset was begun with other arguments.

    Example::

        >>> with LMDBWriter("train.lmdb") as writer:  # doctest: +SKIP
        ...     for image, label in samples:
        ...         writer.write((image, label))
        ...     writer.classes = ["cat", "dog"]
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        samples_per_shard: int | None = None,
        map_size_step: int = MAP_SIZE_STEP,
        overwrite: bool = False,
        resume: bool = False,
    ) -> None:
        or_none(whole_number, "samples_per_shard", samples_per_shard, "a number of samples", least=1)
        whole_number("map_size_step", map_size_step, "a number of bytes", least=_MIN_STEP)
        self._per_shard = samples_per_shard
        self._step = map_size_step
        self._classes: tuple[str, ...] | None = None
        overwrite, resume = flag("overwrite", overwrite), flag("resume", resume)
        plan = {"built_by": "LMDBWriter", "samples_per_shard": samples_per_shard}
        self.path = Path(os.path.realpath(path))
        self._finished: list[Shard] = []
        self._shard: ShardWriter | None = None
        self._staging: Staging | None = None
        self._info: LMDBInfo | None = None
        self._pid = os.getpid()
        manifest = _finished(self.path, plan) if resume and not overwrite else None
        self._was_finished = manifest is not None
        if manifest is not None:
            self._finished, self._classes, self._info = list(manifest.shards), manifest.classes, manifest.info
            return
        self._staging = Staging(
            path, overwrite=overwrite, resume=resume, plan=plan, begun_by=f"LMDBWriter, lightning-gpuopt {__version__}"
        )
        try:
            self._find_committed(self._staging)
        except BaseException:
            self._release()
            raise

    def _find_committed(self, staging: Staging) -> None:
        finished = staging.finished()
        while len(self._finished) in finished:
            self._finished.append(finished[len(self._finished)])
        number = len(self._finished)
        if staging.has_shard(number):
            self._shard = ShardWriter(staging.directory, number, durable=True, resume=True, map_size_step=self._step)
            self._finish_if_full()

    def __enter__(self) -> LMDBWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            if self._staging is not None:  # else it was closed or aborted within the block
                self.close()
        elif self._staging is not None and self._pid == os.getpid():
            self._leave(kind.__name__)

    def __len__(self) -> int:
        """Number of samples that are safely on disk, from the first on; the rest are safe once the writer is closed."""
        return self._before() + (0 if self._shard is None else self._shard.committed)

    def __repr__(self) -> str:
        state = f"{len(self)} samples safe of {self.num_samples}"
        if self._staging is None:
            state = "finished" if self._was_finished else "closed"
        return f"LMDBWriter({str(self.path)!r}, {state})"

    def __bool__(self) -> bool:
        return True  # not: whether it is empty

    @property
    def num_samples(self) -> int:
        """Number of samples written so far, including earlier runs."""
        return self._before() + (0 if self._shard is None else self._shard.num_samples)

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes, index by label.

        Set them in the run that closes the dataset: a resume starts without them.
        """
        return self._classes

    @classes.setter
    def classes(self, names: Sequence[str] | None) -> None:
        if names is not None and (isinstance(names, str) or not all(isinstance(name, str) for name in names)):
            refuse("classes", "a list of names, or None", names, wrong_type=True)
        given = None if names is None else tuple(names)
        if self._was_finished and given != self._classes:
            raise ValueError(
                f"{self.path}: it is finished, with the classes {self._classes}; give overwrite=True without "
                "resume=True to write it again"
            )
        self._classes = given

    def write(self, sample: Any) -> None:
        """Append a sample.

        Args:
            sample: bytes, int, float, bool, str, None, a numpy array, a tensor, a PIL image, or a tuple, list or dict
                of these. A PIL image comes back with its current pixels: its EXIF orientation is not applied. An
                unchanged image opened from a file is stored as that file, without the orientation.

        Raises:
            TypeError: It has a part that cannot be stored without pickle or without loss (a masked array); the writer
                continues with the next sample.
            StorageError: It is larger than what LMDB stores.
            OSError: The disk is full; committed samples are safe, and the others, this one included, are kept for the
                next commit.
            ValueError: The writer is closed, or the dataset was finished before.
        """
        staging = self._open()
        try:
            encoded = codec.encode(sample)
        except TypeError as err:
            raise TypeError(f"{self.path}: sample {self.num_samples} cannot be stored: {err}") from err
        if self._shard is None:
            self._shard = ShardWriter(staging.directory, len(self._finished), durable=True, map_size_step=self._step)
        self._shard.add(encoded)
        self._finish_if_full()

    def flush(self) -> None:
        """Commit the samples written so far: afterwards they are safe.

        Raises:
            OSError: The disk is full.
            ValueError: The writer is closed.
        """
        if self._was_finished:
            return
        self._open()
        if self._shard is not None:
            self._shard.commit()

    def close(self) -> LMDBInfo:
        """Finish the dataset and put it at its path. Idempotent.

        Returns:
            What it holds.

        Raises:
            OSError: The disk is full; committed samples are safe, and ``resume=True`` continues.
            ValueError: No sample was written, or the writer was aborted or left with an exception.
        """
        if self._info is not None:
            return self._info
        staging = self._open()
        try:
            if self._shard is not None and self._shard.num_samples:
                self._finish(self._shard)
            if not self._finished:
                self.abort()
                raise ValueError(
                    f"{self.path}: no samples were written, so there is no dataset; write some, then close"
                )
            manifest = Manifest(tuple(self._finished), self._classes, source=staging.plan)
            staging.publish(manifest)
        except BaseException as err:
            if self._staging is not None:
                self._leave(type(err).__name__)
            raise
        self._release()
        self._info = manifest.info
        return self._info

    def abort(self) -> None:
        """Delete the unfinished dataset; a dataset at the path stays unchanged. Idempotent."""
        if self._staging is not None:
            self._open()
            if self._shard is not None:
                self._shard.close()
                self._shard = None
            self._staging.discard()
            self._release()

    def _open(self) -> Staging:
        if self._was_finished:
            raise ValueError(
                f"{self.path}: it is finished, with {len(self)} samples; give overwrite=True without resume=True to "
                "write it again, or another path"
            )
        if self._staging is None:
            raise ValueError(
                f"{self.path}: this LMDBWriter is closed; open another, with another path or overwrite=True"
            )
        if self._pid != os.getpid():
            raise RuntimeError(
                f"{self.path}: this LMDBWriter belongs to process {self._pid}, which forked this one; write there, or "
                "build in several processes with build_lmdb(num_proc=...)"
            )
        return self._staging

    def _before(self) -> int:
        return sum(shard.num_samples for shard in self._finished)

    def _finish_if_full(self) -> None:
        shard = self._shard
        if shard is None or not shard.num_samples:
            return
        full = shard.num_bytes >= SHARD_BYTES if self._per_shard is None else shard.num_samples >= self._per_shard
        if full:
            self._finish(shard)

    def _finish(self, shard: ShardWriter) -> None:
        self._finished.append(shard.finish())
        self._shard = None

    def _leave(self, why: str) -> None:
        """Release the unfinished dataset, and log how to continue."""
        if self._shard is not None:
            try:
                self._shard.commit()
            except (OSError, StorageError) as err:
                _log.warning("%s: the last samples are lost: %s", self.path, err)
        _log.warning(
            "%s is not finished (%s): %d samples are safely written next to it; LMDBWriter(..., resume=True) continues "
            "after them",
            self.path,
            why,
            len(self),
        )
        self._release()

    def _release(self) -> None:
        if self._shard is not None:
            self._shard.close()
        if self._staging is not None:
            self._staging.close()
            self._staging = None


def _finished(path: Path, plan: Plan) -> Manifest | None:
    """The finished dataset at a path, or None; FileExistsError if it was begun otherwise than by this writer."""
    manifest = finished_dataset(path)
    if manifest is None or manifest.source == plan:
        return manifest
    raise FileExistsError(
        f"{path}: the dataset there was written differently ({difference(manifest.source, plan)}); give overwrite=True "
        "to replace it, or another path"
    )
