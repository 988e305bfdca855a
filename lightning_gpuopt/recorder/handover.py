"""Rings are handed to the command that watches a process, while they are empty: what it holds outlives the process."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

log = logging.getLogger(__name__)

VARIABLE: Final = "LIGHTNING_GPUOPT_RECORDER"  # the environment variable that the watching command sets
_TIMEOUT_S: Final = 2.0
_BACKLOG: Final = 128
_CREDENTIALS: Final = struct.Struct("3i")


@dataclass(frozen=True)
class Watcher:
    folder: str  # where rings are written to
    address: str = ""  # abstract socket's name, without the leading zero byte; empty: rings are not taken

    @staticmethod
    def of_this_process() -> Watcher | None:
        """Who watches this process; None: nobody does."""
        try:
            return Watcher(**json.loads(os.environ[VARIABLE]))
        except (KeyError, ValueError, TypeError):
            return None

    def environment(self, before: Mapping[str, str]) -> dict[str, str]:
        return {**before, VARIABLE: json.dumps(asdict(self))}

    def give(self, file: int) -> bool:
        """Hand over a descriptor of rings; returns whether it was taken. Waits two seconds at most."""
        if not self.address:
            return False
        try:
            with socket.socket(socket.AF_UNIX) as line:
                line.settimeout(_TIMEOUT_S)
                line.connect(f"\0{self.address}")
                socket.send_fds(line, [b"r"], [file])
                return True
        except OSError:  # another machine or container, or the command has gone
            log.debug("the rings could not be handed over", exc_info=True)
            return False


class Taker:
    """Takes the rings that are handed over, at the socket ``address``; OSError if there are no such sockets."""

    def __init__(self) -> None:
        self.address = f"gpuopt-{os.getpid()}-{secrets.token_hex(8)}"
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.bind(f"\0{self.address}")
            self._socket.listen(_BACKLOG)
            self._socket.setblocking(False)
        except OSError:
            self._socket.close()
            raise

    @property
    def file(self) -> int:
        """The socket's descriptor, which can be read when there is something to take."""
        return self._socket.fileno()

    def take(self) -> list[int]:
        """The descriptors that were handed over since the last call; does not wait."""
        taken: list[int] = []
        while True:
            try:
                line, _ = self._socket.accept()
            except OSError:
                return taken
            with line, contextlib.suppress(OSError):
                line.settimeout(_TIMEOUT_S)
                credentials = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                if _CREDENTIALS.unpack(credentials)[1] == os.getuid():
                    taken += socket.recv_fds(line, 1, 1)[1]

    def close(self) -> None:
        self._socket.close()
