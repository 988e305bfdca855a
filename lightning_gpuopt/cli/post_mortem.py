"""``lightning-gpuopt post-mortem REPORT_DIR``: why a run died, or what it waits for."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace

from lightning_gpuopt.cli._parser import UsageError

if TYPE_CHECKING:
    from lightning_gpuopt.measurements.flight import FlightRecord
    from lightning_gpuopt.postmortem.record import PostMortem

SUMMARY = "find out why a run died or what it waits for: which process, sample and line"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "report_dir",
        type=str,
        metavar="REPORT_DIR",
        help="reports folder: of watch, of one of its runs, or StallDetector's report_dir",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: Namespace) -> int:
    """Print it; UsageError if there is nothing to read."""
    folder = Path(options.report_dir)
    if not folder.is_dir():
        raise UsageError(f"post-mortem: expected a folder of reports, got {folder}: no such folder")
    found = _read(folder)
    if found is None and folder.absolute().name.startswith("fit-"):  # of watch: what is recorded is next to it
        found = _read(folder.absolute().parent)
    if found is None:
        raise UsageError(
            f"post-mortem: expected a post-mortem.json or the rings of a run, got {folder} without any; a run that "
            "ends normally leaves none"
        )
    print(found.to_json() if options.json else found.text)
    return 0


def _read(folder: Path) -> PostMortem | None:
    """What was written when the command ended, or else what rings say now; the later of the two."""
    from lightning_gpuopt.postmortem.analysis import post_mortem_of
    from lightning_gpuopt.postmortem.record import FILE, PostMortem
    from lightning_gpuopt.recorder.ring_reader import is_alive, records_in, writes_elsewhere
    from lightning_gpuopt.recorder.stacks import ask, wait_of

    records, now_s = records_in(folder), time.time()
    running = [each for each in records if is_alive(each)]

    def is_there(record: FlightRecord) -> bool:
        return record in running or writes_elsewhere(record, now_s)

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
        is_alive=is_there,
        stacks=ask(running),
        waits={each.pid: wait_of(each.pid) for each in running},
    )
