"""``lightning-gpuopt doctor``: what in this environment will hold a GPU back, measured."""

from __future__ import annotations

import json
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from jsonargparse import ArgumentParser, Namespace

from lightning_gpuopt.cli._parser import PROBLEM_FOUND, UsageError

SUMMARY = "find out what in this environment slows a GPU down: driver, CPUs, memory, disk, versions"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--data",
        type=str,
        metavar="PATH",
        help="also measure how fast this dataset is read: a folder of files, an LMDB dataset, or a file",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(options: Namespace) -> int:
    """Look at everything, and print what was found, problems first; 1 if there is one."""
    from lightning_gpuopt.doctor.check import as_data
    from lightning_gpuopt.doctor.examine import examine
    from lightning_gpuopt.doctor.render import render_checks

    try:
        with _termination_cleans_up():
            checks = examine(options.data)
    except OSError as error:
        if options.data is None or error.filename != options.data:
            raise
        raise UsageError(
            f"--data: expected an existing path, got {options.data}: {error.strerror}; give a folder or a file"
        ) from error
    if options.json:
        print(json.dumps(as_data(checks), indent=2, allow_nan=False))
    else:
        print(render_checks(checks, shutil.get_terminal_size().columns))
    return PROBLEM_FOUND if any(check.status == "problem" for check in checks) else 0


@contextmanager
def _termination_cleans_up() -> Iterator[None]:
    """SIGTERM (``timeout``, a batch system) ends the process as Ctrl-C does: the temporary LMDB is removed before."""
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
