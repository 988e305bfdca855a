"""A hang is written down once, and training continues to wait."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil

from lightning_gpuopt.detector.progress import ProgressWatch, write_hang
from lightning_gpuopt.measurements.flight import VALIDATES
from tests.helpers import Clock, wait_for


class Saves:
    """What is watched of a Trainer."""

    def save_checkpoint(self) -> None:
        """Nothing to save."""


def watching(timeout_s: float, write: Callable[[float], None], *clock: Clock) -> closing[ProgressWatch]:
    trainer: Any = Saves()
    return closing(ProgressWatch(trainer, None, timeout_s, write, *clock))


def test_each_hang_is_told_once() -> None:
    clock, told = Clock(), []
    with watching(10.0, told.append, clock) as watch:
        clock.now_s += 9.0
        assert watch.look() == 1.0
        assert told == []
        clock.now_s += 1.0
        assert watch.look() == 10.0
        clock.now_s += 50.0
        watch.look()
        assert told == [10.0]
        watch.step_done()
        clock.now_s += 9.0
        watch.look()
        assert told == [10.0]
        clock.now_s += 6.0
        watch.look()
        assert told == [10.0, 15.0]


def test_what_is_open_is_timed_from_its_own_beginning() -> None:
    clock, told = Clock(), []
    with watching(10.0, told.append, clock) as watch:
        clock.now_s += 8.0
        watch.begins(VALIDATES)
        clock.now_s += 9.0
        assert watch.look() == 1.0
        clock.now_s += 2.0
        watch.look()
        watch.done(VALIDATES)
        clock.now_s += 9.0
        watch.look()
        assert told == [11.0]


def test_a_timeout_longer_than_a_thread_can_wait_is_cut_to_that() -> None:
    with watching(1e300, lambda quiet_s: None, Clock()) as watch:
        assert watch.look() == threading.TIMEOUT_MAX


def test_a_failure_to_write_does_not_end_the_watch() -> None:
    clock = Clock()

    def fail(quiet_s: float) -> None:
        raise OSError("disk full")

    with watching(1.0, fail, clock) as watch:
        clock.now_s += 5.0
        assert watch.look() == 1.0


def test_the_thread_tells_and_ends() -> None:
    told = threading.Event()
    with watching(0.01, lambda quiet_s: told.set()):
        assert told.wait(10)
    assert "gpuopt-hang" not in {thread.name for thread in threading.enumerate()}


def test_the_file_shows_threads_and_workers(tmp_path: Path) -> None:
    release = threading.Event()

    def stuck_here() -> None:
        release.wait(30)

    thread = threading.Thread(target=stuck_here)
    thread.start()
    asleep = subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=-1, stdout=-1)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    try:
        assert asleep.stdout is not None
        asleep.stdout.readline()
        wait_for(lambda: psutil.Process(asleep.pid).status() == psutil.STATUS_SLEEPING)
        workers = [(asleep.pid, "reads samples for 12.0 s"), (gone.pid, "is not monitored")]
        path = write_hang(tmp_path / "new", 0, 12.5, workers, None)
    finally:
        release.set()
        thread.join()
        asleep.kill()
        asleep.communicate()
    text = path.read_text()
    assert f"process {os.getpid()} has made no progress for 12.5 s" in text
    assert "Workers of the training loader: 2" in text
    assert f"  {asleep.pid}: sleeps" in text
    assert "; reads samples for 12.0 s" in text
    assert f"  {gone.pid}: is gone; is not monitored" in text
    assert "in stuck_here" in text
    assert "in test_the_file_shows_threads_and_workers" in text


def test_the_file_appears_when_all_of_it_is_written(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    class Workers(list):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[tuple[int, str]]:
            seen.append([path.name for path in tmp_path.glob("hang-*.txt")])
            return super().__iter__()

    write_hang(tmp_path, 0, 1.0, Workers([(os.getpid(), "waits")]), None)
    assert seen == [[]]
    assert [path.name for path in tmp_path.iterdir()] == ["hang-rank0-1.txt"]
