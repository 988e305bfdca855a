"""Runs sections of ``benchmarks/gpu.py`` in a process for each group, so that what ends one costs no other section.

A process writes a line of JSON as a section begins, keeps figures, and ends. Where it crashes, is killed, or takes
longer than its section may, that section has the figures it kept, and a new process goes on with the rest.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

GRACE_S = 10.0
"""A section stops itself when its time is over; what does not come back from C code is killed so much later."""

_LOOK_S = 0.1
"""Seconds between two looks whether a silent process lives."""

Outcome = dict[str, Any]


class Reporter:
    """What a group's process tells the benchmark's.

    Args:
        fd: the end of a pipe.
    """

    def __init__(self, fd: int) -> None:
        self._file = os.fdopen(fd, "w")

    def tell(self, event: str, name: str, what: object) -> None:
        """Write a line, at once."""
        print(json.dumps([event, name, what], default=str), file=self._file, flush=True)


def run_group(
    command: Sequence[str], names: Sequence[str], add: Callable[[str, Outcome], object], start_s: float = 120.0
) -> None:
    """Run these sections in one process, or in several where one ends early.

    Args:
        command: starts a process, with the end of a pipe and the sections as further arguments.
        names: the sections.
        add: takes each section's outcome, in this order.
        start_s: seconds that a process may take until its first section begins.
    """
    left = list(names)
    while left:
        reader, writer = os.pipe()
        process = subprocess.Popen([*command, str(writer), *left], pass_fds=[writer], start_new_session=True)
        os.close(writer)
        try:
            within, kept, ending = _follow(reader, process, left, add, start_s)
            if not ending:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):  # it, and what it has started
                os.killpg(process.pid, signal.SIGKILL)
            os.close(reader)
            code = process.wait()
        if left:
            why = ending or f"its process ended with {_ending(code)}"
            add(left.pop(0), {**kept, "error": f"{why}{'' if within else ', before it began'}", **_failed(kept)})


def _follow(
    reader: int,
    process: subprocess.Popen[bytes],
    left: list[str],
    add: Callable[[str, Outcome], object],
    start_s: float,
) -> tuple[bool, Outcome, str]:
    """Read a process's lines until it ends, or takes too long.

    Returns:
        Whether a section had begun, the figures that it kept, and what ended the reading if not the process's own end.
    """
    until_s, kept, within, rest = time.monotonic() + start_s, {}, False, b""
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        while left:
            if not selector.select(_LOOK_S):
                if process.poll() is not None:  # a process that it has forked may hold the pipe
                    return within, kept, ""
                if until_s is not None and time.monotonic() > until_s:
                    return within, kept, "killed: it took longer than it may, and did not stop"
                continue
            data = os.read(reader, 1 << 16)
            if not data:
                return within, kept, ""
            *lines, rest = (rest + data).split(b"\n")
            for event, name, what in map(json.loads, lines):
                if event == "begins":
                    kept, within = {}, True
                    until_s = None if what is None else time.monotonic() + what + GRACE_S
                elif event == "keeps":
                    kept = what
                else:
                    left.remove(name)
                    within, until_s = False, time.monotonic() + start_s
                    add(name, what)
    return False, {}, ""


def _failed(kept: Outcome) -> Outcome:
    return {"checks": {**kept.get("checks", {}), "ran": False}}


def _ending(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
