"""What becomes of a training process outside of ``fit``: an exception of ``fit`` that was caught, one that ends it.

Both are seen as the process comes to its end, from what Python keeps of the exception that it has printed.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

from lightning_gpuopt.measurements.flight import OUTSIDE_OF_FIT
from lightning_gpuopt.recorder.board import Board
from lightning_gpuopt.recorder.code_places import described
from lightning_gpuopt.recorder.handover import Watcher
from lightning_gpuopt.recorder.ring import AT, CAUGHT, ENDED, NOT_CAUGHT, Ring
from lightning_gpuopt.recorder.stacks import start_ticks

log = logging.getLogger(__name__)

_MAX_CAUSES: Final = 16

# the last ``fit`` that has failed: its ring, and its exception as its log has it
_failed: list[tuple[Ring, dict[str, Any]]] = []


def watch_this_process() -> None:
    """Have an exception that ends this process handed to the command that watches it; may be called again."""
    _watch(os.getpid())


def watch_for_the_end(ring: Ring, known: dict[str, Any]) -> None:
    """Have a ring say whether the exception that ended its ``fit`` (``known``: see :func:`described`) was caught."""
    _failed[:] = [(ring, known)]
    _watch(os.getpid())


@cache
def _watch(pid: int) -> None:
    atexit.register(_at_exit, pid)


def _at_exit(pid: int) -> None:
    if os.getpid() != pid:  # a copy that was forked
        return
    try:
        _look(getattr(sys, "last_exc", None) or getattr(sys, "last_value", None))
    except Exception:
        log.debug("the end of the process was not recorded", exc_info=True)


def _look(error: BaseException | None) -> None:
    """Note what has become of the last exception; ``error`` has come to the top of the script (None: none has)."""
    for ring, known in _failed:
        same = any(_like(each) == (known["type"], known["message"]) for each in _causes(error))
        ring.numbers[AT["caught"]] = NOT_CAUGHT if same else CAUGHT
        if same:
            return
    if error is not None and (watcher := Watcher.of_this_process()) is not None:
        _hand_over(error, watcher)


def _like(error: BaseException) -> tuple[str, str]:
    known = described(error)
    return known["type"], known["message"]


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(_MAX_CAUSES):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def _hand_over(error: BaseException, watcher: Watcher) -> None:
    """Give the watching command a ring that says no more than how the process ended."""
    board = Board()
    host, pid = socket.gethostname(), os.getpid()
    now = time.monotonic_ns()
    board.rank.begin(
        {"host": host, "run": f"{host}-{pid}{OUTSIDE_OF_FIT}"},
        rank=_number("RANK", _number("LOCAL_RANK", 0)),
        world_size=_number("WORLD_SIZE", 1),
        pid=pid,
        start_ticks=start_ticks(),
        since_ns=now,
        written_ns=now,
        ended=ENDED.index("exception"),
        caught=NOT_CAUGHT,
    )
    board.rank.log("exception", **described(error))
    watcher.give(board.file)
    board.close()


def _number(variable: str, otherwise: int) -> int:
    try:
        return int(os.environ[variable])
    except (KeyError, ValueError):
        return otherwise
