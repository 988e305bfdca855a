"""Where a dataset is built before it is there: a directory beside it, locked, resumable, renamed into place."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import re
import shutil
import socket
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from lightning_gpuopt.storage.errors import StorageError
from lightning_gpuopt.storage.format import (
    MANIFEST,
    SKIPPED,
    Manifest,
    Shard,
    replaced_directory,
    shard_name,
    staging_directory,
)
from lightning_gpuopt.storage.shard import digest_of, sync_directory, write_durably

_PLAN: Final = "plan.json"
_LOCK: Final = "lock"
_SHARD_FILE: Final = re.compile(r"shard-(\d{5,})\.[a-z.]+")
_OUR_FILE: Final = re.compile(rf"{_SHARD_FILE.pattern}|({MANIFEST}|{SKIPPED}|{_PLAN})(\.part)?|lock|part-.*\.lock")
_NO_ENTRY: Final = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT)
_PATIENCE_S: Final = 1.0
_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class Staging:
    """The directory beside a dataset's path in which it is built: locked, resumable, published by a rename.

    Args:
        path: Where the dataset is to be; directories above it are made.
        overwrite: A dataset at `path` may be replaced, and without `resume` an unfinished build is thrown away.
        resume: Go on with an unfinished build, if there is one.
        plan: Plain JSON that every run at work on this dataset must have in common.
        part: (i, n) for one of n jobs that build together; this one owns the shards whose number modulo n is i, and
            cannot publish.

    Raises:
        FileExistsError: There is something at `path` that must stay, or an unfinished build beside it.
        StorageError: Another process builds here, or the unfinished build has another plan.
        OSError: One may not write there.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool,
        resume: bool,
        plan: dict[str, Any],
        part: tuple[int, int] | None = None,
    ) -> None:
        self.path = Path(os.path.realpath(path))
        self.directory = staging_directory(path)
        self._overwrite = overwrite
        self._resume = resume
        self._part = part
        self._plan = json.loads(json.dumps(plan))
        self._locks: list[io.FileIO] = []  # closed, and so unlocked, when they are forgotten
        self._pid = os.getpid()
        self._published = False
        # A refused build leaves nothing behind, so look before anything is made; again when it is locked.
        self._check_target()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock()
            self._heal()
            self._check_target()
            self._settle()
        except BaseException as err:
            self.close()
            if isinstance(err, OSError) and err.errno in _NO_ENTRY:
                why = f"cannot build a dataset here: {err.strerror}; give a path where you may write"
                raise OSError(err.errno, why, str(path)) from None
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
                whole = (
                    stem.with_suffix(".mdb").stat().st_size == shard.file_bytes and stem.with_suffix(".tab").exists()
                )
            except (OSError, ValueError, TypeError, KeyError):
                continue
            if whole and shard.number == number:
                shards[number] = shard
        return shards

    def has_shard(self, number: int) -> bool:
        """Whether there is anything of this shard, finished or not."""
        return number in self._shard_numbers()

    def publish(self, manifest: Manifest) -> None:
        """Make it the dataset at `path`: from one moment to the next, and so that it stays after a power cut.

        Raises:
            FileExistsError: Something has come to be at `path` that must stay.
        """
        assert self._part is None, "a part does not publish"
        if (self.directory / SKIPPED).exists():
            with (self.directory / SKIPPED).open("rb") as stream:
                manifest = replace(manifest, skipped_digest=digest_of(stream))
        write_durably(self.directory / MANIFEST, manifest.to_json().encode())
        self._check_target()
        replaced = replaced_directory(self.path)
        if self.path.exists():
            _remove(replaced)
            os.rename(self.path, replaced)
        os.rename(self.directory, self.path)
        sync_directory(self.path.parent)
        self._published = True
        keep = {MANIFEST, SKIPPED, *(shard.name + suffix for shard in manifest.shards for suffix in (".mdb", ".tab"))}
        for name in set(os.listdir(self.path)) - keep:  # the dataset is whole with or without these
            (self.path / name).unlink(missing_ok=True)
        self._unlock()
        _remove(replaced)

    def discard(self) -> None:
        """Throw the unfinished build away, and let go of it."""
        if not self._published and self._locks:
            self._clear()
            self._remove_directory()
        self._unlock()

    def close(self) -> None:
        """Let go of it, and leave the files for a resume; nothing is left where nothing was written. Idempotent."""
        if not self._published and self._locks and self._part is None and not self._shard_numbers():
            self._remove_directory()
        self._unlock()

    # --- what is there already -----------------------------------------------------------------------------------

    def _check_target(self) -> None:
        path = self.path
        if not os.path.lexists(path):
            return
        if not path.is_dir():
            raise FileExistsError(f"{path}: there is a file of that name; give another path, or move it away")
        if not self._overwrite:
            raise FileExistsError(f"{path}: it exists already; give overwrite=True to replace it, or another path")
        strange = sorted(name for name in os.listdir(path) if not _OUR_FILE.fullmatch(name))
        if strange:
            raise FileExistsError(
                f"{path}: it holds {strange[0]!r}, which is no part of a lightning-gpuopt dataset, and is not deleted; "
                "give another path, or move it away"
            )

    def _heal(self) -> None:
        """Undo or finish what a crash in the midst of `publish` left."""
        replaced = replaced_directory(self.path)
        if not replaced.is_dir():
            return
        if os.path.lexists(self.path):
            _remove(replaced)
        else:
            os.rename(replaced, self.path)

    def _settle(self) -> None:
        """Take up the unfinished build that is there, or begin one."""
        plan = self._read_plan()
        if plan is not None and plan != self._plan and not (self._overwrite and not self._resume):
            raise StorageError(
                f"{self.directory}: the unfinished build there was begun differently "
                f"({_difference(plan, self._plan)}); give overwrite=True without resume=True to throw it away, "
                "or build as it was begun"
            )
        numbers = self._own_shards()
        if numbers and not (self._overwrite or self._resume):
            raise FileExistsError(
                f"{self.path}: an unfinished build lies beside it ({self.directory}); give resume=True to go on "
                "with it, or overwrite=True to begin anew"
            )
        if not self._resume or plan is None:
            if self._part is None:
                self._clear()
            elif plan != self._plan and plan is not None:
                self._clear_alone()
            else:
                self._clear(numbers)
        (self.directory / MANIFEST).unlink(missing_ok=True)  # of a build that was killed just before its rename
        if self._read_plan() is None:
            self._write_plan()
        found = self._read_plan()
        if found != self._plan:  # two parts began at one moment
            raise StorageError(
                f"{self.directory}: another part began with another plan "
                f"({_difference(found or {}, self._plan)}); start all parts with the same arguments"
            )

    def _shard_numbers(self, directory: Path | None = None) -> list[int]:
        names = os.listdir(directory or self.directory)
        return sorted({int(match[1]) for match in map(_SHARD_FILE.fullmatch, names) if match})

    def _own_shards(self) -> list[int]:
        if self._part is None:
            return self._shard_numbers()
        i, n = self._part
        return [number for number in self._shard_numbers() if number % n == i]

    def _clear(self, numbers: list[int] | None = None) -> None:
        """Remove these shards' files; with None everything but the locks."""
        for name in os.listdir(self.directory):
            match = _SHARD_FILE.fullmatch(name)
            if (numbers is None and not name.endswith("lock")) or (match and int(match[1]) in (numbers or ())):
                (self.directory / name).unlink(missing_ok=True)

    def _clear_alone(self) -> None:
        """Clear everything, if no other part is at work."""
        lock = self._locks[0]
        if not _flock(lock, fcntl.LOCK_EX):
            raise StorageError(
                f"{self.directory}: other parts are at work on a build that was begun differently; wait for them, or "
                "end them, and try again"
            )
        self._clear()
        self._write_plan()
        _flock(lock, fcntl.LOCK_SH)

    # --- plan ----------------------------------------------------------------------------------------------------

    def _read_plan(self) -> dict[str, Any] | None:
        try:
            plan = json.loads((self.directory / _PLAN).read_bytes())
        except (OSError, ValueError):  # never written, or killed while it was
            return None
        return plan if isinstance(plan, dict) else None

    def _write_plan(self) -> None:
        """Write the plan, unless another part does it first."""
        beside = self.directory / f"{_PLAN}.{socket.gethostname()}-{os.getpid()}"
        write_durably(beside, json.dumps(self._plan).encode())
        try:
            if self._part is None:
                os.replace(beside, self.directory / _PLAN)
            else:
                os.link(beside, self.directory / _PLAN)
        except FileExistsError:
            pass
        finally:
            beside.unlink(missing_ok=True)
        sync_directory(self.directory)

    # --- locks ---------------------------------------------------------------------------------------------------

    def _lock(self) -> None:
        if self._part is None:
            self._take(_LOCK, fcntl.LOCK_EX, "another process builds this dataset")
            return
        i, n = self._part
        self._take(_LOCK, fcntl.LOCK_SH, "another process builds or joins this dataset")
        self._take(f"part-{i}-of-{n}.lock", fcntl.LOCK_EX, f"another process builds part {i} of {n}")
        for file in self.directory.glob("part-*.lock"):
            if file.name.endswith(f"-of-{n}.lock"):
                continue
            with io.FileIO(file, "r+") as other:
                free = _flock(other, fcntl.LOCK_EX)
            if not free:
                raise self._held("the dataset is being built in another number of parts", file)

    def _take(self, name: str, kind: int, what: str) -> None:
        file = self.directory / name
        while True:
            try:
                lock = io.FileIO(os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+")
            except FileNotFoundError:  # published or discarded in this moment
                self.directory.mkdir(parents=True, exist_ok=True)
                continue
            if not _flock_soon(lock, kind):
                lock.close()
                raise self._held(what, file)
            try:
                same = os.path.samestat(os.fstat(lock.fileno()), os.stat(file))
            except FileNotFoundError:
                same = False
            if same:
                break
            lock.close()  # the one who held it has published it, and gone
        self._locks.append(lock)
        if kind == fcntl.LOCK_EX:
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}".encode())

    def _held(self, what: str, file: Path) -> StorageError:
        try:
            who = file.read_text()
        except (OSError, ValueError):
            who = ""
        return StorageError(
            f"{self.path}: {what}{f' ({who})' if who else ''}; wait until it has ended, or give another path"
        )

    def _unlock(self) -> None:
        for lock in self._locks:
            if os.getpid() == self._pid:  # else a fork's copy: the lock is its parent's
                _flock(lock, fcntl.LOCK_UN)
            lock.close()
        self._locks = []

    def _remove_directory(self) -> None:
        for name in os.listdir(self.directory):
            if name.endswith("lock") or name.startswith(_PLAN):
                (self.directory / name).unlink(missing_ok=True)
        try:
            self.directory.rmdir()
        except OSError:  # something that is not ours; it stays
            return


def _flock_soon(lock: io.FileIO, kind: int) -> bool:
    """Lock, waiting a moment for the processes of a build whose main process was just killed: they end soon."""
    deadline = time.monotonic() + _PATIENCE_S
    while not _flock(lock, kind):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _flock(lock: io.FileIO, kind: int) -> bool:
    """Lock without waiting; False if another holds it."""
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as err:
        if err.errno not in _NO_LOCKS:
            raise
        warnings.warn(
            "this file system has no locks: see to it that no two processes build the same dataset", stacklevel=2
        )
    return True


def _difference(then: dict[str, Any], now: dict[str, Any]) -> str:
    differing = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    return "; ".join(f"{name} was {_short(then.get(name))}, now {_short(now.get(name))}" for name in differing[:3])


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def _remove(path: Path) -> None:
    """Remove what was replaced: a dataset, as `Staging` made sure."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
