"""Locks (flock) on a directory in which a dataset is built; the kernel releases them with the process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import socket
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from lightning_gpuopt.storage.errors import StorageError

_PATIENCE_S: Final = 1.0
_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class Locks:
    """What this process has locked in a directory: one part (i, n) of the work, or with None all of it.

    The directory is made where it is missing. StorageError if another process is at work there.
    """

    def __init__(self, directory: Path, path: Path, part: tuple[int, int] | None) -> None:
        self._directory = directory
        self._path = path
        self._pid = os.getpid()
        self._held: list[io.FileIO] = []
        try:
            if part is None:
                self._take("lock", fcntl.LOCK_EX, "another process builds this dataset")
                return
            i, n = part
            self._take("lock", fcntl.LOCK_SH, "another process builds or joins this dataset")
            self._take(f"part-{i}-of-{n}.lock", fcntl.LOCK_EX, f"another process builds part {i} of {n}")
            self._refuse_other_number(n)
        except BaseException:
            self.release()
            raise

    def __bool__(self) -> bool:
        return bool(self._held)

    @contextlib.contextmanager
    def kept_from_children(self) -> Iterator[None]:
        """Forked processes do not get the locks: somebody else's pool may outlive us and hold them for ever."""
        _NOT_INHERITED.add(self)
        try:
            yield
        finally:
            _NOT_INHERITED.discard(self)

    def release(self) -> None:
        """Release them. Idempotent; in a forked child the parent's locks stay."""
        for lock in self._held:
            if os.getpid() == self._pid:
                _flock(lock, fcntl.LOCK_UN)
            lock.close()
        self._held = []

    def _refuse_other_number(self, n: int) -> None:
        """Refuse a build in another number of parts: its parts would share shards with ours."""
        for file in self._directory.glob("part-*.lock"):
            if not file.name.endswith(f"-of-{n}.lock"):
                with io.FileIO(file, "r+") as other:
                    if not _flock(other, fcntl.LOCK_EX):
                        raise self._refusal("the dataset is being built in another number of parts", file)

    def _take(self, name: str, kind: int, what: str) -> None:
        file = self._directory / name
        while True:
            self._directory.mkdir(parents=True, exist_ok=True)
            try:
                lock = io.FileIO(os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+")
            except FileNotFoundError:  # published or discarded in this moment
                continue
            if not _flock_soon(lock, kind):
                lock.close()
                raise self._refusal(what, file)
            try:
                if os.path.samestat(os.fstat(lock.fileno()), os.stat(file)):
                    break
            except FileNotFoundError:
                pass
            lock.close()  # the process that held it has published or discarded the directory
        self._held.append(lock)
        if kind == fcntl.LOCK_EX:
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}".encode())

    def _refusal(self, what: str, file: Path) -> StorageError:
        try:
            who = file.read_text()
        except (OSError, ValueError):
            who = ""
        return StorageError(
            f"{self._path}: {what}{f' ({who})' if who else ''}; wait until it has ended, or choose another path"
        )


_NOT_INHERITED: Final[set[Locks]] = set()


def _release_in_child() -> None:
    for locks in _NOT_INHERITED:
        locks.release()
    _NOT_INHERITED.clear()


os.register_at_fork(after_in_child=_release_in_child)


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
        warnings.warn("this file system has no locks: let no two processes build the same dataset", stacklevel=2)
    return True
