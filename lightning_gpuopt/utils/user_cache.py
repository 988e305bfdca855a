"""What was found out about a folder once, kept in the user's cache directory."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)


class UserCache:
    """One file below ``$XDG_CACHE_HOME/lightning-gpuopt`` (``~/.cache``); what goes wrong with it is no error.

    Args:
        kind: of what is kept; the folder's name.
        key: what it was found out of, as JSON takes it, with the version of the file's format.
        suffix: of the file's name.
    """

    def __init__(self, kind: str, key: list[Any], suffix: str) -> None:
        root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
        self._path = Path(root, "lightning-gpuopt", kind, f"{name}{suffix}")

    def load(self, parse: Callable[[bytes], T | None]) -> T | None:
        """What was kept; None where there is nothing, or nothing that can be read.

        Args:
            parse: makes it of the file's bytes.
        """
        try:
            return parse(self._path.read_bytes())
        except FileNotFoundError:
            return None
        except Exception as error:  # what cannot be read is made anew
            log.debug("%s cannot be used: %s", self._path, error)
            return None

    def keep(self, write: Callable[[IO[bytes]], object]) -> None:
        """Replace the file, with all of the new content or not at all.

        Args:
            write: writes the content to the stream that it is given.
        """
        temporary: str | None = None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._path.parent, suffix=".part", delete=False) as stream:
                temporary = stream.name
                write(stream)
            os.replace(temporary, self._path)
        except (OSError, ValueError) as error:  # numpy and zipfile refuse some dates and names
            log.debug("%s cannot be kept: %s", self._path, error)
            if temporary is not None and os.path.exists(temporary):
                os.unlink(temporary)
