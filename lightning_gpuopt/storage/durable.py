"""Files that survive a power cut."""

from __future__ import annotations

import errno
import os
import socket
import threading
from pathlib import Path
from typing import Final

# errors of file systems (FUSE, CIFS) that have no such operation
NOT_THERE: Final = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF)


def write(path: Path, data: bytes) -> None:
    """Write a file beside, fsync it and rename it into place."""
    beside = path.with_name(path.name + ".part")
    with beside.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(beside, path)
    sync_directory(path.parent)


def write_first(path: Path, data: bytes) -> None:
    """Write a file as `write` does, unless it is there; of several processes at once the first one's stays."""
    mine = path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}")
    write(mine, data)
    try:
        os.link(mine, path)
    except FileExistsError:
        pass
    except OSError as err:
        if err.errno not in NOT_THERE:
            raise
        if not path.exists():  # no hard links here: of two processes in the same moment the later one's stays
            os.replace(mine, path)
    mine.unlink(missing_ok=True)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make renames in a directory durable, if its file system can."""
    try:
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as err:
        if err.errno not in NOT_THERE:
            raise
