"""The directory beside a dataset's path in which it is built: locked, resumable, published by a rename."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeAlias

from lightning_gpuopt.storage import durable
from lightning_gpuopt.storage.errors import StorageError
from lightning_gpuopt.storage.format import (
    MANIFEST,
    SKIPPED,
    Manifest,
    Shard,
    file_digest,
    shard_name,
    staging_directory,
)
from lightning_gpuopt.storage.sources.tar_index import INDEX
from lightning_gpuopt.storage.writing.changed import Hashes, stored_hashes
from lightning_gpuopt.storage.writing.lock import Locks
from lightning_gpuopt.storage.writing.plan import PLAN, Notes, Plan, as_json, difference, read_plan, write_plan
from lightning_gpuopt.storage.writing.publish import MARKER, SHARD_FILE, check_target, publish, recover, remove

# what the workers of an executor leave, and what they know the directory by
_WORK: Final = re.compile(rf"shard-(\d{{5,}})\.(done|attempt\..*)|{MARKER}.*")
Place: TypeAlias = Callable[[Plan, "list[int] | None", Mapping[int, "Hashes | None"]], tuple[list[int], set[int]]]

_log = logging.getLogger(__name__)

_NO_ENTRY: Final = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT)


class Staging:
    """An unfinished dataset: begun or resumed, and published or left for a resume.

    `plan` is plain JSON that all runs at work on the dataset share; a `part` (i, n) owns the shards whose number modulo
    n is i, and cannot publish. `place` gets another plan that the build was begun with, where its shards began, and the
    samples of the finished ones; it gives where shards begin now, and which stay, or raises ValueError with the reason
    (None: only its own plan will do). FileExistsError if something must stay, StorageError if another process
    builds here or the plan differs.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool,
        resume: bool,
        plan: Plan,
        part: tuple[int, int] | None = None,
        begun_by: str = "",
        place: Place | None = None,
    ) -> None:
        self.path = Path(os.path.realpath(path))
        self.directory = staging_directory(path)
        self.plan = as_json(plan)
        self._overwrite = overwrite
        self._part = part
        self._place = place
        self._begun_by = begun_by
        self._published = False
        # A refused build leaves nothing behind, so look before anything is made; again when it is locked.
        check_target(self.path, overwrite)
        try:
            self._locks = Locks(self.directory, self.path, part)
        except OSError as err:
            if err.errno not in _NO_ENTRY:
                raise
            why = f"cannot build a dataset here: {err.strerror}; pass a writable path"
            raise OSError(err.errno, why, str(path)) from None
        try:
            recover(self.path)
            check_target(self.path, overwrite)
            self._begin(resume)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def finished(self) -> dict[int, Shard]:
        """The shards that are complete, by number; what cannot be read counts as not finished."""
        shards: dict[int, Shard] = {}
        for number in self._shard_numbers():
            stem = self.directory / shard_name(number)
            try:
                shard = Shard.from_json(json.loads(stem.with_suffix(".json").read_bytes()))
                sizes = [(self.directory / name).stat().st_size for name in shard.files]
            except (OSError, ValueError, TypeError, KeyError):
                continue
            if sizes[0] == shard.file_bytes and shard.number == number:
                shards[number] = shard
        return shards

    def has_shard(self, number: int) -> bool:
        """Whether there is anything of this shard, finished or not."""
        return number in self._shard_numbers()

    def adopt(self, number: int) -> None:
        """Take over a shard that a worker finished in its own directory; a crash is made good by another call."""
        done, stem = finished_directory(self.directory, number), self.directory / shard_name(number)
        there = set(os.listdir(done)) if done.is_dir() else set()
        if f"{stem.name}.json" in there:
            stem.with_suffix(".json").unlink(missing_ok=True)
            if f"{stem.name}.mdb" in there:  # nothing has been moved yet
                for suffix in (".skipped", ".samples", ".lab"):
                    stem.with_suffix(suffix).unlink(missing_ok=True)
            for suffix in (".mdb", ".skipped", ".samples", ".lab", ".tab", ".json"):
                if suffix == ".json":
                    durable.sync_directory(self.directory)
                if f"{stem.name}{suffix}" in there:
                    os.replace(done / f"{stem.name}{suffix}", stem.with_suffix(suffix))
            durable.sync_directory(self.directory)
        elif number not in self.finished():
            raise StorageError(
                f"{done}: a worker has finished this, but it is not visible here; make sure that all machines see the "
                "folder's current state (NFS: mount it without attribute caching), then continue with resume=True"
            )
        remove(done)

    def kept_from_children(self) -> contextlib.AbstractContextManager[None]:
        """In this context the processes that are forked do not share the lock."""
        return self._locks.kept_from_children()

    def publish(self, manifest: Manifest) -> None:
        """Rename it to `path`, durably; FileExistsError if something that must stay is there by now."""
        assert self._part is None, "a part does not publish"
        if (self.directory / SKIPPED).exists():
            with (self.directory / SKIPPED).open("rb") as stream:
                manifest = replace(manifest, skipped_digest=file_digest(stream))
        durable.write(self.directory / MANIFEST, manifest.to_json().encode())
        check_target(self.path, self._overwrite)
        publish(self.directory, self.path, manifest)
        self._published = True
        self._locks.release()

    def discard(self) -> None:
        if not self._published and self._locks:
            self._clear()
            self._remove_directory()
        self._locks.release()

    def close(self) -> None:
        """Release it, and leave the files for a resume; nothing is left where nothing was written. Idempotent."""
        if not self._published and self._locks and self._part is None and not self._shard_numbers():
            self._remove_directory()
        self._locks.release()

    def _begin(self, resume: bool) -> None:
        """Go on with the unfinished build that is there, or begin one."""
        plan = self.plan
        found, notes = read_plan(self.directory)
        throw_away = self._overwrite and not resume
        if self._part is None and not throw_away:
            self._clear_work()
        own, kept = self._own_shards(), None
        if found not in (None, plan) and not (throw_away and self._part is None):
            notes, kept = self._go_on_with(found, notes)
        if own:
            self._guard(found, notes, resume)
        if throw_away or found is None:
            notes = Notes(self._begun_by)
            if self._part is None:
                self._clear()
            else:
                self._clear_shards(own)
        (self.directory / MANIFEST).unlink(missing_ok=True)  # of a build that was killed just before its rename
        if kept is not None:
            changed = sorted(self.finished().keys() - kept)
            self._clear_shards(changed)
            write_plan(self.directory, plan, notes, shared=False)
            what = (
                f"({difference(found or {}, plan)}): {len(kept)} finished shards stay, {len(changed)} are built again"
            )
            _log.warning("%s: the source has changed since the build was begun %s", self.path, what)
        if read_plan(self.directory)[0] is None:
            write_plan(self.directory, plan, notes, shared=self._part is not None)
            found = read_plan(self.directory)[0] or {}
            if found != plan:  # two parts began at one moment
                raise StorageError(
                    f"{self.directory}: another part began with another plan ({difference(found, plan)}); start all "
                    "parts with the same arguments"
                )
        self.shard_starts = notes.shard_starts  # in the source, then the number of its samples; None: as the plan says

    def _guard(self, found: Plan | None, notes: Notes, resume: bool) -> None:
        """Raise FileExistsError or StorageError if an unfinished build would be lost, or cannot be gone on with."""
        there = self._what_is_there(notes)
        if not (self._overwrite or resume):
            raise FileExistsError(
                f"{self.path}: an unfinished build is next to it ({self.directory}: {there}); give resume=True "
                "to continue it, or overwrite=True to start again"
            )
        if not self.finished():
            return
        if not resume:
            _log.warning("%s: the unfinished build there is deleted: %s", self.directory, there)
        elif found is None:
            raise StorageError(
                f"{self.directory}: the unfinished build there does not say how it was begun, its {PLAN} is missing or "
                f"damaged; give overwrite=True without resume=True to delete it ({there})"
            )

    def _go_on_with(self, found: Plan, notes: Notes) -> tuple[Notes, set[int]]:
        """How to go on with a build of another plan, and which finished shards stay; StorageError if it cannot."""
        why = ""
        if self._part is None and self._place is not None:
            stored = {number: stored_hashes(self.directory, number) for number in self.finished()}
            try:
                starts, kept = self._place(found, notes.shard_starts, stored)
                return replace(notes, shard_starts=starts), kept
            except ValueError as error:
                why = f": {error}" if str(error) else ""
        differs = difference(found, self.plan) + why
        what = f"{self.directory}: the unfinished build there was begun differently ({differs}); "
        if self._part is None:
            what += (
                f"give overwrite=True without resume=True to delete it ({self._what_is_there(notes)}), or resume=True "
                "and the original arguments to continue it"
            )
        else:
            what += "start all parts with the same arguments, or remove that directory first"
        raise StorageError(what)

    def _what_is_there(self, notes: Notes) -> str:
        """What has been built here, for messages."""
        shards = self.finished()
        files = [file.stat() for file in self.directory.glob("shard-*") if file.is_file()]
        size = sum(about.st_size for about in files) / (1 << 20)
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(max((about.st_mtime for about in files), default=0)))
        what = f"{sum(shard.num_samples for shard in shards.values())} samples in {len(shards)} finished shards"
        by = f", begun by {notes.begun_by}" if notes.begun_by else ""
        return f"{what}, {size:.1f} MiB in all, written until {when}{by}"

    def _shard_numbers(self) -> list[int]:
        return sorted({int(match[1]) for match in map(SHARD_FILE.fullmatch, os.listdir(self.directory)) if match})

    def _own_shards(self) -> list[int]:
        i, n = self._part or (0, 1)
        return [number for number in self._shard_numbers() if number % n == i]

    def _clear(self) -> None:
        """Remove everything but the locks, and indexes, which hold for the tars as they are."""
        for name in self._names():
            if not name.endswith("lock") and not name.startswith(INDEX):
                remove(self.directory / name)

    def _clear_work(self) -> None:
        """Take over what the workers of an executor had finished, and remove what they had not."""
        finished = self.finished()
        for name in os.listdir(self.directory):
            if (match := _WORK.fullmatch(name)) is None:
                continue
            if match[2] == "done" and int(match[1]) not in finished:
                self.adopt(int(match[1]))
            else:
                remove(self.directory / name)

    def _names(self) -> list[str]:
        """What is there; removed in this order, nothing is left after a kill that counts as a finished shard."""
        return sorted(os.listdir(self.directory), key=lambda name: (name != PLAN, not name.endswith(".json")))

    def _clear_shards(self, numbers: list[int]) -> None:
        for name in self._names():
            match = SHARD_FILE.fullmatch(name)
            if match and int(match[1]) in numbers:
                remove(self.directory / name)

    def _remove_directory(self) -> None:
        for name in os.listdir(self.directory):
            if name.endswith("lock") or name.startswith((PLAN, MARKER, INDEX)):
                (self.directory / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # something that is not ours; it stays
            self.directory.rmdir()


def finished_directory(directory: Path, number: int) -> Path:
    """Where a worker of an executor puts the files of a shard when they are all there."""
    return directory / f"{shard_name(number)}.done"


def finished_dataset(path: Path) -> Manifest | None:
    """The finished dataset at a path, or None; FileExistsError if an unfinished build is to replace it."""
    try:
        manifest = Manifest.load(path)
    except (FileNotFoundError, StorageError):
        return None
    beside = staging_directory(path)
    if read_plan(beside)[0] is not None:
        raise FileExistsError(
            f"{os.fspath(path)}: the dataset there is finished, and an unfinished build that is to replace it is "
            f"next to it ({beside}); give overwrite=True and resume=True to continue that, or remove it"
        )
    return manifest
