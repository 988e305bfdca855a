"""What was found out about a folder once, kept in the user's cache directory."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)


class UserCache:
    """One file below ``$XDG_CACHE_HOME/lightning-gpuopt`` (``~/.cache``); what goes wrong with it is no error.

    If nothing can be written there, it is kept in a folder of this user's own below the temporary one. The key is
    JSON, with the version of the file's format in it.
    """

    def __init__(self, kind: str, key: list[Any], suffix: str) -> None:
        root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
        self._temporary = Path(tempfile.gettempdir(), f"lightning-gpuopt-{os.getuid()}")
        self._paths = [each / kind / f"{name}{suffix}" for each in (Path(root, "lightning-gpuopt"), self._temporary)]

    def load(self, parse: Callable[[bytes], T | None]) -> T | None:
        """What ``parse`` makes of the file's bytes; None if there is nothing, or nothing that can be read."""
        for path in self._paths:
            try:
                if self._is_own(path) and (found := parse(path.read_bytes())) is not None:
                    return found
            except FileNotFoundError:
                continue
            except Exception as error:  # what cannot be read is made anew
                log.debug("%s cannot be used: %s", path, error)
        return None

    def keep(self, write: Callable[[IO[bytes]], object]) -> None:
        """Replace the file, with all that ``write`` puts into the stream or not at all."""
        for path in self._paths:
            temporary: str | None = None
            try:
                if path is self._paths[-1]:
                    self._temporary.mkdir(mode=0o700, exist_ok=True)
                path.parent.mkdir(parents=True, exist_ok=True)
                if not self._is_own(path):
                    raise PermissionError(f"{self._temporary} is another user's")
                with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as stream:
                    temporary = stream.name
                    write(stream)
                os.replace(temporary, path)
                return
            except (OSError, ValueError) as error:  # numpy and zipfile refuse some dates and names
                log.debug("%s cannot be kept: %s", path, error)
                if temporary is not None and os.path.exists(temporary):
                    os.unlink(temporary)

    def _is_own(self, path: Path) -> bool:
        """Whether nobody else can have put a file there, as all may below the temporary folder."""
        if self._temporary not in path.parents:
            return True
        status = os.lstat(self._temporary)
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
