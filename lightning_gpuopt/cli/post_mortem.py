"""``lightning-gpuopt post-mortem REPORT_DIR``: why a run died, or what it waits for."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from jsonargparse import ArgumentParser, Namespace

from lightning_gpuopt.cli._parser import UsageError

if TYPE_CHECKING:
    from lightning_gpuopt.postmortem.record import PostMortem

_WRITES_WITHIN_S: Final = 10.0
"""A process of another machine that runs has written within this time: once a second, with clocks that differ."""

SUMMARY = "why a run died, or what it waits for now: which process, sample and line"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``post-mortem``."""
    parser.add_argument(
        "report_dir",
        type=str,
        metavar="REPORT_DIR",
        help="folder of the reports: that of watch, of one of its runs, or StallDetector's report_dir",
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def run(options: Namespace) -> int:
    """Print it.

    Args:
        options: ours.

    Raises:
        UsageError: there is nothing to read.
    """
    folder = Path(options.report_dir)
    if not folder.is_dir():
        raise UsageError(f"post-mortem: expected a folder of reports, got {folder}: no such folder")
    found = _read(folder)
    if found is None:
        raise UsageError(
            f"post-mortem: expected a post-mortem.json or the rings of a run, got {folder} without any; a run that "
            "ended well leaves none"
        )
    print(found.to_json() if options.json else found.text)
    return 0


def _read(folder: Path) -> PostMortem | None:
    """What was written when the command ended, or else what rings say now; the later of the two."""
    from lightning_gpuopt.postmortem.analysis import post_mortem_of
    from lightning_gpuopt.postmortem.record import FILE, PostMortem
    from lightning_gpuopt.recorder.reader import is_alive, records_in
    from lightning_gpuopt.recorder.stacks import ask, wait_of
    from lightning_gpuopt.watch.mailbox import COMMAND_FILE

    if (folder.absolute().parent / COMMAND_FILE).is_file():  # of a fit of a watched run, which keeps them for all
        folder = folder.absolute().parent
    records = records_in(folder)
    now_s, host = time.time(), socket.gethostname()
    here = [each for each in records if is_alive(each)]
    running = [*here, *(each for each in records if each.host != host and now_s - each.written_s < _WRITES_WITHIN_S)]
    living = {(each.host, each.pid, each.start_ticks) for each in running}
    written = max((*folder.glob(FILE), *folder.glob(f"*/{FILE}")), key=lambda each: each.stat().st_mtime, default=None)
    last_s = max((each.written_s for each in records), default=0.0)
    if written is not None and not running and written.stat().st_mtime >= last_s:
        try:
            return PostMortem.from_json(written.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            if not records:
                raise UsageError(f"{written}: {error}") from error
    if not records:
        return None
    return post_mortem_of(
        records,
        now_s=now_s,
        is_alive=lambda each: (each.host, each.pid, each.start_ticks) in living,
        stacks=ask(here),
        waits={each.pid: wait_of(each.pid) for each in here},
    )
