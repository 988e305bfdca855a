"""A loader that Lightning has let go of is gone, and its workers with it, whatever watches or changes the loaders."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lightning_gpuopt import AutoFix, CudaPrefetcher, GpuUtilMonitor, NumWorkersFinder, StallDetector
from tests.fork_server import run
from tests.lanes import combinations
from tests.loaders.let_go import PROGRAMS, Event, events_of

MONITORS: dict[str, Callable[[], list[Any]]] = {
    "monitors": lambda: [GpuUtilMonitor(), StallDetector(), CudaPrefetcher()],
    "finder": lambda: [NumWorkersFinder(max_num_workers=1)],
    "autofix": lambda: [AutoFix()],
}


@cache
def plain_events(program: str) -> list[Event]:
    return events_of(program)


@combinations(
    " ".join(f"{'autofix' if program == 'tuned' else 'finder'}-{program}" for program in PROGRAMS),
    monitors=list(MONITORS),
    program=list(PROGRAMS),
)
def test_iterators_and_workers_end_as_without(
    program: str, monitors: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert events_of(program, *MONITORS[monitors]()) == plain_events(program)


@pytest.mark.matrix
@pytest.mark.parametrize(("program", "fix"), [("reloads_several", ["--fix"]), ("tuned", [])])
def test_under_watch_too(program: str, fix: list[str], tmp_path: Path) -> None:
    watch = [sys.executable, "-m", "lightning_gpuopt", "watch", *fix, "--report-dir", str(tmp_path), "--"]
    done = run([*watch, sys.executable, "-m", "tests.loaders.let_go", program], timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    events = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[[")))
    assert [tuple(each) for each in events] == plain_events(program)
