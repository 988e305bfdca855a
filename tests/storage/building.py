"""A build in a process of its own, which stops where it is told, says so, and waits to be killed."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from lightning_gpuopt.storage import durable
from lightning_gpuopt.storage.codec import EncodedImage
from lightning_gpuopt.storage.writing.build import build_lmdb

NUM_SAMPLES = 2500  # in three shards of 834
BROKEN = range(7, NUM_SAMPLES, 600)


class Numbers:
    """Small samples; some of them are images that cannot be decoded."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Any:
        if index in BROKEN:
            return EncodedImage(b"broken")
        return {"index": index, "values": np.full(8, index)}


def _stop() -> None:
    os.write(1, f"{os.getpid()}\n".encode())
    while True:  # signal.pause() would wait on for a signal that came just before it
        time.sleep(0.05)


def _stop_at(what: str, when: int) -> None:
    """Stop at the `when`-th call of something, or where `Numbers` is asked for that index."""
    if what == "read":
        whole = Numbers.__getitem__

        def read(self: Numbers, index: int) -> Any:
            if index == when:
                _stop()
            return whole(self, index)

        Numbers.__getitem__ = read  # type: ignore[method-assign]
        return
    owner = durable if what == "write" else os
    calls = iter(range(when))
    function = getattr(owner, what)

    def called(*args: Any) -> Any:
        if next(calls, None) is None:
            _stop()
        return function(*args)

    setattr(owner, what, called)


class Build:
    """A build in a fork of this process, in a session of its own; a context manager that kills it in the end."""

    def __init__(self, path: Path, stop: str | None = None, **options: Any) -> None:
        reading, writing = os.pipe()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self.pid = os.fork()
        if self.pid:
            os.close(writing)
            self._pipe = os.fdopen(reading)
            self._status: int | None = None
            return
        os.setsid()  # so that a Ctrl-C can be sent to it and its workers
        os.dup2(writing, 1)
        os.dup2(self._errors.fileno(), 2)
        sys.stderr = os.fdopen(2, "w", buffering=1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = 0
        try:
            _run(path, stop, {"progress": False, **options})
        except BaseException as error:
            traceback.print_exc()
            code = 130 if isinstance(error, KeyboardInterrupt) else 1
        os._exit(code)

    def __enter__(self) -> Build:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._pipe.close()
        self._errors.close()

    def stopped(self) -> int:
        """Wait until it stops; the process id of the process that did, or 0 where none does."""
        return int(self._pipe.readline() or 0)

    def kill(self) -> None:
        """SIGKILL to the main process."""
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
            self._wait()

    def end(self) -> tuple[int, str]:
        """Wait for its end; exit code and what it printed on stderr."""
        self._wait()
        self._errors.seek(0)
        assert self._status is not None
        return os.waitstatus_to_exitcode(self._status), self._errors.read().decode()

    def _wait(self) -> None:
        if self._status is None:
            _, self._status = os.waitpid(self.pid, 0)


def _run(path: Path, stop: str | None, options: dict[str, Any]) -> None:
    if stop is not None:
        where, when = stop.split()
        _stop_at(where, int(when))
    build_lmdb(options.pop("source", None) or Numbers(), path, **options)
