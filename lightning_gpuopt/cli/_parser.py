"""jsonargparse with errors of one line that say what was expected, what came, and what to do."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from jsonargparse import ArgumentParser

PROBLEM_FOUND = 1  # the exit code of a command that has run, and found a problem
INTERRUPTED = 130  # the exit code after Ctrl-C


class UsageError(Exception):
    """What the user asked for cannot be done as asked: a wrong argument, or a path that is not there."""


@contextmanager
def writing_to(argument: str, path: object) -> Iterator[None]:
    """Around writing to a path that an argument names; UsageError if it cannot be written to."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{argument}: expected a writable path, got {path}: {error.strerror}; choose another"
        ) from error


@contextmanager
def termination_cleans_up() -> Iterator[None]:
    """SIGTERM (``timeout``, a batch system) ends the process as Ctrl-C does: its temporary folders are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Parser(ArgumentParser):
    """An ``ArgumentParser`` that raises :class:`UsageError` where the original prints its usage and exits."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise the parser's complaint; jsonargparse's words may have several lines, and capitals before 4.45."""
        text = re.sub(r'Parser key "([\w.]+)":', lambda key: f"--{key[1].replace('_', '-')}:", message)
        text = text.replace("Unrecognized arguments", "unrecognized arguments", 1)
        program = self.prog.replace(" [options]", "")
        raise UsageError(f"{' '.join(text.split()).rstrip('.')}; see '{program} --help'") from ex

    def add_debug_switch(self) -> None:
        """Add ``--debug``, which stands before or after the subcommand; ``main`` reads it."""
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")
